# SPDX-License-Identifier: Apache-2.0
"""The README's code runs unchanged, and a Linen module takes the cache in the same way."""

import functools
import importlib.util
import re
import sys
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import Partial

import kvjax
from kvjax._arrays import Pytree
from kvjax.model import check_model
from tests.drive import ROOT

README = ROOT / "README.md"


BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
GENERATES = 1 + next(number for number, block in enumerate(BLOCKS) if "kvjax.generate(" in block)


FIRST = [block for block in BLOCKS[:GENERATES] if "cache.mixed(" not in block]


@pytest.mark.parametrize("blocks", [FIRST, pytest.param(BLOCKS, marks=pytest.mark.slow)], ids=["first", "all"])
def test_the_readmes_code_runs(blocks, capsys, tmp_path, monkeypatch):
    """By default it runs up to the first generation, without the blocks that need no jit."""
    monkeypatch.chdir(tmp_path)  # it saves a cache, and loads a model
    for folder in ("models", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    exec(compile("\n".join(blocks), str(README), "exec"), {"__name__": "readme"})
    assert "cached" in capsys.readouterr().out


def traces(*models):
    """The number of traces of a program that is called with one model after the other."""
    seen = []
    program = jax.jit(lambda model: seen.append(model) or jax.tree.leaves(model)[0])
    for model in models:
        program(model)
    return len(seen)


def test_a_linen_recipe_made_again_compiles_nothing_anew():
    """Another module does: bound methods are compared by identity, even if flax finds the modules equal."""
    params, module, equal = {"weights": jnp.ones(2)}, Model(), Model()
    assert traces(*(Partial(module.apply, params) for _ in range(3))) == 1
    assert module == equal and traces(Partial(module.apply, params), Partial(equal.apply, params)) == 2
    assert traces(*(Partial(lambda params, *a, **k: module.apply(params, *a, **k), params) for _ in range(3))) == 3


def stand_in():
    """A stand-in for the functions of Equinox that the recipe uses: Equinox is no dependency."""

    def partition(tree, keep):
        return tuple(jax.tree.map(lambda x, half=half: x if keep(x) == half else None, tree) for half in (True, False))

    def array(x):
        return isinstance(x, jax.Array)

    def combine(*halves):
        return jax.tree.map(lambda a, b: b if a is None else a, *halves, is_leaf=lambda x: x is None)

    return types.SimpleNamespace(Module=object, partition=partition, combine=combine, is_array=array)


class Layer(Pytree):
    weights: jax.Array
    activation: Any

    def __call__(self, tokens, pools, view, *, last):
        del view, last
        return self.activation(self.weights)[tokens], pools


def test_the_equinox_recipe_keeps_static_leaves_out_and_compiles_nothing_anew(monkeypatch):
    if importlib.util.find_spec("equinox") is None:
        monkeypatch.setitem(sys.modules, "equinox", stand_in())
    (code,) = re.findall(r"^```py\n(.*?)^```", README.read_text(), re.M | re.S)
    layers = [Layer(number * jnp.ones(9), jax.nn.relu) for number in (1, 2)]
    exec(code, made := {"functools": functools, "jax": jax, "module": layers[0]})
    eqx = made["eqx"]
    models = [made["model"], made["EquinoxModel"](*eqx.partition(layers[1], eqx.is_array))]
    with pytest.raises(ValueError, match=r"activation: got relu, wanted an array"):
        check_model(layers[0])
    for number, model in enumerate(models, 1):
        check_model(model)
        assert float(model(0, None, None, last=None)[0]) == number
    assert traces(*models) == 1


class Attention(nn.Module):
    layer: int

    @nn.compact
    def __call__(self, x, pools, view):
        qkv = nn.DenseGeneral((8, 16))(x)
        pools = kvjax.write(pools, self.layer, qkv[:, :, 4:6], qkv[:, :, 6:], view)
        y = kvjax.attend(qkv[:, :, :4], pools, self.layer, view)
        return x + nn.DenseGeneral(x.shape[-1], axis=(-2, -1))(y), pools


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens, pools, view, *, last):
        embed = nn.Embed(50, 32)
        x = embed(tokens)
        for layer in range(2):
            x, pools = Attention(layer)(x, pools, view)
        return embed.attend(x[jnp.arange(x.shape[0]), last]), pools


@pytest.mark.slow
def test_a_linen_module_generates_through_the_cache():
    layers = [kvjax.LayerSpec(kv_heads=2, head_dim=16)] * 2
    spec = kvjax.make_spec(layers, num_blocks=32, max_seqs=2, max_length=64, block_size=8, dtype="float32")
    cache, module = kvjax.Cache.create(spec), Model()
    tokens, last = jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32)
    params = jax.jit(module.init)(jax.random.key(0), tokens, cache.pools, cache.view(1), last=last)
    model = Partial(module.apply, params)
    prompt = [*range(20)]
    first, cache, _ = kvjax.generate(model, cache, [prompt, prompt], max_new_tokens=6)
    again, cache, _ = kvjax.generate(model, cache, [prompt, [3, 4]], max_new_tokens=6)
    assert again[0].tokens == first[0].tokens == first[1].tokens
    assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 19)
    kvjax.check(cache.state)
