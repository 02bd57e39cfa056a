# SPDX-License-Identifier: Apache-2.0
"""Models on several devices: the same logits and tokens, two sums a layer and no other traffic, sharded weights."""

import concurrent.futures
import json
import re
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import kvjax
from models import load, loading
from models.golden import read_golden
from models.placement import partition_spec
from tests import drive
from tests.drive import output_of
from tests.mesh import AUTO, EXPLICIT, collectives, mesh_of, sent_shapes
from tests.models.families import GOLDENS

HEADS = GOLDENS / "llama_heads"  # 4 kv heads


@pytest.fixture(autouse=True)
def forget_programs_of_a_test():
    """Drops programs: one for eight devices takes eight times the memory maps of another (tests/conftest.py)."""
    yield
    jax.clear_caches()


def cache_of(layers, dtype="float32", mesh=None, num_blocks=40, **options):
    spec = kvjax.make_spec(
        layers, num_blocks=num_blocks, max_seqs=3, max_length=96, block_size=8, dtype=dtype, **options
    )
    return kvjax.Cache.create(spec, mesh=mesh, heads=None if mesh is None else "heads")


def prompt_logits(model, cache, golden):
    """The logits f32[V] at every token of the first three prompts, through the cache."""
    rows = 3
    tokens, lengths = np.maximum(golden.prompts[:rows], 0), golden.lengths[:rows]
    cache, events = jax.jit(kvjax.Cache.admit)(cache, np.arange(rows), tokens, lengths)
    assert events.ok.all()
    step = jax.jit(lambda model, cache: kvjax.step(model, cache, tokens, lengths, logits="all")[1])
    logits = np.asarray(step(model, cache))
    return [logits[row, : lengths[row]] for row in range(rows)]


@pytest.mark.long
def test_a_golden_on_four_devices():
    golden = read_golden(HEADS, 64)
    with mesh_of(1, 4) as mesh:
        model, _ = load(HEADS, mesh=mesh, heads="heads")
        cache = cache_of(model.layer_specs(), mesh=mesh)
        for row, logits in enumerate(prompt_logits(model, cache, golden)):
            np.testing.assert_allclose(logits, golden.logits[row, : len(logits)], rtol=1e-3, atol=1e-3)
        one = np.zeros((3, 1), np.int32), np.ones((3,), np.int32)
        step = jax.jit(kvjax.step, donate_argnums=1).lower(model, cache, *one).compile()
        # Each layer sums its attention and its MLP. The embeddings are looked up on the device that has them.
        assert collectives(step) == {"all-reduce": 2 * len(model.layers) + 1}
        assert set(sent_shapes(step)) == {"f32[3,1,64]"}
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools)) // 4
        assert step.memory_analysis().alias_size_in_bytes > own > step.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_a_scanned_model_on_a_mesh():
    golden = read_golden(HEADS, 64)
    with mesh_of(1, 4) as mesh:
        model, _ = load(HEADS, mesh=mesh, heads="heads", scan=True)
        assert model.run is not None
        for row, logits in enumerate(prompt_logits(model, cache_of(model.layer_specs(), mesh=mesh), golden)):
            np.testing.assert_allclose(logits, golden.logits[row, : len(logits)], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [("gemma3", AUTO), ("gemma4", EXPLICIT)])
