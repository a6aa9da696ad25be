#!/usr/bin/env bash
# Builds the environment of the public load tools, or keeps it where it is right.
# Exit 0: .venv-clients is ready. Exit 3: this machine cannot have it; the reason is printed.
# Nothing of it touches .venv: the tools only speak HTTP with what runs from there.
set -euo pipefail
name=clients
untested="no load tool was run"
venv="${PRFAAS_CLIENTS_VENV:-.venv-clients}"
pins=constraints-clients.txt
. "$(dirname "$0")/pinned_env.sh"

install_all() {
  install_pins # with torch, by which guidellm loads its prompts
}

works() {
  pins_are_installed && [ -x "$venv/bin/aiperf" ] && [ -x "$venv/bin/guidellm" ]
}

provide "aiperf and guidellm" "1.6 GB"
