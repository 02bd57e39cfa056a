# SPDX-License-Identifier: Apache-2.0
"""The demo: one long document, many questions that reuse its blocks, forks, eviction, a host tier, and a table of it.

The bundled model answers right only if attention reads the slots that hold the fact, so every wrong block shows as a
wrong answer.
"""

from __future__ import annotations

import collections
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

import kvjax
from kvjax.interop.log import entry

from . import commands, recall
from .loading import load

CHECKPOINT = pathlib.Path(__file__).parent / "checkpoints" / "recall"
FACTS, QUESTIONS, OTHERS = 48, 24, 6
ROWS, BLOCK, BLOCKS, HOST_BLOCKS = 8, 8, 96, 256

Question = tuple[list[int], int]  # prompt, token of the right answer


def questions(document: recall.Document, people: Sequence[str]) -> list[Question]:
    """Prompts that ask a document for people, with the right answers."""
    return [
        (document.ids + recall.encode(recall.question(person)), recall.IDS[document.facts[person]]) for person in people
    ]


class Session:
    """A model and its cache, and a tally of what went through them."""

    def __init__(self, model: Any, host_blocks: int = 0):
        spec = kvjax.make_spec(
            model.layer_specs(), num_blocks=BLOCKS, max_seqs=ROWS, max_length=BLOCK * 40, block_size=BLOCK,
            dtype="float32", num_host_blocks=host_blocks,
        )  # fmt: skip
        self.model = model
        self.cache: Any = (kvjax.tiers.TieredCache if host_blocks else kvjax.Cache).create(spec)
        self.prompted = self.reused = self.asked = self.right = 0
        self.seconds: list[float] = []
        self.entries: list[dict[str, Any]] = []

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events, decoded."""
        return [event for one in self.entries for event in one["events"]]

    def hear(self, events: Any) -> None:
        """Notes the events of a transition, or of a jitted loop."""
        self.entries.append(entry(events))

    def ask(self, asked: Sequence[Question], *, reuse: bool = True) -> Session:
        """Puts questions one by one, as different users would; without reuse each in a namespace of its own."""
        for prompt, answer in asked:
            began = time.perf_counter()
            outputs, self.cache, _ = kvjax.generate(
                self.model, self.cache, [prompt], max_new_tokens=1, namespaces=None if reuse else [1 + self.asked],
                log_events=False, listener=self.hear,
            )  # fmt: skip
            self.seconds.append(time.perf_counter() - began)
            self.prompted += outputs[0].prompt_tokens
            self.reused += outputs[0].cached_tokens
            self.asked += 1
            self.right += outputs[0].tokens == [answer]
        return self

    def row(self, name: str) -> list[str]:
        """A line of the table."""
        events = self.events
        kinds = collections.Counter(event["kind"] for event in events)
        moved = [event for event in events if event["kind"] == "updated"]
        return [
            name, f"{self.prompted:,}", f"{self.reused:,}", f"{self.prompted - self.reused:,}",
            f"{np.median(self.seconds) * 1e3:.1f} ms" if self.seconds else "",
            f"{self.right} of {self.asked}", *(str(kinds[kind]) for kind in ("stored", "removed", "copied")),
            *(str(sum(event.get("level") == level for event in moved)) for level in (1, 0)),
        ]  # fmt: skip

    def part(self) -> Session:
        """A session that goes on with this one's cache and an empty tally."""
        new = Session.__new__(Session)
        new.__dict__ = {**self.__dict__, "seconds": [], "entries": []}
        new.prompted = new.reused = new.asked = new.right = 0
        return new


class Parts(NamedTuple):
    """The demo's sessions.

    Attributes:
      without: the questions, nothing shared.
      first: the first question, to an empty cache; the following five go on with its cache.
      repeat: the other questions.
      forks: one row forked into four.
      pressure: questions to other documents, for which blocks are evicted.
      again: questions to the first document.
      small: a question to every document, to a cache that cannot hold them all.
      small_again: the same, to that cache.
      large: the same, to a cache with a host tier.
      large_again: the same, to that cache.
      blocks: a drawing of the cache after `repeat`.
    """

    without: Session
    first: Session
    repeat: Session
    forks: Session
    pressure: Session
    again: Session
    small: Session
    small_again: Session
    large: Session
    large_again: Session
    blocks: str


def forked(session: Session, document: recall.Document, people: Sequence[str]) -> None:
    """Computes the document and the start of a question once, forks the row, and asks a different person in each."""
    prompt = document.ids + recall.encode("where is")
    cache, events = session.cache.admit(0, np.asarray(prompt, np.int32), len(prompt))
    session.reused += int(events.cached[0])
    session.prompted += len(prompt) + 2 * len(people)
    session.hear(events)
    width = int(cache.state.seqs.length[0] - cache.state.seqs.committed[0])
    rows = jnp.arange(ROWS)
    fed = np.zeros((ROWS, width), np.int32)
    fed[0] = prompt[-width:]
    cache, _, events = feed(session.model, cache, fed, np.where(rows == 0, width, 0))
    session.hear(events)
    for number in range(1, len(people)):
        cache, _ = cache.fork(0, number)
    words = [recall.encode(f"{person} ?") for person in people]
    fed = np.zeros((ROWS, 2), np.int32)
    fed[: len(people)] = words
    cache, extended = cache.extend(rows < len(people), 2)
    session.hear(extended)
    cache, logits, events = feed(session.model, cache, fed, np.where(rows < len(people), 2, 0))
    session.hear(events)
    answers = np.argmax(logits, axis=-1)[: len(people)]
    session.asked += len(people)
    session.right += sum(int(a) == recall.IDS[document.facts[p]] for a, p in zip(answers, people, strict=True))
    session.cache, released = cache.release(np.arange(len(people), dtype=np.int32))
    session.hear(released)


