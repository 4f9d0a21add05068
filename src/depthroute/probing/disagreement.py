"""Do the slices of a single query want to read different sources? The probe of arXiv 2607.27230 on H = 1 models."""

from __future__ import annotations

from collections.abc import Mapping
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

ARRANGEMENTS = ("contiguous", "interleaved", "equal_strength")


class DisagreementProbe:
    """Collects the KL divergences of slices from their whole at each site; an observer of `pass_over`."""

    def __init__(self, *, slices: int = 4, draws: int = 8, seed: int = 0) -> None:
        if slices < 1:
            raise ValueError(f"slices is {slices}; wanted at least 1")
        check_draws(draws)
        self.slices, self.draws, self.seed = slices, draws, seed
        self._weights: dict[int, Tensor] = {}  # by site: (D, R * A * S), R queries, A arrangements, S slices
        self._sums: dict[int, Tensor] = {}  # by site: (R, A, S)
        self._norms: dict[int, float] = {}

    def __call__(self, site: int, read: DepthRead, sources: tuple[Tensor, ...], counted: Tensor) -> None:
        if site not in self._weights:
            self._prepare(site, read)
        logits = part_logits(read, sources, self._weights[site]).unflatten(-1, (-1, len(ARRANGEMENTS), self.slices))
        whole = logits[..., 0, :].sum(-1).log_softmax(0)[..., None, None]  # (N, B, T, R, 1, 1)
        alone = logits.log_softmax(0)
        divergence = (alone.exp() * (alone - whole)).sum(0)  # (B, T, R, A, S)
        add_to(self._sums, site, torch.einsum("btras,bt->ras", divergence.double(), counted.sum(0)))

    def result(self, model: nn.Module, tokens: int) -> dict[str, Any]:
        """As `subspace_disagreement` returns it."""
        if not self._sums:
            raise ValueError("model: its scheme reads nothing over depth, so there is nothing to probe")
        means = {site: self._sums[site].cpu() / tokens for site in sorted(self._sums)}
        sites = [self._site(model, site, mean) for site, mean in means.items()]
        counts = sorted({site["num_sources"] for site in sites})
        return {
            "slices": self.slices,
            "draws": self.draws,
            "seed": self.seed,
            "tokens": tokens,
            **_readings(torch.stack(list(means.values())).mean(0)),
            "by_num_sources": [
                {
                    "num_sources": count,
                    "sites": sum(site["num_sources"] == count for site in sites),
                    **_readings(torch.stack([means[s["site"]] for s in sites if s["num_sources"] == count]).mean(0)),
                }
                for count in counts
            ],
            "sites": sites,
        }

    def _prepare(self, site: int, read: DepthRead) -> None:
        width = read.query.numel()
        if read.num_heads != 1:
            raise ValueError(
                f"model: its reads have {read.num_heads} route heads; the disagreement of slices is that of one head"
            )
        if width % self.slices:
            raise ValueError(f"slices is {self.slices}; wanted a divisor of the width {width}")
        contiguous = slice_masks(width, self.slices, read.query.device)
        interleaved = torch.eye(self.slices, device=read.query.device).repeat(1, width // self.slices)
        parts = torch.cat([contiguous, interleaved, self.slices * contiguous])
        queries = with_random_queries(read, site, self.draws, self.seed)
        self._weights[site] = part_weights(read, queries, parts)
        self._norms[site] = float(read.query.detach().norm())

    def _site(self, model: nn.Module, site: int, mean: Tensor) -> dict[str, Any]:
        about = describe_site(model, site)
        return {
            **about,
            "num_sources": len(about["sources"]),
            "query_norm": self._norms[site],
            **_readings(mean),
            "slice_kl": mean[0, 0].tolist(),
        }


def subspace_disagreement(
    model: nn.Module, batches: Batches, *, slices: int = 4, draws: int = 8, seed: int = 0
) -> dict[str, Any]:
    """How far each slice of a query, reading alone, is from what the whole query reads: KL(a_s || alpha) in nats.

    a_s is the softmax over sources of slice s alone (<q_s, RMSNorm(source)_s>), alpha the softmax that the site uses;
    the mean is over tokens, slices and sites. Every reading (`kl`) stands beside the same reading of random queries of
    the same norm (`null`, `null_sd` over the draws, `excess` = kl - null), for three arrangements:

    contiguous: the S slices that route heads would have.
    interleaved: channel i belongs to slice i mod S; disagreement of subspaces, and not of any S parts, is in the
        difference between the two.
    equal_strength: contiguous, the logits of a slice times S. Slices that agree have together S times the logit of
        one, so that one alone reads more evenly and its KL is above 0; here it is exactly 0.

    KL grows with the number of sources: `by_num_sources` holds the readings of the sites with each number, and
    `at_equal_sources` compares models by those that they share. `sites` holds the readings of each site, with the
    contiguous KL of each slice (`slice_kl`) and the norm of the query. Ready for JSON.

    `batches` as in `pass_over`: one pass; beside the model's own, memory is for one batch
    (tokens x sources x (draws + 1) x 3 S numbers, a few times) and does not grow with the text.
    Raises ValueError for reads of several heads, a width that S does not divide, and a scheme without reads.
    """
    probe = DisagreementProbe(slices=slices, draws=draws, seed=seed)
    tokens = sum(pass_over(model, batches, probe))
    return probe.result(model, tokens)


def at_equal_sources(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Readings of several models (name -> result of `subspace_disagreement`) at the source counts that all have.

    `num_sources` lists the counts; `models` maps each name to its readings, a mean over those counts.
    Raises ValueError where the models share no count.
    """
    tables = {name: {row["num_sources"]: row for row in result["by_num_sources"]} for name, result in results.items()}
    shared = sorted(set.intersection(*(set(table) for table in tables.values()))) if tables else []
    if not shared:
        raise ValueError(f"results: {', '.join(results) or 'no model'} share no number of sources")
    return {
        "num_sources": shared,
        "models": {
            name: {
                arrangement: {
                    key: sum(table[count][arrangement][key] for count in shared) / len(shared)
                    for key in ("kl", "null", "excess")
                }
                for arrangement in ARRANGEMENTS
            }
            for name, table in tables.items()
        },
    }


def _readings(mean: Tensor) -> dict[str, Any]:
    """(R, A, S) mean divergences -> the reading of each arrangement."""
    by_query = mean.mean(-1)
    return {name: beside_null(by_query[:, i].tolist(), "kl") for i, name in enumerate(ARRANGEMENTS)}
