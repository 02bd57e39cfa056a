# SPDX-License-Identifier: Apache-2.0
"""Errors: wrong arguments raise while tracing, refused requests are data, and nothing is half done."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import LayerSpec, Status
from tests import cases, drive
from tests.drive import EXTRA, PLAIN, VERBS, Driver, padded


def ints(*shape):
    return np.zeros(shape, np.int32)


def floats(*shape):
    return np.zeros(shape, np.float32)


# Wrong arguments: a ValueError while tracing, with the argument, "got" and "wanted".

GOOD = {
    "admit": {"seq": 0, "tokens": ints(8), "length": 4},
    "admit batch": {"seq": ints(2), "tokens": ints(2, 8), "length": ints(2)},
    "adopt": {"tokens": ints(8), "length": 4, "have": np.ones(2, bool)},
    "adopt in groups": {"tokens": ints(8), "length": 4, "have": np.ones((1, 2), bool), "hits": ints(2)},
    "lookup": {"tokens": ints(8), "length": 4},
    "extend": {"active": np.ones(4, bool), "num_tokens": 2},
    "extend rows": {"active": np.ones(4, bool), "num_tokens": ints(4), "max_tokens": 3},
    "extend some": {"active": np.ones(2, bool), "num_tokens": ints(2), "max_tokens": 3, "seqs": ints(2)},
    "commit": {"tokens": ints(4, 8), "num_tokens": ints(4)},
    "commit rows": {"tokens": ints(2, 8), "num_tokens": ints(2), "seqs": ints(2)},
    "fork": {"src": 0, "dst": 1},
    "fork batch": {"src": ints(2), "dst": ints(2)},
    "fork into many": {"src": 0, "dst": ints(2)},
    "truncate": {"seq": 0, "length": 3},
    "truncate batch": {"seq": ints(2), "length": ints(2)},
    "thin": {"seq": 0, "columns": np.zeros(5, bool)},
    "thin batch": {"seq": ints(2), "columns": np.zeros((2, 5), bool)},
    "trim": {"active": np.ones(4, bool), "max_tokens": 3},
    "release": {"seq": 0},
    "release batch": {"seq": ints(3)},
    "evict": {"blocks": ints(2)},
    "pin": {"blocks": ints(2)},
    "unpin": {"blocks": ints(2)},
    "forget_namespaces": {"keep": ints(2)},
    "reset": {},
}
SCALAR = (1.5, True, np.float32(1), ints(1), ints(2, 2))
BATCH = (floats(2), np.ones(2, bool), ints(3), ints(2, 1))
BAD = {
    "admit": {
        "seq": (1.5, True, ints(2, 2)),
        "tokens": (floats(8), ints(2, 8), ints(0), np.int32(3), np.ones(8, bool), "hi", ["hi"], [[1], [2, 3]]),
        "length": SCALAR, "namespace": (*SCALAR, "tenant", None), "now": SCALAR, "reserve_tokens": (0, -1, 2.5),
        "alignment_tokens": (0, -4, 6, 4.0, True),
        "extra_ids": (ints(8),),
    },
    "admit batch": {
        "seq": (floats(2), ints(2, 1)), "tokens": (floats(2, 8), ints(8), ints(3, 8), ints(2, 0)),
        "length": BATCH, "namespace": BATCH, "now": SCALAR, "extra_ids": (ints(2, 8),),
    },
    "adopt": {
        "tokens": (floats(8), ints(2, 8), ints(0), np.int32(3), np.ones(8, bool), "hi"), "length": SCALAR,
        "have": (True, ints(2), np.ones(3, bool), np.ones((2, 2), bool), np.ones((1, 2, 1), bool), "all"),
        "namespace": SCALAR, "hits": (1.5, True, floats(2), ints(3), ints(2, 1)), "now": SCALAR,
        "requested_priority": (ints(2, 2),), "tiers": ("host", ("host", "device"), ("disk",)), "extra_ids": (ints(8),),
    },
    "lookup": {
        "tokens": (floats(8), ints(2, 8), ints(0)), "length": SCALAR, "namespace": SCALAR, "extra_ids": (ints(8),)
    },
    "extend": {
        "active": (ints(4), np.ones(3, bool), np.ones((4, 1), bool), True, "all"), "num_tokens": (0, -1, 1.5, True),
        "now": SCALAR,
    },
    "extend rows": {
        "num_tokens": (floats(4), ints(3), ints(4, 1), np.ones(4, bool)), "max_tokens": (0, None, 1.5),
        "now": SCALAR,
    },
    "extend some": {
        "seqs": (0, floats(2), ints(2, 1)), "active": (np.ones(4, bool), ints(2)), "num_tokens": (ints(4), floats(2)),
        "max_tokens": (0, None), "now": SCALAR,
    },
    "commit": {
        "tokens": (floats(4, 8), ints(8), ints(3, 8), ints(4, 8, 1)),
        "num_tokens": (3, floats(4), ints(3), ints(4, 1), np.ones(4, bool)),
        "extra_ids": (ints(4, 8),), "exact": (True, ints(4)), "now": SCALAR,
    },
    "commit rows": {
        "seqs": (0, floats(2), ints(2, 1)), "tokens": (ints(4, 8),), "num_tokens": (ints(4),),
    },
    "fork": {"src": SCALAR, "dst": (1.5, True, ints(2, 2))},
    "fork batch": {"src": BATCH, "dst": (floats(2), ints(2, 1))},
    "truncate": {"seq": (1.5, True, ints(2, 2)), "length": SCALAR, "now": SCALAR},
    "truncate batch": {"seq": (floats(2),), "length": BATCH, "now": SCALAR},
    "thin": {
        "seq": (1.5, True, ints(2, 2)), "now": SCALAR, "max_removed": (-1, 1.5),
        "columns": (True, ints(5), np.ones(4, bool), np.ones((2, 5), bool), "all"),
    },
    "thin batch": {"seq": (floats(2),), "columns": (ints(2, 5), np.ones((3, 5), bool)), "now": SCALAR},
    "trim": {
        "active": (ints(4), np.ones(3, bool), np.ones((4, 1), bool), True, "all"), "max_tokens": (0, -1, 1.5, True),
    },
    "release": {"seq": (1.5, True, ints(2, 2)), "now": SCALAR},
    "release batch": {"seq": (floats(3), ints(3, 1)), "now": SCALAR},
    "forget_namespaces": {"keep": (0, floats(2), ints(2, 1)), "max_removed": (-1, 1.5)},
    "evict": {"blocks": (0, floats(2), ints(2, 1), np.ones(2, bool)), "max_removed": (-1, 1.5)},
    "pin": {"blocks": (0, floats(2), ints(2, 1), np.ones(2, bool))},
    "unpin": {"blocks": (0, floats(2), ints(2, 1), np.ones(2, bool)), "now": SCALAR},
}  # fmt: skip
CASES = [
    pytest.param(call, argument, value, id=f"{call}-{argument}-{n}")
    for call, arguments in BAD.items()
    for argument, values in arguments.items()
    for n, value in enumerate(values)
]


def traced(call, spec=PLAIN, **changed):
    """Traces a verb without compiling it; `changed` replaces some of its arguments."""
    name = call.split()[0]
    verb = drive.verb(name)
    spec = dataclasses.replace(spec, thinning=name == "thin")
    return jax.eval_shape(lambda state: verb(state, **(GOOD[call] | changed)), state_of(spec))


@functools.cache
def state_of(spec):
    return kvjax.init(spec)


@pytest.mark.parametrize("call", GOOD)
def test_good_arguments(call):
    traced(call)
    traced(call, spec=EXTRA)


@pytest.mark.parametrize(("call", "argument", "value"), CASES)
def test_a_wrong_argument_is_named(call, argument, value):
    name = "(num|max)_tokens" if call.startswith("extend") and "tokens" in argument else argument
    with pytest.raises(ValueError, match=rf"^{name}: got .*wanted "):
        traced(call, **{argument: value})


@pytest.mark.parametrize("call", ["admit", "admit batch", "adopt", "lookup", "commit"])
def test_extra_ids_are_like_the_tokens(call):
    shape = GOOD[call]["tokens"].shape
    traced(call, spec=EXTRA, extra_ids=ints(*shape))
    for bad in (floats(*shape), ints(*shape, 1), ints(*shape[:-1], shape[-1] + 1)):
        with pytest.raises(ValueError, match=r"^extra_ids: got .*wanted "):
            traced(call, spec=EXTRA, extra_ids=bad)


def test_wrong_arguments_of_a_landing_are_named():
    adopted = traced("adopt")[1].adopted

    def landed(**changed):
        arguments = {"adopted": adopted, "arrived": np.ones(2, bool)} | changed
        return jax.eval_shape(lambda state: drive.verb("finish_adoption")(state, **arguments), state_of(PLAIN))

    bad = {
        "adopted": (None, 0, traced("release")[1]), "now": SCALAR,
        "arrived": (True, ints(2), np.ones(3, bool), np.ones((2, 2), bool), "all"),
    }  # fmt: skip
    for argument, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{argument}: got .*wanted "):
                landed(**{argument: value})


@pytest.mark.parametrize("value", [2**31, 2**32 + 5, -(2**31) - 1])
def test_numbers_that_i32_cannot_hold_are_not_cut_short(value):
    """Token 2**32 + 5 must not become token 5, whose K/V are cached by another prompt."""
    for wide in (np.full(8, value), np.full(8, value % 2**64, np.uint64)):
        with pytest.raises(ValueError, match=r"^tokens: got .*wanted "):
            traced("admit", tokens=wide)
    with pytest.raises((ValueError, OverflowError)):  # jax refuses Python's large numbers
        traced("admit", length=value)


def test_a_name_is_no_namespace():
    for call in ("admit", "lookup"):
        with pytest.raises(ValueError, match=r"^namespace: got 'tenant', wanted integers; kvjax\.Namespaces numbers"):
            traced(call, namespace="tenant")


ON_STATES = [*cases.VERBS, *cases.VIEWS, "show", "stats", "check", "snapshot", "index_of", "plot_blocks"]


@pytest.mark.parametrize("verb", ON_STATES)
def test_a_cache_is_no_state(verb):
    cache = kvjax.Cache(state_of(PLAIN), kvjax.init_pools(PLAIN))
    method = f", or the method cache.{verb}" if hasattr(cache, verb) else ""
    with pytest.raises(ValueError, match=rf"^state: got a Cache, wanted its state: cache\.state{method}(\n|$)"):
        jax.eval_shape(drive.verb(verb), cache)
    with pytest.raises(ValueError, match=r"^state: got a tuple, wanted a CacheState"):
        drive.verb(verb)(())


def test_a_donated_state_says_so():
    state = kvjax.init(PLAIN)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    assert repr(state).endswith("; donated)")
    for verb in ON_STATES:
        with pytest.raises(ValueError, match=r"^state: was donated to an earlier call: go on with the result"):
            drive.verb(verb)(state)


def even(tokens, pools, view, *, last):
    """A model with constant logits."""
    return jnp.zeros((*(tokens if last is None else last).shape, 8)), pools


@pytest.mark.parametrize("logits", ["last", "all"])
@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("count", 1, r"count: got shape \[\], wanted \[2\]"), ("count", [1], r"count: got shape \[1\], wanted \[2\]"),
        ("count", ints(2, 1), r"count: got shape \[2, 1\], wanted \[2\]"), ("count", floats(2), "count: got dtype f"),
        ("tokens", ints(2), r"tokens: got shape \[2\], wanted \[2, C\]"),
        ("tokens", [1, 2], r"tokens: got shape \[2\], wanted \[2, C\]"),
        ("tokens", ints(3, 4), r"tokens: got shape \[3, 4\], wanted \[2, C\]"),
        ("seqs", ints(3), r"tokens: got shape \[2, 4\], wanted \[3, C\]"),
        ("seqs", 0, r"seqs: got shape \[\], wanted \[R\]"),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_a_step_is_named_and_not_the_model(argument, value, message, logits):
    spec = kvjax.make_spec([LayerSpec(1, 4)], **SPEC)
    tiered = kvjax.tiers.TieredCache.create(kvjax.make_spec([LayerSpec(1, 4)], **SPEC, num_host_blocks=2))
    arguments = {"tokens": ints(2, 4), "count": ints(2), "logits": logits} | {argument: value}
    for cache in (kvjax.Cache.create(spec), tiered):
        with pytest.raises(ValueError, match=f"^{message}"):
            kvjax.step(jax.tree_util.Partial(even), cache, **arguments)
        assert "donated" not in repr(cache)


def test_lists_will_do_for_a_step():
    cache = kvjax.Cache.create(kvjax.make_spec([LayerSpec(1, 4)], **SPEC))
    step = functools.partial(kvjax.step, jax.tree_util.Partial(even))
    _, logits, _ = jax.eval_shape(lambda cache: step(cache, [[1, 2], [3, 0]], [2, 1], [1, 0]), cache)
    assert logits.shape == (2, 8)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("lru", "got 'lru', wanted an EvictionPolicy"),
        (kvjax.policies.lfu, r"got the function lfu, .* what lfu\(\) returns"),
        (lambda blocks: blocks.hits, "got the function <lambda>"), (tuple(kvjax.lru()), "got .*wanted an Evic"),
    ],
)  # fmt: skip
def test_a_name_or_a_function_is_no_policy(policy, message):
    for make in (kvjax.init, kvjax.Cache.create):
        with pytest.raises(ValueError, match=f"^policy: {message}"):
            make(PLAIN, policy)
    with pytest.raises(ValueError, match=f"^policy: {message}"):
        kvjax.plan([LayerSpec(1, 8)], max_seqs=2, max_length=8, budget_bytes=10_000, policy=policy)


def test_a_traced_layer_needs_an_index_among_several_pools():
    one = kvjax.Cache.create(kvjax.make_spec([LayerSpec(1, 4)] * 2, **SPEC))
    two = kvjax.Cache.create(kvjax.make_spec([LayerSpec(1, 4), LayerSpec(1, 4, window=4)], **SPEC))
    q = floats(2, 1, 1, 4)

    def write(cache, layer, **options):
        return kvjax.write(cache.pools, layer, q, q, cache.view(1), **options)

    def attend(cache, layer, **options):
        return kvjax.attend(q, cache.pools, layer, cache.view(1), **options)

    for call in (write, attend):
        for layer in (0, np.int32(0)):
            jax.eval_shape(functools.partial(call, layer=layer), two)
        jax.eval_shape(call, one, 0)
        jax.eval_shape(lambda cache, index: call(cache, 0, index=index), two, 0)  # noqa: B023
        with pytest.raises(ValueError, match=r"^layer: got a traced value with 2 pools, wanted an int .* index= for"):
            jax.eval_shape(call, two, 0)
        for bad, got in ((0.5, r"float\d+\[\]"), (np.zeros(2, np.int32), r"int32\[2\]"), (True, r"bool\[\]")):
            with pytest.raises(ValueError, match=rf"^index: got {got}, wanted an int or i32\[\]"):
                call(one, 0, index=bad)
        with pytest.raises(ValueError, match=r"^layer: got float32\[\], wanted an int or i32\[\]"):
            jax.eval_shape(call, one, np.float32(0))
    with pytest.raises(ValueError, match=r"^layer: got a traced value, wanted an int; .* `index=`"):
        jax.eval_shape(one.state.spec.locate, 0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64"])
def test_any_integers_will_do(dtype):
    arguments = jax.tree.map(lambda x: np.asarray(x).astype(dtype), GOOD["admit batch"])
    traced("admit batch", **arguments)


# Wrong configurations.

SPEC = {"num_blocks": 4, "max_seqs": 2, "max_length": 8, "block_size": 4}


@pytest.mark.parametrize("name", SPEC)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "4"])
def test_sizes_of_a_spec(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got .*wanted an int of at least 1"):
        kvjax.make_spec(**(SPEC | {name: value}))


@pytest.mark.parametrize("name", ["kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -2, 1.5])
def test_sizes_of_a_layer(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got .*wanted an int of at least 1"):
        dataclasses.replace(LayerSpec(2, 8), **{name: value})
    with pytest.raises(ValueError, match=rf"^{name}: got .*wanted an int of at least 1"):
        dataclasses.replace(kvjax.spec.PoolSpec((0,), 2, 8), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("window", 0), ("window", 1.5), ("sink_tokens", -1), ("sink_tokens", None)]
)
def test_what_a_layer_sees(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got {value}, wanted an int of at least"):
        LayerSpec(2, 8, **({"window": 4} | {name: value}))


@pytest.mark.parametrize(("layers", "message"), [(2, "layers: got 2"), ([2], r"layers\[0\]: got 2"), ("ab", "layers")])
def test_layers_that_are_none(layers, message):
    with pytest.raises(ValueError, match=rf"^{message}.*wanted .*LayerSpec"):
        kvjax.make_spec(layers, **SPEC)
    with pytest.raises(ValueError, match=rf"^{message}.*wanted .*LayerSpec"):
        kvjax.plan(layers, max_seqs=2, max_length=8, budget_bytes=10_000)


def test_groups_that_are_none():
    group = kvjax.spec.GroupSpec(4)
    with pytest.raises(ValueError, match=r"^num_host_blocks: got -1, wanted an int of at least 0"):
        kvjax.make_spec(**SPEC, num_host_blocks=-1)
    for groups in (
        (),
        (group, group),
        (kvjax.spec.GroupSpec(4, window=8),),
        (group, kvjax.spec.GroupSpec(4, sink_tokens=2)),
        (kvjax.spec.GroupSpec(4, window=8), group),
    ):
        with pytest.raises(ValueError, match=r"^groups: got "):
            kvjax.CacheSpec(groups, block_size=4, max_seqs=2, max_blocks_per_seq=2)
    with pytest.raises(ValueError, match=r"^layers\[1\].sink_tokens: got 8 without a window, wanted 0"):
        kvjax.make_spec([LayerSpec(1, 8), LayerSpec(1, 8, sink_tokens=8)], **SPEC)
    with pytest.raises(ValueError, match=r"^layer: got 2, wanted one of the spec's 2 layers, 0\.\.1$"):
        kvjax.make_spec([LayerSpec(1, 8), LayerSpec(2, 8, window=4)], **SPEC).locate(2)
    with pytest.raises(ValueError, match=r"^layer: got 0, wanted a spec that was made with layers"):
        kvjax.make_spec(**SPEC).locate(0)


@pytest.mark.parametrize("layers", [[LayerSpec(1, 8)], []])
@pytest.mark.parametrize("dtype", ["no such", "int32", "uint8", "bool", "complex64", "float64", jnp.float8_e5m2])
def test_dtype_of_a_spec(layers, dtype):
    with pytest.raises(ValueError, match=r"^dtype: got .*wanted "):
        kvjax.make_spec(layers, **SPEC, dtype=dtype)
    with pytest.raises(ValueError, match=r"^dtype: got .*wanted "):
        kvjax.spec.PoolSpec((0,), 1, 8, dtype)


def test_dtype_of_a_state():
    for dtype in (jnp.int32, np.float64, bool):
        with pytest.raises(ValueError, match=r"^arrays\['s'\]: got .*, wanted a floating dtype of at most 32 bits"):
            LayerSpec.recurrent({"s": jax.ShapeDtypeStruct((2,), dtype)})


def as_numpy(value):
    """The value with all ints as numpy's."""
    if isinstance(value, dict):
        return {key: as_numpy(one) for key, one in value.items()}
    return np.int64(value) if isinstance(value, int) and not isinstance(value, bool) else value


