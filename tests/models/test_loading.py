# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: reading, writing, and refusals."""

import contextlib
import gc
import json
import os
import pathlib
import shutil
import time
import tracemalloc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import Decoder, ModelConfig, load, loading, recall, save
from tests.models.families import GOLDENS, shard

FIELDS = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6,
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "global_head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40,
}  # fmt: skip


def make(model_type: str = "llama", dtype=jnp.float32, **fields) -> Decoder:
    """A small model whose parameters are all random. Otherwise norms start as ones, and biases as zeros."""
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


def test_save_and_load_keep_every_bit(tmp_path):
    model = make("qwen2", jnp.bfloat16, tie_word_embeddings=True)
    save(model, tmp_path, recall.make_tokenizer())
    loaded, tokenizer = load(tmp_path)
    assert_same(model, loaded)
    assert tokenizer.encode("where is bob?").ids == recall.encode("where is bob ?")


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3_options", "gemma4_options", "deepseek_v3_options", "qwen3_next", "kimi_linear", "gpt_oss"],
)
def test_names_and_layout_are_hugging_faces(tmp_path, family, scan):
    """A file of another program comes back from `save` with the same names, shapes and values."""
    folder = GOLDENS / family
    model, _ = load(folder, scan=scan)
    save(model, tmp_path)
    ours, theirs = load_file(tmp_path / loading.SINGLE), load_file(folder / loading.SINGLE)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    fields, theirs = (json.loads((path / loading.CONFIG).read_text()) for path in (tmp_path, folder))
    assert ModelConfig.from_hf(fields) == model.config
    if "per_layer_config" in fields:
        fields["per_layer_config"] = {f"{int(n):02}": own for n, own in fields["per_layer_config"].items()}
    both = fields.keys() & theirs.keys()
    assert {name: fields[name] for name in both} == {name: theirs[name] for name in both}


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "prefixes",
    [("language_model.model.", "language_model."), pytest.param(("model.language_model.", ""), marks=pytest.mark.long)],
)
def test_the_decoder_is_found_among_towers(tmp_path, prefixes, tied):
    """Checkpoints with towers are older or newer. Layers that reuse K/V may have projections that nobody reads."""
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
def test_no_float32_copy_of_the_whole_is_made(tmp_path, monkeypatch):
    """Loading as bfloat16 holds the bfloat16 weights and at most two more tensors, never all weights as float32."""
    fields = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12}
    config = ModelConfig.from_hf({"model_type": "llama", **FIELDS, **fields, "head_dim": 64})
    save(Decoder(config, rngs=nnx.Rngs(0)), tmp_path)
    shard(tmp_path)
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))  # as float32
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    most = 0

    def watch(*arguments):
        nonlocal most
        most = max(most, sum(x.nbytes for x in jax.live_arrays()) - before)
        return read(*arguments)

    read = loading._read
    monkeypatch.setattr(loading, "_read", watch)
    tracemalloc.start()  # numpy reports its arrays to it
    try:
        model, _ = load(tmp_path, dtype=jnp.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert held == pytest.approx(whole / 2, rel=0.01)
    assert 0 < most <= held
    assert peak < whole / 8


# Tensors without a parameter: there is a reason for each that is left out.


FAMILIES = [path.parent.name for path in sorted(GOLDENS.glob("*/golden.npz"))]
QUICK = {"llama": False, "gemma3": True, "gpt_oss": True, "qwen3_next_options": False}  # whether it is scanned


@pytest.mark.parametrize(
    ("family", "scan"),
    [
        pytest.param(family, scan, marks=() if QUICK.get(family) == scan else pytest.mark.slow)
        for family in FAMILIES
        for scan in (False, True)
    ],
)
def test_an_output_matrix_of_its_own_is_loaded_where_the_config_is_tied(tmp_path, family, scan):
    """Of every family, also in another file than the embedding, and saved. A copy of the embedding stays tied."""
    folder = shutil.copytree(GOLDENS / family, tmp_path / "model")
    tensors = load_file(folder / loading.SINGLE)
    embedding = tensors[loading._EMBEDDING]
    head = np.random.default_rng(0).normal(size=embedding.shape).astype(embedding.dtype)
    head[:-1] = embedding[:-1]  # the last token's row differs
    fields = json.loads((folder / loading.CONFIG).read_text())
    fields.pop("tie_word_embeddings", None)
    is_gemma = fields["model_type"].startswith("gemma")  # which is tied without the field
    tied = {} if is_gemma else {"tie_word_embeddings": True}
    (folder / loading.CONFIG).write_text(json.dumps(fields | tied))
    save_file({**tensors, loading._HEAD: head}, folder / loading.SINGLE)
    if scan:
        shard(folder)
    model, _ = load(folder, scan=scan)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.lm_head.kernel[...], head.T)
    save(model, tmp_path / "again")
    assert_same(model, load(tmp_path / "again", scan=scan)[0])

    (folder / loading.INDEX).unlink(missing_ok=True)
    save_file({**tensors, loading._HEAD: embedding.copy()}, folder / loading.SINGLE)
    model, _ = load(folder, scan=scan)
    assert model.config.tie_word_embeddings and not hasattr(model, "lm_head")
    save_file({**tensors, loading._HEAD: embedding.astype(jnp.bfloat16)}, folder / loading.SINGLE)
    assert load(folder, dtype="bfloat16", scan=scan)[0].config.tie_word_embeddings
    assert not load(folder, dtype="float32", scan=scan)[0].config.tie_word_embeddings


