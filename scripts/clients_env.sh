#!/usr/bin/env bash
# Builds the environment of the public load tools, or keeps it where it is right.
# Exit 0: .venv-clients is ready. Exit 3: this machine cannot have it; the reason is printed.
# Nothing of it touches .venv: the tools only speak HTTP with what runs from there.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${PRFAAS_CLIENTS_VENV:-.venv-clients}"
pins=constraints-clients.txt
torch=2.13.0+cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

skip() {
  echo "clients: SKIPPED, no load tool was run: $*" >&2
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

works() {
  cmp -s "$pins" "$venv/.installed-pins" && [ -x "$venv/bin/aiperf" ] && [ -x "$venv/bin/guidellm" ]
}

started=$SECONDS
if works; then
  echo "clients: $venv is present"
  exit 0
fi
[ "$(uname -sm)" = "Linux x86_64" ] || skip "the pins are for Linux on x86_64"
python="$(find_python)" || skip "the pins are for Python 3.11, which is not on PATH"
echo "clients: installing aiperf and guidellm into $venv: 1.6 GB, some minutes"
"$python" -m venv --clear "$venv"
# guidellm loads its prompts with torch. Its own wheel first, the CPU's and no other: without it nothing is of use.
"$venv/bin/python" -m pip install -qq --no-deps --no-compile "torch==$torch" || {
  rm -rf "$venv"
  skip "the wheel torch $torch is not on hand (see above); give pip a folder that has it (PIP_FIND_LINKS)"
}
"$venv/bin/python" -m pip install -qq --no-deps --no-compile --requirement "$pins" || {
  rm -rf "$venv"
  skip "the packages in $pins cannot be had (see above)"
}
# Not left to the first start of each process: under PYTHONDONTWRITEBYTECODE that would be every one.
"$venv/bin/python" -m compileall -q -j 0 "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
  >/dev/null || true
cp "$pins" "$venv/.installed-pins"
echo "clients: installed in $((SECONDS - started)) s"