def test_numpys_integers_pass_wherever_an_int_does():
    layer, options = {"kv_heads": 2, "head_dim": 8, "window": 4, "sink_tokens": 2}, {"num_host_blocks": {None: 2, 4: 3}}
    options |= {"num_blocks": {None: 4, 4: 3}, "offload_min_priority": 3, "dtype": "float32"}
    given = SPEC | options
    of_ints = kvjax.make_spec([LayerSpec(2, 8), LayerSpec(**layer)], **given)
    of_numpys = kvjax.make_spec([LayerSpec(2, 8), LayerSpec(**as_numpy(layer))], **as_numpy(given))
    assert of_ints == of_numpys and repr(of_ints) == repr(of_numpys)  # Python's ints again
    assert LayerSpec.latent(np.int32(8), values=np.int16(4)) == LayerSpec.latent(8, values=4)
    arrays, axes = {"s": (np.int64(2), 3)}, {"s": np.int64(1)}
    assert LayerSpec.recurrent(arrays, axes=axes) == LayerSpec.recurrent({"s": (2, 3)}, axes={"s": 1})
    state, q = kvjax.init(of_ints), floats(2, 2, 2, 8)
    kvjax.by_score(lambda blocks: blocks.fill)
    jax.eval_shape(lambda state: kvjax.tiers.offload(state, ints(1), group=np.int64(1)), state)
    jax.eval_shape(lambda state: kvjax.view(state, ints(2), np.int64(2)), state)
    pools = kvjax.init_pools(of_ints)
    jax.eval_shape(lambda s: kvjax.attend(q, pools, np.int64(1), kvjax.view(s, 2), window=np.int64(4)), state)
    kvjax.policies.by_class(lambda blocks, ids: ids, classes=np.int64(3))


