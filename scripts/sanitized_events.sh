#!/usr/bin/env bash
# Builds gateway/csrc/events.c with address and undefined-behaviour sanitizers, in a copy of the
# package under .cache, and runs its tests there: make test-sanitized
set -euo pipefail
cd "$(dirname "$0")/.."
python=${BIN:-.venv/bin}/python
tree=.cache/sanitized
rm -rf "$tree"
mkdir -p "$tree"
cp -r gateway prfaas policies bench tests pyproject.toml "$tree"
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
"${CC:-cc}" -O1 -g -std=gnu11 -Wall -fPIC -shared -fno-omit-frame-pointer \
    -fsanitize=address,undefined -fno-sanitize-recover=all -I"$include" \
    gateway/csrc/events.c -o "$tree/gateway/_events.abi3.so"
# Python itself keeps what it allocates, so leaks are not looked for.
export ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=$PWD/$tree
LD_PRELOAD=$("${CC:-cc}" -print-file-name=libasan.so) \
    "$PWD/$python" -c 'import sys; sys.path.insert(0, sys.argv[1])
import gateway._events, pytest
assert gateway._events.__file__.startswith(sys.argv[1]), gateway._events.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", sys.argv[1], *sys.argv[2:]]))' \
    "$PWD/$tree" "$tree/tests/gateway/test_events.py" "$@"