def test_an_output_matrix_is_divided_among_devices(tmp_path):
    folder = shutil.copytree(GOLDENS / "llama_heads", tmp_path / "model")
    change(folder / loading.CONFIG, tie_word_embeddings=True)
    where = {"mesh": jax.make_mesh((4,), ("heads",)), "heads": "heads"}
    model, _ = load(folder, **where)
    assert not model.lm_head.kernel[...].sharding.is_fully_replicated
    assert_same(model, load(GOLDENS / "llama_heads", **where)[0])


def test_output_matrices_are_compared_in_parts(tmp_path, monkeypatch):
    """An embedding of several parts, of which the last has fewer rows; a difference ends the comparison."""
    monkeypatch.setattr(loading, "_PART", 16 * 7)
    save(make(tie_word_embeddings=True), tmp_path)
    read, whole = list[tuple[int, ...]](), loading._read

    def reading(*args):
        read.append(whole(*args).shape)
        return whole(*args)

    def add(row):
        def change(tensors):
            tensors[loading._HEAD] = tensors[loading._EMBEDDING].copy()
            tensors[loading._HEAD][row:] += row < 40

        return change

    for row, parts in ((40, 6), (39, 6), (0, 1), (7, 2)):
        rewrite(tmp_path, add(row))
        read.clear()
        monkeypatch.setattr(loading, "_read", reading)
        assert loading._is_tied(loading.Folder(tmp_path).tensors(), np.float32) == (row == 40)
        assert len(read) == 2 * parts and set(read) <= {(7, 16), (5, 16)}
        monkeypatch.setattr(loading, "_read", whole)


@pytest.mark.parametrize("shape", [(39, 16), (40, 17), (40,)])
def test_an_output_matrix_of_another_shape_is_no_copy(tmp_path, shape):
    save(make(tie_word_embeddings=True), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({loading._HEAD: np.zeros(shape, np.float32)}))
    with pytest.raises(ValueError, match=r"of the wrong shape: lm_head\.weight .*, wanted \[40, 16\]$"):
        load(tmp_path)


INV_FREQ = "model.layers.1.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", [INV_FREQ, "model.rotary_emb.inv_freq", "rotary_emb.inv_freq"])
def test_frequencies_are_those_of_the_config(tmp_path, dtype, name):
    """Old checkpoints carry them, in the dtype of the weights."""
    model = make(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, head_dim=12)
    save(model, tmp_path)
    right = 1 / (np.float32(1e6) ** (np.arange(0, 12, 2, dtype=np.float32) / 12))
    rewrite(tmp_path, lambda tensors: tensors.update({name: right.astype(dtype)}))
    assert_same(model, load(tmp_path, dtype="float32")[0])
    for wrong in (right[::-1], right[:5], right[None], right * 1.02, np.arange(6), np.zeros(6)):
        value = wrong if wrong.dtype == np.int64 else np.array(wrong, dtype)
        rewrite(tmp_path, lambda tensors, value=value: tensors.update({name: value}))
        with pytest.raises(ValueError, match=r"of other frequencies than the config's: model\..*inv_freq$"):
            load(tmp_path, dtype="float32")


