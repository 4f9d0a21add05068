"""What comes before the first step: the checkpoint as base.yaml names it, the tokens, and the loss of each arm.

python start.py checkpoint data/SmolLM2-135M-Instruct.Q4_1.gguf   makes data/smollm2 of the GGUF file
python start.py losses OUT/start.json                             tokenises; held-out losses in fp32, without autocast
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from depthroute.convert import convert_checkpoint, to_stock
from depthroute.convert.gguf import gguf_tokenizer
from depthroute.data import prepare
from depthroute.studies.study import load_study, runs
from depthroute.training.evaluation import held_out_loss
from depthroute.training.model_building import build_model

STUDY = Path(__file__).parent / "study.yaml"
CHECKPOINT = Path("data/smollm2")


def make_checkpoint(gguf: Path) -> None:
    """The dequantised model and its tokenizer, in fp32."""
    to_stock(convert_checkpoint(gguf, residual={"scheme": "additive"})).save_pretrained(CHECKPOINT)
    tokenizer = gguf_tokenizer(gguf)
    assert tokenizer is not None, f"{gguf} has no tokenizer"
    tokenizer.save_pretrained(CHECKPOINT)


def measure_losses(out: Path, sequences: int | None = None) -> None:
    """Write the fp32 loss of each arm before its first step; of the first `sequences` held-out ones, or of all."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    found: dict[str, Any] = {"device": device, "precision": "fp32"}
    for run in runs(load_study(STUDY)):
        splits = prepare(run.recipe.data_with_tokenizer, os.environ["DEPTHROUTE_CACHE"])
        shown = len(splits.validation) if sequences is None else sequences
        held_out = [splits.validation[i] for i in range(shown)]
        model = build_model(run.recipe, splits.tokenizer).to(device)
        loss = held_out_loss(model, held_out, run.recipe.training.micro_batch_size or 1)
        found[run.arm] = {"loss": loss.mean, "stderr": loss.stderr, "num_tokens": loss.num_tokens}
        print(run.arm, found[run.arm], flush=True)
        del model
    baseline = found["control"]["loss"]
    found["largest_difference"] = max(abs(arm["loss"] - baseline) for arm in found.values() if isinstance(arm, dict))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    began = time.perf_counter()
    what, path, *rest = sys.argv[1:]
    if what == "checkpoint":
        make_checkpoint(Path(path))
    else:
        measure_losses(Path(path), *map(int, rest))
    print(f"{what}: {time.perf_counter() - began:.1f} s")
