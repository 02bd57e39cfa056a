# SPDX-License-Identifier: Apache-2.0
"""The model of a decode step on a GPU: its arithmetic by hand, and one step that is compiled."""

import json
import sys

import pytest

from benchmarks import gpu_model
from benchmarks.gpu_model import Attention, Node, Step
from benchmarks.gpu_step import CONFIGS
from tests.drive import ROOT, output_of
from tests.kernels import gpu_thunks
from tests.kernels.gpu_hlo import Module
from tests.kernels.toolchain import needs_toolchain

ATTENTION = Attention(kv_bytes=43_000_000, scale_bytes=4_300_000, flops=79_000_000)
PRODUCT = Node("product", True, 86_000_000, 790)  # 20 µs by bytes
WIDE = Node("product", True, 43, 3_950_000_000)  # 5 µs by operations
ATTEND = Node("decode_attention", True, 4_300_000, kv_instructions=0.01)  # 12 µs by bytes, 0.7 by instructions
BOOKS = Node("commit_rows", False, 0)


def test_a_kernel_takes_as_long_as_the_longest_of_its_parts():
    took = [1e6 * gpu_model.seconds(node, ATTENTION) for node in (PRODUCT, WIDE, ATTEND, BOOKS)]
    assert took == pytest.approx([20, 5, 12, 0])
    busy = ATTEND._replace(kv_instructions=0.6)  # 25.8 million, 627 billion a second
    assert 1e6 * gpu_model.seconds(busy, ATTENTION) == pytest.approx(0.6 * 43e6 / (132 * 4 * 0.6 * 1980))
    # 133 programs take as long as 264: one multiprocessor has two of them.
    kernel = {"instructions_32kb": 32_768, "programs": 133}
    assert gpu_model.instructions_of(kernel) == pytest.approx(264 / 133)


def test_each_further_layer_is_the_difference_of_two_programs():
    layer = [PRODUCT, ATTEND]
    few, more = ([BOOKS, BOOKS, WIDE, *number * layer] for number in (2, 3))
    found = gpu_model.estimate(few, more, 10, ATTENTION, 300e-6)
    assert found == pytest.approx((300, 5 + 10 * 32, 1 + 10 * 2, 2))
    assert (found.step, found.share) == pytest.approx((348, 300 / 348))
    by_kernel = gpu_model.by_kernel(few, more, 10, ATTENTION)
    assert by_kernel == pytest.approx({"product": 205, "decode_attention": 120, "commit_rows": 0})
    assert list(by_kernel) == ["product", "decode_attention", "commit_rows"]


HLO = """\
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %pool = f32[4,9]{1,0} parameter(1)
  %attend.7 = f32[8]{0} custom-call(%x, %pool), custom_call_target="mosaic_gpu_v2", metadata={op_name="run/model/a"}
  ROOT %copy.3 = f32[8]{0} copy(%attend.7)
}
"""
THUNKS = """\
000: kCommandBuffer [source | sink]
  001: kCustomKernel [source] decode_attention_1_remat2 grid: [49, 8, 1]
  002: kCopy [sink] kCopy
"""


def test_nodes_are_the_kernels_and_copies_of_a_program():
    root = gpu_thunks.parse(THUNKS)
    for thunk in root:
        thunk.instruction = {1: "attend.7", 2: "copy.3"}.get(thunk.number, "")
    kernels = {"decode_attention_1_remat2": {"instructions_32kb": 1024, "programs": 132}}
    nodes = gpu_model.nodes_of(root, Module(HLO, {144}), kernels)
    assert nodes == [Node("decode_attention_remat", True, 64, 0, 1 / 32), Node("copy", False, 64)]
    root.parts[""] = [gpu_thunks.Thunk("kWhile", trips=3, parts={"body": root.parts[""]})]
    with pytest.raises(ValueError, match="kernels in a loop"):
        gpu_model.nodes_of(root, Module(HLO, {144}), kernels)


def weights_of(config):
    """The elements of all weights but an embedding that is not the output matrix, from the shapes of Llama."""
    width, inner, queries = config.hidden_size, config.intermediate_size, config.num_heads
    each = [
        2 * width * layer.head_dim * (queries + layer.kv_heads) + 3 * width * inner + 2 * width
        for layer in config.layers
    ]
    return sum(each) + width + width * config.vocab_size