def test_frequencies_of_layers_with_other_ropes(tmp_path):
    """Those of a layer are its own; those before a rope stretches them are taken too."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    save(make("gemma3_text", sliding_window_pattern=2, rope_parameters=ropes), tmp_path)
    sliding, full = (rope.frequencies(width) for rope, width in load(tmp_path)[0].config.rotations)
    for value, is_right in ((full, True), (8 * full, True), (sliding, False)):
        rewrite(tmp_path, lambda tensors, value=value: tensors.update({INV_FREQ: value}))
        with contextlib.nullcontext() if is_right else pytest.raises(ValueError, match="of other frequencies"):
            load(tmp_path)


def test_towers_and_unread_projections_are_left_out_only_where_the_config_has_them(tmp_path):
    save(make("gemma3_text", sliding_window_pattern=2), tmp_path)
    names = [
        "vision_tower.x", "audio_tower.x", "model.layers.0.self_attn.k_proj.lora_A.weight", "model.layers.0.mask",
        "lm_head.bias", "model.causal_mask",
    ]  # fmt: skip
    for name in names:
        rewrite(tmp_path, lambda tensors, name=name: tensors.update({name: np.ones(2, np.float32)}))
        with pytest.raises(ValueError, match=rf"unexpected: {name}$"):
            load(tmp_path)
        rewrite(tmp_path, lambda tensors, name=name: tensors.pop(name))


@pytest.mark.parametrize("tied", [True, False])
def test_names_without_the_models_prefix(tmp_path, tied):
    """A stream that was saved without its output matrix has no prefix; with one it may have."""
    model = make("gemma4_text", tie_word_embeddings=tied, **GEMMA4)
    save(model, tmp_path)

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    assert_same(model, load(tmp_path)[0])
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": np.ones(16, np.float32)}))
    with pytest.raises(ValueError, match=r"that are there twice: model\.norm\.weight \(as norm\.weight\)$"):
        load(tmp_path)


def test_an_index_may_leave_out_tensors_of_its_files(tmp_path):
    """They are taken too: an output matrix that nobody lists would be dropped otherwise."""
    save(make(), tmp_path)
    shard(tmp_path)
    weight_map = json.loads((tmp_path / loading.INDEX).read_text())["weight_map"]
    weight_map.pop(loading._HEAD)
    change(tmp_path / loading.INDEX, weight_map=weight_map)
    change(tmp_path / loading.CONFIG, tie_word_embeddings=True)
    assert_same(load(tmp_path)[0], make())
    rewrite_shard = tmp_path / weight_map["model.norm.weight"]
    save_file({**load_file(rewrite_shard), "model.extra": np.ones(2, np.float32)}, rewrite_shard)
    with pytest.raises(ValueError, match=r"unexpected: model\.extra$"):
        load(tmp_path)


def test_what_is_saved_over_another_model_is_loaded(tmp_path):
    """Nothing is left of the other one's shards, and of the tokens that end its texts."""
    save(make(eos_token_id=[3, 4]), tmp_path)
    shard(tmp_path)
    model = make(tie_word_embeddings=True)
    save(model, tmp_path)
    assert_same(load(tmp_path)[0], model)


# Tokens that end a text.


