# SPDX-License-Identifier: Apache-2.0
"""`check_model` passes right models however they are written, and names mistakes inside of transformations of NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.testing import check_model

V, E, Q, K, D, LAYERS = 24, 8, 2, 1, 8, 2
RNG = np.random.default_rng(0)
WEIGHTS = {
    "embed": RNG.normal(size=(V, E)),
    "qkv": RNG.normal(size=(LAYERS, E, (Q + 2 * K) * D)) / E**0.5,
    "out": RNG.normal(size=(LAYERS, Q * D, E)) / 4,
}
WEIGHTS = jax.tree.map(lambda x: np.asarray(x, np.float32), WEIGHTS)


def spec_of(layers=None, max_length=32):
    layers = layers or [kvjax.LayerSpec(K, D)] * LAYERS
    return kvjax.make_spec(layers, num_blocks=16, max_seqs=2, max_length=max_length, block_size=4, dtype="float32")


def rope(x, positions):
    angle = positions.astype(jnp.float32)[..., None, None] * 10.0 ** -jnp.arange(D // 2)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


@pytest.fixture(autouse=True)
def promotion():
    """A user's model promotes freely."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# Layers in modules of NNX.


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(E, (Q + 2 * K) * D, rngs=rngs)
        self.out = nnx.Linear(Q * D, E, rngs=rngs)

    def __call__(self, x, layer, pools, view, mistake=""):
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:2], -1, D), [Q, Q + K], 2)
        positions = view.positions
        if mistake == "positions":
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        if mistake == "layer 0":
            layer = 0 * layer
        new = kvjax.write(pools, layer, rope(k, positions), v, view)
        y = kvjax.attend(rope(q, positions), new, layer, view)
        return x + self.out(y.reshape(*x.shape[:2], -1)), pools if mistake == "result dropped" else new


