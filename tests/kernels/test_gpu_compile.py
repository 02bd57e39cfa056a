# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for real GPUs without one: ptxas's account, compared with tests/data/gpu_budgets.json.

A budget is the most of registers, stack and spills, and the least of everything else. The more particular budget
counts. No kernel may spill or use local memory unless a budget of its own allows it, and no program may copy a pool.
"""

import functools
import importlib.metadata
import json

import pytest

from tests.drive import DATA
from tests.kernels import gpu_compile
from tests.kernels.toolchain import needs_toolchain, results_of

JAXLIB = importlib.metadata.version("jaxlib")
MOST = (
    "registers", "stack", "spills", "instructions_32kb", "loop_instructions", "loop_global_loads", "loop_byte_loads",
    "loop_slow_conversions",
)  # fmt: skip
BUDGETS = json.loads((DATA / "gpu_budgets.json").read_text())
CASES = {
    "h200": list(gpu_compile.CASES),
    "a100": [case for case in gpu_compile.CASES if not case.startswith(("mosaic", "step"))],
}
STEPS = [pytest.param(case, marks=pytest.mark.slow) for case in gpu_compile.CASES if case.startswith("step")]
# CI compiles each kernel for an H200; a night adds whole steps, further shapes and the other chip.
SLOW = {
    "adopt", "decode_64", "decode_width_80", "prefill_8", "prefill_128_width_256", "triton_prefill_width_256",
    "decode_f32", "decode_width_64", "decode_width_256", "decode_int8_width_64", "decode_int8_width_256",
    "decode_int8_width_512", "triton_prefill_f32_width_256", "mosaic_decode_128_width_256", "decode_fp8",
    "triton_prefill_fp8", "triton_prefill_int8", "wide_decode_512", "wide_decode_1024", "wide_prefill_1024",
    "latent_decode_128", "latent_prefill_128", "latent_prefill_int8", "step", "step_scanned", "step_sharded",
    "step_context", "latent_decode_int8",
}  # fmt: skip
ALL = [
    pytest.param(target, case, marks=pytest.mark.slow if case in SLOW or target != "h200" else ())
    for target, cases in CASES.items()
    for case in cases
]
TRITON, MOSAIC = ["__gpu$xla.gpu.triton"], ["mosaic_gpu_v2"]

pytestmark = [needs_toolchain, pytest.mark.long]


@functools.cache
def compiled(target, *cases, **more):
    """The results of compiles in a process of their own, because bad parameters can abort it."""
    return dict(zip(cases, results_of("tests.kernels.gpu_compile", target, *cases, **more), strict=True))


def result_of(target, case, **more):
    """The result of one compile. Those of CI share a process, which saves as many starts."""
    shared = case not in SLOW and target == "h200" and not more
    return compiled(target, *([case for case in CASES[target] if case not in SLOW] if shared else [case]), **more)[case]


SAME = "decode_16", "decode_int8", "prefill_16", "triton_prefill_16", "rope_append_int8", "copy"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["append_int8", *(pytest.param(case, marks=pytest.mark.slow) for case in SAME)])
def test_kernels_are_the_same_with_64_bit_types(case):
    kernels = result_of("h200", case, JAX_ENABLE_X64="1")["kernels"]
    assert kernels and kernels == result_of("h200", case)["kernels"]


@pytest.mark.parametrize(("target", "case"), ALL)
def test_kernels_stay_within_their_budgets_and_are_emitted_as_expected(target, case):
    """Pallas has several backends, and its default changes with jax. The library chooses by chip and shape."""
    result = result_of(target, case)
    assert result["kernels"], "no kernel of this library was emitted"
    mosaic = target == "h200" and case.startswith(("prefill", "mosaic"))
    assert result["emitted"] == (MOSAIC if mosaic else TRITON)
    for name, found in result["kernels"].items():
        keys = (name, f"{target} {name}", f"{case} {name}", f"{target} {case} {name}")
        keys += (f"jaxlib {JAXLIB} {case} {name}", f"jaxlib {JAXLIB} {target} {case} {name}")
        budget = {"stack": 0, "spills": 0}
        budget |= {what: bound for key in keys for what, bound in BUDGETS.get(key, {}).items()}
        for what, bound in budget.items():
            if what == "wide_stores" and case in gpu_compile.GPUS:
                continue  # few heads: less than a program's threads can store
            assert found[what] <= bound if what in MOST else found[what] >= bound, f"{name}: {found}"
    decode = result["kernels"].get("decode_attention")
    if "decode" in case and decode and "fixed_split" not in case:  # even shares: one program more would take a turn
        assert decode["programs"] <= decode["resident"] * gpu_compile.MULTIPROCESSORS[target]


@pytest.mark.parametrize("case", ["scatter", pytest.param("adopt", marks=pytest.mark.slow), *STEPS])
def test_pools_are_updated_in_place(case):
    result = result_of("h200", case)
    assert result["pool_copies"] == 0
    assert result["aliased"] >= result["pool"]
    assert result["temporaries"] < 0.05 * result["pool"]


def test_a_pool_of_bytes_is_read_in_words_without_a_copy():
    result = result_of("h200", "decode_int8")
    assert result["temporaries"] < 0.01 * result["pool"]


@pytest.mark.slow
def test_a_scanned_step_copies_one_layers_weights_at_most():
    scanned, unrolled = result_of("h200", "step_scanned"), result_of("h200", "step")
    assert 0 < scanned["layer"] == unrolled["layer"]
    assert scanned["temporaries"] <= unrolled["temporaries"] + scanned["layer"]


@pytest.mark.parametrize("case", STEPS)
def test_the_whole_step_is_made_of_the_kernels(case):
    """Lowering for a GPU with `implementation=None` chooses the kernels."""
    assert set(result_of("h200", case)["kernels"]) == {
        "share_tiles", "decode_attention", "merge_attention", "rope_append", "copy_blocks",
    }  # fmt: skip


@pytest.mark.slow
def test_four_gpus_talk_once_for_attention_and_once_for_the_mlp():
    """Each GPU computes the metadata by itself, and no part of a pool is sent."""
    sent = result_of("h200", "step_sharded")["collectives"]
    layers = [
        f"all-reduce in layer{number}/dot_general" for number in range(gpu_compile.LAYERS) for _ in ("mix", "mlp")
    ]
    assert [one for one in sent if "layer" in one] == layers
    assert len(sent) == len(layers) + 2, sent  # the embeddings' sum, and the likeliest token of each part
    assert result_of("h200", "step")["collectives"] == []


@pytest.mark.slow
def test_four_gpus_that_divide_blocks_merge_attention_by_a_maximum_and_a_sum():
    """The others are those of GPUs that divide heads alone."""
    sent = result_of("h200", "step_context")["collectives"]
    attends = [one for one in sent if "attend" in one]
    assert len(attends) == 2 * gpu_compile.LAYERS and {one.split()[0] for one in attends} == {"all-reduce"}, sent
    assert len(sent) - len(attends) == len(result_of("h200", "step_sharded")["collectives"]), sent
