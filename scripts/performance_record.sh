#!/usr/bin/env bash
# Reads, whole steps, first steps and generation on one card: scripts/performance_record.sh OUT [PART ...], all parts by
# default. Each part is a folder of OUT with its table and raw numbers; parts that are there are skipped, so a run that
# was cut goes on where it was. Nothing else should use the card.
set -euo pipefail

out=$(realpath -m "${1:?usage: scripts/performance_record.sh OUT [PART ...]}")
shift
parts=("$@")
[ $# -gt 0 ] || parts=(reads reads-more steps-100m steps autocast large eager first-step decode)
bench() { ${DEPTHROUTE:-depthroute} bench "$@"; }
steps() { bench train --graphs --processes --rounds 9 --out "$@"; }

run() { # PART FOLDER
    case $1 in
    reads) bench route --out "$2" --processes --shapes 350m 100m 1b 8b-delta --arms engine-compiled engine ;;
    reads-more) bench route --out "$2" --processes --arms engine-compiled engine \
        --shapes 100m-x4 350m-x4 1b-x4 100m-h1 350m-h1 1b-h1 ;;
    steps-100m) steps "$2" --preset 100m --schemes additive mhar mhar:num_heads=1 ;;
    steps) steps "$2" --preset 350m 1b --schemes additive mhar mhar:num_heads=1 ;;
    autocast) steps "$2" --preset 100m 350m 1b --schemes additive mhar --precision autocast ;;
    large) steps "$2" --preset 1b --schemes additive mhar --batch 16 --length 1024 ;;
    eager) # one preset at a time: six models with their eager activations do not fit on a card
        for preset in 100m 350m 1b; do
            bench train --eager --rounds 5 --out "$2/$preset" --preset "$preset" --schemes additive mhar
        done ;;
    first-step) # each scheme alone, nothing cached
        for scheme in additive mhar; do
            TORCHINDUCTOR_CACHE_DIR="$2/cache/$scheme/inductor" TRITON_CACHE_DIR="$2/cache/$scheme/triton" \
                bench train --graphs --rounds 2 --out "$2/$scheme" --preset 1b --schemes "$scheme"
        done
        rm -r "$2/cache" ;;
    decode)
        bench decode --out "$2/launched" --preset 1b --schemes additive mhar
        bench decode --out "$2/compiled" --preset 1b --schemes additive mhar --compile ;;
    *) echo "no part $1" >&2 && return 64 ;;
    esac
}

mkdir -p "$out"
for part in "${parts[@]}"; do
    [ ! -e "$out/$part" ] || continue
    echo "== $part"
    rm -rf "$out/$part.partial"
    mkdir "$out/$part.partial"
    run "$part" "$out/$part.partial" 2> >(tee "$out/$part.partial/errors.txt" >&2) | tee "$out/$part.partial/table.txt"
    mv "$out/$part.partial" "$out/$part"
done
