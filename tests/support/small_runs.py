"""Small training runs on made-up text, for the tests of training: a step takes milliseconds."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from depthroute.data import load_tokenizer
from depthroute.training import Recipe, load_recipe
from support.models import stock

STEPS = 12
_WORDS = ("a", "the", "green", "house", "light", "of", "old", "over", "river", "runs", "slowly", "stone", "tells", "to")


def write_corpus(folder: Path, documents: int = 80, seed: int = 0) -> Path:
    """A .jsonl file of random sentences, in the fields `title` and `text`."""
    draw = random.Random(seed)
    path = folder / "corpus.jsonl"
    lines = []
    for _ in range(documents):
        title, text = (" ".join(draw.choices(_WORDS, k=draw.randint(60, 120))) for _ in range(2))
        lines.append(json.dumps({"title": title, "text": text}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


_SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def write_checkpoint(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A stock checkpoint of the shape of `small_recipe`, moved away from its initial values, with a tokenizer."""
    tokenizer = load_tokenizer("embedded")
    model = stock(family, **{**_SHAPE, "vocab_size": len(tokenizer), "initializer_range": 0.1, **overrides})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_recipe(corpus: Path, *overrides: str, checkpoint: Path | None = None) -> Recipe:
    """A recipe of `STEPS` steps of 8 sequences of 16 tokens, evaluated every 4 steps and logged at each.

    With a checkpoint the model starts from that, and not from a preset.
    """
    values: dict[str, Any] = {
        "name": "small",
        "model": {"preset": "tiny", "decoder": _SHAPE} if checkpoint is None else {"checkpoint": str(checkpoint)},
        "data": {"train": str(corpus), "held_out_fraction": 0.2, "sequence_length": 16, "max_validation_tokens": 500},
        "optimizer": {"warmup_steps": 3},
        "training": {"steps": STEPS, "batch_size": 8, "evaluate_every": 4, "log_every": 1, "tail": 2, "num_threads": 1},
    }
    return load_recipe(values, overrides)


def metrics(out: Path, kind: str, *keys: str) -> list[tuple[Any, ...]]:
    """Some columns of the lines of one kind in metrics.jsonl."""
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [tuple(line[key] for key in keys) for line in lines if line["kind"] == kind]


def exact(out: Path) -> list[Any]:
    """Everything in metrics.jsonl that two equal runs share: all but times and memory."""
    train = metrics(out, "train", "step", "tokens", "loss", "lr", "grad_norm")
    return [*train, *metrics(out, "evaluation", "step", "tokens", "loss", "stderr", "num_tokens")]


def without_times(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the machine and its load."""
    varying = ("seconds", "tokens_per_second", "peak_memory_bytes")
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{key: value for key, value in line.items() if key not in varying} for line in lines]


def same_weights(a: Path, b: Path) -> bool:
    """Whether the final models of two runs are equal bit for bit."""
    left, right = (load_file(out / "final" / "model.safetensors") for out in (a, b))
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def assert_close(a: Path, b: Path, tolerance: float) -> None:
    """Two runs have the same losses and gradient norms at the same steps, up to rounding."""
    for kind, keys in (("train", ("step", "loss", "grad_norm")), ("evaluation", ("step", "loss", "num_tokens"))):
        left, right = metrics(a, kind, *keys), metrics(b, kind, *keys)
        assert left, f"{a} has no line of kind {kind}"
        assert left == [pytest.approx(line, abs=tolerance, rel=0) for line in right]


def start(work: Callable[[], Any]) -> int:
    """Do `work` in a forked process (no imports to repeat), and return its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def end_of(process: int) -> int:
    """Wait for a process; its exit status, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_self() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def as_ranks(work: Callable[[int], Any], ranks: int = 2, ends: int = 0) -> None:
    """Do `work(rank)` in as many processes, with the environment that torchrun gives them; all end with `ends`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def as_rank(rank: int) -> Any:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({key: str(value) for key, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch._dynamo.utils.counters.clear()  # what the process counted that this one was forked from
        return work(rank)

    processes = [start(lambda rank=rank: as_rank(rank)) for rank in range(ranks)]
    assert [end_of(process) for process in processes] == [ends] * ranks
