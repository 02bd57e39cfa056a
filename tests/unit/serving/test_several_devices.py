# SPDX-License-Identifier: Apache-2.0
"""A cache for each device, by other means than `Replicas`: `shard_map`, processes and threads."""

import concurrent.futures
import json
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving import Replicas, Request
from tests import drive
from tests.drive import output_of
from tests.serving_kit import HOST, MODEL, assert_chained, make_cache, make_spec, prompts_of, together
from tests.unit.serving import served_replicas


def assert_alike(found):
    """Asserts that replicas did what each does alone; they have not run equally long, and have reused blocks."""
    alone = {str(number): served_replicas.serve_alone(number) for number in range(2)}
    assert found == alone
    for number, rounds in enumerate(served_replicas.PROMPTS):
        prompts = [prompt for prompts in rounds for prompt in prompts]
        tokens = alone[str(number)]["tokens"]
        assert [len(one) for one in tokens] == [served_replicas.NEW] * len(prompts)
    assert alone["0"]["steps"] != alone["1"]["steps"]
    assert all(max(one["cached"]) >= 8 for one in alone.values())


USES = {
    "generate": kvjax.generate, "run_batch": drive.run_batch, "Engine": lambda *args: drive.engine(*args[:2]),
    "stream": lambda *args: next(drive.stream(*args)),
    "step": lambda model, cache, _: kvjax.step(model, cache, np.zeros((3, 1), np.int32), np.zeros(3, np.int32)),
}  # fmt: skip


@pytest.mark.parametrize("host", [0, HOST])
@pytest.mark.parametrize("use", USES)
def test_a_model_on_another_device_than_the_cache_is_refused(use, host):
    """Before anything is donated."""
    devices = jax.devices()
    model, cache = jax.device_put(MODEL, devices[1]), make_cache(host=host)
    with pytest.raises(ValueError, match=r"^model.*: got an array on .*1.*, wanted it on .*0.*, where the cache is"):
        USES[use](model, cache, [[1, 2]])
    kvjax.check(cache.cache.state if host else cache.state)


def test_an_engine_refuses_a_model_on_another_device_than_a_cache_that_nobody_has_put():
    cache = kvjax.Cache.create(make_spec())
    with pytest.raises(ValueError, match=r"^model.*: got an array on .*1.*, wanted it on .*0"):
        drive.engine(jax.device_put(MODEL, jax.devices()[1]), cache)
    kvjax.check(cache.state)


@pytest.mark.slow
def test_replicas_under_shard_map_serve_as_each_alone():
    if jax.version.__version_info__ < (0, 12):
        pytest.skip("XLA of jaxlib 0.11 crashes while it compiles such a loop inside shard_map")
    found, sent = served_replicas.serve_replicas(jax.devices()[:2])
    assert not sent
    assert_alike(found)


@pytest.mark.slow
def test_replicas_under_shard_map_in_two_processes():
    """Each process submits to its own replica, and reads its shard."""
    if jax.version.__version_info__ < (0, 12):
        pytest.skip("XLA of jaxlib 0.11 crashes while it compiles such a loop inside shard_map")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = sys.executable, "-m", "tests.unit.serving.served_replicas", port
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(output_of, *command, str(number)) for number in range(2)]
        printed = [json.loads(one.result().splitlines()[-1]) for one in running]
    assert [list(found) for found, _ in printed] == [["0"], ["1"]] and not any(sent for _, sent in printed)
    assert_alike(printed[0][0] | printed[1][0])


@pytest.mark.slow
def test_a_thread_for_each_device():
    """Each with `jax.default_device`, a model, a cache and generations of its own."""

    def work(device):
        with jax.default_device(device):
            model, cache = jax.device_put(MODEL, device), make_cache()
            first, cache, _ = together(cache, prompts_of(0), model=model)
            again, cache, _ = together(cache, prompts_of(0), model=model)
        assert {one for leaf in jax.tree.leaves((model, cache)) for one in leaf.devices()} == {device}
        kvjax.check(cache.state)
        assert_chained(prompts_of(0), again)
        assert min(output.cached_tokens for output in again) >= 12
        return [[output.tokens for output in outputs] for outputs in (first, again)]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        one, other = pool.map(work, jax.devices()[:2])
    assert one == other and one[0] == one[1]


ALL = jax.sharding.PartitionSpec()
MESH = jax.make_mesh((1,), ("replicas",), axis_types=(jax.sharding.AxisType.Auto,))
PROGRAMS = {
    "jit": jax.jit,
    "shard_map": lambda function: jax.shard_map(function, mesh=MESH, in_specs=ALL, out_specs=ALL),
}
INSIDE = r"got a call inside a program \(jit, vmap, shard_map\), wanted host code: inside one "


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_what_makes_and_runs_caches_from_the_host_is_refused_inside_a_program(program):
    """`test_hints.py` has `generate`, `stream`, `run_batch` and the verbs of a `TieredCache`."""
    replicas, prompt = Replicas(MODEL, make_spec(), jax.devices()[:1]), jnp.arange(3)
    with pytest.raises(ValueError, match=rf"^Replicas: {INSIDE}use kvjax\.serving\.serve under shard_map"):
        program(lambda _: replicas.run_batch([Request([1, 2])]))(prompt)
    with pytest.raises(ValueError, match=rf"^TieredCache\.create: {INSIDE}make a Cache"):
        program(lambda _: kvjax.tiers.TieredCache.create(make_spec(host=HOST)))(prompt)