step = jax.jit(kvjax.step)


def feed(model, cache: kvjax.Cache, tokens: np.ndarray, count: np.ndarray):
    """Computes each row's next tokens; returns the cache, the logits of each row's last token, and the events."""
    cache, logits, events = step(model, cache, jnp.asarray(tokens), jnp.asarray(count, jnp.int32))
    return cache, logits, events


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = commands.Parser("demo", __doc__)
    commands.add_outputs(parser)
    args = parser.parse_args(arguments)
    commands.prepare(parser, args)
    entries, cache = run()
    commands.save(parser, args, entries)
    commands.draw(parser, args, cache)


def run() -> tuple[list[dict[str, Any]], kvjax.Cache]:
    """Runs the demo and prints it; returns the entries of all transitions (`kvjax.interop.log`) and the cache."""
    console = rich.console.Console(width=138)
    model, _ = load(CHECKPOINT)
    rng = np.random.default_rng(7)
    document, *others = (recall.make_document(rng, FACTS) for _ in range(1 + OTHERS))
    people = list(document.facts)
    asked = questions(document, [people[i] for i in rng.permutation(FACTS)[:QUESTIONS]])
    console.print(f"A document of {FACTS} facts ({len(document.ids)} tokens): {document.text[:80]}...")
    console.print(f"Each question is the document and 4 more tokens, such as: ... {recall.question(people[0])}\n")
    parts = play(model, document, others, asked)
    console.print(table(parts))
    tiers = parts.large_again.cache.cache.state
    console.print("[bold]Blocks after the questions[/bold]")
    console.print(parts.blocks, highlight=False)
    console.print("\n[bold]Blocks at the end[/bold]")
    console.print(kvjax.show(parts.again.cache.state), highlight=False)
    console.print("\n[bold]Blocks of the cache with a host tier[/bold]")
    console.print(kvjax.show(tiers), highlight=False)
    entries = replay(console, parts)
    return entries, parts.again.cache


def play(model: Any, document: recall.Document, others: Sequence[recall.Document], asked: Sequence[Question]) -> Parts:
    """Puts all questions."""
    Session(model).ask(asked[:2]).ask(asked[:1], reuse=False)  # compiles
    without = Session(model).ask(asked, reuse=False)
    first = Session(model).ask(asked[:1])
    repeat = first.part().ask(asked[1:])
    blocks = kvjax.show(repeat.cache.state)
    forks = repeat.part()
    forked(forks, document, list(document.facts)[:4])
    pressure = forks.part().ask([q for other in others for q in questions(other, list(other.facts)[:2])])
    again = pressure.part().ask(asked[:4])

    every = [questions(one, list(one.facts)[:1])[0] for one in (document, *others)]
    small, large = Session(model).ask(every), Session(model, HOST_BLOCKS).ask(every)
    small_again, large_again = small.part().ask(every), large.part().ask(every)
    return Parts(
        without, first, repeat, forks, pressure, again, small, small_again, large, large_again, blocks
    )  # fmt: skip


def table(parts: Parts) -> rich.table.Table:
    """What went through the cache, a line for each session."""
    drawn = rich.table.Table(title="What the cache did")
    counts = (
        "prompted", "reused", "computed", "first token", "right", "stored", "removed", "copied", "to host", "back",
    )  # fmt: skip
    for name in ("", *counts):
        drawn.add_column(name, justify="left" if not name else "right")
    drawn.add_row(*parts.without.row("nothing shared"), end_section=True)
    drawn.add_row(*parts.first.row("a document's first question"))
    drawn.add_row(*parts.repeat.row("its other questions"))
    drawn.add_row(*parts.forks.row("one row forked into four"))
    drawn.add_row(*parts.pressure.row(f"{OTHERS} other documents"))
    drawn.add_row(*parts.again.row("the first document again"), end_section=True)
    drawn.add_row(*parts.small.row(f"{1 + OTHERS} documents, {BLOCKS} blocks"))
    drawn.add_row(*parts.small_again.row("all of them again"), end_section=True)
    drawn.add_row(*parts.large.row(f"and {HOST_BLOCKS} blocks on the host"))
    drawn.add_row(*parts.large_again.row("all of them again"))
    return drawn


def replay(console: rich.console.Console, parts: Parts) -> list[dict[str, Any]]:
    """Verifies answers, caches and indexes folded from events; returns the entries of the cache without a host tier.

    Raises:
      SystemExit: if the demo failed.
    """
    course = [parts.first, parts.repeat, parts.forks, parts.pressure, parts.again]
    tiered = [parts.large, parts.large_again]
    cache, tiers = parts.again.cache, parts.large_again.cache.cache
    events = [e for part in course for e in part.events]
    index_agrees = kvjax.fold(events).index == kvjax.events.index_of(cache.state)
    index_agrees &= kvjax.fold([e for part in tiered for e in part.events]).index == kvjax.events.index_of(tiers.state)
    kvjax.check(cache.state)
    kvjax.check(tiers.state)
    console.print(f"\n{len(events):,} events replayed: the index they give is the cache's: {index_agrees}")
    total = [*course, parts.small, parts.small_again, *tiered]
    share = sum(p.right for p in total) / sum(p.asked for p in total)
    alone = parts.without.right / parts.without.asked
    computed = parts.large_again.prompted - parts.large_again.reused
    right = parts.first.right + parts.repeat.right == parts.without.right
    if not index_agrees or share < 0.98 or not right or computed > BLOCK * (1 + OTHERS):
        raise SystemExit(f"demo failed: {share:.1%} right with reuse, {alone:.1%} without; {computed} computed again")
    return [one for part in course for one in part.entries]


if __name__ == "__main__":
    main()
