# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run; their common parts are command lines, turns that allow donation, and the form of their report.

Benchmarks check their own answers, so that a tiny one tests the parts it times. Its times mean nothing.
"""

import contextlib
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    attention,
    common,
    gpu,
    gpu_step,
    kernels,
    pages,
    replay,
    replicas,
    serving,
    stores,
    trace,
    workload,
)
from benchmarks.common import Bar, Benchmark

pytestmark = pytest.mark.long
NAMES = [name for group in pages.GROUPS.values() for name in group if name != "gpu_model"]  # which has its own tests
# Figures that may be 0, or less; and bars without a figure in a quick run.
ANY = {
    "recompiles", "bubble", "ttft_steps", "preemptions", "unused", "http_answers", "stall",
    "in_turn", "_loops", "_scatters", "_fusions", "_distinct", "logits_differ", "more_temporaries",
    "_drafted", "_accepted", "_pass_cost",
}  # fmt: skip
LEFT_OUT = {
    "over_transformers",
    "serve_",
    "first_",
    "rewrite_",
    "extract_",
    "code_",
    "chat_",
    "recall_8",
    "compile_32_s",
}


def toy(measure, bars=None, sizes=None, strict=False):
    return Benchmark("toy", measure, bars or {}, sizes or {}, strict)


def test_a_command_line_says_sizes_and_writes_what_was_measured_where(tmp_path, capsys, monkeypatch):
    file, seen = tmp_path / "new" / "result.json", []

    def measure(size):
        seen.append(size)
        yield {"steps": 3, "baseline": "another"}
        yield {"step_us": 61.23456789}

    bars = {"step_us": Bar("a step", "µs", at_most=60)}
    sizes = {"rows": (32, 4), "per_call": 8, "way": ("fast", "slow"), "all": (False, True), "shape": ({"a": 1}, {})}
    monkeypatch.setattr(sys, "argv", ["toy", "--quick", "--json", str(file), "--rows", "3"])
    toy(measure, bars, sizes, strict=True).main()
    (size,) = seen
    assert vars(size) == {"rows": 3, "per_call": 8, "way": "slow", "all": True, "shape": {}, "quick": True}
    result = json.loads(file.read_text())
    assert set(result) == {"benchmark", "command", "date", "versions", "cpu", "metrics", "details", "rows", "baseline"}
    assert result["benchmark"] == "toy" and result["command"] == "python -m benchmarks.toy --quick --rows 3"
    assert result["versions"]["jax"] == jax.__version__ and "cores" in result["cpu"]
    assert result["metrics"] == {"step_us": 61.2346} and result["details"] == {"steps": 3.0}
    assert result["rows"]["step_us"]["verdict"] == "missed"
    assert "61.2346  at most 60 µs            missed" in capsys.readouterr().out


@pytest.mark.parametrize("strict", [True, False])
def test_a_missed_bar_ends_a_strict_benchmark_that_is_not_quick(strict):
    made = toy(lambda size: {"step_us": 61.0}, {"step_us": Bar("a step", "µs", at_most=60)}, strict=strict)
    made.main(["--quick"])
    ended = pytest.raises(SystemExit, match="step_us is 61 µs, the bar at most 60")
    with ended if strict else contextlib.nullcontext():
        made.main([])


def test_programs_take_turns_and_the_first_round_does_not_count(monkeypatch):
    order, now = [], np.zeros(2)
    clocks = types.SimpleNamespace(process_time=lambda: now[0], perf_counter=lambda: now[1])
    monkeypatch.setattr(common, "time", clocks)

    def program(name, seconds):
        def run(number):
            order.append(name)
            now[:] += seconds[number], 2 * seconds[number]
            return number

        numbers = iter(range(4))
        return lambda: next(numbers), run

    programs = {"slow": program("slow", (100, 1, 7, 2)), "fast": program("fast", (0.5,) * 4)}
    took, results = common.in_turns(programs, 3)
    assert order == ["slow", "fast"] * 4 and results == {"slow": 3, "fast": 3}
    assert took == {"slow": (2, 4, 2), "fast": (0.5, 1, 1)}
    assert common.times(took, "ms", "cpu", calls=2) == {"slow_ms": 1000, "fast_ms": 250}


def test_arguments_are_donated_and_other_answers_end_a_benchmark():
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    programs = {"add": (lambda: jnp.arange(3), add), "numpy": lambda: np.arange(1, 4)}
    _, results = common.in_turns(programs, 2, np.array_equal)
    assert results["add"].tolist() == [1, 2, 3]
    with pytest.raises(SystemExit, match="benchmark failed: other and add: their answers differ"):
        common.in_turns({**programs, "other": lambda: np.arange(3)}, 1, np.array_equal)


def test_a_process_of_its_own_returns_figures_or_ends_the_benchmark():
    assert common.apart("trace", "_ids", "7x2 3x1") == [7, 8, 3]
    with pytest.raises(SystemExit, match=r"_ids in a process of its own: (.|\n)*ValueError"):
        common.apart("trace", "_ids", "7y2")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_has_every_figure_of_the_pages(name, tmp_path, monkeypatch):
    file, made = tmp_path / "result.json", pages.of_name(name)
    if name == "replicas":  # in this process, which has the devices already, and compiles faster
        size = made.size(quick=True)
        monkeypatch.setattr(common, "apart", lambda *args: replicas.PARTS[args[2]][0](size))
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--json", str(file)])
    with jax.numpy_rank_promotion("allow"):
        made.main()
    result = json.loads(file.read_text())
    measured = result.get("metrics", {})  # absent if a quick run has none of the bars
    missing = [metric for metric in made.bars if metric not in measured]
    assert not [metric for metric in missing if not any(part in metric for part in LEFT_OUT)]
    values = measured | result.get("details", {})
    assert not [metric for metric, value in values.items() if value <= 0 and not any(part in metric for part in ANY)]


@pytest.mark.slow
def test_other_bytes_end_the_benchmark_of_stores(tmp_path, monkeypatch):
    def other(store, block, number):
        future = read(store, block, number)
        return types.SimpleNamespace(result=lambda: [words ^ words.dtype.type(1) for words in future.result()])

    read = stores.DiskStore.read
    monkeypatch.setattr(stores.DiskStore, "read", other)
    with pytest.raises(SystemExit, match="written: other bytes than were written"):
        stores.measure_disk(stores.Bytes(stores.measure.size(quick=True)), tmp_path)


def test_other_tokens_end_the_benchmark_of_serving_unless_two_are_as_good(monkeypatch):
    prompts, outputs = [[1], [2]], {"one": [[3, 4], [5, 6]], "other": [[3, 4], [5, 7]]}
    seen = []

    def margin(model, size, tokens):
        seen.append(tokens)
        return apart

    monkeypatch.setattr(workload, "margin", margin)
    apart = workload.TIE / 2
    workload.require_same(None, None, prompts, outputs)
    assert seen == [[2, 5]]
    apart = workload.TIE
    with pytest.raises(SystemExit, match="one and other chose different tokens for prompt 1"):
        workload.require_same(None, None, prompts, outputs)


def test_used_slots_are_those_of_rows_that_decode():
    def step(mixed, tokens, rows, counts):
        chunks = types.SimpleNamespace(rows=np.array(rows), count=np.array(counts))
        return types.SimpleNamespace(mixed=mixed, chosen=types.SimpleNamespace(tokens=np.array(tokens)), chunks=chunks)

    mixed = step(True, [[9, -1], [8, -1], [-1, -1]], [1, 2], [5, 4])  # row 1 chooses after its prompt
    without = step(False, [[9, 9], [8, -1], [-1, -1]], [-1, -1], [0, 0])
    assert serving.tokens_of_steps([mixed, without]) == (4, [10])


def test_requests_of_the_trace_have_equal_tokens_where_it_has_equal_blocks(tmp_path):
    first, second, *_ = requests = trace.read_trace(trace.TRACE, 2000)
    assert len(requests) == 2000 and max(request.due for request in requests) == 2676
    assert (first.due, len(first.prompt), first.new_tokens) == (0, 423, 32)  # of 6,758 and 500 tokens
    assert first.prompt[:32].tolist() == second.prompt[:32].tolist()
    assert not set(first.prompt[32:].tolist()) & set(second.prompt[32:].tolist())
    file = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [*range(14)]}
    file.write_text(json.dumps(line) + "\n")
    assert np.array_equal(trace.read_trace(file, 1)[0].prompt, first.prompt)
    with pytest.raises(SystemExit, match="got 1 requests, wanted 2"):
        trace.read_trace(file, 2)
    published = trace.read_blocks(file)
    assert published.block_size == 512 and published.blocks(0).tolist() == [*range(14)]
    assert np.array_equal(trace.read_blocks(trace.TRACE, 1).input_length, published.input_length)


def test_the_clock_of_a_replay_goes_on_while_nothing_is_to_be_done():
    class ThreeSteps:
        """Each request takes three steps, one after the other."""

        steps = left = 0
        busy = property(lambda self: self.left > 0)

        def submit(self, request):
            self.left += 3

        def run(self, steps):
            steps = min(steps, self.left)
            self.steps, self.left = self.steps + steps, self.left - steps

    requests = [trace.Request(due, np.arange(4), 1) for due in (0, 2, 50, 51)]
    due, clock = replay.replay(ThreeSteps(), requests)
    assert due.tolist() == [0, 2, 6, 7]  # the system is idle from 6 to 50
    assert clock == 56


def test_a_replay_ends_if_plain_python_reuses_other_tokens():
    ours = {name: np.arange(3) for name in replay.FIELDS}
    replay.require_same(ours, ours)
    with pytest.raises(SystemExit, match=r"cached is \[0 1 2\], and \[0 1 3\] in plain Python"):
        replay.require_same(ours, ours | {"cached": np.array([0, 1, 3])})


def record_of(*names):
    """The records of the kernel sections in a quick run."""
    record = gpu.Record()
    for name, run in kernels.sections(kernels.QUICK).items():
        if name == "ceilings" or name.startswith(names):
            with record.guard(name):
                run(record)
    return record


@pytest.mark.slow
def test_kernels_run_without_a_gpu_when_tiny():
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention is not strict
        record = record_of("decode_2x64_int8", "decode_ragged", "prefill", "append", "moves", "host", "tuning")
    assert not record.errors and not record.not_measured
    wanted = {"decode_2x64_int8_of_copy", "prefill_tiny_of_product", "append_us", "gather_tiny_of_copy"}
    assert wanted <= set(record.metrics["xla"]) and len(record.metrics["tuning"]) == 2
    assert {"copy_tb_s", "host_scatter_same_memory", "device_put_to_host_gb_s"} <= set(record.metrics["device"])
    assert all(value > 0 for metrics in record.metrics.values() for value in metrics.values())


@pytest.mark.slow
def test_whole_steps_read_what_they_are_held_against():
    record, config = gpu.Record(), gpu_step.CONFIGS["tiny"]
    gpu_step.measure(record, "tiny", 2, quick=True)
    model = gpu_step.random_model(config)
    assert gpu_step.weight_bytes(model) == sum(x.nbytes for x in jax.tree.leaves(model)) - 2 * 128 * 32  # no embedding
    # Rows, tokens, layers, K and V, heads of bf16.
    assert gpu_step.kv_bytes(config, 2, gpu_step.QUICK) == 2 * 48 * 2 * 2 * (2 * 16 * 2)
    assert record.metrics["kvjax"]["step_tiny_b2_tokens_s"] > 0


@pytest.mark.slow
def test_loops_choose_the_same_tokens_however_they_are_run():
    metrics = record_of("loop_tiny").metrics["kvjax"]
    names = {f"{who}{kind}_us" for who in gpu.DECIDES for kind in ("", "_bookkeeping")} | {"same_tokens"}
    assert set(metrics) == {f"loop_tiny_b2_k{k}_{name}" for k in (1, 16) for name in names}
    assert metrics["loop_tiny_b2_k1_same_tokens"] == metrics["loop_tiny_b2_k16_same_tokens"] == 1
    assert all(value > 0 for value in metrics.values())


def test_a_loop_that_chooses_other_tokens_in_its_second_run_is_an_error(monkeypatch):
    timed = 1e-6, None, jnp.array([[[3, 4]], [[3, 5]]])
    state = types.SimpleNamespace(spec=types.SimpleNamespace(block_size=16))
    monkeypatch.setattr(gpu_step, "begin", lambda *_: (None, state, None))
    monkeypatch.setattr(gpu_step, "time_loop", lambda *_: timed)
    with pytest.raises(SystemExit, match="loop_tiny_b2_k1_device: two runs chose different tokens"):
        gpu_step.measure_loops(gpu.Record(), "tiny", 2, quick=True)


def test_a_candidate_that_is_faster_is_named(monkeypatch):
    seconds = iter([4e-6, 2e-6])
    monkeypatch.setattr(gpu, "time_s", lambda *_: (next(seconds), None))
    record = gpu.Record()
    kernels.tune(record, kernels.QUICK)
    (line,) = record.faster
    assert line.startswith("pallas_kernels/tuning.py, triton_decode: Programs(") and "is 2.00x, 2 us for 4" in line


def test_what_fails_is_recorded_and_the_rest_goes_on():
    record = gpu.Record({"copy_tb_s": 2.0})
    with record.guard("first"):
        record.add("a", "us", 9.5)
        record.rate("a", "rate", 1e12, "copy_tb_s")
        raise ValueError("wrong")
    with record.guard("second"):
        raise NotImplementedError("not for int8")
    with record.guard("third", ours=False):
        raise RuntimeError("theirs")
    assert record.metrics["a"] == {"us": 9.5, "rate_tb_s": 1.0, "rate_of_copy": 0.5}
    assert record.errors == {"first": "ValueError: wrong"}
    assert record.not_measured == {"second": "not for int8", "third": "RuntimeError: theirs"}


def test_a_gpu_is_busy_while_any_of_its_streams_is():
    def thread(tid, name):
        return {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}

    def event(tid, name, start, duration):
        return {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": start, "dur": duration}

    events = [
        thread(13, "Stream #13(Compute)"), thread(14, "Stream #14"), thread(15, "XLA Ops"), {},
        event(13, "attend", 10, 4), event(14, "copy", 12, 5), event(13, "attend", 20, 1), event(15, "fusion", 0, 99),
    ]  # fmt: skip
    assert gpu.busy_us(events) == (8.0, {"attend": 5, "copy": 5})
    with pytest.raises(NotImplementedError, match="no events"):
        gpu.busy_us(events[2:3])


def test_other_attention_than_that_of_contiguous_rows_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(attention, "attend_contiguous", lambda q, *_: 0 * q)
    with pytest.raises(SystemExit, match="skewed and skewed_contiguous: their answers differ"):
        attention.measure_lengths(attention.Shape(8, 256, 2, 1, 8, 1), rounds=1)
