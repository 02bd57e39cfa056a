# SPDX-License-Identifier: Apache-2.0
"""Two caches in two processes publish their events, and a router sends each question to where most of it is cached.

The caches hold three documents each, and there are six: dealt out in turn, questions about all of them reach both
caches, and documents push each other out. The router itself is in prefix_router.py.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import rich.console
import rich.table

import kvjax

from . import commands, demo, recall
from .generate import INTERRUPTED
from .loading import load

if TYPE_CHECKING:
    from kvjax.interop.vllm import Publisher

    from .prefix_router import Router

NAMES = ("one", "two")
BLOCK, BLOCKS = 8, 112  # three documents of 30 blocks, with the questions about them
SECONDS = 300.0  # that a process may take to start, with compiling, and to answer
PATIENCE = 5.0  # for a process whose pipe was closed to end by itself
ANY = "tcp://127.0.0.1:*"


class Answer(NamedTuple):
    """The answer of a cache.

    Attributes:
      tokens: of the answer.
      cached: tokens of the prompt that were cached.
      last: number of the last message that tells of it.
    """

    tokens: list[int]
    cached: int
    last: int | None


class Engine:
    """The model and a cache, whose events are published; in a process of its own."""

    def __init__(self, model: Any, source: Publisher, spec: kvjax.CacheSpec):
        self.model, self.source, self.spec = model, source, spec
        self.cache = kvjax.Cache.create(spec)

    def empty(self) -> int | None:
        """Begins anew with an empty cache; the number of the message that tells of it."""
        self.cache = kvjax.Cache.create(self.spec)
        self.source.attach(self.cache.state)
        self.source.flush(SECONDS)
        return self.source.last

    def ask(self, prompt: list[int]) -> Answer:
        """Generates, and publishes what the cache does."""
        (output,), self.cache, _ = kvjax.generate(
            self.model, self.cache, [prompt], max_new_tokens=2, log_events=False, listener=self.source.publish
        )
        self.source.flush(SECONDS)
        return Answer(output.tokens, output.cached_tokens, self.source.last)

    def index(self) -> set[tuple[int, ...]]:
        """The cached prefixes of whole blocks."""
        kvjax.check(self.cache.state)
        index = kvjax.events.index_of(self.cache.state)
        return {path for _, _, path in index if len(path) % self.spec.block_size == 0}


def bundled() -> tuple[Any, kvjax.CacheSpec]:
    """The bundled model, and the spec of a cache that holds three documents."""
    model, _ = load(recall.CHECKPOINT)
    return model, kvjax.make_spec(
        model.layer_specs(), num_blocks=BLOCKS, max_seqs=1, max_length=BLOCK * 40, block_size=BLOCK,
        dtype="float32",
    )  # fmt: skip


def serve(pipe: Connection, keep_programs: bool) -> None:
    """The process of an engine: answers calls until the other end of the pipe is closed."""
    from kvjax.interop.vllm import Publisher

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks hears Ctrl-C, and closes the pipe
    commands.keep_programs(keep_programs)
    model, spec = bundled()
    with contextlib.suppress(EOFError, BrokenPipeError), Publisher(spec, bind=ANY, replay=ANY) as source:
        engine = Engine(model, source, spec)
        pipe.send((source.endpoint, source.replay_endpoint))
        while True:
            name, *args = pipe.recv()
            pipe.send(getattr(engine, name)(*args))


class Remote:
    """An engine in another process."""

    def __init__(self, name: str, keep_programs: bool):
        context = multiprocessing.get_context("spawn")
        self.name, (self._pipe, theirs) = name, context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, keep_programs), daemon=True)
        self._process.start()
        theirs.close()  # so that its end shows

    def send(self, verb: str, *args: Any) -> None:
        """Calls a method of the engine; `receive` tells if the process has ended."""
        with contextlib.suppress(ConnectionError):
            self._pipe.send((verb, *args))

    def receive(self) -> Any:
        """The result of the method.

        Raises:
          SystemExit: if the process ended, or takes too long.
        """
        with contextlib.suppress(EOFError, ConnectionError):
            if self._pipe.poll(SECONDS):
                return self._pipe.recv()
            raise SystemExit(f"router failed: engine {self.name} did not answer within {SECONDS:.0f} s")
        raise SystemExit(f"router failed: the process of engine {self.name} ended")

    def call(self, verb: str, *args: Any) -> Any:
        """Both."""
        self.send(verb, *args)
        return self.receive()

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Tally(NamedTuple):
    """Counts over the questions.

    Attributes:
      prompted, reused: tokens, for each cache.
      right: answers.
      mirrored: whether all mirrors equal their caches.
    """

    prompted: dict[str, int]
    reused: dict[str, int]
    right: int
    mirrored: bool


def count(
    names: Iterable[str], pairs: Sequence[demo.Question], answers: Sequence[tuple[str, Answer]], mirrored: bool
) -> Tally:
    """The counts over questions, each with its answer and the name of the cache that gave it."""
    prompted, reused = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for (prompt, _), (name, answer) in zip(pairs, answers, strict=True):
        prompted[name] += len(prompt)
        reused[name] += answer.cached
    right = sum(answer.tokens[0] == wanted for (_, wanted), (_, answer) in zip(pairs, answers, strict=True))
    return Tally(prompted, reused, right, mirrored)


def play(
    engines: Mapping[str, Remote], router: Router, pairs: Sequence[demo.Question], choose: Callable[[list[int]], str]
) -> Tally:
    """Puts the questions one by one, each to the engine chosen for it, beginning with empty caches."""

    def followed(name: str, last: int) -> None:
        if not router.mirrors[name].wait(lambda one: one.complete and (one.last or 0) >= last, SECONDS):
            raise SystemExit(f"router failed: the mirror of engine {name} does not follow")

    for name, engine in engines.items():
        followed(name, engine.call("empty"))
    answers = list[tuple[str, Answer]]()
    for prompt, _ in pairs:
        name = choose(prompt)
        got = engines[name].call("ask", prompt)
        followed(name, got.last)
        answers.append((name, got))
    mirrored = all(
        engine.call("index") == {prefix.tokens for prefix in router.mirrors[name].index}
        for name, engine in engines.items()
    )
    return count(engines, pairs, answers, mirrored)


def questions(documents: int, each: int) -> list[demo.Question]:
    """Questions about documents, in any order."""
    rng = np.random.default_rng(7)
    texts = [recall.make_document(rng, demo.FACTS) for _ in range(documents)]
    every = [one for document in texts for one in demo.questions(document, list(document.facts)[:each])]
    return [every[number] for number in rng.permutation(len(every))]


def run(pairs: Sequence[demo.Question], keep_programs: bool) -> dict[str, Tally]:
    """Puts the questions twice: to the engines in turn, and by the router."""
    from .prefix_router import Router

    with contextlib.ExitStack() as stack:
        engines = {}
        for name in NAMES:
            engines[name] = Remote(name, keep_programs)
            stack.callback(engines[name].close)
        router = Router({name: engine.receive() for name, engine in engines.items()})
        stack.callback(router.close)
        for engine in engines.values():  # they compile at the same time
            engine.send("ask", pairs[0][0])
        for engine in engines.values():
            engine.receive()
        in_turn = itertools.cycle(NAMES)
        return {
            "round robin": play(engines, router, pairs, lambda _: next(in_turn)),
            "router": play(engines, router, pairs, router.route),
        }


def table(tallies: Mapping[str, Tally], number: int) -> rich.table.Table:
    """A table of reused tokens, a line for each way to deal the questions out."""
    names = list(next(iter(tallies.values())).prompted)
    result = rich.table.Table(title=f"{number} questions, {len(names)} caches")
    for name in ("", "prompted", "reused", "computed", *(f"reused by {name}" for name in names), "right"):
        result.add_column(name, justify="left" if not name else "right")
    for name, tally in tallies.items():
        prompted, reused = sum(tally.prompted.values()), sum(tally.reused.values())
        parts = [f"{tally.reused[one]:,} of {tally.prompted[one]:,}" for one in names]
        result.add_row(
            name, f"{prompted:,}", f"{reused:,}", f"{prompted - reused:,}", *parts, f"{tally.right} of {number}"
        )
    return result


def report(command: str, tallies: Mapping[str, Tally], number: int) -> None:
    """Prints the table, and whether the mirrors equal the caches.

    Raises:
      SystemExit: if they do not, if the second way to deal the questions out reuses no more than the first one, or if
        too many answers are wrong.
    """
    console = rich.console.Console(width=120)
    console.print(table(tallies, number))
    mirrored = all(tally.mirrored for tally in tallies.values())
    console.print(f"The router's mirrors equal the caches: {mirrored}")
    first, second = (sum(tally.reused.values()) for tally in tallies.values())
    right = min(tally.right for tally in tallies.values())
    if not mirrored or second <= first or right < 0.98 * number:
        raise SystemExit(f"{command} failed: {second} tokens reused to {first}, {right} of {number} answers right")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help.

    Raises:
      SystemExit: if the demo failed.
    """
    parser = commands.Parser("router", __doc__)
    parser.add_argument("--quick", action="store_true", help="few questions: a test of the demo")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    commands.check_extra(parser, "wires")
    pairs = questions(*(4, 4) if args.quick else (6, 12))
    try:
        tallies = run(pairs, not args.no_compile_cache)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    report("router", tallies, len(pairs))


if __name__ == "__main__":
    main()