@pytest.mark.parametrize("family", [*QUICK])
def test_tokens_that_end_a_text_are_those_of_both_files(tmp_path, family):
    folder = shutil.copytree(GOLDENS / family, tmp_path / "model")
    change(folder / loading.CONFIG, eos_token_id=7)
    assert load(folder)[0].config.eos_token_ids == (7,)
    for more, wanted in ((9, (7, 9)), ([9, 7, 11], (7, 9, 11)), ([], (7,)), (None, (7,)), (7, (7,))):
        (folder / loading.GENERATION).write_text(json.dumps({"eos_token_id": more, "temperature": 0.6}))
        model, _ = load(folder)
        assert model.config.eos_token_ids == wanted
        save(model, tmp_path / "again")
        saved = json.loads((tmp_path / "again" / loading.GENERATION).read_text())
        assert saved == {"bos_token_id": model.config.bos_token_id, "eos_token_id": list(wanted)}
        assert load(tmp_path / "again")[0].config == model.config


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *((json.dumps({"eos_token_id": value}), "eos_token_id: got .*, wanted token ids below vocab_size=40")
          for value in (40, -1, True, 1.0, "</s>", [1, "x"], {}, [[1]])),
        ("[]", "got a JSON list, wanted an object"), ("null", "got a JSON NoneType"), ("{", "not valid JSON"),
    ],
)  # fmt: skip
def test_odd_values_of_generation_config_are_named(folder, text, complaint):
    (folder / loading.GENERATION).write_text(text)
    with pytest.raises(ValueError, match=rf"/generation_config\.json: {complaint}") as caught:
        load(folder)
    assert str(caught.value).count(str(folder)) == 1


@pytest.mark.parametrize("name", [loading.CONFIG, loading.INDEX, loading.GENERATION])
def test_files_may_begin_with_a_byte_order_mark(saved, tmp_path, name):
    folder = shutil.copytree(saved / "shards", tmp_path / "model")
    content = (folder / name).read_bytes() if (folder / name).exists() else b'{"eos_token_id": null}'
    (folder / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert_same(load(folder)[0], make())


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
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if "input_layernorm" not in name])
    with pytest.raises(ValueError, match=r"missing: .* and 11 more"):
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


# Files that nobody should trust. Errors come before any part of the model is built.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(make(), folder)
    shard(shutil.copytree(folder, folder / "shards"))
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch):
    """A checkpoint of one file; to build its model fails."""
    monkeypatch.setattr(loading, "Decoder", None)
    return shutil.copytree(saved, tmp_path / "model", ignore=lambda *_: ["shards"])


@pytest.fixture
def shards(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "Decoder", None)
    return shutil.copytree(saved / "shards", tmp_path / "model")


