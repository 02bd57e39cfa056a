# SPDX-License-Identifier: Apache-2.0
"""Associative recall: a document says where people are, and a question asks for one of them.

    document   "alice is in paris . bob is in oslo . ..."
    question   "where is bob ?"
    answer     "oslo ."

People and places are drawn anew for every document, so a model cannot memorise them. An answer is right only if
attention reads the right slots. A prompt is a document followed by a question, so prompts about the same document share
it as a prefix.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

_PEOPLE = """
    adam agnes albert alice amir anna arthur astrid basil beatrix ben bianca bob boris bruno carla carmen cecil
    celia chloe clara conrad cora cyrus daisy dana david dora edgar edith elena elias ella emil emma erik esther
    ethan eva felix fiona flora frank freya gavin george gina gloria grace greta gustav hanna harold hector heidi
    helen henry hugo ian ida igor ingrid iris isaac ivan ivy jack jane jasper joan jonas julia karl kate kevin
    kira kurt lara laura leah leo lewis lily linda louis lucy luke magnus maria mark martha max maya mia milo mina
    molly nadia ned nina noah nora olga oliver oscar otto paula penny peter petra philip quentin rachel ralph
    rita robert rosa
"""
_PLACES = """
    accra algiers amman ankara antwerp athens auckland baghdad baku bamako bangkok basel beijing belgrade bergen
    berlin bern bilbao bogota bologna bonn boston brisbane brussels budapest cairo calgary caracas chennai chicago
    cologne copenhagen cork cusco dakar dallas damascus delhi denver dhaka doha dresden dubai dublin durban
    edinburgh florence geneva genoa ghent glasgow graz hamburg hanoi harare havana helsinki houston istanbul
    jakarta kabul kampala karachi kathmandu kigali kingston kyoto lagos lahore leeds leipzig lima lisbon
    liverpool london luanda lusaka lyon madrid malaga managua manila maputo marseille melbourne memphis miami
    milan minsk montreal moscow mumbai munich nairobi nantes naples oslo ottawa oxford palermo paris perth porto
    prague quebec quito rabat reykjavik riga rome rotterdam santiago seattle seoul seville shanghai sofia
    stockholm sydney taipei tallinn tampere tehran tirana tokyo
"""
CHECKPOINT = pathlib.Path(__file__).parent / "checkpoints" / "recall"  # a small model that has learned it
PEOPLE = tuple(_PEOPLE.split())
PLACES = tuple(_PLACES.split())
WORDS = ("<pad>", "<unk>", ".", "?", "is", "in", "where")
VOCABULARY = WORDS + PEOPLE + PLACES
IDS = {word: token_id for token_id, word in enumerate(VOCABULARY)}

FACT_TOKENS = 5  # PERSON is in PLACE .
QUESTION_TOKENS = 4  # where is PERSON ?


@dataclasses.dataclass(frozen=True)
class Document:
    """Facts in their order in the text."""

    facts: dict[str, str]  # place of each person
    times: int = 1  # repetitions of all facts in the text

    @property
    def text(self) -> str:
        """A sentence for each fact, `times` times."""
        return " ".join(f"{person} is in {place} ." for _ in range(self.times) for person, place in self.facts.items())

    @property
    def ids(self) -> list[int]:
        """Token ids of the text."""
        return encode(self.text)


def make_document(rng: np.random.Generator, num_facts: int, times: int = 1) -> Document:
    """Draws `num_facts` different people, and a place for each. Places may repeat."""
    people = [PEOPLE[i] for i in rng.permutation(len(PEOPLE))[: _checked(num_facts)]]
    return Document({person: PLACES[rng.integers(len(PLACES))] for person in people}, times)


def question(person: str) -> str:
    """The question about a person. Append it to a document's text, or `encode` it and append the ids."""
    return f"where is {person} ?"


def encode(text: str) -> list[int]:
    """Token ids of words and marks separated by spaces. A word outside the vocabulary becomes <unk>."""
    return [IDS.get(word, IDS["<unk>"]) for word in text.split()]


def decode(ids: Sequence[int]) -> str:
    """Words of token ids, separated by spaces."""
    return " ".join(VOCABULARY[i] for i in ids)


def make_tokenizer():
    """Makes a `tokenizers.Tokenizer` with the same vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "<unk>"])
    return tokenizer


def make_batch(
    rng: np.random.Generator, num_documents: int, num_facts: int, num_questions: int, *, repeat: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Draws documents, each with several questions and answers after it.

    Args:
      rng: source of the documents.
      num_documents: B.
      num_facts: facts in each document.
      num_questions: questions about each document.
      repeat: whether several questions may be about the same person. Training needs this. Otherwise a model learns to
        guess among the places that were not an answer yet, instead of looking.

    Returns:
      Tokens i32[B, T] with T = num_facts * 5 + num_questions * 6, and the positions i32[num_questions] of the question
      marks, where a place is to be predicted. The place and a full stop follow each.
    """
    if num_questions < 1 or (num_questions > num_facts and not repeat):
        raise ValueError(f"num_questions: got {num_questions}, wanted 1 to num_facts={num_facts}, or repeat=True")
    people = rng.permuted(np.tile(np.arange(len(PEOPLE)), (num_documents, 1)), axis=1)[:, : _checked(num_facts)]
    places = rng.integers(len(PLACES), size=people.shape)
    people = people + IDS[PEOPLE[0]]
    places = places + IDS[PLACES[0]]
    if repeat:
        chosen = rng.integers(num_facts, size=(num_documents, num_questions))
    else:
        chosen = rng.permuted(np.tile(np.arange(num_facts), (num_documents, 1)), axis=1)[:, :num_questions]

    def sentences(*words: str | np.ndarray) -> np.ndarray:
        """Makes sentences of fixed words, and of words from arrays [B, n]."""
        columns = [IDS[word] if isinstance(word, str) else word for word in words]
        return np.stack(np.broadcast_arrays(*columns), axis=2).reshape(num_documents, -1)

    facts = sentences(people, "is", "in", places, ".")
    asked = np.take_along_axis(people, chosen, 1)
    answers = np.take_along_axis(places, chosen, 1)
    asks = sentences("where", "is", asked, "?", answers, ".")
    first_mark = num_facts * FACT_TOKENS + QUESTION_TOKENS - 1
    marks = first_mark + np.arange(num_questions) * (QUESTION_TOKENS + 2)
    return np.concatenate([facts, asks], axis=1).astype(np.int32), marks.astype(np.int32)


def _checked(num_facts: int) -> int:
    if not 1 <= num_facts <= len(PEOPLE):
        raise ValueError(f"num_facts: got {num_facts}, wanted 1 to {len(PEOPLE)}")
    return num_facts