@pytest.mark.parametrize("num_tokens", [ints(4), [1, 0, 0, 0], jnp.int32(1), np.array(1)], ids=repr)
def test_an_array_of_tokens_asks_for_the_most(num_tokens):
    for where in (jax.eval_shape, lambda call: call()):
        with pytest.raises(
            ValueError, match=r"^max_tokens: got None with num_tokens i32\[4?\], wanted an int: the largest number"
        ):
            where(lambda: kvjax.extend(state_of(PLAIN), np.ones(4, bool), num_tokens))
    with pytest.raises(ValueError, match=r"^max_tokens: got None with num_tokens i32\[\], wanted an int"):
        jax.eval_shape(lambda number: kvjax.extend(state_of(PLAIN), np.ones(4, bool), number), 3)


@pytest.mark.parametrize("made", [kvjax.Cache, kvjax.tiers.TieredCache])
def test_a_cache_is_made_by_create(made):
    with pytest.raises(ValueError, match=rf"^{made.__name__}: got a spec, wanted {made.__name__}\.create\(spec\)"):
        made(PLAIN)
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        made()


@pytest.mark.parametrize(
    "value", [0, -1, 13, 1.5, True, np.int32(0), np.int64(13), np.zeros(2, np.int32), jnp.int32(13)]
)
def test_capacity_of_a_cache(value):
    with pytest.raises(ValueError, match=r"^num_blocks: got .*wanted "):
        kvjax.init(PLAIN, num_blocks=value)


