#!/usr/bin/env bash
# Installs a headless Chromium from Debian's packages, unless there is one. Tries again where a mirror fails.
set -euo pipefail

for name in "${DEPTHROUTE_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable chrome-headless-shell; do
    if [ -n "$name" ] && command -v "$name" > /dev/null; then
        echo "Chromium is there: $(command -v "$name")"
        exit 0
    fi
done
if ! command -v apt-get > /dev/null; then
    echo "no Chromium, and no apt-get to install it; install one, or name it in DEPTHROUTE_CHROMIUM" >&2
    exit 1
fi

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq \
        -o Acquire::Retries=5 -o Acquire::http::Timeout=60 -o DPkg::Lock::Timeout=300 "$@"
}

for attempt in 1 2 3 4; do
    if apt update && apt install --yes --no-install-recommends chromium fonts-dejavu-core > /dev/null; then
        chromium --version
        exit 0
    fi
    echo "attempt $attempt to install chromium failed" >&2
    sleep $((attempt * 20))
done
exit 1
