# SPDX-License-Identifier: Apache-2.0
"""Beginners' mistakes: the error for each, before anything is compiled or donated."""

import dataclasses
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

import kvjax
from kvjax.model import forward
from kvjax.serving import make_requests
from tests import drive
from tests.serving_kit import NUMBERS, successor

SPEC = kvjax.make_spec([kvjax.LayerSpec(1, 2)], num_blocks=4, max_seqs=2, max_length=8, block_size=4, dtype="float32")
GROUP = dataclasses.replace(SPEC.groups[0], num_host_blocks=4)
TIERED = dataclasses.replace(SPEC, groups=(GROUP,))
USES = [kvjax.generate, drive.stream, drive.run_batch]


MODEL = Partial(successor)


def refused(message, model=MODEL, prompts=((1, 2, 3),), use=kvjax.generate, **options):
    """Asserts that a generation refuses it, and that the cache does not change; returns the error."""
    cache = kvjax.Cache.create(SPEC)
    with pytest.raises(ValueError, match=message) as caught:
        use(model, cache, prompts, **options)
    kvjax.check(cache.state)
    return caught.value


@pytest.mark.parametrize(
    ("wrong", "takes"),
    [
        (lambda tokens, pools, view: (tokens, pools), r"\(tokens, pools, view\)"),
        (lambda tokens, pools, view, last_index: (tokens, pools), r"\(tokens, pools, view, last_index\)"),
        (lambda tokens, *, last: (tokens, None), r"\(tokens, \*, last\)"),
    ],
)
def test_a_model_that_is_called_otherwise_is_refused_with_the_call(wrong, takes):
    call = r"wanted one that is called as model\(tokens, pools, view, last=\); see kvjax\.serving\.Model"
    error = refused(rf"^model: got a model that takes {takes} \(.*\), {call}", Partial(wrong))
    assert isinstance(error.__cause__, TypeError)
    tokens, count = np.zeros((2, 1), np.int32), np.ones(2, np.int32)
    with pytest.raises(ValueError, match=call):
        jax.eval_shape(kvjax.step, Partial(wrong), kvjax.Cache.create(SPEC), tokens, count)


def test_an_error_inside_a_model_stays_as_it_is():
    def broken(tokens, pools, view, *, last):
        return (lambda tokens, pools, view: None)(tokens, pools, view, last=last)

    with pytest.raises(TypeError, match="got an unexpected keyword argument 'last'"):
        kvjax.generate(Partial(broken), kvjax.Cache.create(SPEC), [[1]])


class OfNNX(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, tokens, pools, view, *, last):
        logits, pools = successor(tokens, pools, view, last=last)
        return self.layer(logits), pools


class OfLinen(nn.Module):
    layer: nn.Module

    @nn.compact
    def __call__(self, tokens, pools, view, *, last):
        logits, pools = successor(tokens, pools, view, last=last)
        return self.layer(logits), pools


