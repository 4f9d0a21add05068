"""What route heads read, and how they differ: maps, deviations from their mean, and how stable both are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.probing.queries import (
    beside_null,
    check_draws,
    part_logits,
    part_weights,
    slice_masks,
    with_random_queries,
)
from depthroute.probing.text_pass import Batches, add_to, describe_site, pass_over
from depthroute.residual import DepthRead


class HeadProbe:
    """Collects the mean weights of the trained and of random queries at each site; an observer of `pass_over`."""

    def __init__(self, *, draws: int = 8, seed: int = 0) -> None:
        check_draws(draws)
        self.draws, self.seed = draws, seed
        self._weights: dict[int, Tensor] = {}  # by site: (D, R * H), R queries, H heads
        self._sums: dict[int, Tensor] = {}  # by site: (2, R, H, N), the halves of the text apart
        self._entropies: dict[int, Tensor] = {}  # by site: (H,)

    def __call__(self, site: int, read: DepthRead, sources: tuple[Tensor, ...], counted: Tensor) -> None:
        if site not in self._weights:
            queries = with_random_queries(read, site, self.draws, self.seed)
            heads = slice_masks(read.query.numel(), read.num_heads, read.query.device)
            self._weights[site] = part_weights(read, queries, heads)
        logits = part_logits(read, sources, self._weights[site]).unflatten(-1, (-1, read.num_heads))
        logs = logits.log_softmax(0)  # (N, B, T, R, H)
        weights = logs.exp()
        add_to(self._sums, site, torch.einsum("nbtrh,pbt->prhn", weights.double(), counted))
        entropy = -(weights[..., 0, :] * logs[..., 0, :]).sum(0)  # (B, T, H)
        add_to(self._entropies, site, torch.einsum("bth,bt->h", entropy.double(), counted.sum(0)))

    def result(self, model: nn.Module, tokens: tuple[int, int]) -> dict[str, Any]:
        """As `head_maps` returns it."""
        if not self._sums:
            raise ValueError("model: its scheme reads nothing over depth, so there is nothing to probe")
        sums = {site: self._sums[site].cpu() for site in sorted(self._sums)}
        means = {site: total.sum(0) / sum(tokens) for site, total in sums.items()}  # (R, H, N)
        halves = None
        if all(tokens):
            share = torch.tensor(tokens, dtype=torch.float64)[:, None, None, None]
            halves = {site: _deviation(total / share) for site, total in sums.items()}
        sites = [self._site(model, site, mean, sum(tokens)) for site, mean in means.items()]
        several = next(iter(means.values())).shape[1] > 1
        if several:
            for site in sites:
                site.update(_site_deviation(means[site["site"]], None if halves is None else halves[site["site"]]))
        return {
            "num_heads": next(iter(means.values())).shape[1],
            "draws": self.draws,
            "seed": self.seed,
            "tokens": sum(tokens),
            "tokens_by_half": list(tokens),
            "entropy": _mean([value for site in sites for value in site["entropy"]]),
            "relative_entropy": _mean([site["relative_entropy"] for site in sites]),
            "deviation": _deviation_of_all(list(means.values()), halves) if several else None,
            "sources": _source_reads(sites),
            "sites": sites,
        }

    def _site(self, model: nn.Module, site: int, mean: Tensor, tokens: int) -> dict[str, Any]:
        entropy = self._entropies[site].cpu() / tokens
        return {
            **describe_site(model, site),
            "weights": mean[0].tolist(),
            "entropy": entropy.tolist(),
            "relative_entropy": float(entropy.mean()) / math.log(mean.shape[-1]) if mean.shape[-1] > 1 else 1.0,
        }


def head_maps(model: nn.Module, batches: Batches, *, draws: int = 8, seed: int = 0) -> dict[str, Any]:
    """What every route head of every site reads, over a text; ready for JSON.

    For each of `sites`: `weights` ([H][N], means over tokens), `entropy` ([H], of the weights of one token in nats,
    mean over tokens) and `relative_entropy` (over heads, divided by log N: 1 is even). `entropy` and
    `relative_entropy` of all are means over sites (and heads). For each of `sources`, by name: `sites` (how many can
    read it), `mean_weight` (over those and heads) and `relative_weight` (weight times N: 1 is an even share).

    With H > 1, `deviation` is about the weights of a head minus the mean over heads, and each site has it as a map:

    largest: its largest absolute value, beside that of random queries of the same norm (`null`, `null_sd` over the
        draws, `excess`).
    split_half: its Pearson correlation between the halves of the text, over all sites, heads and sources, beside that
        of random queries: a fixed query repeats itself on other text whether it has learned something or not.
    between_heads: the mean correlation of two heads, over all sites and sources, beside that of random queries;
        `by_centring` is what subtracting the mean makes of heads that are independent, -1 / (H - 1), and `matrix`
        holds all pairs.

    A correlation is None where one side does not vary (fresh queries) or the text has one half only. `batches` as in
    `pass_over`, with its halves; one pass, memory for one batch. Raises ValueError for a scheme without reads.
    """
    probe = HeadProbe(draws=draws, seed=seed)
    tokens = pass_over(model, batches, probe)
    return probe.result(model, tokens)


def _deviation(weights: Tensor) -> Tensor:
    """(..., H, N) weights of heads minus their mean over heads."""
    return weights - weights.mean(-2, keepdim=True)


def _site_deviation(mean: Tensor, halves: Tensor | None) -> dict[str, Any]:
    deviation = _deviation(mean)  # (R, H, N)
    return {
        "deviation": deviation[0].tolist(),
        "largest": beside_null(deviation.abs().amax((1, 2)).tolist(), "largest"),
        "split_half": None if halves is None else _correlation(halves[0, 0], halves[1, 0]),
    }


def _deviation_of_all(means: list[Tensor], halves: dict[int, Tensor] | None) -> dict[str, Any]:
    deviations = [_deviation(mean) for mean in means]
    largest = torch.stack([deviation.abs().amax((1, 2)) for deviation in deviations]).amax(0)  # (R,)
    maps = torch.cat(deviations, -1)  # (R, H, N of all sites)
    heads = maps.shape[1]
    between = [_between_heads(query) for query in maps]
    split: list[float | None] = [None] * len(maps)
    if halves is not None:
        first, second = torch.cat(list(halves.values()), -1)  # (R, H, N of all sites) each
        split = [_correlation(a, b) for a, b in zip(first, second, strict=True)]
    return {
        "largest": beside_null(largest.tolist(), "largest"),
        "split_half": _beside_null_or_none(split),
        "between_heads": {
            **_beside_null_or_none([_mean_of_pairs(matrix) for matrix in between]),
            "by_centring": -1 / (heads - 1),
            "matrix": between[0],
        },
    }


def _between_heads(maps: Tensor) -> list[list[float | None]]:
    """(H, M) maps of the heads of one query -> the correlation of every two."""
    return [[_correlation(a, b) for b in maps] for a in maps]


def _mean_of_pairs(matrix: list[list[float | None]]) -> float | None:
    return _mean([value for i, row in enumerate(matrix) for value in row[:i]])


def _beside_null_or_none(values: list[float | None]) -> dict[str, float | None]:
    trained, *random = values
    return {"r": trained, "null": _mean(random)}


def _correlation(a: Tensor, b: Tensor) -> float | None:
    a, b = (x.flatten() - x.mean() for x in (a, b))
    norms = float(a.norm() * b.norm())
    # Below this, fp32 weights that are all alike differ by rounding alone.
    return float(a @ b) / norms if norms > 1e-12 * a.numel() else None


def _mean(values: list[Any]) -> float | None:
    return None if not values or None in values else sum(values) / len(values)


def _source_reads(sites: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How much each source is read, in the order in which sources come up."""
    found: dict[str, list[tuple[float, int]]] = {}
    for site in sites:
        for i, name in enumerate(site["sources"]):
            weight = sum(row[i] for row in site["weights"]) / len(site["weights"])
            found.setdefault(name, []).append((weight, len(site["sources"])))
    return [
        {
            "source": name,
            "sites": len(reads),
            "mean_weight": sum(weight for weight, _ in reads) / len(reads),
            "relative_weight": sum(weight * count for weight, count in reads) / len(reads),
        }
        for name, reads in found.items()
    ]