def test_goldens_with_windows_on_two_by_two_devices(family, kind):
    golden = read_golden(GOLDENS / family, 256)
    with mesh_of(2, 2, kind) as mesh:
        model, _ = load(GOLDENS / family, mesh=mesh, heads="heads")
        cache = cache_of(model.layer_specs(), mesh=mesh)
        for row, logits in enumerate(prompt_logits(model, cache, golden)):
            np.testing.assert_allclose(logits, golden.logits[row, : len(logits)], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [((1, 4), EXPLICIT, "float32"), ((2, 2), AUTO, "int8"), ((2, 4), AUTO, "float8_e4m3fn")],
)
def test_generate_and_stream_with_reuse_and_eviction(shape, kind, dtype):
    plain, _ = load(HEADS)
    golden = read_golden(HEADS, 64)
    prompts = [golden.prompts[row, : golden.lengths[row]].tolist() for row in range(3)] * 2
    steps = golden.greedy.shape[1]
    longest = max(map(len, prompts)) + steps
    options = {"max_seqs": 2, "max_length": longest, "block_size": 8, "dtype": dtype}
    spec = kvjax.make_spec(plain.layer_specs(), num_blocks=2 * -(-longest // 8) + 2, **options)

    def run(generate, model, **where):
        return generate(model, kvjax.Cache.create(spec, **where), prompts, max_new_tokens=steps, chunk=16)

    wanted, _, _ = run(kvjax.generate, plain)
    with mesh_of(*shape, kind) as mesh:
        where = {"mesh": mesh, "heads": "heads"}
        model, _ = load(HEADS, **where)
        outputs, _, events = run(kvjax.generate, model, **where)
        *_, last = run(drive.stream, model, **where)
    assert "removed" in {event["kind"] for event in events} and any(output.cached_tokens for output in outputs)
    for row, (output, streamed, alone) in enumerate(zip(outputs, last.outputs, wanted, strict=True)):
        assert output.tokens == streamed.tokens == alone.tokens
        assert output.cached_tokens == streamed.cached_tokens == alone.cached_tokens
        if dtype == "float32":
            assert output.tokens == golden.greedy[row % 3].tolist()


@pytest.mark.long
def test_only_the_parts_that_a_device_needs_are_read(monkeypatch):
    read, whole = [], loading._read
    monkeypatch.setattr(loading, "_read", lambda tensor, *args: read.append(whole(tensor, *args)) or read[-1])
    with mesh_of(1, 4) as mesh:
        model, _ = load(HEADS, mesh=mesh, heads="heads")
    plain, _ = load(HEADS)
    sizes = [part.size for part in read]
    for (path, leaf), like in zip(jax.tree.leaves_with_path(model), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(like))
        parts = 1 if leaf.sharding.is_fully_replicated else 4
        assert leaf.addressable_shards[0].data.size == leaf.size // parts
        name = jax.tree_util.keystr(path)
        assert (parts == 4) == bool(re.search("proj|embed|lm_head", name) and "o_proj.bias" not in name), name
    # Each part once, for all devices of this process, then the plain model.
    assert sum(sizes) == 2 * sum(leaf.size for leaf in jax.tree.leaves(plain))
    assert max(sizes[: len(sizes) - len(jax.tree.leaves(plain))]) == 64 * 8 * 16 // 4  # q_proj, the largest


def test_weights_that_cannot_be_divided_are_refused():
    with mesh_of(1, 8) as mesh:
        with pytest.raises(
            ValueError, match=r"^mesh: got 8 devices along 'heads', wanted a divisor of 100 \(layers.0.mlp"
        ):
            partition_spec("layers.0.mlp.up_proj.kernel", (64, 100), mesh, "heads")
        assert partition_spec("lm_head.kernel", (64, 100), mesh, "heads") == P()  # whole everywhere
        with pytest.raises(ValueError, match=r"^heads: got 'model', wanted one of the mesh's axes \('data', 'heads'\)"):
            load(HEADS, mesh=mesh, heads="model")
    with pytest.raises(ValueError, match=r"^heads: got 'heads' without a mesh, wanted None"):
        load(HEADS, heads="heads")


def divided(init, *axes):
    return nnx.with_partitioning(init, axes)


class Attention(nnx.Module):
    """Attention with sinks, of 4 kv heads. Its weights carry their shardings for Flax."""

    def __init__(self, layer, rngs):
        self.layer, init = layer, nnx.initializers.lecun_normal()
        linear = {"use_bias": False, "rngs": rngs}
        self.q = nnx.Linear(32, 8 * 16, kernel_init=divided(init, None, "heads"), **linear)
        self.k = nnx.Linear(32, 4 * 16, kernel_init=divided(init, None, "heads"), **linear)
        self.v = nnx.Linear(32, 4 * 16, kernel_init=divided(init, None, "heads"), **linear)
        self.out = nnx.Linear(8 * 16, 32, kernel_init=divided(init, "heads", None), **linear)
        self.sinks = nnx.Param(divided(nnx.initializers.normal(), "heads")(rngs.params(), (8,)))

    def __call__(self, x, pools, view):
        explicit = EXPLICIT in jax.sharding.get_abstract_mesh().axis_types
        q, k, v = (linear(x).reshape(*x.shape[:2], -1, 16) for linear in (self.q, self.k, self.v))
        pools = kvjax.write(pools, self.layer, k, v, view)
        y = kvjax.attend(q, pools, self.layer, view, sinks=self.sinks[...])
        return self.out(y.reshape(*x.shape[:2], -1), out_sharding=P() if explicit else None), pools


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(100, 32, rngs=rngs)
        self.attention = nnx.List([Attention(layer, rngs) for layer in range(2)])

    def __call__(self, tokens, pools, view, *, last):
        x = self.embed(tokens)
        for attention in self.attention:
            y, pools = attention(x, pools, view)
            x = x + y
        return x[jnp.arange(x.shape[0]), last] @ self.embed.embedding[...].T, pools


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, tokens, pools, view, *, last):
        def dense(features, *axes):
            init = linen.with_partitioning(linen.initializers.lecun_normal(), axes)
            return linen.Dense(features, use_bias=False, kernel_init=init)

        embed = linen.Embed(100, 32)
        x = embed(tokens)
        for layer in range(2):
            q, k, v = (dense(n * 16, None, "heads")(x).reshape(*x.shape[:2], n, 16) for n in (8, 4, 4))
            pools = kvjax.write(pools, layer, k, v, view)
            y = kvjax.attend(q, pools, layer, view)
            x = x + dense(32, "heads", None)(y.reshape(*x.shape[:2], -1))
        return embed.attend(x[jnp.arange(x.shape[0]), last]), pools


LAYERS = [kvjax.LayerSpec(4, 16)] * 2
PROMPTS = [list(range(40)), [*range(20), 7], [3, 1, 4], list(range(40))]


def tokens_of(model, cache):
    outputs, _, _ = kvjax.generate(model, cache, PROMPTS, max_new_tokens=6)
    assert outputs[-1].cached_tokens
    return [output.tokens for output in outputs]


def logits_of(model, cache):
    """The logits after each of three prompts of five tokens."""
    tokens, lengths = np.arange(15, dtype=np.int32).reshape(3, 5), np.full((3,), 5, np.int32)
    cache, events = jax.jit(kvjax.Cache.admit)(cache, np.arange(3), tokens, lengths)
    assert events.ok.all()
    return np.asarray(jax.jit(kvjax.step)(model, cache, tokens, lengths)[1])


def one_device(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param(EXPLICIT, (1, 4), marks=pytest.mark.slow), pytest.param(AUTO, (2, 2), marks=pytest.mark.slow)],
)
def test_an_nnx_module_of_the_users_own_with_sinks(kind, shape):
    with mesh_of(*shape, kind) as mesh, jax.set_mesh(mesh):
        model = Model(nnx.Rngs(0))  # Flax places weights that carry a sharding
        assert model.attention[0].q.kernel.sharding.spec == P(None, "heads")
        tokens = tokens_of(model, cache_of(LAYERS, mesh=mesh))
    assert tokens == tokens_of(one_device(model), cache_of(LAYERS))


