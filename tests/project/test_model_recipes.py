# SPDX-License-Identifier: Apache-2.0
"""The models of docs/tutorials/models: they compile nothing anew, and generate through the cache."""

import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import Partial

import kvjax
from kvjax._arrays import Pytree
from kvjax.model import check_model
from tests.drive import ROOT


def recipe(name):
    """A new module from a file of docs/tutorials/models."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/tutorials/models/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def traces(*models):
    """The number of traces of a program that is called with one model after the other."""
    seen = []
    program = jax.jit(lambda model: seen.append(model) or jax.tree.leaves(model)[0])
    for model in models:
        program(model)
    return len(seen)


def test_a_plain_function_compiles_nothing_anew():
    plain, weights = recipe("plain_model"), {"embed": jnp.ones(2)}
    models = [plain.model_of(jax.tree.map(lambda x, n=number: n * x, weights)) for number in range(3)]
    check_model(models[0])
    assert traces(*models) == 1


def test_a_linen_recipe_made_again_compiles_nothing_anew():
    """Another module does: bound methods are compared by identity, even if flax finds the modules equal."""
    linen, params = recipe("linen_model"), {"weights": jnp.ones(2)}
    module, equal = linen.MODULE, linen.Model()
    check_model(linen.model_of(params))
    assert traces(*(linen.model_of(params) for _ in range(3))) == 1
    assert module == equal and traces(linen.model_of(params), Partial(equal.apply, params)) == 2
    assert traces(*(Partial(lambda params, *a, **k: module.apply(params, *a, **k), params) for _ in range(3))) == 3


def stand_in():
    """A stand-in for the parts of Equinox that the recipe uses: Equinox is no dependency."""

    def partition(tree, keep):
        return tuple(jax.tree.map(lambda x, half=half: x if keep(x) == half else None, tree) for half in (True, False))

    def array(x):
        return isinstance(x, jax.Array)

    def combine(*halves):
        return jax.tree.map(lambda a, b: b if a is None else a, *halves, is_leaf=lambda x: x is None)

    return types.SimpleNamespace(Module=Pytree, partition=partition, combine=combine, is_array=array)


@pytest.mark.parametrize("installed", [True, False], ids=["equinox", "stand-in"])
def test_the_equinox_recipe_keeps_static_leaves_out_and_compiles_nothing_anew(installed, monkeypatch):
    """The activation function is a static leaf: the program of one model serves another one with the same function."""
    if not installed:
        monkeypatch.setitem(sys.modules, "equinox", stand_in())
    elif importlib.util.find_spec("equinox") is None:
        pytest.skip("needs equinox")
    recipes = recipe("equinox_model")

    def module(number, activation=jax.nn.gelu):
        weights = {name: number * jnp.ones((2, 2)) for name in ("down", "out", "qkv", "up")}
        layer = recipes.Layer(**weights, activation=activation)
        return recipes.Model(embed=number * jnp.ones((9, 2)), head=jnp.ones((2, 9)), layers=(layer,))

    with pytest.raises(ValueError, match=r"activation: got gelu, wanted an array"):
        check_model(module(1))
    models = [recipes.model_of(module(number)) for number in (1, 2)]
    for number, model in enumerate(models, 1):
        check_model(model)
        whole = recipes.eqx.combine(model.arrays, model.static)
        assert float(whole.embed[0, 0]) == float(whole.layers[0].up[0, 0]) == number
        assert whole.layers[0].activation is jax.nn.gelu
    assert traces(*models) == 1
    assert traces(models[0], recipes.model_of(module(1, jax.nn.relu))) == 2


@pytest.mark.slow
def test_a_linen_module_generates_through_the_cache():
    layers, linen = [kvjax.LayerSpec(kv_heads=2, head_dim=16)] * 2, recipe("linen_model")
    spec = kvjax.make_spec(layers, num_blocks=32, max_seqs=2, max_length=64, block_size=8, dtype="float32")
    cache = kvjax.Cache.create(spec)
    tokens, last = jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32)
    params = jax.jit(linen.MODULE.init)(jax.random.key(0), tokens, cache.pools, cache.view(1), last=last)
    model, prompt = linen.model_of(params), [*range(20)]
    first, cache, _ = kvjax.generate(model, cache, [prompt, prompt], max_new_tokens=6)
    again, cache, _ = kvjax.generate(model, cache, [prompt, [3, 4]], max_new_tokens=6)
    assert again[0].tokens == first[0].tokens == first[1].tokens
    assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 19)
    kvjax.check(cache.state)
