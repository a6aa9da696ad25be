#!/usr/bin/env bash
# Engine and pair on CUDA tensors, within 10 minutes; figures go to bench/results/gpu.json.
# Without a GPU it says so and exits 0. It runs on a bare machine whose Python has torch: what else
# is missing it installs beside it, in .cache/gpu-site, or names where nothing can be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

sees_gpu() {
  "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

python=""
for candidate in ${PYTHON:-} .venv/bin/python python3; do
  if command -v "$candidate" >/dev/null && sees_gpu "$candidate"; then
    python="$candidate"
    break
  fi
done
if [ -z "$python" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "bench gpu: this machine has a GPU, but no Python here has a torch that sees it." >&2
    echo "bench gpu: run 'make venv' with a CUDA build of torch, or name one with PYTHON=..." >&2
    exit 1
  fi
  echo "bench gpu: no CUDA GPU on this machine, nothing measured"
  exit 0
fi

site="$PWD/.cache/gpu-site"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}:$site"
missing="$("$python" bench/gpu_packages.py)"
if [ -n "$missing" ]; then
  echo "bench gpu: installing into .cache/gpu-site:" $missing
  # Without dependencies: torch and what came with it stay as they are.
  if ! "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$site" $missing; then
    echo "bench gpu: cannot run, these packages are missing and cannot be installed:" $missing >&2
    exit 1
  fi
fi
# The codecs' C extension, which rows of codecs need; without a compiler there are none.
if ! "$python" -c 'import prfaas.codecs._native' 2>/dev/null; then
  "$python" setup.py -q build_ext --inplace >/dev/null 2>&1 \
    || echo "bench gpu: no C extension could be built, so no rows of codecs"
fi
exec timeout 600 "$python" -m bench.gpu "$@"