@pytest.mark.parametrize(("name", "layers"), [("1b", 16), ("8b", 32)])
def test_the_floor_is_what_must_move_once(name, layers):
    config, step = CONFIGS[name], Step(CONFIGS[name], "bfloat16", 32, 2048)
    width = config.layers[0].head_dim
    kv = 32 * 2048 * layers * 2 * 8 * width
    moved = 2 * weights_of(config) + 2 * kv + 4 * 32 * 128_256
    assert step.floor_bytes() == moved and step.floor_s() == pytest.approx(moved / 4.3e12)
    assert step._replace(dtype="int8").floor_bytes() == moved - kv + 4 * kv // width  # a scale of 4 bytes to a head
    flops = 2 * 4096 * weights_of(config) + 4 * 4096 * layers * 32 * width
    assert step._replace(rows=4096, length=1).floor_s() == pytest.approx(flops / 790e12)
    assert step.fits and not Step(CONFIGS["8b"], "bfloat16", 128, 8192).fits


def test_the_table_leaves_out_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(gpu_model, "find_compilers", lambda: True)
    nodes = [Node("product", True, 10**9), ATTEND]
    kernels = {"decode_attention": {"registers": 168}}
    monkeypatch.setattr(gpu_model, "compile_step", lambda step, layers: ([BOOKS, *layers * nodes], kernels))
    size = gpu_model.measure.size(models=["8b"], batches=[128], lengths=[8192])
    result = gpu_model.measure.run(size)
    assert list(result["left_out"]) == ["step_8b_b16_b128_8192"]
    assert list(result["kernels_us"]) == ["step_8b_int8_b128_8192"]
    metrics = {name.removeprefix("step_8b_int8_b128_8192_"): value for name, value in result.items()}
    assert metrics["gaps_us"] == 64 and metrics["bookkeeping_us"] == 1 and 0 < metrics["share"] < 1
    assert result["constants"] == gpu_model.CONSTANTS
    assert result["attention"] == {"step_8b_int8_b128_8192": kernels}
    nodes[0] = BOOKS
    with pytest.raises(SystemExit, match=r"step_8b_int8_b128_8192: .* less than the floor"):
        gpu_model.measure.run(size)


def test_without_compilers_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_model, "find_compilers", lambda: False)
    gpu_model.measure.main(["--json", str(tmp_path / "model.json")])
    result = json.loads((tmp_path / "model.json").read_text())
    assert result["not_measured"].startswith("no CUDA compiler") and "metrics" not in result


# Runs the command, and notes what else counts of the programs that it compiles.
NOTED = """
import json, sys
from benchmarks import gpu_model
from tests.kernels.gpu_programs import Budgets, parts_of
find, seen = gpu_model.nodes_of, []
def noted(root, *rest):
    nodes = find(root, *rest)
    seen.append((len(nodes), sum(node.is_of_model for node in nodes), parts_of(root, Budgets().rare)))
    return nodes
gpu_model.nodes_of = noted
gpu_model.measure.main()
print(json.dumps(seen))
"""


@needs_toolchain
@pytest.mark.slow
def test_a_step_is_compiled_and_its_nodes_are_those_that_are_counted(tmp_path):
    file = tmp_path / "model.json"
    printed = output_of(sys.executable, "-c", NOTED, "--quick", "--json", str(file), PYTHONPATH=str(ROOT))
    counts = json.loads(printed.splitlines()[-1])
    for nodes, of_model, parts in counts:
        assert nodes == parts["model"]["launches"] + parts["around"]["launches"]
        assert of_model >= parts["model"]["launches"] > 20
    (two, its, _), (three, others, _) = counts
    assert 10 < others - its == three - two  # a layer more is all of the model
    metrics, attention = (json.loads(file.read_text())[key] for key in ("details", "attention"))
    assert {"registers", "resident", "programs"} <= set(attention["step_tiny_b16_b2_64"]["decode_attention"])
    found = {name.removeprefix("step_tiny_b16_b2_64_"): value for name, value in metrics.items()}
    assert 0 < found["floor_us"] < found["kernels_us"] < found["step_us"] and 0 < found["share"] < 1
    assert found["gaps_us"] == its and found["bookkeeping_us"] == pytest.approx(two - its, abs=0.1)
    parts = found["kernels_us"] + found["gaps_us"] + found["bookkeeping_us"]
    assert found["step_us"] == pytest.approx(parts, rel=1e-5)
    assert found["share"] == pytest.approx(found["floor_us"] / found["step_us"], rel=1e-4)


@needs_toolchain
@pytest.mark.slow
def test_nothing_is_computed_twice_where_pools_fill_the_memory(tmp_path):
    """XLA counts a pool more than once, and would compute a layer's products again to save memory that it has."""
    file, options = tmp_path / "model.json", ("--models", "8b", "--batches", "128", "--lengths", "4096")
    output_of(sys.executable, "-m", "benchmarks.gpu_model", *options, "--json", str(file), PYTHONPATH=str(ROOT))
    result = json.loads(file.read_text())
    assert not [kernel for kernels in result["kernels_us"].values() for kernel in kernels if "remat" in kernel]
    assert result["details"]["step_8b_b16_b128_4096_share"] > 0.9
