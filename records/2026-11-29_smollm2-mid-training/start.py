"""What comes before the first step: the checkpoint as base.yaml names it, the tokens, and the loss of each arm.

python start.py checkpoint data/SmolLM2-135M-Instruct.Q4_1.gguf   makes data/smollm2 of the GGUF file
python start.py losses OUT                                        tokenises, and writes OUT/start.json: held-out losses
                                                                  before the first step, in fp32 without autocast
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
AT_ONCE = 16


def make_checkpoint(gguf: Path) -> None:
    """The dequantised model and its tokenizer, in fp32."""
    to_stock(convert_checkpoint(gguf, residual={"scheme": "additive"})).save_pretrained(CHECKPOINT)
    tokenizer = gguf_tokenizer(gguf)
    assert tokenizer is not None, f"{gguf} has no tokenizer"
    tokenizer.save_pretrained(CHECKPOINT)


def measure_losses(out: Path) -> None:
    """Write the loss of each arm before its first step, and how far apart they are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    arms: dict[str, Any] = {}
    for run in runs(load_study(STUDY)):
        splits = prepare(run.recipe.data_with_tokenizer, os.environ["DEPTHROUTE_CACHE"])
        model = build_model(run.recipe, splits.tokenizer).to(device)
        loss = held_out_loss(model, splits.validation, AT_ONCE)
        arms[run.arm] = {"loss": loss.mean, "stderr": loss.stderr, "num_tokens": loss.num_tokens}
        print(run.arm, arms[run.arm], flush=True)
        del model
    apart = max(abs(arm["loss"] - arms["control"]["loss"]) for arm in arms.values())
    out.mkdir(parents=True, exist_ok=True)
    found = {"precision": "fp32", "device": device, "arms": arms, "largest_difference": apart}
    (out / "start.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    began = time.perf_counter()
    what, path = sys.argv[1:]
    make_checkpoint(Path(path)) if what == "checkpoint" else measure_losses(Path(path))
    print(f"{what}: {time.perf_counter() - began:.1f} s")
