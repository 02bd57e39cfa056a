# SPDX-License-Identifier: Apache-2.0
"""Calls on the day that jax has no Triton any more, in processes that cannot import it."""

import json
import os
import sys
import textwrap

import pytest

from tests.drive import ROOT, output_of
from tests.kernels.toolchain import needs_toolchain, results_of

# Imported by Python itself when it starts.
GONE = """
    import sys

    class Gone:
        def find_spec(self, name, path=None, target=None):
            if name.startswith(("jax.experimental.pallas.triton", "jax._src.pallas.triton")):
                raise ImportError(f"{name} is gone")

    sys.meta_path.insert(0, Gone())
"""

GENERATE = """
import json
import kvjax
from models import load
model, _ = load("tests/data/goldens/llama")
spec = kvjax.make_spec(model.layer_specs(), num_blocks=20, max_seqs=2, max_length=48, block_size=8, dtype="float32")
prompts = [list(range(1, 30)), [*range(1, 20), 3]]
outputs, _, _ = kvjax.generate(model, kvjax.Cache.create(spec), prompts, max_new_tokens=6)
print(json.dumps([output.tokens for output in outputs]))
"""


@pytest.fixture
def gone(tmp_path):
    """A folder that keeps a process from importing Triton, if it stands first in its path."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(GONE))
    return str(tmp_path)


@pytest.mark.slow
def test_generate_gives_the_same_tokens(gone):
    paths = str(ROOT), f"{gone}{os.pathsep}{ROOT}"
    with_it, without = (output_of(sys.executable, "-c", GENERATE, PYTHONPATH=path) for path in paths)
    assert json.loads(with_it.splitlines()[-1]) == json.loads(without.splitlines()[-1])


@pytest.mark.slow
@needs_toolchain
def test_a_step_compiles_for_a_gpu_with_mosaic_and_plain_xla(gone):
    (result,) = results_of("tests.kernels.gpu_compile", "h200", "step", first=gone)
    assert result["pool_copies"] == 0 and result["aliased"] >= result["pool"]
    assert result["emitted"] == ["mosaic_gpu_v2"]
    assert set(result["kernels"]) == {
        "mosaic_rope_append",
        "mosaic_decode_attention",
        "mosaic_merge_attention",
        "mosaic_copy_blocks",
    }
    switches = "decode_attention=mosaic,rope_append=mosaic,copy_blocks=mosaic"
    (switched,) = results_of("tests.kernels.gpu_compile", "h200", "step", KVJAX_KERNELS=switches)
    assert switched["emitted"] == result["emitted"] and switched["launches"] == result["launches"]


@pytest.mark.slow
@needs_toolchain
def test_a_step_without_triton_never_stops_for_the_host(gone):
    (with_it,) = results_of("tests.kernels.gpu_programs", "--json", "layer")
    (without,) = results_of("tests.kernels.gpu_programs", "--json", "layer", first=gone)
    for part, counts in without.items():
        print(f"a layer, {part}: {with_it[part]['kernels']} kernels with Triton, {counts['kernels']} without")
        assert counts["stops"] == 0


@pytest.mark.slow
@needs_toolchain
def test_a_layer_without_triton_has_few_more_kernels(gone):
    (without,) = results_of("tests.kernels.gpu_programs", "--json", "step_8b_32", first=gone)
    assert without["middle"]["kernels"] <= 16 and without["all"]["stops"] == 0
