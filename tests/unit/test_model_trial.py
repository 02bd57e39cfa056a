# SPDX-License-Identifier: Apache-2.0
"""`check_model` passes right models, and names 24 planted mistakes of a small Flax model by their layer or argument."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import kvjax
from kvjax.testing import check_model

V, E, Q, K, D, LAYERS = 40, 16, 4, 2, 8, 2
SPEC = kvjax.make_spec(
    [kvjax.LayerSpec(K, D), kvjax.LayerSpec(K, D, window=6)],
    num_blocks=64, max_seqs=4, max_length=256, block_size=16, dtype="float32",
)  # fmt: skip


def rope(x, positions):
    angle = positions.astype(jnp.float32)[..., None, None] * 10.0 ** -jnp.arange(D // 2)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def normal(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def masked(q, k, v, window=None, scale=D**-0.5):
    """Attention over the tokens of the call alone."""
    at = jnp.arange(q.shape[1])
    distance = at[:, None] - at
    is_seen = (distance >= 0) & (distance < (window or 99))
    score = jnp.einsum("rchd,rthd->rhct", q, jnp.repeat(k, Q // K, 2)) * scale
    weight = jax.nn.softmax(jnp.where(is_seen, score, -jnp.inf), -1)
    return jnp.einsum("rhct,rthd->rchd", weight, jnp.repeat(v, Q // K, 2))


class Layer(nnx.Module):
    """Attention with rope and norms of q and k."""

    def __init__(self, layer, mistake, rngs):
        self.layer = layer
        self.mistake = mistake if layer == LAYERS - 1 or mistake.startswith("all") else ""
        heads = K - 1 if self.mistake == "a kv head too few" else K
        self.q = nnx.Linear(E, (Q - 1 if self.mistake == "a query head too few" else Q) * D, rngs=rngs)
        self.k, self.v = nnx.Linear(E, heads * D, rngs=rngs), nnx.Linear(E, heads * D, rngs=rngs)
        self.o = nnx.Linear(Q * D, E, rngs=rngs)

    def qkv(self, x, positions):
        q, k, v = (f(x).reshape(*x.shape[:2], -1, D) for f in (self.q, self.k, self.v))
        return rope(normal(q), positions), rope(normal(k), positions), v

    def dense(self, x, positions):
        q, k, v = self.qkv(x, positions)
        return x + self.o(masked(q, k, v, (None, 6)[self.layer]).reshape(*x.shape[:2], -1))

    def __call__(self, x, pools, view, given):
        has, positions = self.mistake.__eq__, view.positions
        if has("all: rope of arange"):
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        if has("all: rope of the lengths"):
            positions = jnp.broadcast_to(view.lengths[:1, None] - 1, x.shape[:2])
        if has("token shift"):
            x = x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        if has("norm over the tokens"):
            x = x / (1 + jnp.abs(x).mean((0, 1)))
        q, k, v = self.qkv(x, positions)
        layer = 0 if has("layer 0") else self.layer
        source, new = given if has("first pools") else OUTSIDE["pools"] if has("outside") else pools, pools
        if has("norm after the write"):
            k = self.k(x).reshape(k.shape)
        if has("k and v exchanged"):
            k, v = v, k
        if has("q is written"):
            k = q[:, :, ::2]
        if not has("not written"):
            new = kvjax.write(source, layer, k, v, view)
        if has("written twice"):
            new = kvjax.write(new, layer, k, v, view)
        options = {"scale": 1.0} if has("no scale") else {"window": 9} if has("another window") else {}
        if has("scale of the chunk"):
            options = {"scale": x.shape[1] ** -0.5}
        if has("a soft cap for one token") and x.shape[1] == 1:
            options = {"soft_cap": 0.1}
        read = self.layer - 1 if has("attends to the layer before") else layer
        if has("own mask"):
            y = masked(q, k, v, 6)
        else:
            y = kvjax.attend(q, pools if has("attends before") else new, read, view, **options)
        x = x + self.o(y.reshape(*x.shape[:2], -1))
        return x, pools if has("result dropped") else new


class Model(nnx.Module):
    def __init__(self, mistake="", rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.mistake = mistake
        self.embed = nnx.Embed(V, E, rngs=rngs)
        self.place = nnx.Embed(64, E, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([Layer(layer, mistake, rngs) for layer in range(LAYERS)])

    def dense(self, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = 4 * self.embed(tokens)
        for layer in self.layers:
            x = layer.dense(x, positions)
        return self.embed.attend(x)

    def __call__(self, tokens, pools, view, *, last):
        x, given = 4 * self.embed(tokens), pools
        if self.mistake == "places of arange":
            x = x + self.place(jnp.arange(x.shape[1]))
        if self.mistake == "dropout":
            x = self.drop(x)
        for layer in self.layers:
            x, pools = layer(x, pools, view, given)
        at = jnp.full_like(last, -1) if self.mistake == "last is ignored" else last
        pools = given if self.mistake == "returns the given" else pools
        return self.embed.attend(x[jnp.arange(x.shape[0]) if view.starts is None else 0, at]), pools


@pytest.fixture(autouse=True)
def promotion():
    """A user's model promotes freely."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


