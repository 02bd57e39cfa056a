# SPDX-License-Identifier: Apache-2.0
"""Mistakes with pools are errors where a model is traced, and right models pass, however they are transformed."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.model import call
from kvjax.pools.lineage import partial_models

LAYERS = 3
WEIGHTS = {"embed": jnp.ones((50, 8)), "out": jnp.ones((LAYERS, 8, 8)) / 8}
SPECS = {
    "one pool": kvjax.make_spec(
        [kvjax.LayerSpec(1, 8)] * LAYERS, num_blocks=4, max_seqs=1, max_length=16, block_size=4
    ),
    "windows": kvjax.make_spec(
        [kvjax.LayerSpec(1, 8), kvjax.LayerSpec(1, 8, window=8), kvjax.LayerSpec(1, 8)],
        num_blocks=4, max_seqs=1, max_length=16, block_size=4,
    ),
}  # fmt: skip


def model_of(mistake="", transform=lambda function: function):
    def model(weights, tokens, pools, view, *, last):
        x, given = weights["embed"][tokens], pools
        for i in range(LAYERS):
            layer = 0 if mistake == "layer 0 everywhere" else i

            @transform
            def block(x, pools, i=i, layer=layer):
                h = x[:, :, None]
                source = {"each into the first": given, "from outside": OUTSIDE.get("pools")}.get(mistake, pools)
                new = pools
                if not (mistake == "a layer is not written" and layer == 1):
                    new = kvjax.write(source, layer, h, h, view)
                if mistake == "twice":
                    new = kvjax.write(new, layer, h, h, view)
                read = pools if mistake == "reads the old pools" else new
                x = x + kvjax.attend(h, read, layer, view)[:, :, 0] @ weights["out"][i]
                return x, pools if mistake == "result dropped" else new

            x, pools = block(x, pools)
        pools = given if mistake == "returns the given" else pools
        return x[jnp.arange(x.shape[0]), last] @ weights["embed"].T, pools

    return jax.tree_util.Partial(model, WEIGHTS)


OUTSIDE = {}


def step(model, spec="one pool"):
    cache = kvjax.Cache.create(SPECS[spec])
    OUTSIDE["pools"] = cache.pools
    return jax.eval_shape(lambda cache: kvjax.step(model, cache, np.zeros((1, 2), np.int32), np.array([2])), cache)


MISTAKES = {
    "result dropped": r"the write of layer 1 takes the pools that the model was given, wanted the result of the last",
    "each into the first": r"the write of layer 1 takes the pools that the model was given, .* of layer 0 at test_line",
    "returns the given": r"the model returns the pools that the model was given, .* the last write, of layer 2 at",
    "layer 0 everywhere": r"layer: got 0 a second time .* own number: the model's layers are \[0, 1, 2\]",
    "twice": r"layer: got 0 a second time in a model call, first at test_lineage.py:\d+",
    "reads the old pools": r"attend of layer 0 takes the pools that the model was given",
    "a layer is not written": r"layer: got 1 in attend before its write, wanted kvjax.write of layer 1 first",
    "from outside": r"the write of layer 0 takes pools from outside of the model call, wanted its argument",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_layer(mistake):
    with pytest.raises(ValueError, match=MISTAKES[mistake]):
        step(model_of(mistake))


@pytest.mark.parametrize("mistake", ["result dropped", "each into the first", "returns the given"])
def test_pools_of_several_groups_are_told_apart(mistake):
    with pytest.raises(
        ValueError, match=r"pools: the (write of layer [12] takes|model returns) (the pools|pools from)"
    ):
        step(model_of(mistake), "windows")


@pytest.mark.parametrize("written", [(), (0,), (0, 2)])
def test_layers_without_a_write_are_named_if_the_model_uses_the_cache(written):
    def model(tokens, pools, view, *, last):
        h = jnp.zeros((*tokens.shape, 1, 8))
        for layer in written:
            pools = kvjax.write(pools, layer, h, h, view)
        return jnp.zeros((1, 9)), pools

    if not written:
        step(jax.tree_util.Partial(model))
        return
    with partial_models():  # such as the first layers of a model, which draft
        step(jax.tree_util.Partial(functools.partial(model)))
    missing = sorted({0, 1, 2} - {*written})
    words = f"layer{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} too"
    with pytest.raises(ValueError, match=rf"^model: got pools with layers .* written, wanted {words}: a model writes"):
        step(jax.tree_util.Partial(model))


def scanned(weights, tokens, pools, view, *, last):
    def block(carry, inputs):
        x, pools = carry
        layer, out = inputs
        h = x[:, :, None]
        pools = kvjax.write(pools, layer, h, h, view)
        return (x + kvjax.attend(h, pools, layer, view)[:, :, 0] @ out, pools), None

    layers = jnp.arange(LAYERS, dtype=jnp.int32)
    (x, pools), _ = jax.lax.scan(block, (weights["embed"][tokens], pools), (layers, weights["out"]))
    return x[jnp.arange(x.shape[0]), last] @ weights["embed"].T, pools


def chosen(weights, tokens, pools, view, *, last):
    """Both branches write, from the same pools outside of them."""
    h = weights["embed"][tokens][:, :, None]
    for layer in range(LAYERS):
        write = functools.partial(kvjax.write, pools, layer, h, view=view)
        pools = jax.lax.cond(jnp.sum(h) > 0, lambda write=write: write(v=h), lambda write=write: write(v=2 * h))
    return kvjax.attend(h, pools, 0, view)[:, -1, 0] @ weights["embed"].T, pools


@jax.custom_vjp
def same(x):
    return x


same.defvjp(lambda x: (x, None), lambda _, g: (g,))


def custom(block):
    return lambda x, pools: block(*same((x, pools)))


RIGHT = {
    "plain": model_of(),
    "remat": model_of(transform=jax.checkpoint),
    "jit": model_of(transform=jax.jit),
    "custom vjp": model_of(transform=custom),
    "scan": jax.tree_util.Partial(scanned, WEIGHTS),
    "cond": jax.tree_util.Partial(chosen, WEIGHTS),
    "barrier": model_of(transform=lambda block: lambda *args: jax.lax.optimization_barrier(block(*args))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_models_pass(name):
    step(RIGHT[name])
    if name not in ("scan",):
        step(RIGHT[name], "windows")


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "custom vjp"])
def test_right_models_pass_under_a_gradient(name):
    cache = kvjax.Cache.create(SPECS["one pool"])

    def loss(weights, cache):
        model = jax.tree_util.Partial(RIGHT[name].func, weights)
        return kvjax.step(model, cache, np.zeros((1, 2), np.int32), np.array([2]))[1].sum()

    assert jax.eval_shape(jax.grad(loss), WEIGHTS, cache)["out"].shape == (LAYERS, 8, 8)


def numbered(number, index=lambda i: None):
    """A model whose layers have their numbers, or their indices in the pool, as other kinds of integers."""

    def model(weights, tokens, pools, view, *, last):
        h = weights["embed"][tokens][:, :, None]
        for i in range(LAYERS):
            pools = kvjax.write(pools, number(i), h, h, view, index=index(i))
            h = h + kvjax.attend(h, pools, number(i), view, index=index(i))
        return h[jnp.arange(h.shape[0]), last, 0] @ weights["embed"].T, pools

    return jax.tree_util.Partial(model, WEIGHTS)


@pytest.mark.parametrize("number", [np.int32, jnp.int32])
def test_numbers_of_layers_may_be_arrays_also_outside_of_jit(number):
    step(numbered(number))
    cache = kvjax.Cache.create(SPECS["one pool"])
    view = cache.view(1)
    tokens = np.zeros((1, 1), np.int32)
    logits, _ = call(numbered(number), tokens, cache.pools, view, np.zeros(1, np.int32))
    assert logits.shape == (1, 50)


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (lambda i: i, None),
        (jnp.int32, None),
        (lambda i: 2 * i, r"layer: got 2 a second time"),  # the index 4 is clamped
        (lambda i: 0, r"layer: got 0 a second time"),
        (lambda i: min(i, 1), r"layer: got 1 a second time"),
    ],
)
def test_an_index_in_a_pool_stands_for_its_layer(index, wanted):
    model = numbered(lambda i: 0, index)
    if wanted is None:
        step(model)
        return
    with pytest.raises(ValueError, match=f"^{wanted}"):
        step(model)


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.jit])
def test_stale_pools_are_found_between_transformed_layers(transform):
    with pytest.raises(ValueError, match=r"the model returns the pools that the model was given"):
        step(model_of("returns the given", transform))


@pytest.mark.parametrize("name", ["plain", "scan", "remat"])
def test_the_checks_add_no_operation_to_a_program(name, monkeypatch):
    """The program of a model call is that of a call without a record of its writes."""

    def lowered():
        cache = kvjax.Cache.create(SPECS["one pool"])
        model = jax.tree_util.Partial(functools.partial(RIGHT[name].func), WEIGHTS)  # traced anew
        view = cache.view(2)
        program = jax.jit(lambda pools: call(model, np.zeros((1, 2), np.int32), pools, view, np.array([1])))
        return program.lower(cache.pools).as_text()

    with_checks = lowered()
    monkeypatch.setattr("kvjax.model.recording", lambda lineage: contextlib.nullcontext())
    monkeypatch.setattr("kvjax.pools.lineage.Lineage.check_result", lambda self, pools: None)
    assert lowered() == with_checks


def test_a_step_has_one_select_more_than_its_model():
    """The logits of a refused row are NaN."""
    cache = kvjax.Cache.create(SPECS["one pool"])
    tokens, counts = np.zeros((1, 2), np.int32), np.array([2])
    program = jax.jit(lambda cache: kvjax.step(RIGHT["plain"], cache, tokens, counts)[1]).lower(cache).as_text()
    assert program.count("0x7FC00000") == 1, "one NaN"