# Refused requests: a status, and an unchanged state.


def cache_of(num_blocks):
    return Driver(kvjax.init(PLAIN, num_blocks=num_blocks))


WIDTH = PLAIN.max_length + 1  # of prompts


@pytest.mark.long
def test_a_prompt_that_fits_only_in_part_goes_in_with_fewer_reserved_tokens():
    cache = cache_of(12)
    assert cache.admit(0, [1] * WIDTH) == ["ROW_FULL"]
    assert cache.admit(0, [1] * WIDTH, reserve_tokens=5) == ["OK"] and int(cache.state.seqs.length[0]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("seq", [2**31 - 1, -(2**31)])
def test_unknown_rows(seq):
    """The machine of the oracle has those next to the real ones."""
    cache = cache_of(12)
    cache.admit(0, [1])
    assert cache.admit(seq, [1]) == ["BAD_REQUEST"]
    assert cache.status("release", seq) == ["BAD_REQUEST"]
    assert cache.status("truncate", seq, 1) == ["BAD_REQUEST"]
    assert cache.status("fork", seq, 1) == ["BAD_REQUEST"]
    assert cache.status("fork", 0, seq) == ["BAD_REQUEST"]
    rows = np.array([seq, 0], np.int32)
    assert cache.status("commit", ints(2, 20), np.array([1, 0], np.int32), seqs=rows) == ["BAD_REQUEST", "OK"]
    assert cache.grow(1, 1, seqs=rows) == ["BAD_REQUEST", "OK"]  # all rows or none
    assert cache.grow(0, 1, seqs=rows) == ["OK", "OK"] and cache.state.seqs.length.tolist() == [2, 0, 0, 0]


ROWS_BY = {
    "admit": lambda state, rows: kvjax.admit(state, rows, ints(*np.shape(rows), 8), ints(*np.shape(rows)) + 4),
    "truncate": lambda state, rows: kvjax.truncate(state, rows, 1), "release": kvjax.release,
    "fork from": lambda state, rows: kvjax.fork(state, rows, ints(*np.shape(rows))),
    "fork to": lambda state, rows: kvjax.fork(state, 0, rows),
    "swap_out": kvjax.tiers.swap_out, "swap_in": kvjax.tiers.swap_in,
}  # fmt: skip
LISTS_BY = {
    "commit": lambda state, rows: kvjax.commit(state, ints(np.size(rows), 8), ints(np.size(rows)), seqs=rows),
    "extend": lambda state, rows: kvjax.extend(state, np.ones(np.size(rows), bool), seqs=rows),
    "beam_step": lambda state, rows: kvjax.beam_step(state, rows, ints(np.size(rows))),
    "view": lambda state, rows: kvjax.view(state, 1, seqs=rows),
    "ragged": lambda state, rows: kvjax.ragged(state, 1, 4, seqs=rows),
}


@pytest.mark.parametrize("call", [*ROWS_BY, *LISTS_BY])
def test_all_verbs_take_the_rows_that_admit_takes(call):
    """Integers of any type, in lists or arrays, with -1 for padding; and nothing else. `release` takes all of them."""
    take = (ROWS_BY | LISTS_BY)[call]
    state = state_of(drive.TIERS)
    numbers, lists = [np.uint8(1)], [[0, -1]]
    if call == "release":
        numbers += [0, np.int64(1), jnp.int32(0), -1, 7]
        lists += [(0, np.int64(1)), np.array([0, -1]), np.array([0, 1], np.uint8), jnp.arange(2), range(2)]
    for rows in (*(numbers if call in ROWS_BY else ()), *lists):
        jax.eval_shape(lambda state, rows=rows: take(state, rows), state)
    for bad in (0.0, True, [0.0], [True, False], [[0]], "0", None, np.array([2**32, 0])):
        if bad is not None or call in ROWS_BY:  # None: all rows
            with pytest.raises((ValueError, TypeError), match="got "):
                jax.eval_shape(lambda state, bad=bad: take(state, bad), state)


def test_free_rows_are_found_for_whoever_needs_some():
    cache = cache_of(12)
    for row in (0, 2):
        assert cache.admit(row, [1, 2, 3]) == ["OK"]
    for number, wanted in ((1, [1]), (2, [1, 3]), (3, [1, 3, -1]), (6, [1, 3, -1, -1, -1, -1])):
        rows, status = kvjax.serving.free_rows(cache.state, number)
        assert (rows.tolist(), int(status)) == (wanted, Status.HELD if -1 in wanted else Status.OK)
    for number in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"^num_rows: got .*, wanted an int of at least 1"):
            kvjax.serving.free_rows(cache.state, number)


