"""Residual schemes: how a sublayer reads from and writes to what came before it. One small file for each."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from depthroute.errors import nearest
from depthroute.residual.additive import Additive
from depthroute.residual.base import Residual, State
from depthroute.residual.block_mhar import BlockMhar
from depthroute.residual.delta_mhar import DeltaMhar
from depthroute.residual.denseformer import DenseFormer
from depthroute.residual.hyper_connections import HyperConnections
from depthroute.residual.mhar import Mhar
from depthroute.residual.mhc import Mhc
from depthroute.residual.options import build_options
from depthroute.residual.read import DepthRead

__all__ = ["DepthRead", "Residual", "State", "available", "build", "check", "option_names", "resolve"]

_SCHEMES: dict[str, type[Residual]] = {
    "additive": Additive,
    "block_mhar": BlockMhar,
    "delta_mhar": DeltaMhar,
    "denseformer": DenseFormer,
    "hyper_connections": HyperConnections,
    "mhar": Mhar,
    "mhc": Mhc,
}


def available() -> tuple[str, ...]:
    """The names of all schemes."""
    return tuple(_SCHEMES)


def option_names() -> frozenset[str]:
    """The names of the options of all schemes, and "scheme"."""
    options = {field.name for scheme in _SCHEMES.values() for field in fields(scheme.Options)}
    return frozenset(options | {"scheme"})


def resolve(residual: dict[str, Any], decoder: Any) -> dict[str, Any]:
    """The `residual` entry of a configuration, checked against the decoder, with every default written out.

    Raises ValueError or TypeError that names the key, what it got and what it wants.
    """
    scheme, options = _parse(residual)
    scheme.check(options, decoder)
    return {"scheme": residual["scheme"], **asdict(options)}


def check(residual: dict[str, Any]) -> None:
    """Raise what `resolve` would for an entry that no decoder can have: a wrong scheme, key or value."""
    _parse(residual)


def build(residual: dict[str, Any], decoder: Any) -> Residual:
    """The scheme that a `residual` entry describes, for this decoder. Draws no random numbers."""
    scheme, options = _parse(residual)
    return scheme(options, decoder)


def _parse(residual: dict[str, Any]) -> tuple[type[Residual], Any]:
    if not isinstance(residual, dict):
        raise TypeError(f"residual is {residual!r}, but must be a mapping like {{'scheme': 'mhar', 'num_heads': 'kv'}}")
    values = dict(residual)
    name = values.pop("scheme", None)
    if name is None:
        raise ValueError(f"residual has no 'scheme'; wanted one of {', '.join(_SCHEMES)}")
    if not isinstance(name, str):
        raise TypeError(f"residual.scheme is {name!r}, but must be one of {', '.join(_SCHEMES)}")
    if name not in _SCHEMES:
        raise ValueError(f"residual.scheme: unknown scheme {name!r}{nearest(name, _SCHEMES)}")
    scheme = _SCHEMES[name]
    return scheme, build_options(scheme.Options, values, name)
