"""Make README.md of results.json and of what was measured before it: python write_readme.py"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PAIRS = {"350m": "DDP", "1b": "FSDP2"}
BEFORE = (
    HERE / "before/results-ece932e.json",
    HERE.parent / "2026-11-30_fsdp2-host/results-default.json",
    HERE / "before/results-e7e1bc0.json",
    HERE / "before/results-efa3a7c.json",
)
LEAST_DDP, POINTS, LEAST_8B = 0.90, 0.02, 0.95  # what was aimed at

TEXT = """\
# One GPU and two: losses, speed, memory

{gpus} x {device} of one host, joined by NVLink (an all-reduce moves {bus:.0f} GB/s through each); torch {torch},
transformers {transformers}, commit {commit}.
fp32 weights under bf16 autocast, random tokens, vocabulary 151936 (8B: 128256), compiled as a whole for DDP and in
parts for FSDP2. Made by

    PYTHONPATH=src python {command}

in {seconds:.0f} s, of which the slowest part took {compile:.0f} s to compile; then `write_readme.py`.

## One GPU and two, the same microbatch for each

| part | microbatch | tokens/s, 1 GPU | tokens/s, 2 GPUs | scaling | peak memory of each | difference of losses |
| --- | --- | --- | --- | --- | --- | --- |
{pairs}

Speed is the median of {rounds} rounds of {steps} steps (8B: of one). Scaling: speed of two by twice that of one, both
from one process with the same graphs. The losses are of {losses} steps with the same global batch, where one GPU
accumulates what two would have done; the largest difference is given.

## Eight billion parameters in shards of two

| part | microbatch | tokens/s | peak memory of each | steps |
| --- | --- | --- | --- | --- |
{sharded}

## What this shows, and what it does not

{conclusions}

## 1b by FSDP2 at earlier commits

{earlier}

