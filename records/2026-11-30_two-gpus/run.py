"""Trains on one GPU and on all GPUs of this host, and writes what was measured to OUT/results.json.

    PYTHONPATH=src python records/2026-11-30_two-gpus/run.py OUT

About five minutes on two H200s; no data, no tokenizer. Each part is a group of processes as torchrun starts them, one
for each GPU: `350m` with DDP and `1b` with FSDP2, each plain (`additive`) and routed (`mhar`), on one GPU and on all;
and 8 B parameters in shards with and without `delta_mhar`. All parts compile side by side, in the memory of one layer
at a time; then they are measured one after the other, while the others wait (where one still compiles after three
minutes, the result names it). A part that fails, or takes longer than
its limit, is written down with the end of its log, and the others go on.

    --only PART ...      some parts alone
    --gpus N             instead of all
    --patience S         seconds after which measuring begins although a part still compiles (180)
    --measure-limit S    seconds for the measurement of one part (120)
    --limit S            seconds for all of it (540)
    --tiny               small shapes on the CPU with gloo: shows that the script works, measures nothing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from depthroute.bench.scale import table
from depthroute.files import write_json
from depthroute.training.environment import describe_environment

_SHARDED = (
    "--preset 8b --strategy fsdp2 --sharded --checkpointing --batch 2 --length 4096 --learning-rate 1e-5 "
    "--warm-up 1 --steps 1"
)
PARTS = {
    "350m-additive": "--preset 350m --scheme additive --strategy ddp --batch 16 --length 1024",
    "350m-mhar": "--preset 350m --scheme mhar --strategy ddp --batch 16 --length 1024",
    "1b-additive": "--preset 1b --scheme additive --strategy fsdp2 --keep-gathered --batch 16 --length 1024",
    "1b-mhar": "--preset 1b --scheme mhar --strategy fsdp2 --keep-gathered --batch 16 --length 1024",
    "8b-additive": f"{_SHARDED} --scheme additive",
    "8b-delta_mhar": f"{_SHARDED} --scheme delta_mhar:num_heads=8,block_layers=4",
}
_TINY = (
    "--device cpu --backend aot_eager --batch 1 --length 16 --rounds 2 --steps 1 --loss-steps 3 --overrides "
    "vocab_size=64 num_hidden_layers=2 hidden_size=32 intermediate_size=48 head_dim=8 num_attention_heads=8 "
    "num_key_value_heads=8"
)
_LOG_LINES = 40


class Part:
    """One group of processes, and the files through which it is told when its turn has come."""

    def __init__(self, name: str, arguments: str, folder: Path, gpus: int) -> None:
        self.name, self.file, self.log = name, folder / f"{name}.json", folder / f"{name}.log"
        self.ready, self.go = folder / f"{name}.ready", folder / f"{name}.go"
        self.error: str | None = None
        self.beside: list[str] = []  # what still compiled when its measurement began
        command = [sys.executable, "-m", "depthroute.bench.scale", "--out", str(self.file)]
        command += ["--hold", str(folder / name), *arguments.split()]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(gpus)}
        # Many parts compile at once: each with few helpers.
        few = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        with self.log.open("wb") as log:
            self.processes = [
                subprocess.Popen(
                    command,
                    env={**os.environ, **few, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for rank in range(gpus)
            ]

    def ended(self) -> bool:
        """Whether it is over; where one process has failed the others are ended, since they would wait for it."""
        statuses = [process.poll() for process in self.processes]
        failed = next((status for status in statuses if status), None)
        if failed is not None and self.error is None:
            self.stop(f"a process ended with status {failed}")
        return all(process.poll() is not None for process in self.processes)

    def stop(self, reason: str) -> None:
        """End all its processes and what they have started."""
        self.error = self.error or reason
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.is_file() else {}
        found["compiling_beside"] = self.beside
        if self.error is not None:
            lines = self.log.read_text(errors="replace").splitlines()
            found |= {"error": self.error, "log": lines[-_LOG_LINES:]}
        return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _links() -> str | None:
    """How the GPUs are joined."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
    return None


def run(out: Path, names: list[str], gpus: int, tiny: bool, patience: float, measure: float, limit: float) -> dict:
    """Start all parts, let them compile, measure them in turn; results.json is written anew after each."""
    began = time.monotonic()
    folder = out / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    environment = describe_environment()
    environment["command"] = ["OUT" if word == str(out) else word for word in environment["command"]]
    results: dict[str, Any] = {"environment": environment, "links": _links(), "gpus": gpus, "parts": {}}
    parts = [Part(name, PARTS[name] + (f" {_TINY}" if tiny else ""), folder, gpus) for name in names]

    def keep(part: Part) -> None:
        results["parts"][part.name] = part.result()
        results["seconds"] = time.monotonic() - began
        write_json(out / "results.json", results)
        state = part.error or "done"
        print(f"{results['seconds']:5.0f} s  {part.name}: {state}", flush=True)

    def compiling() -> list[Part]:
        return [part for part in parts if not part.ready.exists() and not part.ended()]

    try:
        while compiling() and time.monotonic() - began < patience:
            time.sleep(0.1)
        print(f"{time.monotonic() - began:5.0f} s  still compiling: {[part.name for part in compiling()]}", flush=True)
        waiting = list(parts)
        while waiting:
            part = next((part for part in waiting if part not in compiling()), None)
            if part is not None:
                waiting.remove(part)
                part.beside = [other.name for other in compiling()]
                part.go.touch()
                until = min(time.monotonic() + measure, began + limit)
                while not part.ended():
                    if time.monotonic() > until:
                        part.stop("its time was over")
                    time.sleep(0.1)
                keep(part)
            elif time.monotonic() - began > limit:
                break
            else:
                time.sleep(0.1)
    finally:
        for part in parts:
            if not part.ended():
                part.stop("the script ended")
                keep(part)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--patience", type=float, default=180)
    parser.add_argument("--measure-limit", type=float, default=120)
    parser.add_argument("--limit", type=float, default=540)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing outlives this
    number = given.gpus or (2 if given.tiny else torch.cuda.device_count())
    found = run(given.out, given.only, number, given.tiny, given.patience, given.measure_limit, given.limit)
    print(table(found["parts"]))
