# SPDX-License-Identifier: Apache-2.0
"""A cache for each device by other means than `Replicas`: models elsewhere, and `shard_map` over processes."""

import concurrent.futures
import json
import socket
import sys

import jax
import numpy as np
import pytest

import kvjax
from tests import drive
from tests.drive import output_of
from tests.serving_kit import HOST, MODEL, make_cache, make_spec
from tests.unit.serving import served_replicas

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
    alone = {str(number): served_replicas.serve_alone(number) for number in range(2)}
    assert printed[0][0] | printed[1][0] == alone
    for number, rounds in enumerate(served_replicas.PROMPTS):
        tokens = alone[str(number)]["tokens"]
        assert [len(one) for one in tokens] == [served_replicas.NEW] * sum(map(len, rounds))
    assert alone["0"]["steps"] != alone["1"]["steps"]  # they have not run equally long, and have reused blocks
    assert all(max(one["cached"]) >= 8 for one in alone.values())