@pytest.mark.long
def test_the_same_row_twice_in_one_call():
    cache = cache_of(12)
    rows, lengths = np.array([2, 2, 1, 7], np.int32), np.array([3, 3, 3, 3], np.int32)
    tokens = np.arange(4 * WIDTH, dtype=np.int32).reshape(4, WIDTH)
    assert cache.status("admit", rows, tokens, lengths) == ["OK", "HELD", "OK", "BAD_REQUEST"]
    assert np.asarray(cache.state.groups[0].blocks.refcount).sum() == 2
    rows = np.array([2, 1, 2, -1], np.int32)
    assert cache.grow(1, 1, 1, 0, seqs=rows) == ["BAD_REQUEST", "OK", "BAD_REQUEST", "OK"]
    assert cache.grow(0, 1, 1, 0, seqs=rows) == ["OK", "OK", "BAD_REQUEST", "OK"]  # named twice, though requested once
    assert cache.grow(0, 1, 0, 0, seqs=rows) == ["OK"] * 4 and cache.state.seqs.length.tolist() == [0, 4, 3, 0]
    counts = np.array([1, 1, 1, 0], np.int32)
    assert cache.status("commit", ints(4, 20), counts, seqs=rows) == ["BAD_REQUEST", "OK", "BAD_REQUEST", "OK"]
    assert cache.status("release", rows) == ["OK", "OK", "BAD_REQUEST", "BAD_REQUEST"]


