# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run; their common parts are timing that allows donation, and the form of their report.

Benchmarks check their own answers, so that a tiny one tests the parts it times. Its times mean nothing.
"""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks import (
    attention,
    batch_job,
    bookkeeping,
    common,
    decode_loop,
    engine,
    events,
    gpu,
    gpu_step,
    kernels,
    kinds,
    learned,
    listeners,
    memory,
    offload,
    replay,
    replicas,
    research,
    rollout,
    sampling,
    scan,
    serving,
    simulators,
    stores,
    trace,
    transformers_batches,
)  # fmt: skip
from benchmarks.memory import read_lengths
from tests.oracle import static_sampling
from tests.unit.research import cases

pytestmark = pytest.mark.slow


def test_report_writes_what_was_measured_where(tmp_path, capsys, monkeypatch):
    file = tmp_path / "new" / "result.json"
    monkeypatch.setattr(sys, "argv", ["toy", "--quick", "--json", str(file), "--rounds", "3"])
    common.report("toy", {"step_us": 61.23456789, "steps": 3}, file)
    result = json.loads(file.read_text())
    assert set(result) == {"benchmark", "command", "date", "versions", "cpu", "metrics"}
    assert result["benchmark"] == "toy" and result["command"] == "python -m benchmarks.toy --quick --rounds 3"
    assert result["versions"]["jax"] == jax.__version__
    assert result["metrics"] == {"step_us": 61.2346, "steps": 3.0}
    assert "cores" in result["cpu"]
    assert "61.2346" in capsys.readouterr().out


def test_details_are_reported_along_with_the_metrics(tmp_path, capsys):
    common.report("toy", {"ratio": 2}, tmp_path / "result.json", {"fast_s": 0.5})
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"] == {"ratio": 2} and result["details"] == {"fast_s": 0.5}
    assert "fast_s" in capsys.readouterr().out


def test_best_of_makes_donated_arguments_anew():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    seconds, result = common.best_of(step, lambda: (jnp.arange(1000),), repeats=3)
    assert 0 < seconds < 10
    assert int(result[-1]) == 1000


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
    assert took == {"slow": (2, 4), "fast": (0.5, 1)}


def test_a_broken_bound_ends_the_benchmark():
    common.require(True, "fine")
    with pytest.raises(SystemExit, match="benchmark failed: too slow"):
        common.require(False, "too slow")


def test_the_lengths_are_those_of_the_trace():
    lengths = read_lengths()
    assert lengths.shape == (502, 2)
    assert lengths[0].tolist() == [6758, 500]
    assert lengths.min() >= 1


@pytest.mark.slow
def test_decode_loop_agrees_with_the_contiguous_one(tmp_path, monkeypatch):
    file = tmp_path / "decode_loop.json"
    monkeypatch.setattr(sys, "argv", ["decode_loop", "--quick", "--json", str(file)])
    decode_loop.main()
    result = json.loads(file.read_text())
    assert result["benchmark"] == "decode_loop"
    assert {"step_ratio", "attention_ratio", "bookkeeping_us"} <= set(result["metrics"])
    assert all(value > 0 for value in result["metrics"].values())


def test_kinds_of_layers_agree_with_what_they_are_compared_with(tmp_path, monkeypatch):
    file = tmp_path / "kinds.json"
    monkeypatch.setattr(sys, "argv", ["kinds", "--quick", "--json", str(file)])
    kinds.main()
    metrics = json.loads(file.read_text())["metrics"]
    assert {"latent_over_contiguous", "latent_over_doubled", "latent_bytes"} <= set(metrics)
    assert (metrics["row_snapshots_in_chunks"], metrics["row_snapshots_decoding"]) == (5, 2)
    assert metrics["latent_bytes"] == 0.5 and all(value > 0 for value in metrics.values())


@pytest.mark.parametrize("generates", [False, True])
def test_events_are_published_as_they_happened(tmp_path, monkeypatch, generates):
    """A generation, whose programs take long to compile, is one of the cases."""
    file = tmp_path / "events.json"
    monkeypatch.setattr(sys, "argv", ["events", "--quick", "--json", str(file)])
    if not generates:
        monkeypatch.setattr(listeners, "measure", lambda *_: common.Took(1.0, 1.0))
        monkeypatch.setattr(listeners, "profile", lambda *_: "")
    events.main()
    metrics = json.loads(file.read_text())["metrics"]
    rates = {"encode_per_s", "encode_removed_per_s", "encode_64_per_s", "mirror_per_s", "trtllm_per_s"}
    ratios = {f"{name}_{of}" for name in ("listener", "all_listeners") for of in ("ratio", "cpu_ratio")}
    assert set(metrics) == {*rates, *ratios, "resync_s"}
    assert all(value > 0 for value in metrics.values())


def test_offload_brings_back_what_it_took(tmp_path, monkeypatch):
    file = tmp_path / "offload.json"
    monkeypatch.setattr(sys, "argv", ["offload", "--quick", "--json", str(file)])
    offload.main()
    metrics = json.loads(file.read_text())["metrics"]
    assert {"to_host_of_device_put", "to_device_of_device_put", "stall_of_step_offload"} <= set(metrics)
    assert all(value > 0 for name, value in metrics.items() if "stall" not in name)


@pytest.mark.slow
def test_stores_bring_back_what_they_took(tmp_path, monkeypatch):
    file = tmp_path / "stores.json"
    monkeypatch.setattr(sys, "argv", ["stores", "--quick", "--folder", str(tmp_path), "--json", str(file)])
    stores.main()
    result = json.loads(file.read_text())
    assert set(result["metrics"]) == set(stores.BARS)
    assert all(value > 0 for value in {**result["metrics"], **result["details"]}.values())
    assert [*tmp_path.iterdir()] == [file]


def test_other_bytes_end_the_benchmark_of_stores(tmp_path, monkeypatch):
    def other(store, block, number):
        future = read(store, block, number)
        return types.SimpleNamespace(result=lambda: [words ^ words.dtype.type(1) for words in future.result()])

    read = stores.DiskStore.read
    monkeypatch.setattr(stores.DiskStore, "read", other)
    with pytest.raises(SystemExit, match="store: other bytes than were written"):
        stores.measure_disk(stores.Bytes(stores.QUICK), tmp_path)


@pytest.mark.slow
def test_an_engine_and_a_server_are_compared_with_a_batch(tmp_path, monkeypatch):
    file = tmp_path / "engine.json"
    monkeypatch.setattr(sys, "argv", ["engine", "--quick", "--rounds", "1", "--json", str(file)])
    engine.main()
    metrics = json.loads(file.read_text())["metrics"]
    assert set(metrics) == set(engine.BARS)
    assert all(value > 0 for name, value in metrics.items() if name not in ("bubble", "ttft_steps_p99"))


@pytest.mark.slow
def test_replicas_are_compared_with_one(tmp_path, monkeypatch):
    file = tmp_path / "replicas.json"
    monkeypatch.setattr(sys, "argv", ["replicas", "--quick", "--json", str(file)])
    # In this process, which has the devices already, and compiles faster.
    monkeypatch.setattr(replicas, "measure_apart", lambda part, options: replicas.PARTS[part].measure(replicas.QUICK))
    replicas.main()
    result = json.loads(file.read_text())
    assert set(result["rows"]) == set(replicas.BARS)
    assert all(value > 0 for name, value in {**result["metrics"], **result["details"]}.items() if "in_turn" not in name)


def test_a_part_that_fails_ends_the_benchmark_of_replicas():
    with pytest.raises(SystemExit, match=r"benchmark failed: speed: (.|\n)*unrecognized arguments: --slow"):
        replicas.measure_apart("speed", ["--slow"])


def test_other_tokens_end_the_benchmark_of_replicas(monkeypatch):
    calls = iter(range(9))
    monkeypatch.setattr(replicas, "Replicas", lambda *_: None)
    monkeypatch.setattr(replicas, "run", lambda *_: [types.SimpleNamespace(tokens=[next(calls)])])
    monkeypatch.setattr(batch_job, "margin", lambda *_: batch_job.TIE)
    with pytest.raises(SystemExit, match="one and two chose different tokens for prompt 0"):
        replicas.compare_speed(replicas.QUICK._replace(questions=1))


def test_other_tokens_end_the_benchmark_of_stores():
    one, other = types.SimpleNamespace(tokens=[1, 2]), types.SimpleNamespace(tokens=[1, 3])
    stores.stored_prefixes.require_same([one], [one])
    with pytest.raises(SystemExit, match="other tokens with a store"):
        stores.stored_prefixes.require_same([one], [other])


@pytest.mark.slow
def test_scanned_steps_equal_the_unrolled_ones_and_copy_no_pool(tmp_path, monkeypatch):
    file = tmp_path / "scan.json"
    monkeypatch.setattr(sys, "argv", ["scan", "--quick", "--json", str(file)])
    before = jax.config.jax_enable_compilation_cache
    scan.main()
    jax.config.update("jax_enable_compilation_cache", before)  # the benchmark does without
    metrics = json.loads(file.read_text())["metrics"]
    assert {"scanned_compile_ratio", "unrolled_compile_ratio", "step_ratio"} <= set(metrics)
    assert metrics.pop("more_temporaries_of_a_layer") <= 1
    assert all(value > 0 for value in metrics.values())


def test_sampling_by_row_chooses_what_programs_for_one_way_choose(tmp_path, monkeypatch):
    file = tmp_path / "sampling.json"
    monkeypatch.setattr(sys, "argv", ["sampling", "--quick", "--json", str(file)])
    sampling.main()
    metrics = json.loads(file.read_text())["metrics"]
    assert {"greedy_ratio", *(f"{way}_ratio" for way in sampling.WAYS)} <= set(metrics)
    assert all(value > 0 for value in metrics.values())


def test_a_program_that_chooses_other_tokens_ends_the_benchmark_of_sampling():
    wrong = {"plain": sampling.plain, "other": sampling.static(static_sampling.Static(5.0))}
    with pytest.raises(SystemExit, match="programs chose different tokens"):
        sampling.compare(wrong, kvjax.Sampling(), sampling.QUICK, 1)


@pytest.mark.slow
def test_rollouts_choose_what_a_dense_sampler_chooses(tmp_path, monkeypatch):
    file = tmp_path / "rollout.json"
    monkeypatch.setattr(sys, "argv", ["rollout", "--quick", "--json", str(file)])
    rollout.main()
    result = json.loads(file.read_text())
    assert result["benchmark"] == "rollout"
    assert [*result["metrics"]] == [
        "group_x", "decode_x", "score_x", "canonical_x", "canonical_short_x", "slots_of_dense", "recompiles",
    ]  # fmt: skip
    assert result["metrics"].pop("recompiles") == 0
    assert all(value > 0 for value in {**result["metrics"], **result["details"]}.values())


def test_a_sampler_that_chooses_other_tokens_ends_the_benchmark_of_rollouts(monkeypatch):
    size = rollout.QUICK.decode
    other = lambda size: lambda model, prompt: np.full((size.samples, size.new), -1)  # noqa: E731
    monkeypatch.setattr(rollout, "dense_sampler", other)
    monkeypatch.setattr(rollout, "paged_sampler", lambda size: lambda *_: (np.zeros((size.samples, size.new)), None))
    with pytest.raises(SystemExit, match="the samplers chose other tokens"):
        rollout.compare_samplers(rollout.QUICK, size)


@pytest.mark.slow
def test_a_batch_is_answered_alike_in_one_program_and_by_others(tmp_path, monkeypatch):
    file = tmp_path / "serving.json"
    monkeypatch.setattr(sys, "argv", ["serving", "--quick", "--json", str(file)])
    serving.main()
    result = json.loads(file.read_text())
    theirs = transformers_batches.installed()
    assert [*result["metrics"]] == [name for name in serving.BARS if theirs or "transformers" not in name]
    assert all(value > 0 for value in result["metrics"].values())
    assert result["metrics"]["slots_used"] < 1 > result["metrics"]["budget_used"]
    assert {"loop_over_python_wall", "slots_used_mixed_lengths"} <= set(result["details"])


def test_other_tokens_end_the_benchmark_of_serving_unless_two_are_as_good(monkeypatch):
    prompts, outputs = [[1], [2]], {"one": [[3, 4], [5, 6]], "other": [[3, 4], [5, 7]]}
    seen = []

    def margin(model, size, tokens):
        seen.append(tokens)
        return apart

    monkeypatch.setattr(batch_job, "margin", margin)
    apart = batch_job.TIE / 2
    batch_job.require_same(None, batch_job.QUICK, prompts, outputs)
    assert seen == [[2, 5]]
    apart = batch_job.TIE
    with pytest.raises(SystemExit, match="one and other chose different tokens for prompt 1"):
        batch_job.require_same(None, batch_job.QUICK, prompts, outputs)


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


@pytest.mark.slow
def test_a_replay_reuses_what_the_scheduler_in_plain_python_reuses(tmp_path, monkeypatch):
    file, picture = tmp_path / "replay.json", tmp_path / "replay.png"
    monkeypatch.setattr(replay, "WAYS", [("max_tokens", True), ("num_tokens", False)])
    monkeypatch.setattr(sys, "argv", ["replay", "--quick", "--json", str(file), "--plot", str(picture)])
    replay.main()
    metrics = json.loads(file.read_text())["metrics"]
    assert metrics["max_tokens_waits_reused"] > metrics["num_tokens_alone_reused"] > 0
    assert picture.stat().st_size > 1000


def test_a_replay_ends_if_plain_python_reuses_other_tokens():
    ours = replay.Ended(*np.arange(12).reshape(4, 3))
    replay.require_same(ours, ours)
    with pytest.raises(SystemExit, match=r"cached is \[0 1 2\], and \[0 1 3\] in plain Python"):
        replay.require_same(ours, ours._replace(cached=np.array([0, 1, 3])))


@pytest.mark.slow
def test_simulators_find_what_plain_python_finds(tmp_path, monkeypatch):
    file = tmp_path / "research.json"
    monkeypatch.setattr(sys, "argv", ["research", "--quick", "--json", str(file)])
    monkeypatch.setattr(learned, "measure", lambda quick: ({"learned_gain_300": 0.25}, {}))
    research.main()
    result = json.loads(file.read_text())
    assert (
        set(result["metrics"]) == {*research.BARS, "learned_gain_300"} - {"requests", *learned.BARS}
        and result["details"]["requests"] == 300
    )
    assert all(value > 0 for value in result["metrics"].values())


def test_curves_and_bounds_are_those_of_plain_python():
    trace_ = trace.read_blocks(trace.TRACE, 300)
    for measure, name in ((research.measure_lru, "lru_curve_x"), (research.measure_belady, "belady_x")):
        metrics, _ = measure(trace_, research.QUICK)
        assert list(metrics) == [name] and metrics[name] > 0


def test_other_hits_than_in_plain_python_end_the_benchmark():
    one, other = (lambda found: (tuple, lambda _: found))(np.array([[1, 2]])), (tuple, lambda _: [[1, 3]])
    assert min(simulators.in_this_group("toy", one, one, 1)) > 0
    with pytest.raises(SystemExit, match="toy: other hits than in plain Python"):
        simulators.in_this_group("toy", one, other, 1)


def test_gains_are_means_of_the_splits(monkeypatch):
    parts = [(100, 200), (150, 300), (200, 300)]
    answer = lambda trace, sizes, on=None, **_: cases.comparison(parts if on is None else [(0, 300)], sizes)  # noqa: E731
    monkeypatch.setattr(learned, "compare_learned", answer)
    gains, details = learned.measure(quick=True)
    assert gains == {"learned_gain_300": 0.25, "learned_gain_600": 0.25}
    lows = {f"learned_low_{size}{of}": 0.15 for of in ("", *(f"_split_{n}" for n in (1, 2, 3))) for size in (300, 600)}
    assert details == lows | {"drawn_gain_700": 0.25}


@pytest.mark.slow
def test_learned_policies_are_compared_with_lru(capsys):
    learned.measure(quick=True)
    assert "learned from 300 requests, counted in 0 to 299" in capsys.readouterr().out


def test_gains_below_the_bars_end_the_benchmark():
    gains = {f"learned_gain_{size}": bar for size, bar in learned.GAINS.items()}
    learned.require_bars(gains, {"low": 0.01})
    with pytest.raises(SystemExit, match="learned_gain_5859 is 8 %, the bar at least 9 %"):
        learned.require_bars(gains | {"learned_gain_5859": 0.08}, {"low": 0.01})
    with pytest.raises(SystemExit, match=r"an interval begins at -0\.01, wanted"):
        learned.require_bars(gains, {"low": -0.01})


def run_kernels(monkeypatch, file, *args):
    monkeypatch.setattr(sys, "argv", ["kernels", "--json", str(file), *args])
    kernels.main()
    return json.loads(file.read_text())


def test_kernels_run_without_a_gpu_when_tiny(tmp_path, monkeypatch):
    sections = "decode_2x64_int8", "decode_ragged", "prefill", "append", "moves", "host"
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention is not strict
        result = run_kernels(monkeypatch, tmp_path / "quick.json", "--quick", "--only", *sections)
    assert not result["errors"] and set(result["not_measured"]) == {"decode_2x64_b16", "step_tiny_b2", "loop_tiny_b2"}
    wanted = {"decode_2x64_int8_of_copy", "prefill_tiny_of_product", "append_us", "gather_tiny_of_copy"}
    assert wanted <= set(result["metrics"]["xla"])
    assert {"copy_tb_s", "host_scatter_same_memory"} <= set(result["metrics"]["device"])
    assert all(value > 0 for metrics in result["metrics"].values() for value in metrics.values())


@pytest.mark.slow  # a section of `kernels`; the tests above run others
def test_whole_steps_read_what_they_are_held_against():
    record = gpu.Record("toy", [], None)
    gpu_step.measure(record, "tiny", 2, quick=True)
    model = jax.tree.leaves(gpu_step.random_model(gpu_step.CONFIGS["tiny"]))
    shape = record.result["shapes"]["step_tiny_b2"]
    assert shape["weight_bytes"] == sum(x.nbytes for x in model) - 2 * 128 * 32  # without the embedding
    assert shape["kv_bytes"] == 2 * 48 * 2 * 2 * (2 * 16 * 2)  # rows, tokens, layers, K and V, heads of bf16
    assert record.value("kvjax", "step_tiny_b2_tokens_s") > 0


@pytest.mark.slow
def test_loops_choose_the_same_tokens_however_they_are_run():
    record = gpu.Record("toy", [], None)
    gpu_step.measure_loops(record, "tiny", 2, quick=True)
    metrics = record.result["metrics"]["kvjax"]
    names = {f"{who}{kind}_us" for who in gpu.DECIDES for kind in ("", "_bookkeeping")} | {"same_tokens"}
    assert set(metrics) == {f"loop_tiny_b2_k{k}_{name}" for k in (1, 16) for name in names}
    assert metrics["loop_tiny_b2_k1_same_tokens"] == metrics["loop_tiny_b2_k16_same_tokens"] == 1
    assert all(value > 0 for value in metrics.values())


def test_a_loop_that_chooses_other_tokens_in_its_second_run_is_an_error(monkeypatch):
    timed = gpu_step.Timed(1e-6, None, jnp.array([[[3, 4]], [[3, 5]]]))
    state = types.SimpleNamespace(spec=types.SimpleNamespace(block_size=16))
    monkeypatch.setattr(gpu_step, "begin", lambda *_: (None, state, None))
    monkeypatch.setattr(gpu_step, "time_loop", lambda *_: timed)
    with pytest.raises(SystemExit, match="loop_tiny_b2_k1_device: two runs chose different tokens"):
        gpu_step.measure_loops(gpu.Record("toy", [], None), "tiny", 2, quick=True)


def test_kernels_say_so_without_a_gpu(tmp_path, monkeypatch):
    result = run_kernels(monkeypatch, tmp_path / "none.json")
    assert result["metrics"] == {} and result["not_measured"] == {"everything": "no GPU"}
    verdicts = [verdict for verdicts in result["bars"].values() for verdict in verdicts.values()]
    assert len(verdicts) > 20 and set(verdicts) == {"not measured"}


def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path):
    file = tmp_path / "record.json"
    bars = [gpu.Bar("us", 10, ("a", "b"), at_most=True), gpu.Bar("rate", 0.9, ("a",))]
    record = gpu.Record("toy", bars, file)
    with record.guard("first"):
        record.add("a", "us", 9.5)
        record.rate("a", "rate", 1e12, "copy_tb_s")
        raise ValueError("wrong")
    with record.guard("second"):
        raise NotImplementedError("not for int8")
    with record.guard("third", ours=False):
        raise RuntimeError("theirs")
    with pytest.raises(SystemExit, match="benchmark failed: first"):
        record.end()
    result = json.loads(file.read_text())
    assert result["metrics"] == {"a": {"us": 9.5, "rate_tb_s": 1.0}}
    assert result["errors"] == {"first": "ValueError: wrong"}
    assert result["not_measured"] == {"second": "not for int8", "third": "RuntimeError: theirs"}
    assert result["bars"] == {
        "us at most 10": {"a": "met: 9.5", "b": "not measured"},
        "rate at least 0.9": {"a": "not measured"},
    }


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


def test_attention_agrees_with_contiguous_attention():
    shape = attention.Shape(rows=2, length=64, heads=4, kv_heads=2, width=8, layers=2)
    metrics = attention.measure("tiny", shape, rounds=1)
    assert all(value > 0 for value in metrics.values())


def test_attention_on_a_mixed_line_agrees_with_that_of_its_parts():
    line = attention.Line(rows=2, chunks=2, chunk=8, length=64, heads=4, kv_heads=2, width=8)
    metrics = attention.measure_mixed(line, rounds=1)
    assert metrics.keys() >= {"mixed_over_apart", "mixed_as_ragged_over_apart"}
    assert all(value > 0 for value in metrics.values())


def test_attention_to_rows_in_parts_agrees_with_the_loop(monkeypatch):
    shape = attention.Shape(rows=8, length=2048, heads=2, kv_heads=1, width=8, layers=1)
    metrics = attention.measure_lengths(shape, rounds=1)
    assert metrics.keys() >= {"skewed_over_loop", "equal_over_loop"} and all(value > 0 for value in metrics.values())
    monkeypatch.setattr(attention, "attend_contiguous", lambda q, *_: 0 * q)
    with pytest.raises(SystemExit, match="skewed: answers differ"):
        attention.measure_lengths(shape, rounds=1)


@pytest.mark.slow
def test_bookkeeping_evicts_stores_and_merges(monkeypatch):
    for name, value in {"ROWS": 32, "LENGTH": 256, "STEPS": 32, "CALLS": 2}.items():
        monkeypatch.setattr(bookkeeping, name, value)
    assert bookkeeping.checked_steps(1024, repeats=1) > 0
    assert bookkeeping.measure_calls(1024, repeats=1) > 0
    assert bookkeeping.measure_admit(1024, repeats=1) > 0


@pytest.mark.slow
@pytest.mark.parametrize("caches", [1, 3])
def test_caches_under_vmap_are_served(caches):
    assert bookkeeping.measure_caches(256, caches, repeats=1) > 0


@pytest.mark.slow
def test_memory_counts_unused_slots(monkeypatch):
    for name, value in {"ROWS": 2, "NUM_BLOCKS": 256}.items():
        monkeypatch.setattr(memory, name, value)
    with jax.numpy_rank_promotion("allow"):
        metrics = memory.unused(np.array([[700, 60], [520, 90], [1024, 33]]))
    assert 0 < metrics["unused_percent"] < 4


def test_the_decode_loop_updates_the_pools_in_place():
    metrics = memory.in_place()
    assert metrics["step_temporaries_percent_of_pool"] < 5
    assert metrics["donated_percent_of_pool"] >= 100
