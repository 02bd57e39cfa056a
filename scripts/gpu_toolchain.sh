#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs compilers for NVIDIA GPUs, which need no GPU (jax's CUDA plugin, ptxas, nvdisasm; 196 MB), for the jaxlib of
# a Python:
#
#   scripts/gpu_toolchain.sh [PYTHON]
#
# They go to .gpu-toolchain/<version of jaxlib>, where only the tests that need them look: within .venv the plugin would
# complain about missing CUDA libraries at every start of jax. Where they cannot be installed, those tests skip.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${1:-.venv/bin/python}
version=$("$python" -c 'import importlib.metadata as m; print(m.version("jaxlib"))') || exit 0
dir=.gpu-toolchain/$version
packages=("jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-nvdisasm)
if [ "$(cat "$dir/.installed" 2>/dev/null)" = "${packages[*]}" ]; then exit 0; fi
if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then exit 0; fi
rm -rf "$dir"
if command -v uv >/dev/null; then
  uv pip install --quiet --python "$python" --no-deps --target "$dir" "${packages[@]}"
else
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$dir" "${packages[@]}"
fi
if [ $? -eq 0 ]; then
  echo "${packages[*]}" >"$dir/.installed"
else
  echo "setup: no CUDA compiler to be had for jaxlib $version; the tests that compile for GPUs will skip"
  rm -rf "$dir"
fi
