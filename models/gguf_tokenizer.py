# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file: byte-level BPE with merges, or SentencePiece's BPE with scores and bytes."""

from __future__ import annotations

from typing import Any

from .fields import listed, only, token

_FIELD = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's, in place of a space
_LONGEST = 1024  # characters of a token: pieces of scores are tried at each place where they can be cut
# How a text is cut into words before its bytes are merged. None: by GPT-2's rule, after each digit is cut off.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {"smollm": None, "llama-bpe": _WORDS.format(digits="{1,3}"), "qwen2": _WORDS.format(digits="")}


def make_tokenizer(values: dict[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` of a file's fields, None if they have none; a ValueError says what is wrong."""
    if f"{_FIELD}.model" not in values:
        return None
    kind = only(values, f"{_FIELD}.model", "gpt2", "llama")
    texts = _texts(values)
    types = _of_tokens(values, "token_type", texts)
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


def _of_tokens(values: dict[str, Any], name: str, texts: list[str]) -> list[Any]:
    """The value of a field that has an entry for each token."""
    entries = listed(values, f"{_FIELD}.{name}") or []
    if len(entries) != len(texts):
        raise ValueError(f"{_FIELD}.{name}: got {len(entries)} entries, wanted {len(texts)}, one for each token")
    return entries


def _byte_level(values: dict[str, Any], texts: list[str]) -> Any:
    """BPE over bytes that are written as letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers  # only text needs it

    name = only(values, f"{_FIELD}.pre", *_CUTS)
    merges = [str(merge).split(" ") for merge in listed(values, f"{_FIELD}.merges") or []]
    broken = next((merge for merge in merges if len(merge) != 2), None)
    if broken is not None:
        raise ValueError(f"{_FIELD}.merges: got {' '.join(broken)!r:.80}, wanted two tokens and a space between them")
    vocabulary = {text: number for number, text in enumerate(texts)}
    pairs = [(left, right) for left, right in merges]
    made = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=name == "llama-bpe"))
    cut: Any = pre_tokenizers.Digits(individual_digits=True)
    if _CUTS[name] is not None:
        cut = pre_tokenizers.Split(Regex(_CUTS[name]), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_CUTS[name] is None)
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, letters])
    made.decoder = decoders.ByteLevel()
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    return made


def _sentence_piece(values: dict[str, Any], texts: list[str], types: list[int]) -> Any:
    """BPE over characters, in which a pair is merged the sooner the higher its piece scores; others are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _of_tokens(values, "scores", texts)
    unknown = token(values, f"{_FIELD}.unknown_token_id", len(texts))
    vocabulary = {text: number for number, text in enumerate(texts)}
    pieces = {text: number for number, text in enumerate(texts) if types[number] == _NORMAL}
    pairs = [
        (-scores[number], pieces[text[:cut]], pieces[text[cut:]])
        for text, number in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    merges = [(texts[left], texts[right]) for _, left, right in sorted(pairs)]
    has_prefix = values.get(f"{_FIELD}.add_space_prefix", True)
    made = Tokenizer(
        models.BPE(
            vocabulary, merges, byte_fallback=True, fuse_unk=True,
            unk_token=None if unknown is None else texts[unknown],
        )
    )  # fmt: skip
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    return made


def _add_tokens(made: Any, texts: list[str], types: list[int]) -> None:
    """Adds the tokens that are found in a text before it is cut; those for control are not shown."""
    from tokenizers import AddedToken

    kinds = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}  # whether it is special
    added = [(text, kinds[kind]) for text, kind in zip(texts, types, strict=True) if kind in kinds and text]
    made.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])


def _add_edges(made: Any, values: dict[str, Any], texts: list[str], kind: str) -> None:
    """Adds the tokens with which a text begins and ends, where the model wants them."""
    from tokenizers import processors

    begins = kind == "llama" or values.get(f"{_FIELD}.pre") == "llama-bpe"
    template, ids = ["$A"], {}
    for edge, absent, position in (("bos", begins, 0), ("eos", False, 2)):
        number = token(values, f"{_FIELD}.{edge}_token_id", len(texts))
        if number is not None and values.get(f"{_FIELD}.add_{edge}_token", absent):
            ids[texts[number]] = number
            template.insert(position, texts[number])
    if ids:
        made.post_processor = processors.TemplateProcessing(template, None, [*ids.items()])
