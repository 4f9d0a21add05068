"""Python's garbage collector, kept from stopping a training run."""

from __future__ import annotations

import gc
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def freeze_heap() -> None:
    """Leave what is there now out of later collections: modules, the optimizer, what the compiler has made.

    A collection of everything walks over a million objects then. Under FSDP2 that was 0.4 s on one rank or the other
    in one of sixteen steps, while its device and all other ranks waited (records/2026-11-30_fsdp2-host).
    """
    gc.collect()
    gc.freeze()


class FrozenHeap(TrainerCallback):
    """`freeze_heap` after the first step, when the graphs of training are made, until `close`.

    Nothing where the caller has frozen the heap: there is no way to give back a part of it.
    """

    def __init__(self) -> None:
        self._stepped = self._frozen = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._stepped and not gc.get_freeze_count():
            freeze_heap()
            self._frozen = True
        self._stepped = True

    def close(self) -> None:
        if self._frozen:
            gc.unfreeze()
