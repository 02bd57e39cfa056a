#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment that holds this checkout (editable) and what it needs. Does nothing when that is done.
#
#   scripts/setup.sh [DIR [EXTRAS [REQUIREMENT...]]]
#
# DIR defaults to .venv, EXTRAS (of pyproject.toml) to test; each REQUIREMENT is passed to the installer as it is.
# Each set of EXTRAS leaves a stamp in DIR; a change of pyproject.toml, of the checkout's path or of the
# requirements makes it void.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${1:-.venv}
extras=${2:-test}
requirements=("${@:3}")
stamp="$dir/.installed-${extras//,/-}"
want="$(cksum <pyproject.toml) $PWD ${requirements[*]-}"

say() { printf 'setup: %s\n' "$*"; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# The first Python of at least 3.12 that really runs (a version manager's shim may stand on PATH and not).
find_python() {
  local name
  for name in python3 python3.12 python3.13 python3.14 python; do
    if is_new_enough "$name"; then echo "$name" && return; fi
  done
  return 1
}

# uv knows more places to look than PATH, and fetches a Python where there is none.
uv_venv() { "$1" venv --quiet --python 3.12 "$dir" || "$1" venv --quiet --python '>=3.12' "$dir"; }

make_venv() {
  local python
  if command -v uv >/dev/null && uv_venv uv; then return; fi
  if python=$(find_python) && "$python" -m venv "$dir"; then return; fi
  say "no Python 3.12 or newer on PATH: asking uv, from a private environment (.venv-uv)"
  if python3 -m venv .venv-uv && .venv-uv/bin/python -m pip install --quiet uv && uv_venv .venv-uv/bin/uv; then return; fi
  say "please install Python 3.12 or newer with its venv module, or uv (pip install uv), and run this again"
  exit 1
}

# uv where there is one, because it is several times as fast; else the environment's own pip.
install() {
  local uv
  for uv in uv .venv-uv/bin/uv; do
    if command -v "$uv" >/dev/null; then
      "$uv" pip install --python "$dir/bin/python" "$@"
      return
    fi
  done
  "$dir/bin/python" -m pip --version >/dev/null 2>&1 || "$dir/bin/python" -m ensurepip
  local quiet=--quiet
  if [ -t 1 ]; then quiet=--no-input; fi # a person watches: let pip report
  "$dir/bin/python" -m pip install $quiet --disable-pip-version-check "$@"
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && is_new_enough "$dir/bin/python"; then exit 0; fi

began=$SECONDS
if ! is_new_enough "$dir/bin/python"; then
  if [ -e "$dir" ] && [ ! -f "$dir/pyvenv.cfg" ]; then say "$dir is there and is no virtual environment" && exit 1; fi
  say "making $dir: about 800 MB, a minute or two"
  rm -rf "$dir"
  make_venv
fi
say "installing kvjax[$extras]${requirements[*]+ with ${requirements[*]}} into $dir"
install --editable ".[$extras]" ${requirements[@]+"${requirements[@]}"}
echo "$want" >"$stamp"
say "done in $((SECONDS - began)) s"