OUTSIDE = {}
# The beginning of the error that names the layer or the argument. None: no name is promised.
MISTAKES = {
    "result dropped": "pools: the model returns|pools: attend of layer 1|model: got pools with layers",
    "first pools": "pools: the write of layer 1 takes the pools that the model was given",
    "returns the given": "pools: the model returns the pools that the model was given",
    "outside": "pools: the model takes pools from outside of its call",
    "layer 0": "k|layer: got 0 a second time|.*layer 1",
    "not written": "layer: got 1 in attend before its write",
    "written twice": "layer: got 1 a second time",
    "attends before": "pools: attend of layer 1 takes|layer: got 1 in attend before",
    "another window": "window: got 9 for layer 1, wanted 6",
    "a query head too few": "q: got shape",
    "a kv head too few": "k: got shape .* layer 1",
    "own mask": "attend of layer 1: is missing",
    "attends to the layer before": "attend of layer 1: is missing",
    "dropout": "model: ",
    "all: rope of arange": "positions: .* rotate q and k of layer 0 by view.positions",
    "all: rope of the lengths": "positions: .* layer 0",
    "places of arange": "(positions|layer 0): .* differ one token at a time, first [qkv] of layer 0",
    "last is ignored": "last: ",
    "token shift": "layer 1: .* differ one token at a time, first [qkv] of layer 1",
    "norm over the tokens": "layer 1: .* first [qkv] of layer 1",
    "scale of the chunk": "attend of layer 1: ",
    "a soft cap for one token": "attend of layer 1: .* one token at a time",
    # These are the same in every form, so that only a reference shows them.
    "k and v exchanged": "k: .* if k and v of layer 1 are exchanged",
    "no scale": r"scale: .* if attend of layer 1 has the scale",
    "norm after the write": None,
    "q is written": None,
}
OF_REFERENCE = [*MISTAKES][-4:]
TRACED = [*MISTAKES][:11]


def reference_of(model):
    return lambda tokens: model.dense(tokens)


def error_of(mistake):
    model, right = Model(mistake), Model()
    if mistake != "a query head too few" and mistake != "a kv head too few":
        nnx.update(model, nnx.state(right))
    if mistake != "dropout":
        model.eval()
    OUTSIDE["pools"] = kvjax.init_pools(SPEC)
    reference = reference_of(right) if mistake in OF_REFERENCE else None
    with pytest.raises(Exception) as caught:  # noqa: PT011 (Flax has errors of its own)
        check_model(model, SPEC, reference=reference)
    return caught.value


def test_there_are_24_mistakes():
    assert len(MISTAKES) >= 24 and sum(name is not None for name in MISTAKES.values()) >= 20


@pytest.mark.parametrize("mistake", TRACED)
def test_a_mistake_that_a_trace_sees_is_named(mistake):
    error = error_of(mistake)
    assert isinstance(error, AssertionError), error
    assert re.match(MISTAKES[mistake], str(error)), str(error)


@pytest.mark.long
@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name not in TRACED])
def test_a_mistake_is_named(mistake):
    error = error_of(mistake)
    print(mistake, "->", error)
    if MISTAKES[mistake] is None:
        assert str(error).startswith("logits: the logits differ from the reference from position")
    else:
        assert re.match(MISTAKES[mistake], str(error)), str(error)


@pytest.mark.long
def test_a_right_model_passes():
    model = Model()
    model.eval()
    errors = check_model(model, SPEC, reference=reference_of(model))
    assert max(errors.values()) < 1e-4 and len(errors) == 8


def scanned(mistake):
    """Three layers in a scan with remat, where a trace cannot see which layers are written."""
    embed = jax.random.normal(jax.random.key(0), (V, D))

    def model(embed, tokens, pools, view, *, last):
        def block(carry, layer):
            x, pools = carry
            h = x[:, :, None]
            layer = {"layer 0": jnp.int32(0), "layers from 1 on": layer + 1}.get(mistake, layer)
            new = kvjax.write(pools, layer, h, h, view)
            x = x + kvjax.attend(h, new, layer, view)[:, :, 0]
            return (x, pools if mistake == "result dropped" else new), None

        layers = jnp.arange(3, dtype=jnp.int32)
        (x, pools), _ = jax.lax.scan(jax.checkpoint(block), (embed[tokens], pools), layers)
        return x[jnp.arange(x.shape[0]), last] @ embed.T, pools

    return jax.tree_util.Partial(model, embed)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("layer 0", r"layer: the model never writes layers 1, 2, wanted each layer's own number"),
        ("layers from 1 on", r"layer: the model never writes layer 0, wanted each layer's own number"),
        ("result dropped", r"pools: the model returns pools without the writes of layers 0, 1, 2, wanted"),
    ],
)
def test_layers_of_a_scan_without_a_write_are_named(mistake, message, dtype):
    spec = kvjax.make_spec([kvjax.LayerSpec(1, D)] * 3, num_blocks=8, max_seqs=1, max_length=32, dtype=dtype)
    with pytest.raises(AssertionError, match=f"^{message}"):
        check_model(scanned(mistake), spec)


def test_a_model_without_a_cache_passes():
    def next_number(tokens, pools, view, *, last):
        return jax.nn.one_hot(tokens[jnp.arange(len(tokens)) if view.starts is None else 0, last] + 1, V), pools

    spec = kvjax.make_spec([kvjax.LayerSpec(1, D)], num_blocks=8, max_seqs=1, max_length=32)
    assert max(check_model(jax.tree_util.Partial(next_number), spec).values()) == 0


def test_a_mistake_of_a_form_alone_is_named():
    """A branch for one token, which forgets the result of the write."""

    def model(embed, tokens, pools, view, *, last):
        h = embed[tokens][:, :, None]
        new = kvjax.write(pools, 0, h, h, view)
        x = kvjax.attend(h, pools if tokens.shape[1] == 1 else new, 0, view)[:, :, 0]
        return x[jnp.arange(x.shape[0]), last] @ embed.T, new

    spec = kvjax.make_spec([kvjax.LayerSpec(1, D)], num_blocks=8, max_seqs=1, max_length=32)
    message = r"^pools: attend of layer 0 takes the pools that the model was given, .* with tokens i32\[1, 1\]"
    with pytest.raises(AssertionError, match=message):
        check_model(jax.tree_util.Partial(model, jnp.eye(V, D)), spec)