@pytest.mark.long
def test_blocks_by_impossible_numbers_or_twice():
    cache = cache_of(6)
    cache.start(0, [1] * 8)
    row = np.asarray(cache.state.groups[0].table[0])
    head, tail = row[:1], row[1:2]
    pad = functools.partial(np.append, values=np.int32(-1))
    for verb in ("pin", "unpin", "evict"):
        assert cache.status(verb, np.array([-1, -1], np.int32)) == ["OK"]
        for unknown in (12, -2, 2**31 - 1):
            assert cache.status(verb, pad(np.array([unknown], np.int32))) == ["BAD_REQUEST"]
    assert cache.status("pin", np.append(head, head)) == ["BAD_REQUEST"]
    assert cache.status("pin", row[:2]) == ["OK"] and cache.status("release", 0) == ["OK"]
    assert cache.status("unpin", np.append(tail, tail)) == ["BAD_REQUEST"]
    assert cache.status("unpin", row[:2]) == ["OK"]
    for verb, named in (("evict", pad(head)), ("forget_namespaces", np.array([3, 3], np.int32))):
        assert cache.status(verb, named, max_removed=1) == ["BAD_REQUEST"] and int(cache.events.shortfall) == 1
    assert cache.status("forget_namespaces", np.array([3, 3], np.int32)) == ["OK"]
    assert cache.status("evict", pad(head)) == ["OK"]  # nothing to do
    assert int(cache.state.groups[0].num_empty) == 6