Between e7e1bc0 and efa3a7c clipping and AdamW came to work on the shards themselves and small layers to share an FSDP2
unit; after it the reads came to take the host less. Until then a round had 2 steps, not {steps}. A round begins with
nothing handed out ahead, so its first step waits for the host; how much of the last difference that is was not
measured.
Traces of both ranks before and between: [both-ranks.log](both-ranks.log).
"""


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def gib(peaks: list[int] | int) -> str:
    peak = max(peaks) if isinstance(peaks, list) else peaks
    return f"{peak / 2**30:.1f} GiB"


def speed(part: dict[str, Any], which: str) -> str:
    return f"{part[which]['tokens_per_second']:,.0f}" if which in part else f"not measured: {part.get('error', '')}"


def pair(name: str, part: dict[str, Any]) -> str:
    return row(
        f"{name}, {part['strategy']}{', gathered once a step' if part.get('keep_gathered') else ''}",
        f"{part['batch']} x {part['length']}",
        speed(part, "one"),
        speed(part, "all"),
        f"{part['efficiency']:.3f}" if "efficiency" in part else "",
        " / ".join(gib(part[which]["peak_memory"]) for which in ("one", "all") if which in part),
        f"{part['largest_loss_difference']:.1e}" if "largest_loss_difference" in part else "",
    )


def shards(name: str, part: dict[str, Any]) -> str:
    every = part.get("all")
    taken = f"{len(every['losses'])} and the timed ones" if every else ""
    memory = gib(every["peak_memory"]) if every else ""
    return row(name, f"{part['batch']} x {part['length']}", speed(part, "all"), memory, taken)


def reached(yes: bool) -> str:
    return "reached" if yes else "**not reached**"


def conclusions(parts: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for preset, strategy in PAIRS.items():
        plain, routed = parts[f"{preset}-additive"], parts[f"{preset}-mhar"]
        both = "efficiency" in plain and "efficiency" in routed
        if both:
            apart, wanted = (
                plain["efficiency"] - routed["efficiency"],
                f"within {100 * POINTS:.0f} points of `additive`",
            )
            yes = apart <= POINTS and (strategy != "DDP" or routed["efficiency"] >= LEAST_DDP)
            aim = f"{wanted}, at least {LEAST_DDP:.2f}" if strategy == "DDP" else wanted
            found.append(
                f"{preset} by {strategy}: `additive` scales with {plain['efficiency']:.3f}, `mhar` with "
                f"{routed['efficiency']:.3f}; the aim for `mhar` ({aim}) is {reached(yes)}."
            )
        differences = [part["largest_loss_difference"] for part in (plain, routed) if "largest_loss_difference" in part]
        if differences:
            first, last = plain["one"]["losses"][0], plain["one"]["losses"][-1]
            found.append(
                f"{preset} by {strategy}: the losses of two GPUs are {max(differences):.1e} at most from those of one "
                f"while they go from {first:.1f} to {last:.1f}, in bf16, where sums in another order round differently."
            )
        if "one" in plain and "one" in routed:
            ratio = routed["one"]["tokens_per_second"] / plain["one"]["tokens_per_second"]
            found.append(f"{preset} on one GPU: `mhar` runs at {ratio:.2f}x of `additive`.")
    plain, routed = parts["8b-additive"].get("all"), parts["8b-delta_mhar"].get("all")
    if plain and routed:
        ratio = routed["tokens_per_second"] / plain["tokens_per_second"]
        found.append(
            f"8B in shards: with routing {ratio:.3f}x of the speed without it (aim {LEAST_8B}: "
            f"{reached(ratio >= LEAST_8B)}), {gib(routed['peak_memory'])} against {gib(plain['peak_memory'])}."
        )
    return found + unsteady(parts) + not_measured(parts)


def earlier() -> str:
    """What 1b by FSDP2 was before."""
    lines = [row("commit", "`additive`", "`mhar`", "rounds of `mhar` on two GPUs"), row(*["---"] * 4)]
    for file in BEFORE:
        found = json.loads(file.read_text(encoding="utf-8"))
        plain, routed = (found["parts"][f"1b-{scheme}"] for scheme in ("additive", "mhar"))
        rounds = ", ".join(f"{1e3 * time:.0f}" for time in routed["all"]["step_s"])
        lines.append(
            row(
                f"[{found['environment']['commit'][:7]}]({os.path.relpath(file, HERE)})",
                f"{plain['efficiency']:.3f}",
                f"{routed['efficiency']:.3f}",
                f"{rounds} ms",
            )
        )
    return "\n".join(lines)


def unsteady(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Measurements whose rounds differ by more than a tenth."""
    found = []
    for name, part in parts.items():
        for which, gpus in (("one", "one GPU"), ("all", "all")):
            times = part.get(which, {}).get("step_s", [])
            if times and max(times) > 1.1 * min(times):
                shown = ", ".join(f"{1e3 * time:.0f}" for time in times)
                found.append(f"The rounds of {name} on {gpus} differ widely: {shown} ms a step.")
    return found


def not_measured(parts: dict[str, dict[str, Any]]) -> list[str]:
    failed = [f"{name} ({part['error']})" for name, part in parts.items() if "error" in part]
    disturbed = [
        f"{name} ({', '.join(part['compiling_beside'])})"
        for name, part in parts.items()
        if part.get("compiling_beside")
    ]
    found = [f"**Not measured, or not to the end**: {'; '.join(failed)}."] if failed else []
    if disturbed:
        found.append(f"Measured while another part still compiled on the same host: {'; '.join(disturbed)}.")
    return found


def main() -> None:
    found = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    parts, environment = found["parts"], found["environment"]
    compile_s = max(part.get("compile_s", 0.0) for part in parts.values())
    measured = [part["one"] for part in parts.values() if "one" in part]
    text = TEXT.format(
        gpus=found["gpus"],
        device=environment["devices"][0],
        torch=environment["packages"]["torch"],
        transformers=environment["packages"]["transformers"],
        commit=environment["commit"],
        command=" ".join([f"records/{HERE.name}/run.py", "OUT", *environment["command"][2:]]),
        seconds=found["seconds"],
        compile=compile_s,
        bus=median(part["bus_gb_per_s"] for part in parts.values() if part.get("bus_gb_per_s")),
        pairs="\n".join(pair(name, part) for name, part in parts.items() if not name.startswith("8b")),
        sharded="\n".join(shards(name, part) for name, part in parts.items() if name.startswith("8b")),
        rounds=len(measured[0]["step_s"]),
        steps=parts["1b-mhar"]["steps"],
        losses=len(measured[0]["losses"]),
        conclusions="\n".join(f"- {line}" for line in conclusions(parts)),
        earlier=earlier(),
    )
    (HERE / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
