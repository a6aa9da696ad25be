#!/usr/bin/env bash
# Builds the environment of the public load tools, or keeps it where it is right.
# Exit 0: .venv-clients is ready. Exit 3: this machine cannot have it; the reason is printed.
# Nothing of it touches .venv: the tools only speak HTTP with what runs from there.
set -euo pipefail
cd "$(dirname "$0")/.."
name="clients, no load tool was run"
venv="${PRFAAS_CLIENTS_VENV:-.venv-clients}"
pins=constraints-clients.txt
. scripts/pinned_env.sh

works() {
  pins_are_installed && [ -x "$venv/bin/aiperf" ] && [ -x "$venv/bin/guidellm" ]
}

started=$SECONDS
if works; then
  echo "clients: $venv is present"
  exit 0
fi
echo "clients: installing aiperf and guidellm into $venv: 1.6 GB, some minutes"
install_pins # with torch, by which guidellm loads its prompts
pins_are_in
works || { echo "clients: $venv does not hold what $pins says" >&2; exit 1; }
echo "clients: installed in $((SECONDS - started)) s"
