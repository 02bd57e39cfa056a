# SPDX-License-Identifier: Apache-2.0
"""Decoders with scanned layers: the runs of layers, the same logits, the same files, pools updated in place."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from models import Decoder, LayerConfig, ModelConfig, scanned, unrolled
from models.scan import Run, ScanPosition, longest_run
from tests.models.families import FULL, GEMMA4, SLIDING, config

TOKENS = np.random.default_rng(0).integers(32, size=(2, 12)).astype(np.int32)
KINDS = {"F": LayerConfig(2, 8), "s": LayerConfig(2, 8, window=5), "w": LayerConfig(1, 8)}


def layers(pattern, **reuses):
    """Layers by letters. A letter with a key like _7 reuses the K/V of a layer."""
    reuses = {int(number[1:]): owner for number, owner in reuses.items()}
    return [dataclasses.replace(KINDS[kind], reuses=reuses.get(number)) for number, kind in enumerate(pattern)]


@pytest.mark.parametrize(
    ("pattern", "run"),
    [
        ("F" * 32, Run(0, 1, 32)),
        ("sssssF" * 4 + "ss", Run(0, 6, 4)),
        ("w" + "ssF" * 3 + "w", Run(1, 3, 3)),
        ("FFsssssF", Run(2, 1, 5)),
        ("sFsF" + "w" * 4, Run(4, 1, 4)),
        ("FsFs", Run(0, 2, 2)),
        ("Fsw", None),
        ("F", None),
    ],
)
def test_the_run_leaves_the_fewest_layers_to_compile(pattern, run):
    assert longest_run(layers(pattern)) == run


def test_layers_whose_kv_are_reused_are_unrolled():
    assert longest_run(layers("sFsFsF", _5=3, _4=2)) is None
    assert longest_run(layers("sFsFsFsF", _7=5, _6=4)) == Run(0, 2, 2)
    assert longest_run(layers("sFsFsFsF", _7=1, _6=0, _5=1, _4=0, _3=1, _2=0)) == Run(2, 2, 3)  # they have none


def test_layers_with_an_mlp_are_not_those_with_experts():
    assert longest_run(layers("FFFFF"), dense=(0,)) == Run(1, 1, 4)
    assert longest_run(layers("FFFF"), dense=(1, 3)) == Run(0, 2, 2)


def gemma4() -> ModelConfig:
    """A run of two periods, one layer before it, and after it two layers whose K/V the last two reuse."""
    types = [FULL, *[FULL, SLIDING, SLIDING] * 2, FULL, SLIDING, SLIDING, FULL]
    return config(**{**GEMMA4, "num_hidden_layers": 11, "layer_types": types, "num_kv_shared_layers": 2})


@pytest.mark.parametrize(
    ("of", "dtype"),
    [
        pytest.param(config, jnp.float32, marks=pytest.mark.slow),
        pytest.param(config, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(gemma4, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_dense_logits_and_gradients_are_those_of_the_unrolled_model(of, dtype):
    model = Decoder(of(), dtype=dtype, rngs=nnx.Rngs(0))

    @jax.jit
    def loss(model):
        logits = model.dense(TOKENS)
        return jnp.sum(logits * jnp.cos(jnp.arange(logits.size, dtype=jnp.float32)).reshape(logits.shape)), logits

    # The stacked weights' gradients are those of the layers, stacked.
    (_, logits), gradient = jax.value_and_grad(loss, has_aux=True)(scanned(model))
    (_, wanted), wanted_gradient = jax.value_and_grad(loss, has_aux=True)(model)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == jnp.float32 else {"rtol": 0.1, "atol": 0.5}
    np.testing.assert_allclose(logits, wanted, **close)
    chex.assert_trees_all_close(unrolled(gradient), wanted_gradient, **close)


@pytest.mark.long
def test_a_scanned_model_is_made_in_two_ways_and_back():
    model = Decoder(gemma4(), rngs=nnx.Rngs(0))
    one, other = scanned(model), Decoder(gemma4(), scan=True, rngs=nnx.Rngs(0))
    assert one.run == Run(1, 3, 2) and len(one.layers) == len(model.layers) - 3
    assert one.layers[1].mlp.up_proj.kernel.shape == (2, *model.layers[1].mlp.up_proj.kernel.shape)
    chex.assert_trees_all_equal(one, other)
    chex.assert_trees_all_equal(unrolled(one), model)
    assert scanned(one) is one and unrolled(model) is model
    assert one.layer_specs() == model.layer_specs()
    single = Decoder(config(num_hidden_layers=1), rngs=nnx.Rngs(0))
    assert scanned(single) is single and Decoder(single.config, scan=True, rngs=nnx.Rngs(0)).run is None


def decode_of(num_layers, scan):
    """A model's part of a decode step, with donated pools; and the shapes of its arguments."""
    fields = {"num_hidden_layers": num_layers, "hidden_size": 64, "intermediate_size": 128}
    model = nnx.eval_shape(lambda: Decoder(config(**fields), scan=scan, rngs=nnx.Rngs(0)))
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=2047, max_seqs=4, max_length=256, dtype="float32")
    cache = jax.eval_shape(lambda: kvjax.Cache.create(spec))
    view, tokens = jax.eval_shape(lambda cache: cache.view(1), cache), jax.ShapeDtypeStruct((4, 1), jnp.int32)
    return jax.jit(Decoder.__call__, donate_argnums=2), (model, tokens, cache.pools, view)


def scans(jaxpr):
    """The lengths of all scans in a jaxpr, inner ones included."""
    found = []
    for equation in jaxpr.eqns:
        found += [equation.params["length"]] if equation.primitive.name == "scan" else []
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            found += scans(inner) if hasattr(inner, "eqns") else []
    return found


def test_all_layers_are_one_scan():
    for scan, wanted in ((True, [7]), (False, [])):
        decode, args = decode_of(7, scan)
        assert scans(decode.trace(*args).jaxpr.jaxpr) == wanted


@pytest.mark.slow
def test_a_step_copies_no_pool_and_one_layers_weights_at_most():
    compiled = {}
    for scan in (False, True):
        decode, args = decode_of(4, scan)
        compiled[scan] = decode.lower(*args).compile()
    model, _, pools, _ = args
    (pool,) = jax.tree.leaves(pools)
    shape = ",".join(map(str, pool.shape))
    assert not re.findall(rf"\w+\[{shape}\]\S* copy(?:-start)?\(", compiled[True].as_text())
    memory = {scan: program.memory_analysis() for scan, program in compiled.items()}
    assert memory[True].alias_size_in_bytes >= pool.size * 4
    layer = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model.layers[0])) // 4
    assert memory[True].temp_size_in_bytes <= memory[False].temp_size_in_bytes + layer


def test_layers_of_one_scan_share_a_pool():
    spec = kvjax.make_spec([kvjax.LayerSpec(2, 8)] * 4, num_blocks=4, max_seqs=1, max_length=16)
    (group,) = spec.groups
    (pool,) = group.pools
    halves = tuple(dataclasses.replace(pool, layers=numbers) for numbers in ((0, 1), (2, 3)))
    apart = dataclasses.replace(spec, groups=(dataclasses.replace(group, pools=halves),))
    index = jax.jit(lambda number, spec: ScanPosition(range(1, 4, 2), number).index(spec), static_argnums=1)
    assert [int(index(number, spec)) for number in (0, 1)] == [1, 3]
    with pytest.raises(ValueError, match=r"^pools: got layers \[1, 3\] in several pools, wanted one"):
        index(0, apart)
