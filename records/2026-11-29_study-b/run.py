"""Runs of study B, landing one by one: python run.py OUT [RUN ...]

From the root of the repository, with --help for more; OUT/archives/ then holds what is to be unpacked in
results/ here. data/ holds what recipes/studies/base/open-corpus.yaml names, and DEPTHROUTE_CACHE says where the
token files go.
"""

import sys
from pathlib import Path

from depthroute.studies.landing import in_order
from depthroute.studies.landing_command import main

STUDY = "studies/study-b"
TEXTS = ("data/corpus/openstax.val.jsonl.xz", "data/corpus/wikipedia_en.val.jsonl.xz")  # for the probe
FIRST = ("additive", "mhar-h1", "mhar-h4")  # of the arms

if __name__ == "__main__":
    missing = in_order(STUDY, FIRST, landed=Path(__file__).parent / "results")
    missing = [name for name in missing if "width=d512" not in name]  # those are study A's
    sys.exit(main(STUDY, missing, TEXTS))
