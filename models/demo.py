# SPDX-License-Identifier: Apache-2.0
"""The demo: many questions about a long document reuse its blocks. It also shows forks, eviction, and a host tier.

The bundled model gives the right answer only if attention reads the slots with the fact, so a wrong block leads to a
wrong answer.
"""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.box
import rich.console
import rich.table

import kvjax
from kvjax.interop import log
from kvjax.stores import DiskStore

from . import commands, recall, stores
from .loading import load

# The model distinguishes 48 facts without a mistake. Repeated seven times, they take far longer to compute than a
# question.
FACTS = 48
TIMES = 7
QUESTIONS = 12
ALONE = 4  # questions without reuse
OTHERS = 4  # further documents
SEED = 7
ROWS = 8
BLOCK = 16
BLOCKS = 320
HOST_BLOCKS = 256
LENGTH = FACTS * TIMES * recall.FACT_TOKENS + 2 * BLOCK
MAX_COLUMNS = 100
MAP_LINES = 4
PATIENCE_MS = 60_000  # for reads from a store, so they succeed even on a busy machine

Question = tuple[list[int], int]  # prompt, token of the right answer


class ChatTurn(NamedTuple):
    """An answered question."""

    prompted: int  # tokens of its prompt
    reused: int  # tokens of its prompt from the cache or a store
    seconds: float  # to the answer
    stored: int = 0  # reused tokens that came from a store


def questions(document: recall.Document, people: Sequence[str]) -> list[Question]:
    """Prompts with questions about people in a document, with the right answers."""
    return [
        (document.ids + recall.encode(recall.question(person)), recall.IDS[document.facts[person]]) for person in people
    ]


def make_spec(model: Any, host_blocks: int = 0) -> kvjax.CacheSpec:
    """The spec of a session's cache. All sessions may share a store."""
    return kvjax.make_spec(
        model.layer_specs(),
        num_blocks=BLOCKS,
        max_seqs=ROWS,
        max_length=LENGTH,
        block_size=BLOCK,
        dtype="float32",
        num_host_blocks=host_blocks,
    )


class Session:
    """A model and its cache, perhaps with a store, and a tally of its questions."""

    def __init__(self, model: Any, host_blocks: int = 0, store: DiskStore | None = None, cache: Any = None):
        if cache is None:
            cache = (kvjax.tiers.TieredCache if host_blocks else kvjax.Cache).create(make_spec(model, host_blocks))
        self.model = model
        self.cache = cache
        self.store = store
        self.prompted = self.reused = self.answered = self.right = 0
        self.turns: list[ChatTurn] = []
        self.entries: list[dict[str, Any]] = []

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events, decoded."""
        return [event for entry in self.entries for event in entry["events"]]

    def hear(self, events: Any) -> None:
        """Records the events of a transition, or of a jitted loop."""
        self.entries.append(log.entry(events))

    def ask(self, pairs: Sequence[Question], *, reuse: bool = True) -> Session:
        """Asks the questions in turn, as different users would. Without reuse, each question has its own namespace."""
        for prompt, answer in pairs:
            began = time.perf_counter()
            outputs, self.cache, _ = kvjax.generate(
                self.model,
                self.cache,
                [prompt],
                max_new_tokens=1,
                namespace=0 if reuse else 1 + self.answered,
                log_events=False,
                listener=self.hear,
                store=self.store,
            )
            seconds = time.perf_counter() - began
            turn = ChatTurn(outputs[0].prompt_tokens, outputs[0].cached_tokens, seconds, outputs[0].stored_tokens)
            self.turns.append(turn)
            self.prompted += turn.prompted
            self.reused += turn.reused
            self.answered += 1
            self.right += outputs[0].tokens == [answer]
        return self

    @property
    def first_token(self) -> float:
        """Median of the seconds to the first token."""
        return float(np.median([turn.seconds for turn in self.turns]))

    def tokens(self, *, has_store: bool) -> list[str]:
        """The session's line in the table of tokens."""
        stored = [f"{sum(turn.stored for turn in self.turns):,}"] if has_store else []
        first_token = _ms(self.first_token) if self.turns else ""
        right = f"{self.right} of {self.answered}"
        return [f"{self.prompted - self.reused:,}", f"{self.reused:,}", *stored, first_token, right]

    def records(self) -> list[str]:
        """The session's line in the table of events."""
        kinds = collections.Counter(event["kind"] for event in self.events)
        levels = collections.Counter(event["level"] for event in self.events if event["kind"] == "updated")
        return [str(n) for n in (*(kinds[kind] for kind in ("stored", "removed", "copied")), levels[1], levels[0])]

    def part(self) -> Session:
        """A session with the same cache and an empty tally."""
        return Session(self.model, store=self.store, cache=self.cache)

    def fork(self, pairs: Sequence[Question]) -> Session:
        """Computes the prompts' common tokens once, and forks the row for their last two tokens."""
        shared = pairs[0][0][:-2]
        self.cache, admitted = self.cache.admit(0, np.asarray(shared, np.int32), len(shared))
        self.hear(admitted)
        self.compute([shared[int(self.cache.state.seqs.committed[0]) :]])
        for row in range(1, len(pairs)):
            self.cache, _ = self.cache.fork(0, row)
        self.cache, extended = self.cache.extend(np.arange(ROWS) < len(pairs), 2)
        self.hear(extended)
        tokens = self.compute([prompt[-2:] for prompt, _ in pairs])
        self.cache, released = self.cache.release(np.arange(len(pairs), dtype=np.int32))
        self.hear(released)
        self.prompted += len(shared) + 2 * len(pairs)
        self.reused += int(admitted.cached[0])
        self.answered += len(pairs)
        self.right += sum(token == answer for token, (_, answer) in zip(tokens, pairs, strict=True))
        return self

    def compute(self, rows: Sequence[list[int]]) -> list[int]:
        """Computes the next tokens of the first rows. Returns the likeliest next token of each row."""
        count = np.zeros(ROWS, np.int32)
        count[: len(rows)] = [len(row) for row in rows]
        tokens = np.zeros((ROWS, max(2, *count)), np.int32)  # a single token needs no separate program
        for row, new in enumerate(rows):
            tokens[row, : len(new)] = new
        self.cache, logits, events = step(self.model, self.cache, tokens, count)
        self.hear(events)
        return np.argmax(logits, axis=-1)[: len(rows)].tolist()

    def drawing(self, width: int) -> str:
        """The map of the cache's blocks."""
        return kvjax.show(self.cache.state, width=width, max_lines=MAP_LINES)


