# shellcheck shell=bash
# What the environments beside .venv have in common; sourced with `name`, `untested`, `venv` and `pins`
# set. Exit 3 of who sources it: this machine cannot have the environment; the reason is printed.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch=2.13.0+cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

skip() {
  echo "$name, $untested: SKIPPED: $*" >&2
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

site_packages() {
  "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

pins_are_installed() {
  cmp -s "$pins" "$venv/.installed-pins"
}

install_pins() {
  local python
  [ "$(uname -sm)" = "Linux x86_64" ] || skip "the pins are for Linux on x86_64"
  python="$(find_python)" || skip "the pins are for Python 3.11, which is not on PATH"
  "$python" -m venv --clear "$venv"
  # Torch's own wheel for CPUs, tried first: where it is not on hand nothing else is of use.
  "$venv/bin/python" -m pip install -qq --no-deps --no-compile "torch==$torch" || {
    rm -rf "$venv"
    skip "the wheel torch $torch is not on hand (see above); give pip a folder that has it (PIP_FIND_LINKS)"
  }
  "$venv/bin/python" -m pip install -qq --no-deps --no-compile --requirement "$pins" || {
    rm -rf "$venv"
    skip "the packages in $pins cannot be had (see above)"
  }
  # Not left to the first start of each process: under PYTHONDONTWRITEBYTECODE that would be every one.
  "$venv/bin/python" -m compileall -q -j 0 "$(site_packages)" >/dev/null || true
}

# What it is and how large, and what it holds: keeps it where it `works`, else has it made by
# `install_all`.
provide() {
  local what="$1" size="$2" started=$SECONDS
  if works; then
    echo "$name: $venv is present ($what)"
    return
  fi
  echo "$name: installing $what into $venv: $size, some minutes"
  install_all
  cp "$pins" "$venv/.installed-pins"
  works || { echo "$name: $venv does not hold what $pins says" >&2; exit 1; }
  echo "$name: installed in $((SECONDS - started)) s"
}
