# SPDX-License-Identifier: Apache-2.0
"""The bytes of tokens, read from tokenizers; the tokens of a text spell the text."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvjax.grammar import Vocabulary, compile_schema
from tests.grammar_kit import next_state

TEXTS = ['{"name": "Zoë 日本 😀", "n": [1, 2]}', "a  b\n\tc", "İstanbul\x00\x7f"]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    made.add_tokens([AddedToken("<tool>", special=False), AddedToken("<|end|>", special=True)])
    return made


def pieces():
    texts = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), SPACE, "a", "b", "{", '"', f"{SPACE}b", "日"]
    merges = [(SPACE, "b")]
    made = Tokenizer(
        models.BPE({text: number for number, text in enumerate(texts)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    made.add_special_tokens(["<unk>"])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.mark.parametrize("make", [byte_level, pieces])
@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_text_have_its_bytes(make, text):
    tokenizer = make()
    vocabulary = Vocabulary.of(tokenizer)
    assert len(vocabulary) == tokenizer.get_vocab_size()
    tokens = [vocabulary.tokens[number] for number in tokenizer.encode(text).ids]
    assert b"".join(tokens) == text.encode()
    assert len(tokens) <= len(text.encode())


def test_special_tokens_have_no_text_and_others_that_were_added_do():
    tokenizer = byte_level()
    vocabulary = Vocabulary.of(tokenizer, size=400)
    assert len(vocabulary) == 400 and vocabulary.tokens[tokenizer.get_vocab_size() :] == (None,) * (
        400 - tokenizer.get_vocab_size()
    )
    assert vocabulary.tokens[tokenizer.token_to_id("<eos>")] is None
    assert vocabulary.tokens[tokenizer.token_to_id("<|end|>")] is None
    assert vocabulary.tokens[tokenizer.token_to_id("<tool>")] == b"<tool>"


def test_a_fast_tokenizer_of_transformers_is_read_by_its_backend():
    class Fast:
        backend_tokenizer = byte_level()

    assert Vocabulary.of(Fast()).tokens == Vocabulary.of(byte_level()).tokens


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_text_as_the_tokenizer_cuts_it_is_accepted(make):
    tokenizer = make()
    schema = {"type": "object", "properties": {"a b": {"type": "string"}}, "required": ["a b"]}
    table = compile_schema(schema, Vocabulary.of(tokenizer))
    state = 0
    for token in tokenizer.encode(json.dumps({"a b": "日本 b"}, ensure_ascii=False)).ids:
        state = next_state(table, state, token)
        assert state >= 0
    assert table.may_end[state] and next_state(table, 0, 0) < 0


def test_wrong_vocabularies():
    with pytest.raises(ValueError, match="tokens: got 'a', wanted bytes or None"):
        Vocabulary([b"a", "a"])
    with pytest.raises(ValueError, match="size: got 10, wanted at least"):
        Vocabulary.of(byte_level(), size=10)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(ValueError, match=r"tokenizer: got decoders \[\] of a WordLevel model, wanted byte-level BPE"):
        Vocabulary.of(words)