step = jax.jit(kvjax.step)


class Parts(NamedTuple):
    """The demo's sessions, in the order of the tables' lines, and a map of the blocks after `repeat`."""

    without: Session  # some of the questions, nothing shared
    first: Session  # the first question, to an empty cache, which the following four sessions share
    repeat: Session  # the other questions
    forks: Session  # a row forked into four
    pressure: Session  # questions to other documents, for which blocks are evicted
    again: Session  # questions to the first document
    small: Session  # a question to every document, to a cache too small for all of them
    small_again: Session  # the same, to that cache
    large: Session  # the same, to a cache with a host tier
    large_again: Session  # the same, to that cache
    blocks: str


NAMES = (
    "nothing shared",
    "first question",
    "other questions",
    "a row forked in 4",
    f"{OTHERS} other documents",
    "the first again",
    f"{1 + OTHERS} in {BLOCKS} blocks",
    "all of them again",
    f"{HOST_BLOCKS} on the host",
    "all of them again",
)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = commands.Parser("demo", __doc__)
    commands.add_outputs(parser)
    stores.add_store(parser)
    args = parser.parse_args(arguments)
    stores.check(parser, args)
    commands.prepare(parser, args)
    run_command(parser, args)


def run_command(parser: commands.Parser, args: argparse.Namespace) -> None:
    """Runs the demo with the prepared options of a command."""
    model, _ = load(recall.CHECKPOINT)
    with stores.opened(parser, args, make_spec(model), recall.CHECKPOINT, PATIENCE_MS) as store:
        entries, cache = run(model, store)
    commands.save(parser, args, entries)
    commands.draw(parser, args, cache)


def run(model: Any, store: DiskStore | None = None) -> tuple[list[dict[str, Any]], kvjax.Cache]:
    """Runs the demo and prints it. Returns the entries of all transitions (`kvjax.interop.log`), and the cache."""
    console = rich.console.Console(highlight=False)
    console.width = min(console.width, MAX_COLUMNS)
    rng = np.random.default_rng(SEED)
    document, *others = (recall.make_document(rng, FACTS, TIMES) for _ in range(1 + OTHERS))
    people = [list(document.facts)[i] for i in rng.permutation(FACTS)[:QUESTIONS]]
    console.print(
        f"A document of {FACTS} facts, each stated {TIMES} times ({len(document.ids):,} tokens). A question is the "
        f"document and {recall.QUESTION_TOKENS} more tokens, such as: {recall.question(people[0])}\n"
    )
    parts = play(model, document, others, questions(document, people), console.width, store)
    show(console, parts, people)
    if store is not None:
        store.flush()
        counts = store.counters
        console.print(f"{counts['read']:,} blocks read from the store, {counts['written']:,} written to it")
    return replay(console, parts), parts.again.cache