def test_prompts_that_are_none():
    cache = cache_of(12)

    def admit(tokens, length):
        return cache.status("admit", 0, tokens, length, namespace=0)

    for length in (0, -1, WIDTH + 1, 2**31 - 1, -(2**31)):
        assert admit(ints(WIDTH), length) == ["BAD_REQUEST"]
    assert cache.admit(0, [1, -1, 2]) == ["BAD_REQUEST"]
    assert cache.admit(0, [1, 2], namespace=-1) == ["BAD_REQUEST"]
    assert admit(np.full(WIDTH, -7, np.int32), 1) == ["BAD_REQUEST"]
    assert admit(padded([2**31 - 1], WIDTH, -7), 1) == ["OK"]


def test_a_lookup_of_nonsense_finds_nothing():
    cache = cache_of(12)
    cache.admit(0, [1] * 9)
    cache.write({0: [1] * 9})
    find, ones = VERBS["lookup"], np.ones(WIDTH, np.int32)
    assert cache.found([1] * 9) == 8
    for tokens, length, space in ((ones, 0, 0), (ones, -1, 0), (ones, WIDTH + 1, 0), (ones, 9, -1), (-ones, 9, 0)):
        match = find(cache.state, tokens, np.int32(length), namespace=np.int32(space))
        assert int(match.cached_tokens) == 0 and not np.any(match.blocks >= 0) and int(match.source) < 0