TRAINING = {
    "NNX's Dropout": lambda: OfNNX(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
    "NNX's BatchNorm": lambda: OfNNX(nnx.BatchNorm(NUMBERS, rngs=nnx.Rngs(0))),
    "Linen's Dropout": lambda: Partial(OfLinen(nn.Dropout(0.5, deterministic=False)).apply, {}),
    "Linen's BatchNorm": lambda: Partial(
        OfLinen(nn.BatchNorm(use_running_average=False, use_bias=False, use_scale=False)).apply,
        {"batch_stats": {"layer": {"mean": jnp.zeros(NUMBERS), "var": jnp.ones(NUMBERS)}}},
    ),
}


@pytest.mark.parametrize("layer", TRAINING)
def test_a_layer_in_training_mode_is_refused_with_a_hint_at_eval(layer):
    model, cache = TRAINING[layer](), kvjax.Cache.create(SPEC)
    with pytest.raises(Exception, match=r"[Cc]annot|needs PRNG|its call changes") as caught:
        kvjax.generate(model, cache, [[1, 2, 3]])
    assert isinstance(caught.value, ValueError) or type(caught.value).__module__ == "flax.errors"
    texts = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert sum("model.eval()?" in text for text in texts) == 1
    kvjax.check(cache.state)
    if isinstance(model, nnx.Module):
        model.eval()
        drive.stream(model, cache, [[1, 2, 3]])


class Transformed(nnx.Module):
    """Calls a layer inside of a transformation of NNX, which puts new arrays with the same values into the layer."""

    def __init__(self, transform, layer):
        self.transform = transform
        self.layer = layer

    def __call__(self, x):
        return self.transform(lambda layer, x: layer(x))(self.layer, x)


def twice(function):
    """`nnx.remat` inside of `nnx.scan`, over stacked layers."""
    scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return scan(nnx.remat(function))


def linear(rngs):
    return nnx.Linear(NUMBERS, NUMBERS, rngs=rngs)


TRANSFORMED = {
    "jit": lambda: Transformed(nnx.jit, linear(nnx.Rngs(0))),
    "remat": lambda: Transformed(nnx.remat, linear(nnx.Rngs(0))),
    "jit of remat": lambda: Transformed(lambda function: nnx.jit(nnx.remat(function)), linear(nnx.Rngs(0))),
    "scan of remat": lambda: Transformed(twice, nnx.vmap(linear)(nnx.Rngs(0).split(2))),
}


def called(model):
    """Traces a call of a model."""
    cache = kvjax.Cache.create(SPEC)
    tokens = np.zeros((2, 1), np.int32)
    return jax.eval_shape(forward, model, tokens, cache.pools, cache.view(1), np.zeros(2, np.int32))


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_layers_inside_of_transformations_of_nnx_are_not_taken_for_a_change(transform):
    logits, _ = called(OfNNX(TRANSFORMED[transform]()))
    assert logits.shape == (2, NUMBERS)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_a_layer_in_training_mode_inside_of_a_transformation_is_refused(transform):
    layer = nnx.BatchNorm(NUMBERS, rngs=nnx.Rngs(0))
    model = OfNNX(Transformed(transform, layer))
    with pytest.raises(ValueError, match=r"^model: got a model that its call changes"):
        called(model)
    model.eval()
    called(model)


def test_a_call_that_changes_a_models_attribute_is_refused():
    class Counts(nnx.Module):
        calls = 0

        def __call__(self, tokens, pools, view, *, last):
            self.calls += 1
            return successor(tokens, pools, view, last=last)

    refused("^model: got a model that its call changes, wanted one that stays as it is", Counts())


def test_a_static_leaf_of_a_model_is_named():
    def mlp(weights, *args, **options):
        return successor(*args, **options)

    model = Partial(mlp, {"up": jnp.ones(2), "layers": [{"activation": jax.nn.relu}]})
    wanted = r"wanted an array: partition static leaves, then jax\.tree_util\.Partial\(fn, arrays\)"
    refused(rf"^model.*\['layers'\]\[0\]\['activation'\]: got relu, {wanted}", model)
    refused(rf"^model.*: got 'gelu', {wanted}", Partial(mlp, "gelu"))


def shard_mapped(function, *args):
    mesh = jax.make_mesh((1,), ("replicas",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)(*args)


PROGRAMS = {
    "jit": lambda function, *args: jax.jit(function)(*args),
    "vmap": lambda function, *args: jax.vmap(function)(*jax.tree.map(lambda x: jnp.stack([x, x]), args)),
    "shard_map": shard_mapped,
}
INSIDE = r"got a call inside a program \(jit, vmap, shard_map\), wanted host code: "


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("use", USES)
def test_generation_inside_a_program_is_refused_with_a_hint_at_serve_and_decode(use, program):
    wanted = rf"^generation: {INSIDE}inside one use kvjax\.serving\.serve or kvjax\.serving\.decode"
    cache = kvjax.Cache.create(SPEC)
    with pytest.raises(ValueError, match=wanted):
        program(lambda cache: use(MODEL, cache, [[1, 2]])[1], cache)
    with pytest.raises(ValueError, match=wanted):
        program(lambda prompt: use(MODEL, cache, [prompt])[1], jnp.arange(3))
    with pytest.raises(ValueError, match=wanted):
        program(lambda prompts: use(MODEL, cache, prompts)[1], jnp.ones((2, 3), jnp.int32))
    kvjax.check(cache.state)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_tiered_cache_inside_a_program_is_refused_with_a_hint_at_its_cache(program):
    """The verbs that move nothing may be traced."""
    tiered, tokens = kvjax.tiers.TieredCache.create(TIERED), jnp.arange(4)
    calls = {
        "admit": lambda tiered, x: tiered.admit(0, x, 4),
        "offload": lambda tiered, x: tiered.offload(x),
        "swap_out": lambda tiered, x: tiered.swap_out(x[0]),
    }
    for name, call in calls.items():
        wanted = rf"^TieredCache\.{name}: {INSIDE}it moves blocks; inside one use the verbs of its `cache`"
        with pytest.raises(ValueError, match=wanted):
            program(functools.partial(call, tiered), tokens)
        with pytest.raises(ValueError, match=wanted):
            program(lambda cache, call=call: call(tiered.replace(cache), np.arange(4)), tiered.cache)
    kvjax.check(tiered.state)


@pytest.mark.parametrize("program", ["jit", "shard_map"])
def test_what_makes_caches_is_refused_inside_a_program(program):
    replicas = kvjax.serving.Replicas(MODEL, SPEC, jax.devices()[:1])
    with pytest.raises(ValueError, match=rf"^Replicas: {INSIDE}inside one use kvjax\.serving\.serve under shard_map"):
        PROGRAMS[program](lambda _: replicas.run_batch(make_requests([[1, 2]])), jnp.arange(3))
    with pytest.raises(ValueError, match=rf"^TieredCache\.create: {INSIDE}inside one make a Cache"):
        PROGRAMS[program](lambda _: kvjax.tiers.TieredCache.create(TIERED), jnp.arange(3))


def test_a_progress_gives_a_state_that_is_never_donated():
    cache = kvjax.Cache.create(SPEC)
    progress = kvjax.serving.Progress([], {}, [], [], types.SimpleNamespace(result=cache))
    state = progress.state
    jax.tree.map(lambda x: x.delete(), cache)  # like a loop to which it was donated
    assert "2 rows" in kvjax.show(state)
    kvjax.check(state)
    with pytest.raises(ValueError, match=r"^cache: was donated to an earlier call"):
        progress.state  # noqa: B018


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_padded_prompts_are_refused(array):
    wanted = r"^prompts: got an array \[2, 3\], wanted a list for each prompt, without padding"
    refused(wanted, prompts=array([[1, 2, 3], [1, 0, 0]]))


def test_prompts_of_equal_lengths_are_lists():
    for prompts in ([[1, 2], [3, 4]], ((1, 2), (3, 4)), list(np.array([[1, 2], [3, 4]])), np.zeros((0,), np.int32)):
        assert [request.prompt.tolist() for request in make_requests(prompts)] == [list(prompt) for prompt in prompts]
