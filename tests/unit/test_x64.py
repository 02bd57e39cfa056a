# SPDX-License-Identifier: Apache-2.0
"""With jax's 64-bit types enabled everything works, and keeps its 32-bit types."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import LayerSpec
from pallas_kernels import lowering_for
from tests import cases, drive
from tests.cases import OPTIONS, ROWS, SPECS, TEXT

pytestmark = pytest.mark.long


def by_class():
    """A policy of two classes, with a score of their heads."""
    return kvjax.policies.by_class(
        lambda blocks, ids: blocks.hits[ids], lambda blocks, heads: blocks.stored[heads], classes=2
    )


POLICIES = (by_class, *(policy.make for policy in cases.POLICIES.values()))
CALLS = [("plain", call) for call in ("admit several", "extend", "extend some", "commit")]
CALLS += [pytest.param("all of it", call, marks=pytest.mark.slow) for call in cases.CALLS | cases.HOST_CALLS]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def types(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def narrow(tree):
    return all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(tree))


def traced(fn, *args, **options):
    """The shapes of a function's results, by a trace for each platform, which shows errors of types."""
    return jax.eval_shape(functools.partial(fn, **options), *args)


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_verbs(name, call):
    args, options = (cases.CALLS | cases.HOST_CALLS)[call]
    state = traced(lambda: kvjax.init(SPECS[name], num_blocks=7))
    after = traced(drive.verb(call.split()[0]), state, *args, **options)
    assert narrow((state, after))
    if call != "lookup":
        chex.assert_trees_all_equal_shapes_and_dtypes(after[0], state)
        if after[1].transfer is not None:
            done, events = traced(kvjax.tiers.complete, after[0], after[1].transfer, True)
            chex.assert_trees_all_equal_shapes_and_dtypes(done, state)
            assert narrow(events)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy):
    def both(state):
        policy, (group, _) = state.policy, state.groups
        pstate = policy.touched(group.policy, group.blocks, jnp.arange(3, dtype=jnp.int32), jnp.int32(0))
        return policy.chosen(pstate, group.blocks, lambda ids: ids >= 0, jnp.int32(2), jnp.int32(0), 4)

    state = traced(lambda: kvjax.init(SPECS["all of it"], policy()))
    ids, pstate = traced(both, state)
    assert types(ids) == [((4,), jnp.int32)] and types(pstate) == types(state.groups[0].policy)


def pools_and_view(spec, form):
    """Pools and views with a model's shapes in decode, in padded prefill, in a ragged batch and in a mixed one."""
    state, pools = kvjax.init(spec), kvjax.init_pools(spec)
    if form == "ragged":
        return pools, kvjax.ragged(state, np.full(ROWS, 3), 8, np.arange(ROWS))
    if form == "mixed":
        return pools, kvjax.pools.mixed(state, np.ones(ROWS, bool), np.arange(ROWS), np.full(ROWS, 3), 8)
    return pools, kvjax.view(state, np.full(ROWS, 3), max_tokens=1 if form == "decode" else 4)


@pytest.mark.parametrize("form", ["decode", "prefill", "ragged", "mixed"])
@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("all of it", "bfloat16"))]
)
def test_writing_and_attending(name, form):
    """They are traced for every possible platform. `tests/kernels/` compiles the kernels for GPUs."""
    spec = SPECS["plain"] if name == "bfloat16" else SPECS[name]
    dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
    if name == "bfloat16":
        spec = kvjax.make_spec([LayerSpec(1, 128)], dtype="bfloat16", **OPTIONS)

    def layer(number, implementation, index=None):
        pools, view = pools_and_view(spec, form)
        _, _, _, kv_heads, _, width = pools.at(number)[3].shape
        kv = jnp.ones((*view.positions.shape, kv_heads, width), dtype)
        pools = kvjax.write(pools, number, kv, kv, view, index=index)
        window = spec.groups[pools.at(number)[0]].window
        q = jnp.ones((*view.positions.shape, 2 * kv_heads, width), dtype)
        options = {"index": index, "window": window, "return_lse": True, "implementation": implementation}
        out = kvjax.attend(q, pools, number, view, **options)
        return pools, view, out

    for number in range(sum(len(pool.layers) for group in spec.groups for pool in group.pools)):
        for implementation in (None, "triton", "xla"):
            with lowering_for("cuda"):
                assert narrow(traced(layer, number=number, implementation=implementation))
                index = jax.ShapeDtypeStruct((), jnp.int64)
                assert narrow(jax.eval_shape(functools.partial(layer, number, implementation), index))


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_copies(implementation):
    spec = SPECS["all of it"]
    state, pools = traced(lambda: (kvjax.init(spec), kvjax.init_pools(spec)))
    _, events = traced(kvjax.admit, state, 0, TEXT, 9)
    with lowering_for("cuda"):
        after = traced(kvjax.apply, pools, events, implementation=implementation)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, pools)


def last_token(tokens, pools, view, *, last):
    """A model that predicts the token after the last one, through the cache."""
    x = jax.nn.one_hot(tokens, 32, dtype=jnp.float32).reshape(*tokens.shape, 2, 16)
    pools = kvjax.write(pools, 0, x, x, view)
    y = kvjax.attend(10 * x, pools, 0, view, scale=10.0)
    return jnp.roll(y.reshape(*tokens.shape, 32), 1, axis=-1)[jnp.arange(last.shape[0]), last], pools


@pytest.mark.slow
def test_generation_and_moves():
    spec = kvjax.make_spec(
        [LayerSpec(2, 16)], num_blocks=6, num_host_blocks=6, max_seqs=2, max_length=24, block_size=4, dtype="float32"
    )
    tiered, model = kvjax.tiers.TieredCache.create(spec), jax.tree_util.Partial(last_token)
    before = types((tiered.cache, tiered.host.arrays))
    for start in (1, 11, 1):  # the last one is onboarded
        prompt = list(range(start, start + 14))
        outputs, tiered, _ = kvjax.generate(
            model, tiered, [prompt], max_new_tokens=4, sampling=kvjax.Sampling(temperature=1e-3, top_k=4, top_p=0.9)
        )
    assert outputs[0].cached_tokens == 13
    assert types((tiered.cache, tiered.host.arrays)) == before
    kvjax.check(tiered.cache.state)