@pytest.mark.slow
def test_a_traced_capacity_out_of_range_counts_as_no_blocks():
    """In a sweep over sizes, a size that is too large must not look like a result."""
    sizes = jnp.array([13, -1, 0, 2**31 - 1, 12])
    states = jax.vmap(lambda n: kvjax.init(PLAIN, num_blocks=n))(sizes)
    *wrong, right = (jax.tree.map(lambda x, i=i: x[i], states) for i in range(5))
    kvjax.check(right)
    for state in wrong:
        for verb, status, args in (
            ("admit", Status.NO_BLOCKS, (np.int32(0), np.ones(WIDTH, np.int32), np.int32(1))),
            ("release", Status.BAD_REQUEST, (0,)),
            ("reset", Status.OK, ()),
        ):
            after, events = VERBS[verb](state, *args)
            assert events.status[0] == status
            if status != Status.OK:
                chex.assert_trees_all_equal(after, state)
        with pytest.raises(AssertionError, match=r"^broken: num_blocks out of range\n"):
            kvjax.check(state)
        counted = kvjax.debug.stats(state)
        assert str(counted).startswith("num_blocks out of range") and counted.active_share == 1.0
        assert (counted.filled_share, counted.unused_share, counted.total_slots) == (0.0, 0.0, 0)


def test_a_size_that_only_one_group_has_fits_neither():
    spec = kvjax.make_spec(
        [LayerSpec(1, 4), LayerSpec(1, 4, window=8)], num_blocks={None: 12, 8: 6}, max_seqs=2, max_length=20,
        block_size=4,
    )  # fmt: skip
    state = jax.jit(lambda n: kvjax.init(spec, num_blocks=n))(9)
    with pytest.raises(AssertionError, match=r"^broken: num_blocks out of range \(group 1\)\n"):
        kvjax.check(state)
    assert kvjax.debug.stats(state).num_blocks == 9 and kvjax.debug.stats(state, 1).num_blocks == 0


# `checked`: an exception instead of a status.


def test_checked_raises_with_the_row_and_the_status():
    admit = kvjax.debug.checked(VERBS["admit"])
    state, _ = admit(kvjax.init(PLAIN), np.int32(0), ints(WIDTH), np.int32(3))
    with pytest.raises(
        kvjax.debug.RequestError, match=r"^admit: row 0 of the request was refused with HELD: seq 0 had 3 reserved"
    ) as caught:
        admit(state, np.int32(0), ints(WIDTH), np.int32(3))
    assert caught.value.status is Status.HELD and caught.value.row == 0
    with pytest.raises(
        kvjax.debug.RequestError, match=r"^release: row 1 .* BAD_REQUEST: seq 1 had 0 reserved"
    ) as caught:
        kvjax.debug.checked(VERBS["release"])(state, np.array([0, 1, 2], np.int32))
    assert caught.value.row == 1
    assert isinstance(caught.value, ValueError)


def test_checked_lets_a_full_pool_pass():
    admit = kvjax.debug.checked(VERBS["admit"])
    state = kvjax.init(PLAIN, num_blocks=1)
    _, events = admit(state, np.int32(0), ints(WIDTH), np.int32(5))
    assert events.status.tolist() == [Status.NO_BLOCKS]
    _, events = admit(state, np.int32(0), ints(WIDTH), np.int32(WIDTH))
    assert events.status.tolist() == [Status.ROW_FULL]


def test_checked_names_the_verb():
    assert kvjax.debug.checked(kvjax.extend).__name__ == "extend"
    assert kvjax.debug.checked(kvjax.extend).__doc__ == kvjax.extend.__doc__
