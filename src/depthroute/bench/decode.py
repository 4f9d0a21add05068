"""Generation: milliseconds a token with a static cache, and of the prompt before it. Schemes side by side.

    python -m depthroute.bench.decode --out DIR --preset 1b [--schemes additive mhar] [--batches 1 32] [--context 1024]
        [--prefill 8 2048] [--compile]

A decode step is one forward of one token for each sequence, replayed from a CUDA graph and launched from Python; with
--compile as torch.compile makes it, which fuses the norms and additions of every scheme. Before anything is timed,
steps through the cache must give the logits of one forward over the whole text.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from depthroute.bench import timing
from depthroute.bench.arm import parse_scheme
from depthroute.bench.options import count, field
from depthroute.bench.train import MICROBATCH
from depthroute.errors import in_one_line
from depthroute.files import new_folder
from depthroute.models.compat import CACHE

CHECKED = (2, 24, 8)  # sequences, tokens of a text, and how many of them are decoded one by one
ALLOWED = {torch.bfloat16: 3e-2, torch.float32: 1e-4}  # largest difference of a logit, of the largest logit
ROUNDS = 5
# What transformers finds for a prompt by looking at its positions: attention is causal without a mask, and a faster
# kernel. It cannot look while a graph is captured, and would then make a mask.
NO_MASKS = {"full_attention": None}
GRAPHS = 64  # of one function: one for each model and size
LEAST_CONTEXT = 64  # half of it has places for all steps that `_times` runs


class Decoder:
    """One scheme's model, and steps of its generation."""

    def __init__(self, scheme: str, decoder: Any, dtype: torch.dtype, device: str, compiled: bool = False) -> None:
        import depthroute

        torch.manual_seed(0)
        config = depthroute.DepthRoutedConfig(decoder=decoder, residual=parse_scheme(scheme))
        model: Any = depthroute.DepthRoutedForCausalLM(config)
        self.scheme, self.decoder, self.dtype, self.device = scheme, decoder, dtype, device
        self.model = model.to(device, dtype).eval()
        self.run = torch.compile(self.forward, fullgraph=True, dynamic=False) if compiled else self.forward

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: StaticCache | None = None, masks: dict[str, None] | None = None) -> Tensor:
        """Logits of the last token of ids (B, T), given what the cache holds."""
        cached = {"use_cache": cache is not None, CACHE: cache}
        return self.model(input_ids=ids, attention_mask=masks, logits_to_keep=1, **cached).logits

    def filled(self, batch: int, prompt: int, context: int) -> StaticCache:
        """A static cache of `context` places that holds a random prompt."""
        cache = StaticCache(config=self.decoder, max_cache_len=context)
        self.forward(self.ids(batch, prompt), cache)
        return cache

    def ids(self, batch: int, length: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.decoder.vocab_size, (batch, length), generator=generator).to(self.device)

    def error(self) -> float:
        """How far logits as measured, through the cache, are from those of one launched forward, of the largest."""
        batch, length, last = CHECKED
        ids = self.ids(batch, length, seed=1)
        cache = StaticCache(config=self.decoder, max_cache_len=length)
        self.forward(ids[:, : length - last], cache)
        pairs = [(self.run(ids, masks=NO_MASKS), self.forward(ids))]  # a prompt, as it is measured
        for end in range(length - last + 1, length + 1):
            pairs.append((self.run(ids[:, end - 1 : end], cache), self.forward(ids[:, :end])))
        return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)

    def step(self, batch: int, context: int) -> Callable[[], Any]:
        """A decode step with half of the cache filled; it may be called as often as half of the cache has places."""
        cache, ids = self.filled(batch, context // 2, context), self.ids(batch, 1, seed=2)
        return lambda: self.run(ids, cache)

    def prompt(self, batch: int, length: int) -> Callable[[], Any]:
        """The forward of a prompt."""
        ids = self.ids(batch, length)
        return lambda: self.run(ids, masks=NO_MASKS)


@torch._dynamo.config.patch(recompile_limit=GRAPHS)
def measure(
    preset: str,
    schemes: list[str],
    *,
    batches: list[int],
    context: int,
    prefill: tuple[int, int],
    overrides: dict[str, Any],
    compiled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    times: Callable[[Callable[[], Any]], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """One row for each scheme and batch, and one for the prompt; `of_first` is against the first scheme, turn by turn.

    times: how a call is timed; the median, least and most milliseconds of a graph's replay and of launches by default.
    """
    from depthroute.models import presets

    times = times or _times
    decoder = presets.decoder_config(preset, **overrides)
    models = [Decoder(scheme, decoder, dtype, device, compiled) for scheme in schemes]
    rows: list[dict[str, Any]] = []
    for model in models:
        error = model.error()
        row = {"preset": preset, "scheme": model.scheme, "compiled": compiled}
        row |= {"error": error, "green": error <= ALLOWED[dtype]}
        rows += [{**row, "what": "decode", "batch": batch, "length": context} for batch in batches]
        rows.append({**row, "what": "prefill", "batch": prefill[0], "length": prefill[1]})
    for what, batch, length in [*(("decode", batch, context) for batch in batches), ("prefill", *prefill)]:
        ours = [row for row in rows if (row["what"], row["batch"], row["length"]) == (what, batch, length)]
        samples: list[list[float]] = [[] for _ in models]
        for _ in range(ROUNDS):
            for model, row, taken in zip(models, ours, samples, strict=True):
                if not row["green"]:
                    continue
                found = times(model.step(batch, length) if what == "decode" else model.prompt(batch, length))
                row.update(found)
                taken.append(found["ms"])
        for row, taken in zip(ours, samples, strict=True):
            if taken and samples[0]:
                row["ms"] = statistics.median(taken)
                row["spread"] = [min(taken), max(taken)]
                row["of_first"] = statistics.median(a / b for a, b in zip(taken, samples[0], strict=True))
    return rows


def _times(call: Callable[[], Any]) -> dict[str, Any]:
    return {"ms": timing.graph_times(call, repeats=3).median, "eager_ms": timing.eager_times(call, repeats=3).median}


def table(rows: list[dict[str, Any]]) -> str:
    """The results in a few lines."""
    lines = [
        f"{'scheme':22s} {'what':8s} {'size':>10s} {'graph ms (least-most)':>24s} {'x first':>7s} {'eager ms':>9s}"
    ]
    for row in rows:
        head = f"{row['scheme']:22s} {row['what']:8s} {row['batch']:>4d} x {row['length']:<5d}"
        if not row["green"]:
            lines.append(f"{head} logits through the cache are off by {row['error']:.1e}: no numbers")
            continue
        span = f"{row['ms']:.3f} ({row['spread'][0]:.3f}-{row['spread'][1]:.3f})"
        lines.append(f"{head} {span:>24s} {row.get('of_first', float('nan')):7.3f} {row.get('eager_ms', 0.0):9.3f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="depthroute bench decode", description="Measure generation.")
    parser.add_argument("--out", type=Path, required=True, help="folder for decode.json")
    parser.add_argument("--preset", choices=list(MICROBATCH), default="1b")
    parser.add_argument("--schemes", nargs="+", default=["additive", "mhar"], help="mhar, mhar:num_heads=1, ...")
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 32], help="sequences that are decoded at once")
    parser.add_argument("--context", type=count, default=1024, help="places of the cache; half of them are filled")
    parser.add_argument(
        "--prefill", nargs=2, type=count, default=[8, 2048], metavar=("B", "T"), help="size of the prompt"
    )
    parser.add_argument(
        "--overrides", nargs="*", type=field, default=[], metavar="FIELD=VALUE", help="of the decoder configuration"
    )
    parser.add_argument("--compile", action="store_true", help="measure what torch.compile makes of the models")
    options = parser.parse_args(arguments)
    options.out = new_folder(options.out, "--out")
    if options.context < LEAST_CONTEXT:
        parser.error(f"--context is {options.context}, but should be at least {LEAST_CONTEXT}")
    timing.require_cuda()
    rows = measure(
        options.preset,
        options.schemes,
        batches=options.batches,
        context=options.context,
        prefill=tuple(options.prefill),
        overrides=dict(options.overrides),
        compiled=options.compile,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decode.json").write_text(json.dumps({"environment": timing.environment(), "rows": rows}, indent=1))
    print(f"{timing.environment()['device']}, bf16{', compiled' if options.compile else ''}")
    print(table(rows))


if __name__ == "__main__":
    in_one_line(main)