def change(file: pathlib.Path, **fields) -> None:
    """Changes fields of a file of JSON."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_index(folder: pathlib.Path, name: str, file) -> None:
    index = folder / loading.INDEX
    change(index, weight_map={**json.loads(index.read_text())["weight_map"], name: file})


@pytest.mark.parametrize(
    "file", [7, None, ["a"], "", ".", "/etc/passwd", "../model/a.safetensors", "a/../../b", "/dev/zero"]
)
def test_an_index_names_files_of_its_folder(shards, file):
    change_index(shards, "lm_head.weight", file)
    with pytest.raises(ValueError, match=r"index\.json: lm_head\.weight: got .*, wanted a file in this folder$"):
        load(shards)


def test_an_index_names_tensors_that_its_files_have(shards):
    change_index(shards, "model.vision_tower.x", "model-00001-of-00003.safetensors")
    complaint = r"index\.json: got tensors that model-00001-of-00003\.safetensors lacks: model\.vision_tower\.x$"
    with pytest.raises(ValueError, match=complaint):
        load(shards)
    change(shards / loading.INDEX, weight_map={})
    with pytest.raises(ValueError, match=r"config\.json: num_hidden_layers: got 2, wanted 0: no tensor is of layer 0$"):
        load(shards)


def test_a_folder_of_links_is_read(saved, tmp_path):
    """The cache of Hugging Face has snapshots of links to blobs, which are outside the folder."""
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate((saved / "shards").iterdir()):
        blob = shutil.copy(file, tmp_path / str(number))
        (tmp_path / "snapshot" / file.name).symlink_to(os.path.relpath(blob, tmp_path / "snapshot"))
    model, tokenizer = load(tmp_path / "snapshot")
    assert_same(model, make())
    assert tokenizer is None


@pytest.mark.parametrize("name", ["config.json", loading.GENERATION, loading.INDEX, loading.SINGLE, "tokenizer.json"])
@pytest.mark.parametrize("kind", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/null", path)])
def test_what_is_no_file_is_refused_and_does_not_block(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    kind(folder / name)
    with pytest.raises(ValueError, match=rf"{name}: got a folder, a pipe or a device, wanted a file$"):
        load(folder)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "I64"])
def test_weights_are_floats(saved, tmp_path, dtype):
    folder = shutil.copytree(saved, tmp_path / "model")

    def retype(tensors):
        for name, tensor in tensors.items():
            tensors[name] = np.ones(tensor.shape, np.int64 if dtype == "I64" else np.uint8)

    rewrite(folder, retype)
    file = (folder / loading.SINGLE).read_bytes()
    start = 8 + int.from_bytes(file[:8], "little")
    header = file[8:start].replace(b'"U8"', f'"{dtype}"'.encode())
    (folder / loading.SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + file[start:])
    with pytest.raises(ValueError, match=rf"of the wrong dtype: .* {dtype}, wanted F64, F32, F16, BF16 and 13 more$"):
        load(folder)


def test_the_first_tensor_of_floats_gives_the_dtype(saved, tmp_path):
    """Other tensors may be integers, such as positions in a tower. float64 becomes what jax makes of it."""
    folder = shutil.copytree(saved, tmp_path / "model")
    change(folder / loading.CONFIG, model_type="gemma3_text")
    position = {"vision_tower.a": np.ones(2, np.int64)}
    for dtype, wanted in ((np.float16, np.float16), (np.float64, np.float32)):
        save_file({**position, "model.norm.weight": np.ones(2, dtype)}, folder / loading.SINGLE)
        assert loading._stored_dtype(loading.Folder(folder).tensors()) == wanted


@pytest.mark.parametrize("layers", [3, 2_000, 10_000_000])
@pytest.mark.parametrize("is_in_text", [False, True], ids=["alone", "in the text's config"])
def test_layers_that_no_tensor_is_of_are_reported_at_once(folder, layers, is_in_text):
    text = {"num_hidden_layers": layers}
    change(folder / loading.CONFIG, **{"model_type": "gemma3", "text_config": FIELDS | text} if is_in_text else text)
    begin = time.process_time()
    with pytest.raises(ValueError, match=rf"num_hidden_layers: got {layers}, wanted 2: no tensor is of layer 2$"):
        load(folder)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("name", ["config.json", loading.INDEX])
@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ' * 200_000, "9" * 5000, "\xff"])
def test_json_that_nobody_can_read_is_refused(folder, name, text):
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{name}: not valid JSON \(.*\)$") as caught:
        load(folder)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        *(({name: value}, f"{name}: got .*, wanted token ids below vocab_size=40")
          for name in ("eos_token_id", "bos_token_id") for value in (40, -1, 2**31, 10**400, True, 1.0, [1, 40])),
        ({"bos_token_id": [1, 2]}, r"bos_token_id: got \[1, 2\], wanted one token id"),
        *(({"rms_norm_eps": value}, "rms_norm_eps: got .*, wanted a positive number that float32 has")
          for value in (float("inf"), float("nan"), -1e-6, 0, 1e39, 1e-50, 10**400, True, "1e-6")),
        *(({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, name: value}},
           rf"rope_parameters\.{name}: got .*, wanted a positive number")
          for name in ("rope_theta", "factor") for value in (float("inf"), float("nan"), -1.0, 0.0, 10**400)),
        *(({name: value}, f"{name}: got .*, wanted an int of at least 1 and below 2")
          for name in ("vocab_size", "hidden_size", "head_dim", "max_position_embeddings")
          for value in (2**31, 10**400)),
    ],
)  # fmt: skip
def test_numbers_that_no_model_has_are_refused(fields, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}") as caught:
        ModelConfig.from_hf({"model_type": "llama", **FIELDS, **fields})
    assert len(str(caught.value)) < 300
    gemma = {name: value for name, value in fields.items() if name != "rope_parameters"}
    with pytest.raises(ValueError, match=f"^{complaint}") if gemma else contextlib.nullcontext():
        ModelConfig.from_hf({"model_type": "gemma3_text", **FIELDS, **gemma})
