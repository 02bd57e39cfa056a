#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs what needs a GPU, the most telling first: `benchmarks.gpu_first`, whose file in benchmarks/results/ it goes on
# with, then the tests of the kernels. Arguments go to `benchmarks.gpu_first`, such as --minutes.
# The Python is PYTHON, else one that has jax with CUDA, else .venv-gpu, which is made for it with the jax extra named
# by CUDA (cuda13 or cuda12) and needs a package index.
set -euo pipefail
cd "$(dirname "$0")/.."

no_gpu() {
  echo "make gpu: no usable GPU here ($*); nothing was run" >&2
  exit 1
}

export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
find_devices='import jax; print("make gpu: jax", jax.__version__, "on", jax.devices("cuda"))'
python=${PYTHON:-.venv/bin/python}
if [ "$python" = .venv/bin/python ]; then
  nvidia-smi -L >/dev/null 2>&1 || no_gpu "nvidia-smi finds none"
  python=python3
  if ! python3 -c "$find_devices" >/dev/null 2>&1; then
    scripts/setup.sh .venv-gpu "test,${CUDA:-cuda13}"
    python=.venv-gpu/bin/python
  fi
fi
"$python" -c "$find_devices" || no_gpu "$python says why above"
failed=0
"$python" -m benchmarks.gpu_first "$@" || failed=1
# Any pytest will do, which may lack some of the project's options; and Triton's kernels warn that they are deprecated.
"$python" -m pytest -o addopts= -o minversion=7 -W ignore::pytest.PytestConfigWarning \
  -W "ignore:The Pallas Triton backend is deprecated:DeprecationWarning" \
  -p no:cacheprovider -q -m gpu tests/kernels || failed=1
exit "$failed"
