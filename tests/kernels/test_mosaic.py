# SPDX-License-Identifier: Apache-2.0
"""The Mosaic kernels against a float64 oracle and under race detection, in Pallas's GPU simulator."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import mosaic, tuning
from tests.drive import output_of
from tests.kernels import simulate_mosaic

QUICK = ["decode_all", "prefill_plain", "moves", "writes"]
LONG = ["prefill_all", "long", "decode_int8", "decode_fp8"]
SLOW = [case for case in simulate_mosaic.CASES if case not in [*QUICK, *LONG, "broken"]]


@functools.cache
def results(*cases):
    """The results of cases, from a process of their own."""
    # The simulator blocks a thread of XLA's for each warpgroup, and XLA has one thread a core.
    printed = output_of(sys.executable, "-m", "tests.kernels.simulate_mosaic", *cases, NPROC="8")
    return {result["case"]: result["error"] for result in map(json.loads, printed.splitlines())}


@pytest.mark.long
@pytest.mark.parametrize("case", QUICK)
def test_equal_to_the_oracle_and_free_of_races(case):
    assert results(*QUICK)[case] is None


@pytest.mark.slow
@pytest.mark.parametrize("case", [*LONG, *[pytest.param(case, marks=pytest.mark.slow) for case in SLOW]])
def test_more_cases_are_equal_and_free_of_races(case):
    assert results(*(LONG if case in LONG else SLOW))[case] is None


@pytest.mark.long
def test_the_simulator_would_find_a_race():
    assert "RACE DETECTED" in results("broken")["broken"]


def refusal(monkeypatch, chip, dtype="bfloat16", width=64, size=16, scale=1.0):
    monkeypatch.setattr(tuning, "chip", lambda: chip)
    q, rows = jax.ShapeDtypeStruct((2, 8, width), dtype), jnp.ones(2, jnp.int32)
    pool = jax.ShapeDtypeStruct((9, 1, 2, 2, size, width), dtype)
    run = functools.partial(mosaic.decode_attention, scale=scale)
    with pytest.raises(NotImplementedError) as caught:
        jax.eval_shape(run, q, pool, 0, jnp.zeros((2, 4), jnp.int32), rows)
    return str(caught.value)


def test_what_it_cannot_serve_it_refuses(monkeypatch):
    assert "not for ampere" in refusal(monkeypatch, "ampere")
    assert "float32" in refusal(monkeypatch, "hopper", dtype="float32")
    assert "heads are 40 wide" in refusal(monkeypatch, "hopper", width=40)
    assert "blocks of 24" in refusal(monkeypatch, "hopper", size=24)
    assert "scale -1.0" in refusal(monkeypatch, "hopper", scale=-1.0)


def test_prefill_over_bytes_is_left_to_others(monkeypatch):
    monkeypatch.setattr(tuning, "chip", lambda: "hopper")
    q, rows = jax.ShapeDtypeStruct((8, 8, 64), jnp.bfloat16), jnp.ones(2, jnp.int32)
    pool, scales = jax.ShapeDtypeStruct((9, 1, 2, 2, 16, 64), jnp.int8), jax.ShapeDtypeStruct((9, 1, 2, 2, 16), "f4")
    args = q, pool, 0, jnp.zeros((2, 4), jnp.int32), rows, rows, rows
    assert "no prefill over K/V with a byte" in refused(
        lambda scales, *args: mosaic.prefill_attention(*args, max_count=8, scale=1.0, scales=scales), scales, *args
    )


def refused(function, *args, **options):
    with pytest.raises(NotImplementedError) as caught:
        jax.eval_shape(functools.partial(function, **options), *args)
    return str(caught.value)


def test_writes_that_it_cannot_serve_it_refuses(monkeypatch):
    slots = jnp.zeros(3, jnp.int32)

    def arguments(width=64, kv_heads=2, dtype="bfloat16", stored="bfloat16"):
        pool = jax.ShapeDtypeStruct((9, 1, 2, kv_heads, 16, width), stored)
        k, q = (jax.ShapeDtypeStruct((3, heads, width), dtype) for heads in (kv_heads, 4 * kv_heads))
        return q, k, pool, jax.ShapeDtypeStruct((3, 1, width // 2), jnp.float32)

    def append(*args, **options):
        _, k, pool, _ = arguments(*args)
        return refused(mosaic.append_kv, pool, 0, k, k, slots, **options)

    def rope(*args):
        q, k, pool, angle = arguments(*args)
        return refused(mosaic.rope_append, q, k, k, angle, angle, pool, 0, slots)

    monkeypatch.setattr(tuning, "chip", lambda: "ampere")
    assert "not for ampere" in append() and "not for ampere" in rope()
    monkeypatch.setattr(tuning, "chip", lambda: "hopper")
    assert "2 heads of 16 in bfloat16, wanted multiples of 128 bytes" in append(16)
    assert "a byte per element" in append(64, 2, "bfloat16", "int8", scales=jnp.zeros((9, 1, 2, 2, 16)))
    assert "288 heads of 64; wanted at most 256, and" in rope(64, 48)
    assert "bfloat16, bfloat16, bfloat16 and a pool of float32, wanted one dtype" in rope(64, 2, "bfloat16", "float32")
