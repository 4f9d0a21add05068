"""Runs of study A at 6,000 steps, landing one by one: python run_long.py OUT [RUN ...]

From the root of the repository, with --help for more; OUT/archives/ then holds what is to be unpacked in
results-long/ here. data/ holds what recipes/studies/base/open-corpus.yaml names, and DEPTHROUTE_CACHE says where the
token files go.
"""

import sys
from pathlib import Path

from depthroute.studies.landing import in_order
from depthroute.studies.landing_command import main

STUDY = "studies/study-a-long"
TEXTS = ("data/corpus/openstax.val.jsonl.xz", "data/corpus/wikipedia_en.val.jsonl.xz")  # for the probe
FIRST = ("mhar-h1", "mhar-h4")  # of the arms

if __name__ == "__main__":
    missing = in_order(STUDY, FIRST, landed=Path(__file__).parent / "results-long")
    sys.exit(main(STUDY, missing, TEXTS))