@pytest.mark.slow
def test_a_linen_module_of_the_users_own():
    module = LinenModel()
    with mesh_of(2, 2) as mesh:
        cache = cache_of(LAYERS, mesh=mesh)
        inputs = np.zeros((3, 1), np.int32), cache.pools, cache.view(1)

        def init():
            return module.init(jax.random.key(0), *inputs, last=np.zeros((3,), np.int32))

        params = linen.unbox(jax.jit(init, out_shardings=linen.get_sharding(jax.eval_shape(init), mesh))())
        assert params["params"]["Dense_0"]["kernel"].sharding.spec == P(None, "heads")
        logits = logits_of(jax.tree_util.Partial(module.apply, params), cache)
    wanted = logits_of(jax.tree_util.Partial(module.apply, one_device(params)), cache_of(LAYERS))
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


def of_processes(count, *options):
    """The output of each of so many processes that share a mesh."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1]) if count > 1 else "0"
    command = sys.executable, "-m", "tests.models.two_processes", port
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = [pool.submit(output_of, *command, str(number), *options) for number in range(count)]
        return [json.loads(one.result().splitlines()[-1]) for one in running]  # Gloo prints lines of its own


@pytest.mark.slow
def test_two_processes_do_what_one_does():
    (alone,) = of_processes(1)
    assert of_processes(2) == [alone, alone]  # the clock too is the first one's
    assert of_processes(2, "--context") == [alone, alone]
    cached = [cached for outputs in alone["results"][::2] for _, cached, _ in outputs]
    kinds = {event["kind"] for events in alone["results"][1::2] for event in events}
    assert max(cached) >= 32 and {"stored", "removed", "updated"} <= kinds and not alone["lost"]

    first, second = of_processes(2, "--fail")  # a move that fails in one process has failed in both
    assert first["results"] == second["results"] and first["state"] == second["state"]
    assert "a move failed in another process" in first["lost"][0] and "division by zero" in second["lost"][0]
    tokens = [[[tokens for tokens, *_ in outputs] for outputs in one["results"][::2]] for one in (first, alone)]
    assert tokens[0] == tokens[1]
