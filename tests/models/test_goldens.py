# SPDX-License-Identifier: Apache-2.0
"""Every family's reference outputs, by each way: whole sequences, the cache, scanned layers, and several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax.model import forward
from models import load, verify
from models.golden import read_golden
from tests.mesh import EXPLICIT
from tests.models.families import (
    CONTEXT,
    FAMILIES,
    GOLDENS,
    OPTIONS,
    OWN_FAMILIES,
    check_cached,
    check_dense,
    dense,
    make_cache,
    where_of,
)

MAIN = ("deepseek_v3", "qwen3_next", "kimi_linear", "gpt_oss")
WAYS = {
    "one device": {},
    "scanned": {"scan": True},
    "scanned on four devices": {"scan": True, "shape": (1, 4)},
    "two by two devices": {"shape": (2, 2)},
    "two by two devices, explicit": {"shape": (2, 2), "kind": EXPLICIT},
}


@pytest.fixture(autouse=True)
def forget_programs_for_several_devices(request):
    """Drops programs: one for eight devices takes eight times the memory maps of another (tests/conftest.py)."""
    yield
    if "devices" in request.node.name:
        jax.clear_caches()


def of(families, *rest, mark=()):
    """Rows of a table, one for each family."""
    return [pytest.param(family, *rest, marks=mark) for family in families]


QUICK = ("llama", "gemma4", "qwen3_next", "qwen3_longrope")


@pytest.mark.parametrize(
    "family",
    [
        *QUICK,
        *of([name for name in FAMILIES + OPTIONS + OWN_FAMILIES if name not in QUICK], mark=pytest.mark.long),
    ],
)
def test_whole_sequences(family):
    check_dense(family, 1e-3 if family in FAMILIES else 2e-4)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("llama_heads", "one device"),
        *of(["qwen3"], "scanned", mark=pytest.mark.long),
        *of(["gemma3"], "scanned", mark=pytest.mark.long),  # not equal layers, but a period
        ("qwen3_longrope", "one device"),
        *of([name for name in OPTIONS if name != "qwen3_longrope"], "one device", mark=pytest.mark.long),
        *of(("qwen3_yarn", "qwen3_fp8"), "two by two devices", mark=pytest.mark.slow),
        *of(["gemma4"], "one device", mark=pytest.mark.long),
        *of(MAIN, "scanned", mark=pytest.mark.long),
        *of(["llama_heads"], "scanned on four devices", mark=pytest.mark.long),
        *of(["gemma3"], "two by two devices", mark=pytest.mark.slow),
        *of(["gemma4"], "two by two devices, explicit", mark=pytest.mark.slow),
    ],
)
def test_prompts_through_the_cache(family, way):
    options = dict(WAYS[way])
    scan = options.pop("scan", False)
    with where_of(**options) as where:
        check_cached(family, scan=scan, **where)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--scan"]], ids=["one layer after the other", "scanned"])
@pytest.mark.parametrize("family", FAMILIES + OPTIONS + OWN_FAMILIES)
def test_verify_passes(family, flags, capsys):
    """Cold, with reuse and after churn, from pools of NaN."""
    assert verify.main([str(GOLDENS / family), *flags]) == 0
    assert "ok: largest logit error" in capsys.readouterr().out


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
def test_verify_passes_where_devices_divide_the_tokens_of_blocks(family, shape, monkeypatch):
    with where_of(shape, CONTEXT) as where:
        if family in MAIN:  # `load` divides no such weights

            def everywhere(*args, **_):
                model, tokenizer = load(*args)
                return jax.device_put(model, NamedSharding(where["mesh"], P())), tokenizer

            monkeypatch.setattr(verify, "load", everywhere)
        tallies = verify.verify(GOLDENS / family, where=where)
        assert all(tally.ok for tally in tallies.values()), tallies


@pytest.mark.slow
def test_int8_on_eight_devices_is_that_of_one_device():
    alone = verify.verify(GOLDENS / "llama", "int8")
    with where_of((2, 4), CONTEXT) as where:
        divided = verify.verify(GOLDENS / "llama", "int8", where=where)
    for way, tally in divided.items():
        assert tally.compared == alone[way].compared and abs(tally.error - alone[way].error) < 0.05, way


@pytest.mark.slow
@pytest.mark.parametrize("family", MAIN)
def test_most_prompt_tokens_are_found_again(family):
    """Each prompt after those that share a prefix with it, then after itself."""
    model, _ = load(GOLDENS / family)
    golden = read_golden(GOLDENS / family, model.config.vocab_size)
    prompts = [golden.prompts[row, :length].tolist() for row, length in enumerate(golden.lengths)]
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=256, max_seqs=8, max_length=256, block_size=16, dtype="float32"
    )
    cache, found = kvjax.Cache.create(spec), 0
    for _ in range(2):
        outputs, cache = kvjax.generate(model, cache, prompts, max_new_tokens=8)[:2]
        found += sum(output.cached_tokens for output in outputs)
        for row, output in enumerate(outputs):
            assert output.tokens == golden.greedy[row, :8].tolist()
    assert found > sum(map(len, prompts))


@pytest.mark.parametrize(
    "family", [*of(["llama"], mark=pytest.mark.long), *of(["gemma3", "gemma4", *MAIN], mark=pytest.mark.slow)]
)
def test_logits_of_a_chunk_of_single_tokens_and_of_a_mixed_line(family):
    """Two rows decode while the third computes its prompt."""
    model, _ = load(GOLDENS / family)
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(3, 11)).astype(np.int32)
    done, on = jnp.array([5, 8, 2]), np.array([True, True, False])
    last = np.array([5, 0, 10, 1, 3], np.int32)  # the line has rows 0 to 2, then nine tokens of row 2

    @jax.jit
    def run(model, cache):
        cache, _ = cache.admit(np.arange(3), tokens, np.full(3, 11))
        view = cache.view(done, 8)
        first, pools = model(jnp.asarray(tokens[:, :8]), cache.pools, view, last=None)
        cache, _ = cache.replace(pools=pools).commit(tokens[:, :8], done)
        line = jnp.asarray(np.concatenate([tokens[0, 5:6], tokens[1, 8:9], [0], tokens[2, 2:], [0]])[None])
        return first, forward(model, line, cache.pools, cache.mixed(on, np.array([2]), np.array([9]), 10), last)[0]

    first, mixed = run(model, make_cache(model.layer_specs()))
    wanted, close = dense(model, tokens), {"atol": 5e-4 if family == "gemma4" else 2e-4}
    for row, count in enumerate((5, 8, 2)):
        np.testing.assert_allclose(first[row, :count], wanted[row, :count], **close)
    positions = ((2, 4), (0, 5), (2, 9), (1, 8), (2, 2))
    np.testing.assert_allclose(mixed, np.stack([wanted[row, at] for row, at in positions]), **close)


@pytest.mark.parametrize("family", of(["llama", "gemma3", "gemma4", *MAIN], mark=pytest.mark.slow))
def test_bfloat16(family):
    """The logits of weights in bfloat16, with and without the cache, are near those of the same weights in float32."""
    model, _ = load(GOLDENS / family, dtype=jnp.bfloat16)
    wide, _ = load(GOLDENS / family)
    nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model)))
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(3, 12)).astype(np.int32)
    last = np.array([11, 4, 0])

    @jax.jit
    def run(model, cache):
        cache, _ = cache.admit(np.arange(3), tokens, np.full(3, 12))
        view = cache.view(12)
        return [model(jnp.asarray(tokens), cache.pools, view, last=some)[0] for some in (None, last)]

    paged, some = run(model, make_cache(model.layer_specs(), "bfloat16"))
    wanted = dense(wide, tokens)
    for logits in (dense(model, tokens), paged):
        assert logits.dtype == jnp.float32
        assert np.median(np.abs(logits - wanted)) < 0.1 * np.median(np.abs(wanted))  # some tokens choose other experts
    np.testing.assert_allclose(some, np.asarray(paged)[np.arange(3), last], atol=0.1)


def test_golden_copies_are_small():
    assert all(path.stat().st_size < 2_000_000 for path in GOLDENS.rglob("*"))
