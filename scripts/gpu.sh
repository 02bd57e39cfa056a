#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs everything that needs a GPU: its tests, then the benchmark of the kernels, whose result goes to
# benchmarks/results/ whether or not the tests passed. Arguments go to pytest. A PYTHON other than the checkout's .venv
# must have jax with CUDA and what the tests need; without one .venv-gpu is made, with the jax extra named by CUDA
# (cuda13 or cuda12).
set -euo pipefail
cd "$(dirname "$0")/.."

no_gpu() {
  echo "make gpu: no usable GPU here ($*); nothing was run" >&2
  exit 1
}

python=${PYTHON:-.venv/bin/python}
if [ "$python" = .venv/bin/python ]; then
  nvidia-smi -L >/dev/null 2>&1 || no_gpu "nvidia-smi finds none"
  scripts/setup.sh .venv-gpu "test,${CUDA:-cuda13}"
  python=.venv-gpu/bin/python
fi
export JAX_PLATFORMS=cuda,cpu
"$python" -c 'import jax; print("make gpu: jax", jax.__version__, "on", jax.devices("cuda"))' 2>/dev/null ||
  no_gpu "jax of $python finds none"
failed=0
"$python" -m pytest -m gpu --continue-on-collection-errors "$@" || failed=1
name=$("$python" -c 'import jax; print(jax.devices("cuda")[0].device_kind.lower().replace(" ", "-"))')
"$python" -m benchmarks.kernels --json "benchmarks/results/$name.json" || failed=1
exit "$failed"
