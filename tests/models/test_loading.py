# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: what is read, what is written, what is refused."""

import gc
import json
import pathlib
import tracemalloc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import Decoder, ModelConfig, load, loading, recall, save
from tests.drive import DATA

GOLDENS = DATA / "goldens"
FIELDS = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6,
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "global_head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40,
}  # fmt: skip


def make(model_type: str = "llama", dtype=jnp.float32, **fields) -> Decoder:
    """A small model all of whose parameters are random: norms and biases start as ones and zeros otherwise."""
    config = ModelConfig.from_hf({"model_type": model_type, **FIELDS, **fields})
    model = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), nnx.state(model))
    nnx.update(model, state)
    return model


def assert_same(one: Decoder, other: Decoder) -> None:
    assert one.config == other.config
    chex.assert_trees_all_equal(nnx.state(one), nnx.state(other))


def rewrite(folder: pathlib.Path, change) -> None:
    """Changes the tensors of model.safetensors."""
    tensors = load_file(folder / loading.SINGLE)
    change(tensors)
    save_file(tensors, folder / loading.SINGLE)


def shard(folder: pathlib.Path, num_files: int = 3) -> None:
    """Splits model.safetensors into several files with an index."""
    tensors = load_file(folder / loading.SINGLE)
    weight_map = {}
    for number in range(num_files):
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(tensors.items())[number::num_files])
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / loading.SINGLE).unlink()
    (folder / loading.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("gemma3_text", {"sliding_window_pattern": 2}),
        ("gemma4_text", GEMMA4),
    ],
)
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.long), jnp.bfloat16])
def test_save_and_load_keep_every_bit(tmp_path, model_type, fields, dtype):
    model = make(model_type, dtype, **fields)
    save(model, tmp_path, recall.make_tokenizer())
    loaded, tokenizer = load(tmp_path)
    assert_same(model, loaded)
    assert tokenizer.encode("where is bob?").ids == recall.encode("where is bob ?")


def test_shards_give_the_same_model(tmp_path):
    model = make()
    save(model, tmp_path)
    shard(tmp_path)
    loaded, tokenizer = load(tmp_path)
    assert_same(model, loaded)
    assert tokenizer is None


@pytest.mark.parametrize("family", ["llama", "gemma3_options", "gemma4_options"])
def test_names_and_layout_are_hugging_faces(tmp_path, family):
    """A file that another program wrote comes back from `save` with the same names, shapes and values."""
    folder = GOLDENS / family
    save(load(folder)[0], tmp_path)
    ours, theirs = load_file(tmp_path / loading.SINGLE), load_file(folder / loading.SINGLE)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    fields = json.loads((tmp_path / "config.json").read_text())
    theirs = json.loads((folder / "config.json").read_text())
    fields["per_layer_config"] = {f"{int(n):02}": own for n, own in fields.get("per_layer_config", {}).items()}
    assert {name: fields[name] for name in fields if name in theirs} == {
        name: theirs[name] for name in theirs if name in fields
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_the_decoder_is_found_beside_towers(tmp_path, prefixes, tied):
    """Older and newer checkpoints with towers; layers that reuse K/V may have projections that nobody reads."""
    model = make("gemma4_text", tie_word_embeddings=tied, **GEMMA4)
    save(model, tmp_path)

    def add_towers(tensors):
        tensors["model.layers.3.self_attn.k_proj.weight"] = np.ones((16, 16), np.float32)
        tensors["model.layers.3.self_attn.k_norm.weight"] = np.ones(8, np.float32)
        for name in list(tensors):
            prefix = prefixes[0] + name.removeprefix("model.") if name.startswith("model.") else prefixes[1] + name
            tensors[prefix] = tensors.pop(name)
        for name in ("vision_tower.encoder.layers.0.mlp.fc1.weight", "model.embed_vision.embedding_projection.weight"):
            tensors[name] = np.ones((2, 2), np.float32)

    rewrite(tmp_path, add_towers)
    text = json.loads((tmp_path / "config.json").read_text())
    tie = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text, **tie}))
    assert_same(model, load(tmp_path)[0])

    rewrite(tmp_path, lambda tensors: tensors.update({"vision.weight": np.ones(2, np.float32)}))
    with pytest.raises(ValueError, match=r"unexpected: vision\.weight$"):
        load(tmp_path)


def test_dtype_is_converted_and_stored_dtype_is_the_default(tmp_path):
    save(make(dtype=jnp.bfloat16), tmp_path)
    for wanted, got in ((None, jnp.bfloat16), ("float32", jnp.float32), (jnp.float16, jnp.float16)):
        model, _ = load(tmp_path, dtype=wanted)
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(got)}


@pytest.mark.long
def test_no_float32_copy_of_the_whole_is_made(tmp_path):
    """Loading as bfloat16 holds the bfloat16 weights, and beside them a tensor or two, never all as float32."""
    fields = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12}
    config = ModelConfig.from_hf({"model_type": "llama", **FIELDS, **fields, "head_dim": 64})
    save(Decoder(config, rngs=nnx.Rngs(0)), tmp_path)
    shard(tmp_path)
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))  # as float32
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    most = 0

    def watch(items):
        nonlocal most
        for item in items:
            most = max(most, sum(x.nbytes for x in jax.live_arrays()) - before)
            yield item

    tensors = loading._tensors
    tracemalloc.start()  # numpy reports its arrays to it
    try:
        loading._tensors = lambda files: watch(tensors(files))
        model, _ = load(tmp_path, dtype=jnp.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        loading._tensors = tensors
        tracemalloc.stop()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert held == pytest.approx(whole / 2, rel=0.01)
    assert 0 < most <= held
    assert peak < whole / 8


def test_ignored_tensors(tmp_path):
    model = make(tie_word_embeddings=True)
    save(model, tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)

    rewrite(tmp_path, add)
    assert_same(model, load(tmp_path)[0])


def test_faulty_tensors_are_named(tmp_path):
    save(make(), tmp_path)

    def spoil(tensors):
        tensors["model.layers.1.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
        tensors["lm_head.weight"] = np.zeros((16, 40), np.float32)

    rewrite(tmp_path, spoil)
    with pytest.raises(ValueError, match="tensors") as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.1.mlp.extra.weight" in message
    assert "of the wrong shape: lm_head.weight [16, 40], wanted [40, 16]" in message


def test_many_faulty_tensors_are_counted(tmp_path):
    save(make(), tmp_path)
    rewrite(tmp_path, dict.clear)
    with pytest.raises(ValueError, match=r"missing: .* and 13 more"):
        load(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    save(make(), tmp_path)
    shard(tmp_path)
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match="names files that are not there: model-00002-of-00003"):
        load(tmp_path)
    (tmp_path / loading.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        load(tmp_path)
    (tmp_path / loading.INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=r"found neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / loading.SINGLE).write_bytes(b"no tensors here")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="wanted an object"):
        load(tmp_path)
