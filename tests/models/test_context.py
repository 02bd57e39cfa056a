# SPDX-License-Identifier: Apache-2.0
"""Models whose blocks are divided among devices by token: the references' logits, and what a layer sends."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from models import load, verify
from models.placement import partition_spec
from tests import drive
from tests.mesh import AUTO, EXPLICIT, collectives, mesh_of, sent_shapes
from tests.models.families import GOLDENS

AXES = {"heads": "heads", "context": "context"}


@pytest.fixture(autouse=True)
def forget_programs_of_a_test():
    """Drops programs: one for eight devices takes eight times the memory maps of another (tests/conftest.py)."""
    yield
    jax.clear_caches()


def context_mesh(heads, context, kind=AUTO):
    return mesh_of(heads, context, kind, ("heads", "context"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", (2, 2)),
        ("llama_heads", (2, 4)),
        ("qwen3", (1, 4)),  # one kv head
        ("gemma3", (2, 2)),  # windows, whose blocks are whole
        ("gpt_oss", (2, 2)),  # sinks, and windows
        ("deepseek_v3", (1, 4)),  # latents
        ("qwen3_next", (1, 2)),  # states, which are whole
    ],
)
def test_goldens(family, shape, monkeypatch):
    """Cold, with reuse and after churn, from pools of NaN."""
    with context_mesh(*shape) as mesh:
        where = {"mesh": mesh, **AXES}
        if family in ("gpt_oss", "deepseek_v3", "qwen3_next"):  # `load` divides no such weights
            monkeypatch.setattr(verify, "load", lambda *args, **_: everywhere(mesh, *load(*args)))
        tallies = verify.verify(GOLDENS / family, where=where)
        assert all(tally.ok for tally in tallies.values()), tallies


def everywhere(mesh, model, tokenizer):
    """A model with a copy of its weights on each device."""
    return jax.device_put(model, NamedSharding(mesh, P())), tokenizer


@pytest.mark.slow
def test_int8_is_that_of_one_device():
    alone = verify.verify(GOLDENS / "llama", "int8")
    with context_mesh(2, 4) as mesh:
        divided = verify.verify(GOLDENS / "llama", "int8", where={"mesh": mesh, **AXES})
    for way, tally in divided.items():
        assert tally.compared == alone[way].compared and abs(tally.error - alone[way].error) < 0.05, way


@pytest.mark.parametrize(
    "shape", [pytest.param((2, 2), marks=pytest.mark.long), pytest.param((1, 4), marks=pytest.mark.slow)]
)
def test_a_layer_sends_one_maximum_and_one_sum_more(shape):
    """A decode step with weights that heads alone divide; then with weights that both axes do."""
    with context_mesh(*shape) as mesh:
        where = {"mesh": mesh, **AXES}
        model, _ = load(GOLDENS / "llama_heads", mesh=mesh, heads="heads")
        spec = kvjax.make_spec(
            model.layer_specs(), num_blocks=256, max_seqs=3, max_length=96, block_size=8, dtype="float32"
        )
        cache, one = kvjax.Cache.create(spec, **where), (np.zeros((3, 1), np.int32), np.ones(3, np.int32))
        step = jax.jit(kvjax.step, donate_argnums=1).lower(model, cache, *one).compile()
        layers, sums = len(model.layers), 2 if shape[0] > 1 else 0
        of_vocabulary = 1 if shape[0] > 1 else 0
        assert collectives(step) == {"all-reduce": (2 + sums) * layers + of_vocabulary}
        heads = model.config.num_heads // shape[0]
        assert {f"f32[3,{heads}]", f"f32[3,{heads},17]"} <= set(sent_shapes(step))
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pools)) // (shape[0] * shape[1])
        assert step.memory_analysis().alias_size_in_bytes > own > 8 * step.memory_analysis().temp_size_in_bytes

        model, _ = load(GOLDENS / "llama_heads", **where)
        both = jax.jit(kvjax.step, donate_argnums=1).lower(model, cache, *one).compile()
        largest = max(int(np.prod([*map(int, s[4:-1].split(","))])) for s in sent_shapes(both) if s.startswith("f32["))
        assert largest <= 3 * max(64, model.config.num_heads * 17)  # activations, and never a weight or a block


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kind"), [((2, 2), AUTO), ((2, 4), AUTO), ((2, 2), EXPLICIT)])
def test_generate_and_stream_give_the_tokens_of_one_device(shape, kind):
    """With reuse, eviction and a host tier."""
    prompts = np.random.default_rng(1).integers(64, size=(4, 40)).tolist()
    prompts += [[*prompts[0][:30], 1, 2], prompts[1]]
    plain, _ = load(GOLDENS / "llama_heads")
    spec = kvjax.make_spec(
        plain.layer_specs(), num_blocks=16, num_host_blocks=12, max_seqs=2, max_length=64, block_size=8, dtype="float32"
    )

    def run(model, **where):
        cache = kvjax.tiers.TieredCache.create(spec, **where)
        outputs, cache, events = kvjax.generate(model, cache, prompts, max_new_tokens=8, chunk=16)
        *_, last = drive.stream(model, cache, prompts, max_new_tokens=8, chunk=16)
        kvjax.check(last.cache.state)
        return [(one.tokens, one.cached_tokens) for one in [*outputs, *last.outputs]], events

    wanted, events = run(plain)
    assert {"removed", "updated"} <= {event["kind"] for event in events} and any(cached for _, cached in wanted)
    with context_mesh(*shape, kind) as mesh:
        where = {"mesh": mesh, **AXES}
        assert run(load(GOLDENS / "llama_heads", **where)[0], **where) == (wanted, events)


def test_weights_are_divided_over_both_axes_where_both_can():
    with context_mesh(2, 4) as mesh:
        name = "layers.0.mlp.up_proj.kernel"
        assert partition_spec(name, (64, 96), mesh, **AXES) == P(None, ("heads", "context"))
        assert partition_spec(name, (64, 100), mesh, **AXES) == P(None, "heads")
        with pytest.raises(ValueError, match=r"^context: got 'heads', wanted another of the mesh's axes"):
            load(GOLDENS / "llama_heads", mesh=mesh, heads="heads", context="heads")
    with pytest.raises(ValueError, match=r"^context: got 'context' without a mesh, wanted None"):
        load(GOLDENS / "llama_heads", context="context")
