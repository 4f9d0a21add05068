"""Reads to test with, and how far two results of one are apart."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from depthroute.ops import depth_mix

on_gpu = pytest.mark.gpu
INTERPRETER = pytest.param(
    ("cpu", torch.float32),
    id="interpreter",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only without a CUDA device"),
)
CUDA = [
    pytest.param(("cuda", dtype), id=f"cuda-{name}", marks=on_gpu)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
]
on_every_target = pytest.mark.parametrize("target", [INTERPRETER, *CUDA])
on_fp32 = pytest.mark.parametrize("target", [INTERPRETER, CUDA[0]])


@dataclass(frozen=True)
class Case:
    """One read: its inputs, all leaves, and an upstream gradient."""

    sources: tuple[Tensor, ...]
    query: Tensor
    norm_weight: Tensor
    upstream: Tensor
    num_heads: int

    def results(self, **options) -> dict[str, Tensor]:
        """The mix, and the gradient of every input under the upstream gradient, by name."""
        mix = depth_mix(
            list(self.sources), self.query, num_heads=self.num_heads, norm_weight=self.norm_weight, **options
        )
        names = ["query", "norm_weight", *(f"sources[{n}]" for n in range(len(self.sources)))]
        inputs = [self.query, self.norm_weight, *self.sources]
        return {"mix": mix.detach(), **dict(zip(names, torch.autograd.grad(mix, inputs, self.upstream), strict=True))}

    def double(self) -> "Case":
        """The same numbers in fp64."""
        return replace(
            self,
            sources=tuple(source.detach().double().requires_grad_() for source in self.sources),
            query=self.query.detach().double().requires_grad_(),
            norm_weight=self.norm_weight.detach().double().requires_grad_(),
            upstream=self.upstream.double(),
        )


def make_case(
    N: int, shape: tuple[int, ...], num_heads: int, target=("cpu", torch.float32), *, seed: int = 0, spread: float = 0.5
) -> Case:
    """N random sources of `shape` (..., D); `spread` is about the standard deviation of a token's logits."""
    device, dtype = target
    generator = torch.Generator().manual_seed(seed)
    D = shape[-1]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    common = normal(*shape)  # sources of one model resemble each other a little
    return Case(
        sources=tuple((normal(*shape) + 0.3 * common).to(device, dtype).requires_grad_() for _ in range(N)),
        query=(normal(D) * spread * (num_heads / D) ** 0.5).to(device).requires_grad_(),
        norm_weight=(1 + 0.2 * normal(D)).to(device).requires_grad_(),
        upstream=normal(*shape).to(device, dtype),
        num_heads=num_heads,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the 2-norm; NaN anywhere gives NaN, which no bound accepts."""
    difference = (actual.detach().double() - expected.detach().double()).norm()
    scale = expected.detach().double().norm()
    return float(difference / scale) if scale > 0 else float(difference)


def assert_as_good_as_reference(case: Case, actual: dict[str, Tensor], *, factor: float = 1.5, **options) -> None:
    """fp32: within 1e-5 of the fp64 reference. 16 bits: at most `factor` times the reference's error in that type."""
    exact = case.double().results(backend="reference", **options)
    plain = case.results(backend="reference", **options)
    assert {name: value.dtype for name, value in actual.items()} == {name: plain[name].dtype for name in actual}
    wrong = {}
    for name, value in actual.items():
        error, bound = relative_error(value, exact[name]), max(1e-5, factor * relative_error(plain[name], exact[name]))
        if case.sources[0].dtype == torch.float32:
            bound = 1e-5
        if not error <= bound:
            wrong[name] = f"{error:.2e} > {bound:.2e}"
    assert not wrong
