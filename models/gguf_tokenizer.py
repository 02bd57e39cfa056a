# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file: byte-level BPE with merges, or SentencePiece's BPE with scores and bytes."""

from __future__ import annotations

from typing import Any

from .fields import listed, only, token

_FIELD = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)  # types of tokens
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's character for a space
_LONGEST = 1024  # characters of a token; `_sentence_piece` tries to cut a piece after each of them
# Rules for cutting a text into words before its bytes are merged. None cuts off each digit, then applies GPT-2's rule.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {"smollm": None, "llama-bpe": _WORDS.format(digits="{1,3}"), "qwen2": _WORDS.format(digits="")}


def make_tokenizer(values: dict[str, Any]) -> Any:
    """Makes the `tokenizers.Tokenizer` of a file's fields, or None if they have none. A ValueError names a field."""
    if f"{_FIELD}.model" not in values:
        return None
    kind = only(values, f"{_FIELD}.model", "gpt2", "llama")
    texts = _texts(values)
    types = _token_entries(values, "token_type", texts)
    try:
        made = _byte_level(values, texts) if kind == "gpt2" else _sentence_piece(values, texts, types)
    except ValueError:
        raise
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(f"{_FIELD}: not a tokenizer ({error})") from error
    _add_tokens(made, texts, types)
    _add_edges(made, values, texts, kind)
    return made


def _texts(values: dict[str, Any]) -> list[str]:
    texts = listed(values, f"{_FIELD}.tokens")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{_FIELD}.tokens: got {texts!r:.80}, wanted a list of texts")
    longest = max(texts, key=len)
    if len(longest) > _LONGEST:
        raise ValueError(f"{_FIELD}.tokens: got one of {len(longest)} characters, wanted at most {_LONGEST}")
    return texts


def _token_entries(values: dict[str, Any], name: str, texts: list[str]) -> list[Any]:
    """The value of a field with an entry for each token."""
    entries = listed(values, f"{_FIELD}.{name}") or []
    if len(entries) != len(texts):
        raise ValueError(f"{_FIELD}.{name}: got {len(entries)} entries, wanted {len(texts)}, one for each token")
    return entries


def _byte_level(values: dict[str, Any], texts: list[str]) -> Any:
    """BPE over bytes written as letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers  # only text needs it

    rule = only(values, f"{_FIELD}.pre", *_CUTS)
    merges = [str(merge).split(" ") for merge in listed(values, f"{_FIELD}.merges") or []]
    broken = next((merge for merge in merges if len(merge) != 2), None)
    if broken is not None:
        raise ValueError(f"{_FIELD}.merges: got {' '.join(broken)!r:.80}, wanted two tokens and a space between them")
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    pairs = [(first, second) for first, second in merges]
    made = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=rule == "llama-bpe"))
    cut: Any = pre_tokenizers.Digits(individual_digits=True)
    if _CUTS[rule] is not None:
        cut = pre_tokenizers.Split(Regex(_CUTS[rule]), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_CUTS[rule] is None)
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    made.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        made.normalizer = normalizers.NFC()
    return made


def _sentence_piece(values: dict[str, Any], texts: list[str], types: list[int]) -> Any:
    """BPE over characters. Pairs with higher scores merge sooner, and characters without a token become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _token_entries(values, "scores", texts)
    unknown = token(values, f"{_FIELD}.unknown_token_id", len(texts))
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    pieces = {text: token_id for token_id, text in enumerate(texts) if types[token_id] == _NORMAL}
    pairs = [
        (-scores[token_id], pieces[text[:cut]], pieces[text[cut:]])
        for text, token_id in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    merges = [(texts[first], texts[second]) for _, first, second in sorted(pairs)]
    has_prefix = values.get(f"{_FIELD}.add_space_prefix", True)
    made = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else texts[unknown],
        )
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    return made


def _add_tokens(made: Any, texts: list[str], types: list[int]) -> None:
    """Adds the tokens to find in a text before cutting it. Control tokens are not shown."""
    from tokenizers import AddedToken

    kinds = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}  # whether it is special
    added = [(text, kinds[kind]) for text, kind in zip(texts, types, strict=True) if kind in kinds and text]
    made.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])


def _add_edges(made: Any, values: dict[str, Any], texts: list[str], kind: str) -> None:
    """Adds the tokens at the beginning and the end of a text, if the model has them."""
    from tokenizers import processors

    begins = kind == "llama" or values.get(f"{_FIELD}.pre") == "llama-bpe"
    template = ["$A"]
    ids = {}
    for edge, absent, position in (("bos", begins, 0), ("eos", False, 2)):
        token_id = token(values, f"{_FIELD}.{edge}_token_id", len(texts))
        if token_id is not None and values.get(f"{_FIELD}.add_{edge}_token", absent):
            ids[texts[token_id]] = token_id
            template.insert(position, texts[token_id])
    if ids:
        made.post_processor = processors.TemplateProcessing(template, None, [*ids.items()])