def show(console: rich.console.Console, parts: Parts, people: Sequence[str]) -> None:
    """Prints bars, tables and maps, in the console's width."""
    console.print("[bold]Prompt tokens computed (█) and reused (░), and the time to the first token[/bold]")
    alone = parts.without
    console.print(bar("no cache", ChatTurn(alone.turns[0].prompted, 0, alone.first_token), console.width))
    for person, turn in zip(people, [*parts.first.turns, *parts.repeat.turns], strict=True):
        console.print(bar(recall.question(person), turn, console.width))
    console.print()
    lines, has_store = [*zip(NAMES, parts[:-1], strict=True)], parts.first.store is not None
    heads = "computed", "reused", *(["stored"] if has_store else []), "first token", "right"
    console.print(table("Tokens", heads, [(name, part.tokens(has_store=has_store)) for name, part in lines]), "")
    heads = "stored", "removed", "copied", "to host", "back"
    console.print(table("Blocks, by events", heads, [(name, part.records()) for name, part in lines]), "")
    maps = {
        "after the questions": parts.blocks,
        "at the end": parts.again.drawing(console.width),
        "of the cache with a host tier": parts.large_again.drawing(console.width),
    }
    for name, drawing in maps.items():
        console.print(f"[bold]Blocks {name}[/bold]")
        console.print(drawing + "\n", markup=False)


def bar(name: str, turn: ChatTurn, width: int) -> str:
    """A question's prompt tokens as a bar, in `width` columns."""
    counts = f" {turn.prompted - turn.reused:>5,} + {turn.reused:>5,} {_ms(turn.seconds):>7}"
    length = width - len(counts) - 20
    computed = -(-(turn.prompted - turn.reused) * length // turn.prompted)
    return f"{name:<20}" + "█" * computed + "░" * (length - computed) + counts


def play(
    model: Any,
    document: recall.Document,
    others: Sequence[recall.Document],
    pairs: Sequence[Question],
    width: int,
    store: DiskStore | None = None,
) -> Parts:
    """Asks all questions. Questions without reuse do not use the store either."""
    Session(model).ask(pairs[:2]).ask(pairs[:1], reuse=False)  # compiles
    if store is not None:
        _compile_store(model, pairs[:1])
    without = Session(model).ask(pairs[:ALONE], reuse=False)
    first = Session(model, store=store).ask(pairs[:1])
    repeat = first.part().ask(pairs[1:])
    blocks = repeat.drawing(width)
    forks = repeat.part().fork(questions(document, list(document.facts)[:4]))
    pressure = forks.part().ask([q for other in others for q in questions(other, list(other.facts)[:2])])
    again = pressure.part().ask(pairs[:4])

    first_questions = [questions(text, list(text.facts)[:1])[0] for text in (document, *others)]
    small = Session(model, store=store).ask(first_questions)
    large = Session(model, HOST_BLOCKS, store).ask(first_questions)
    small_again = small.part().ask(first_questions)
    large_again = large.part().ask(first_questions)
    return Parts(without, first, repeat, forks, pressure, again, small, small_again, large, large_again, blocks)


def _compile_store(model: Any, pairs: Sequence[Question]) -> None:
    """Compiles the programs for a store, with a store in memory."""
    with DiskStore(
        "memory://",
        make_spec(model),
        model="recall",
        names=kvjax.Namespaces(),
        max_bytes=stores.DEFAULT_BYTES,
        read_timeout_ms=PATIENCE_MS,
    ) as store:
        for host_blocks in (0, 0, HOST_BLOCKS):  # writes; reads
            Session(model, host_blocks, store).ask(pairs)
            store.flush()


def table(title: str, heads: Sequence[str], lines: Sequence[tuple[str, list[str]]]) -> rich.table.Table:
    """Columns of numbers, a line for each session."""
    result = rich.table.Table(
        "", title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    for head in heads:
        result.add_column(head, justify="right", no_wrap=True)
    for name, numbers in lines:
        result.add_row(name, *numbers)
    return result


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def replay(console: rich.console.Console, parts: Parts) -> list[dict[str, Any]]:
    """Verifies answers, caches, and indexes folded from events.

    Returns:
      The entries of the cache without a host tier.

    Raises:
      SystemExit: the demo failed.
    """
    course = [parts.first, parts.repeat, parts.forks, parts.pressure, parts.again]
    tiered = [parts.large, parts.large_again]
    index_agrees = True
    for sessions in (course, tiered):
        state = sessions[-1].cache.state
        events = [event for session in sessions for event in session.events]
        kvjax.check(state)
        index_agrees &= kvjax.fold(events).index == kvjax.events.index_of(state)
    num_events = sum(len(session.events) for session in course)
    console.print(f"{num_events:,} events replayed give the index of the cache: {index_agrees}")
    total = [*course, parts.small, parts.small_again, *tiered]
    share = sum(p.right for p in total) / sum(p.answered for p in total)
    alone = parts.without.right / parts.without.answered
    computed = parts.large_again.prompted - parts.large_again.reused
    right = alone * QUESTIONS == parts.first.right + parts.repeat.right
    if not index_agrees or share < 0.98 or not right or computed > BLOCK * (1 + OTHERS):
        raise SystemExit(f"demo failed: {share:.1%} right with reuse, {alone:.1%} without; {computed} computed again")
    reused = (parts.first.reused + parts.repeat.reused) / (parts.first.prompted + parts.repeat.prompted)
    times = parts.without.first_token / parts.repeat.first_token
    console.print(f"{reused:.0%} of prompt tokens reused, first token {times:.1f} times sooner")
    return [entry for session in course for entry in session.entries]


if __name__ == "__main__":
    main()
