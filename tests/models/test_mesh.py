# SPDX-License-Identifier: Apache-2.0
"""Models on several devices: the same tokens, a few sums a layer and no other traffic, sharded weights."""

import concurrent.futures
import json
import re
import socket
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import kvjax
from models import load, loading
from models.golden import read_golden
from models.placement import partition_spec
from tests import drive
from tests.drive import output_of
from tests.mesh import AUTO, EXPLICIT, collectives, sent_shapes
from tests.models.families import CONTEXT, GOLDENS, HEADS, check_cached, make_cache, where_of

LLAMA = GOLDENS / "llama_heads"  # 4 kv heads
ONE = np.zeros((3, 1), np.int32), np.ones((3,), np.int32)  # a token of each row


@pytest.fixture(autouse=True)
def forget_programs_of_a_test():
    """Drops programs: one for eight devices takes eight times the memory maps of another (tests/conftest.py)."""
    yield
    jax.clear_caches()


@pytest.mark.long
def test_a_layer_sends_two_sums():
    with where_of((1, 4)) as where:
        model, cache = check_cached("llama_heads", **where)
        step = jax.jit(kvjax.step, donate_argnums=1).lower(model, cache, *ONE).compile()
        # Each layer sums its attention and its MLP. The embeddings are looked up on the device that has them.
        assert collectives(step) == {"all-reduce": 2 * len(model.layers) + 1}
        assert set(sent_shapes(step)) == {"f32[3,1,64]"}
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools)) // 4
        assert step.memory_analysis().alias_size_in_bytes > own > step.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [pytest.param((2, 2), marks=pytest.mark.long), pytest.param((1, 4), marks=pytest.mark.slow)]
)
def test_where_tokens_are_divided_too_a_layer_sends_one_maximum_and_one_sum_more(shape):
    """A decode step with weights that heads alone divide; then with weights that both axes do."""
    with where_of(shape, CONTEXT) as where:
        model, _ = load(LLAMA, **where | {"context": None})
        cache = make_cache(model.layer_specs(), num_blocks=256, **where)
        step = jax.jit(kvjax.step, donate_argnums=1).lower(model, cache, *ONE).compile()
        layers, sums = len(model.layers), 2 if shape[0] > 1 else 0
        of_vocabulary = 1 if shape[0] > 1 else 0
        assert collectives(step) == {"all-reduce": (2 + sums) * layers + of_vocabulary}
        heads = model.config.num_heads // shape[0]
        assert {f"f32[3,{heads}]", f"f32[3,{heads},17]"} <= set(sent_shapes(step))
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools)) // (shape[0] * shape[1])
        assert step.memory_analysis().alias_size_in_bytes > own > 8 * step.memory_analysis().temp_size_in_bytes

        model, _ = load(LLAMA, **where)
        both = jax.jit(kvjax.step, donate_argnums=1).lower(model, cache, *ONE).compile()
        largest = max(int(np.prod([*map(int, s[4:-1].split(","))])) for s in sent_shapes(both) if s.startswith("f32["))
        assert largest <= 3 * max(64, model.config.num_heads * 17)  # activations, and never a weight or a block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "shape", "kind", "dtype"),
    [
        (HEADS, (1, 4), EXPLICIT, "float32"), (HEADS, (2, 2), AUTO, "int8"), (HEADS, (2, 4), AUTO, "float8_e4m3fn"),
        (CONTEXT, (2, 2), AUTO, "float32"), (CONTEXT, (2, 4), AUTO, "float32"), (CONTEXT, (2, 2), EXPLICIT, "float32"),
    ],
)  # fmt: skip
def test_generate_and_stream_give_the_tokens_of_one_device(axes, shape, kind, dtype):
    """With reuse, eviction and a host tier."""
    golden, (plain, _) = read_golden(LLAMA, 64), load(LLAMA)
    prompts = [golden.prompts[row, : golden.lengths[row]].tolist() for row in range(3)]
    prompts += [[*prompts[0][:30], 1, 2], *prompts]
    steps = golden.greedy.shape[1]
    spec = kvjax.make_spec(
        plain.layer_specs(), num_blocks=15, num_host_blocks=4, max_seqs=2, max_length=64, block_size=8, dtype=dtype
    )

    def run(model, **where):
        cache = kvjax.tiers.TieredCache.create(spec, **where)
        outputs, cache, events = kvjax.generate(model, cache, prompts, max_new_tokens=steps, chunk=16)
        *_, last = drive.stream(model, cache, prompts, max_new_tokens=steps, chunk=16)
        kvjax.check(last.cache.state)
        return [(one.tokens, one.cached_tokens) for one in [*outputs, *last.outputs]], events

    wanted, events = run(plain)
    assert {"removed", "updated"} <= {event["kind"] for event in events} and any(cached for _, cached in wanted)
    if dtype == "float32":
        assert [tokens for tokens, _ in wanted[4:7]] == golden.greedy.tolist()
    with where_of(shape, axes, kind) as where:
        assert run(load(LLAMA, **where)[0], **where) == (wanted, events)


@pytest.mark.long
def test_only_the_parts_that_a_device_needs_are_read(monkeypatch):
    read, whole = [], loading._read
    monkeypatch.setattr(loading, "_read", lambda tensor, *args: read.append(whole(tensor, *args)) or read[-1])
    with where_of((1, 4)) as where:
        model, _ = load(LLAMA, **where)
    plain, _ = load(LLAMA)
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


def test_weights_are_divided_over_both_axes_where_both_can_and_else_refused():
    with where_of((2, 4), CONTEXT) as where:
        name = "layers.0.mlp.up_proj.kernel"
        assert partition_spec(name, (64, 96), **where) == P(None, ("heads", "context"))
        assert partition_spec(name, (64, 100), **where) == P(None, "heads")
        with pytest.raises(ValueError, match=r"^context: got 'heads', wanted another of the mesh's axes"):
            load(LLAMA, **where | {"context": "heads"})
    with where_of((1, 8)) as where:
        complaint = r"^mesh: got 8 devices along 'heads', wanted a divisor of 100 \(layers.0.mlp"
        with pytest.raises(ValueError, match=complaint):
            partition_spec(name, (64, 100), **where)
        assert partition_spec("lm_head.kernel", (64, 100), **where) == P()  # whole everywhere
        with pytest.raises(ValueError, match=r"^heads: got 'model', wanted one of the mesh's axes \('data', 'heads'\)"):
            load(LLAMA, **where | {"heads": "model"})
    for axis in CONTEXT:
        with pytest.raises(ValueError, match=rf"^{axis}: got '{axis}' without a mesh, wanted None"):
            load(LLAMA, **{axis: axis})
    with where_of((1, 2)) as where:
        complaint = "^mesh: got one, wanted None: the weights of qwen3_next are not divided"
        with pytest.raises(ValueError, match=complaint):
            load(GOLDENS / "qwen3_next", **where)


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
