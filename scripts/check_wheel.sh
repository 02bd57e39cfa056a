#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel, installs it into an empty environment and uses it there, away from the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "wheel: building"
"$python" -m build --wheel --outdir "$work" . >"$work/build.log" 2>&1 || { cat "$work/build.log" && exit 1; }
"$python" -m zipfile --list "$work"/kvjax-*.whl

echo "wheel: installing into an empty environment"
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$work"/kvjax-*.whl

cp scripts/use_wheel.py "$work"
cd "$work"
JAX_PLATFORMS=cpu venv/bin/python -I use_wheel.py
