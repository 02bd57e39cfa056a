# SPDX-License-Identifier: Apache-2.0
"""The choice of kernels: the programs that have them, and those that do not."""

import functools
import sys

import chex
import jax
import numpy as np
import pytest

import kvjax
from kvjax.gpu import choice, lowering_for
from tests.drive import PLAIN, Driver, output_of

S, P = PLAIN.max_seqs, PLAIN.block_size
ROWS = np.ones(S, bool)
OPTIONS = {"num_blocks": 12, "max_seqs": 4, "max_length": 20, "block_size": P}
WINDOW = [kvjax.LayerSpec(1, 1), kvjax.LayerSpec(1, 1, window=6)]


def has_kernel(verb, state, *args, **options):
    """Whether the program has a kernel if it is lowered for a GPU."""
    with lowering_for("cuda"):
        text = str(jax.make_jaxpr(lambda state: getattr(kvjax, verb)(state, *args, **options))(state))
    return "pallas_call" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "policy", "num_tokens", "served"),
    [
        ({}, None, 1, True),
        ({}, kvjax.policies.vllm_v1(), P, True),
        ({"extra_ids": True}, None, P, True),
        ({}, None, P + 1, False),
        ({}, kvjax.policies.fifo(), 1, False),
        ({"retention": True}, None, 1, False),
        ({"num_host_blocks": 4}, None, 1, False),
        ({"layers": WINDOW}, None, 1, False),
        ({"max_seqs": 1024}, None, 1, True),
        ({"max_seqs": 1025}, None, 1, False),
    ],
)
def test_kernels_serve_some_caches(options, policy, num_tokens, served):
    spec = kvjax.make_spec(**{"layers": [], **OPTIONS, **options})
    state = jax.eval_shape(lambda: kvjax.init(spec, policy))
    tokens, counts = np.zeros((spec.max_seqs, num_tokens), np.int32), np.zeros(spec.max_seqs, np.int32)
    assert has_kernel("extend", state, counts == 0, num_tokens) == served
    assert has_kernel("commit", state, tokens, counts) == served


def half_full():
    """A cache whose rows have all written something."""
    driver = Driver(kvjax.init(PLAIN), verified=False)
    for seq in range(S):
        driver.start(seq, range(seq, 2 * seq + 3))
    return driver.state


TOKENS, COUNTS = np.arange(S * P, dtype=np.int32).reshape(S, P), np.zeros(S, np.int32)
CALLS = [("extend", (ROWS,)), ("commit", (TOKENS, COUNTS))]


@pytest.mark.parametrize(("verb", "args"), CALLS)
def test_kernels_are_traced_for_a_present_platform_or_a_requested_one(verb, args):
    """One function, traced twice: the context is a part of the keys of jax's caches."""
    state, program = jax.eval_shape(lambda: kvjax.init(PLAIN)), jax.jit(getattr(kvjax, verb))
    assert "pallas_call" not in str(program.trace(state, *args).jaxpr)
    with lowering_for("cuda"):
        traced = program.trace(state, *args)
    assert "pallas_call" in str(traced.jaxpr) and "_rows" not in traced.lower().as_text()


def test_lowering_for_knows_the_platforms_of_kernels():
    with pytest.raises(ValueError, match="platform: got 'rocm', wanted one of \\['cuda', 'tpu'\\]"):
        lowering_for("rocm")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [1, 2])
def test_no_kernel_runs_under_vmap(axes):
    state, active = half_full(), np.array([[True] * S, [False] * S, [True, *[False] * (S - 1)]])
    run = functools.partial(kvjax.extend, state)
    together, batch = run, active
    for axis in range(axes):
        together, batch = jax.vmap(together), active.reshape(*[1] * axis, *active.shape)
    with lowering_for("cuda"):
        assert "pallas_call" not in str(jax.make_jaxpr(together)(batch))
    got = jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), jax.jit(together)(batch))
    alone = jax.jit(run)
    for number, rows in enumerate(active):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, number=number: x[number], got), alone(rows))


@pytest.mark.long
@pytest.mark.parametrize(("verb", "args"), CALLS)
def test_kernels_can_be_interpreted(verb, args):
    def jaxpr():
        return str(jax.make_jaxpr(lambda state: getattr(kvjax, verb)(state, *args))(kvjax.init(PLAIN)))

    with choice.interpreted():
        assert "interpret=True" in jaxpr()
    assert "interpret=True" not in jaxpr()


@pytest.mark.long
def test_a_program_for_the_cpu_imports_no_kernel():
    assert output_of(sys.executable, "-c", CPU_PROGRAM) == "[]\n"


CPU_PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
import kvjax

spec = kvjax.make_spec([kvjax.LayerSpec(1, 16)], num_blocks=4, max_seqs=2, max_length=8, block_size=4, dtype="float32")

def step(cache):
    cache, _ = cache.extend(np.ones(2, bool))
    view, k = cache.view(1), jnp.zeros((2, 1, 1, 16))
    pools = kvjax.write(cache.pools, 0, k, k, view)
    q = kvjax.attend(k, pools, 0, view)
    return cache.replace(pools=pools).commit(np.zeros((2, 1), np.int32), np.ones(2, np.int32)), q

jax.jit(step).trace(jax.eval_shape(lambda: kvjax.Cache.create(spec)))
kernels = ("pallas_kernels.triton", "pallas_kernels.mosaic", "kvjax.gpu.", "jax._src.pallas.triton.")
print([name for name in sys.modules if name.startswith(kernels) and name != "kvjax.gpu.choice"])
"""
