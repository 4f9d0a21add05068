"""The command line of a record whose runs land one by one: `main` is all of its run.py."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from depthroute.studies.landing import land_study

# Models are not kept, so a checkpoint serves only a run that was cut.
OVERRIDES = ("training.save_every=1000",)

_BOOKS = ("data.train=embedded", "data.validation=null")
REHEARSAL = (
    *_BOOKS,
    "training.steps=2",
    "training.log_every=1",
    "training.evaluate_every=2",
    "training.tail=1",
    "optimizer.warmup_steps=1",
)
TINY = (
    *_BOOKS,
    "data.tokenizer=embedded",
    "data.sequence_length=64",
    "data.max_tokens=20000",
    "data.max_validation_tokens=2000",
    "model.decoder.vocab_size=2048",
    "model.decoder.num_hidden_layers=4",
    "model.decoder.hidden_size=64",
    "model.decoder.intermediate_size=96",
    "model.decoder.head_dim=8",
    "optimizer.warmup_steps=2",
    "training.steps=12",
    "training.batch_size=4",
    "training.micro_batch_size=2",
    "training.precision=fp32",
    "training.compile=false",
    "training.cuda_graphs=false",
    "training.evaluate_every=2",
    "training.log_every=1",
    "training.tail=2",
    "training.num_threads=1",
)


def main(study: str, names: Sequence[str], texts: Sequence[str], arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; returns 0 when all of it is finished, else 1.

    `study`: its file. `names`: the runs to make where the command line names none. `texts`: what models are probed on.
    """
    given = _parser(study).parse_intermixed_args(arguments)
    names = given.runs or names
    if given.list:
        print("\n".join(names))
        return 0
    missing = land_study(
        study,
        given.out,
        names,
        overrides=[*OVERRIDES, *(TINY if given.tiny else REHEARSAL if given.rehearse else ())],
        probe=["embedded"] if given.tiny or given.rehearse else texts,
        ahead=given.ahead,
        workers=given.workers,
        minutes=given.minutes,
        least_minutes=given.least_minutes,
    )
    if missing:
        print(f"not finished: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def _parser(study: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"Run runs of {study}, one after the other on each GPU while the next ones compile; each becomes "
        "OUT/archives/<label>_seed-<s>.tar.xz and leaves no model. Run it again to go on."
    )
    parser.add_argument("out", type=Path, help="a folder; the study folder with the models while they train")
    parser.add_argument("runs", nargs="*", metavar="RUN", help='like "mhar-h1/seed-0"; all that have not landed')
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the runs that are left after so long")
    parser.add_argument("--least-minutes", type=float, default=0.0, help="start none with less time than that left")
    parser.add_argument("--ahead", type=int, default=1, help="how many compile while one trains (1)")
    parser.add_argument("--workers", type=int, help="how many train at a time; one on each free GPU by default")
    parser.add_argument("--list", action="store_true", help="print the names of the runs, and run nothing")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--rehearse", action="store_true", help="two steps of each, on the embedded books")
    kinds.add_argument("--tiny", action="store_true", help="a few steps of a small shape on the CPU")
    return parser
