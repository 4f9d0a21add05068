#!/usr/bin/env bash
# Installs bubblewrap from Debian's packages, unless it is there, and says whether it can make a sandbox here.
set -euo pipefail

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq \
        -o Acquire::Retries=5 -o Acquire::http::Timeout=60 -o DPkg::Lock::Timeout=300 "$@"
}

if ! command -v bwrap > /dev/null; then
    for attempt in 1 2 3; do
        apt update && apt install --yes --no-install-recommends bubblewrap > /dev/null && break
        echo "attempt $attempt to install bubblewrap failed" >&2
        sleep $((attempt * 20))
    done
fi
# Where a container forbids it, bubblewrap says what it was not allowed.
bwrap --ro-bind / / --unshare-all --die-with-parent true
bwrap --version