class Model(nnx.Module):
    """Layers in `nnx.scan`, or each in `nnx.remat` or `nnx.jit`."""

    def __init__(self, form, mistake=""):
        self.form = form
        self.mistake = mistake
        self.embed = nnx.Embed(V, E, rngs=nnx.Rngs(0))
        rngs = nnx.Rngs(1)
        if form.startswith("scan"):
            self.layers = nnx.vmap(Attention)(rngs.split(LAYERS))
        else:
            self.layers = nnx.List([Attention(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens, pools, view, *, last):
        x = 3 * self.embed(tokens)

        def block(carry, layer, attention):
            return attention(carry[0], layer, carry[1], view, self.mistake)

        if self.form.startswith("scan"):
            scan = nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
            run = scan(nnx.remat(block) if "remat" in self.form else block)
            x, pools = run((x, pools), jnp.arange(LAYERS, dtype=jnp.int32), self.layers)
        else:
            transform = {"remat": nnx.remat, "jit": nnx.jit}[self.form]
            for layer, attention in enumerate(self.layers):
                run = transform(lambda carry, attention, layer=layer: block(carry, layer, attention))
                x, pools = run((x, pools), attention)
        return self.embed.attend(x[jnp.arange(x.shape[0]), last]), pools


@pytest.mark.long
@pytest.mark.parametrize("form", ["scan", "scan of remat", "remat", "jit"])
def test_transformed_layers_of_nnx_pass(form):
    assert max(check_model(Model(form), spec_of()).values()) < 1e-5


@pytest.mark.parametrize(
    ("form", "mistake", "message"),
    [
        ("scan", "layer 0", r"layer: the model never writes layer 1, wanted each layer's own number"),
        ("scan of remat", "result dropped", r"pools: the model returns pools without the writes of layers 0, 1"),
        ("scan of remat", "positions", r"positions: .* differ one token at a time, and the model does not use"),
        ("remat", "layer 0", r"layer: the model never writes layer 1"),
        ("remat", "positions", r"positions: .* and the model does not use view.positions"),
        ("jit", "result dropped", r"pools: the model returns pools without the writes of layers 0, 1"),
    ],
)
@pytest.mark.long
def test_mistakes_in_transformed_layers_of_nnx_are_named(form, mistake, message):
    with pytest.raises(AssertionError, match=f"^{message}"):
        check_model(Model(form, mistake), spec_of())


# Models that do more, or less, than usual.


def model_of(attend=kvjax.attend, embed=lambda weights, tokens, view: weights["embed"][tokens], head=lambda x: x):
    """A function with weights. `attend`, `embed` and `head` are its parts that differ."""

    def model(weights, tokens, pools, view, *, last):
        x = embed(weights, tokens, view)
        for layer in range(LAYERS):
            q, k, v = jnp.split((x @ weights["qkv"][layer]).reshape(*x.shape[:2], -1, D), [Q, Q + K], 2)
            pools = kvjax.write(pools, layer, rope(k, view.positions), v, view)
            y = attend(rope(q, view.positions), pools, layer, view)
            x = x + y.reshape(*x.shape[:2], -1) @ weights["out"][layer]
        return head(x[jnp.arange(x.shape[0]), last] @ weights["embed"].T), pools

    return jax.tree_util.Partial(model, WEIGHTS)


def over_tables(q, pools, layer, view):
    """Attention of one's own over the block tables."""
    blocks = pools.arrays[0][0][view.tables[0], layer]  # [R, M, 2, K, P, D]
    blocks = jnp.where(jnp.isnan(blocks), 0, blocks)
    rows = jnp.arange(len(blocks))[:, None] + jnp.zeros_like(view.positions)
    if view.starts is not None:
        rows = jnp.searchsorted(view.starts, jnp.arange(q.shape[1]), side="right")[None] - 1
    k, v = (jnp.moveaxis(blocks[:, :, part], 3, 2).reshape(len(blocks), -1, K, D)[rows] for part in (0, 1))
    score = jnp.einsum("rchd,rctkd->rcht", q, k) * D**-0.5
    is_seen = jnp.arange(k.shape[2]) <= view.positions[..., None, None]
    weight = jax.nn.softmax(jnp.where(is_seen, score, -jnp.inf), -1)
    return jnp.einsum("rcht,rctkd->rchd", weight, v)


def without_the_last(q, pools, layer, view):
    """The K/V of the last layer are for somebody else."""
    return kvjax.attend(q, pools, layer, view) if layer < LAYERS - 1 else q


def learned(weights, tokens, view):
    """Positions of a table, NaN after its end."""
    table = jnp.arange(8 * E, dtype=jnp.float32).reshape(8, E) / 64
    return weights["embed"][tokens] + jnp.take(table, view.positions, axis=0, mode="fill")


def in_bfloat16(weights, tokens, view):
    return weights["embed"][tokens].astype(jnp.bfloat16)


WINDOWS = [kvjax.LayerSpec(K, D, window=6), kvjax.LayerSpec(K, D)]
RIGHT = {
    "attention of one's own": (model_of(attend=over_tables), spec_of()),
    "K/V that nobody reads": (model_of(attend=without_the_last), spec_of()),
    "learned positions of a short cache": (model_of(embed=learned), spec_of(WINDOWS, max_length=8)),
    "excluded tokens": (model_of(head=lambda logits: logits.at[:, :3].set(-jnp.inf)), spec_of()),
    "bfloat16": (model_of(embed=in_bfloat16, head=lambda logits: logits.astype(jnp.bfloat16)), spec_of()),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_unusual_models_pass(name):
    with jax.debug_nans(name == "excluded tokens"):
        check_model(*RIGHT[name])


def test_logits_of_padding_do_not_hide_a_mistake():
    """The lowest number for unused tokens is no logit to compare with."""

    def head(logits):
        return jnp.pad(logits, ((0, 0), (0, 4)), constant_values=jnp.finfo(jnp.float32).min)

    def restarts(weights, tokens, view):
        return weights["embed"][tokens] + 0.1 * jnp.arange(tokens.shape[1])[:, None]

    with pytest.raises(AssertionError, match=r"^(positions|layer 0): .* differ one token at a time"):
        check_model(model_of(embed=restarts, head=head), spec_of())


def test_a_layer_by_its_index_has_its_number_in_an_error():
    def attend(q, pools, layer, view):
        scale = 1 / tokens_of(view) if layer == 1 else None
        return kvjax.attend(q, pools, 0, view, index=layer, scale=scale)

    def tokens_of(view):
        return view.positions.shape[1]

    with pytest.raises(AssertionError, match=r"^attend of layer 1: .* one token at a time, first out of layer 1"):
        check_model(model_of(attend=attend), spec_of())


@pytest.mark.long
def test_a_reference_runs_outside_of_jit_and_has_logits_of_all_tokens():
    logits = []

    def reference(tokens):
        logits.append(np.zeros((1, tokens.shape[1], V - len(logits)), np.float32))
        return logits[-1]

    with pytest.raises(AssertionError, match=r"^logits: the logits differ from the reference from position 0 on"):
        check_model(model_of(), spec_of(), reference=reference)
    wanted = rf"^reference: got float32\[1, 14, {V - 1}\], wanted logits f32\[1, 14, {V}\]"
    with pytest.raises(ValueError, match=wanted):
        check_model(model_of(), spec_of(), reference=reference)


def summing(is_right):
    """A model of a recurrent layer, whose states are sums over the tokens so far."""

    def cell(states, inputs, count):
        inputs = inputs * (jnp.arange(inputs.shape[1]) < count[:, None])[..., None]
        sums = states["sum"][:, None] + (jnp.cumsum(inputs, 1) if is_right else jnp.sum(inputs, 1, keepdims=True))
        return jnp.broadcast_to(sums, inputs.shape), {"sum": sums[:, -1]}

    def model(embed, tokens, pools, view, *, last):
        y, pools = kvjax.recur(cell, pools, 0, view, embed[tokens])
        return y[jnp.arange(y.shape[0]), last] @ embed.T, pools

    return jax.tree_util.Partial(model, WEIGHTS["embed"])


RECURRENT = spec_of([kvjax.LayerSpec.recurrent({"sum": (E,)})])


@pytest.mark.long
def test_a_recurrent_layer_passes():
    assert max(check_model(summing(True), RECURRENT).values()) < 1e-5


def test_a_mistake_of_a_recurrent_cell_is_named():
    with pytest.raises(AssertionError, match=r"^recur of layer 0: .* one token at a time, first outputs of layer 0 at"):
        check_model(summing(False), RECURRENT)
