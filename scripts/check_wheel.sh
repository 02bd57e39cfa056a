#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel and uses it away from the checkout, in two environments of their own: alone, and with the extras for
# the models and all wires.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "wheel: building"
"$python" -m build --wheel --outdir "$work" . >"$work/build.log" 2>&1 || { cat "$work/build.log" && exit 1; }
"$python" -m zipfile --list "$work"/kvjax-*.whl

# install DIR [EXTRAS]
install() {
  echo "wheel: installing kvjax${2-} into an empty environment"
  "$python" -m venv "$work/$1"
  "$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check "$(echo "$work"/kvjax-*.whl)${2-}"
}

install alone
install models "[models,wires,agent,metrics,serve]"
cp scripts/use_*.py "$work"
cd "$work"
export JAX_PLATFORMS=cpu
alone/bin/python -I use_wheel.py
models/bin/python -I use_models.py
models/bin/python -I use_wires.py
models/bin/python -m kvjax_models
models/bin/python -m kvjax_models.demo
models/bin/python -m kvjax_models.grpo --help >/dev/null
models/bin/python -m kvjax_models.serve --help >/dev/null
