# SPDX-License-Identifier: Apache-2.0
"""Servers publish what their caches hold, and a router sends each question to the server that has most of it.

Each cache holds three documents, and there are three for each server: dealt out in turn, questions about all of them
reach all caches, and documents push each other out. The servers are `models.serve`, each in a process of its own. The
router itself is in prefix_router.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import rich.console

from . import commands, demo, recall
from .server_process import SECONDS, Answer, ServerEnded, ServerProcess

NAMES = ("one", "two")
BLOCK, BLOCKS = 8, 112  # three documents of 30 blocks, with the questions about them
NEW = 5  # tokens of an answer: a question and all but the last one fill a block
LAG = 10.0  # seconds that a mirror gets to follow its cache
LOSSES = 3  # servers that may end over the same prompt

Choice = Callable[[list[int], Collection[str]], str]  # of a server: by a prompt and the servers that are down


class Reply(NamedTuple):
    """The answer to a prompt."""

    server: str  # its name
    answer: Answer
    is_mirrored: bool  # whether the server found as many whole blocks as its mirror had


class Fleet:
    """Servers by name, with a router in front of them; the end of a `with` ends all.

    Args:
      servers: {name: a `ServerProcess`, or its like on another machine}.
      curve: the keys by which events are read; None: they are in clear.
    """

    def __init__(self, servers: Mapping[str, Any], curve: Any = None):
        from .prefix_router import Router

        self.servers, self._curve = servers, curve
        self.router = Router({})  # with a mirror of each server's cache
        self._threads, self._starts = ThreadPoolExecutor(len(servers)), dict[str, Future[None]]()
        self._choosing = threading.Lock()
        self._turns = {name: threading.Lock() for name in servers}  # a server gets one prompt at a time

    @property
    def down(self) -> set[str]:
        """The servers that are being started, and those that could not be."""
        return {name for name, start in self._starts.items() if not start.done() or start.exception()}

    def __enter__(self) -> Fleet:
        """Starts the servers.

        Raises:
          ServerEnded: if one of them cannot start, or nothing comes from it.
        """
        self._starts = {name: self._threads.submit(self._start, name) for name in self.servers}
        try:
            for start in self._starts.values():
                start.result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers.values():
            server.close()
        self._threads.shutdown(cancel_futures=True)
        self.router.close()

    def answer(
        self, prompts: Sequence[list[int]], choose: Choice, salt: str | None = None, at_once: int | None = None
    ) -> list[Reply]:
        """Puts each prompt to a server; one that ends leaves its prompt to the others.

        The prompts find nothing that was cached under another salt. `at_once` of them are answered at a time; None: as
        many as there are servers.

        Raises:
          ServerEnded: if several servers ended over the same prompt, or none is up.
        """
        with ThreadPoolExecutor(at_once or len(self.servers)) as threads:
            return list(threads.map(lambda prompt: self._answer(prompt, choose, salt), prompts))

    def _answer(self, prompt: list[int], choose: Choice, salt: str | None) -> Reply:
        for _ in range(LOSSES):
            if len(self.down) == len(self.servers):
                wait(self._starts.values(), SECONDS)
            with self._choosing:
                if len(down := self.down) == len(self.servers):
                    raise ServerEnded("no server has started again")
                name = choose(prompt, down)
            try:
                with self._turns[name]:
                    return self._ask(name, prompt, salt)
            except ServerEnded:
                with self._choosing:
                    if name not in self.down:
                        self._starts[name] = self._threads.submit(self._start, name)
        raise ServerEnded(f"{LOSSES} servers ended over the same prompt")

    def _ask(self, name: str, prompt: list[int], salt: str | None) -> Reply:
        mirror = self.router.mirrors[name]
        # The last token of a prompt is computed in any case.
        num_mirrored = min(mirror.lookup(prompt, salt).tokens, len(prompt) - 1)
        answer = self.servers[name].complete(prompt, NEW, salt)
        # The last whole block is published after all that had to leave. A mirror that lags costs reuse alone.
        computed = [*prompt, *recall.encode(answer.text)][:-1]
        mirror.wait(lambda one: one.lookup(computed, salt).tokens == len(computed) // BLOCK * BLOCK, LAG)
        return Reply(name, answer, num_mirrored // BLOCK == answer.num_cached // BLOCK)

    def _start(self, name: str) -> None:
        """Waits until a server answers, and mirrors its cache from the beginning."""
        from kvjax.interop.vllm import Subscriber

        publish, replay = self.servers[name].ready()
        mirror = Subscriber(publish, replay, curve=self._curve)
        if not mirror.wait(lambda one: one.complete, LAG):
            mirror.close()
            raise ServerEnded(f"nothing comes from {publish}, where server {name} publishes")
        before, self.router.mirrors[name] = self.router.mirrors.get(name), mirror
        self.router.sent.setdefault(name, 0)
        if before is not None:
            before.close()


def options(*more: str, host: str = "127.0.0.1") -> list[str]:
    """Options of `models.serve` for the bundled model and a cache that holds three documents, and more options."""
    model = ("--checkpoint", str(recall.CHECKPOINT), "--dtype", "float32")
    sizes = ("--rows", "1", "--blocks", str(BLOCKS), "--block-size", str(BLOCK), "--max-length", str(BLOCK * 40))
    return [*model, *sizes, "--publish", f"tcp://{host}:*", "--replay", f"tcp://{host}:*", *more]


def questions(documents: int, each: int) -> list[demo.Question]:
    """Questions about documents, in any order."""
    rng = np.random.default_rng(7)
    texts = [recall.make_document(rng, demo.FACTS) for _ in range(documents)]
    every = [one for document in texts for one in demo.questions(document, list(document.facts)[:each])]
    return [every[number] for number in rng.permutation(len(every))]


def in_turn(names: Iterable[str]) -> Choice:
    """The rule that sends a prompt to the next server."""
    cycle = itertools.cycle(names)
    return lambda _, down: next(name for name in cycle if name not in down)


def play(command: str, fleet: Fleet, pairs: Sequence[demo.Question], at_once: int | None = None) -> None:
    """Puts the questions to the servers in turn, and by the router, and prints how many tokens each way reuses.

    Raises:
      SystemExit: if a server or a mirror failed, if the router reuses no more, or if too many answers are wrong.
    """
    ways: dict[str, Choice] = {
        "round robin": in_turn(fleet.servers),
        "router": lambda prompt, down: fleet.router.route(prompt, "router", without=down),
    }
    prompts = [prompt for prompt, _ in pairs]
    try:
        with fleet:  # under a salt of its own no way finds what the other one has cached
            replies = {way: fleet.answer(prompts, choose, way, at_once) for way, choose in ways.items()}
    except ServerEnded as error:
        raise SystemExit(f"{command} failed: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(commands.INTERRUPTED) from None
    lines, reused, right = list[tuple[str, list[str]]](), list[int](), list[int]()
    num_prompted = sum(map(len, prompts))
    for way, of_way in replies.items():
        by_server = {name: np.zeros(2, np.int64) for name in fleet.servers}
        for prompt, (name, answer, _) in zip(prompts, of_way, strict=True):
            by_server[name] += answer.num_cached, len(prompt)
        reused.append(sum(reply.answer.num_cached for reply in of_way))
        words = [recall.encode(reply.answer.text)[0] for reply in of_way]
        right.append(sum(word == wanted for word, (_, wanted) in zip(words, pairs, strict=True)))
        parts = [f"{cached:,} of {prompted:,}" for cached, prompted in by_server.values()]
        counts = [f"{count:,}" for count in (num_prompted, reused[-1], num_prompted - reused[-1])]
        lines.append((way, [*counts, *parts, f"{right[-1]} of {len(pairs)}"]))
    heads = ("prompted", "reused", "computed", *(f"reused by {name}" for name in fleet.servers), "right")
    console = rich.console.Console(width=120, highlight=False)
    console.print(demo.table(f"{len(pairs)} questions, {len(fleet.servers)} caches", heads, lines), "")
    are_mirrored = all(reply.is_mirrored for of_way in replies.values() for reply in of_way)
    console.print(f"Each cache had what the router's mirror of it said: {are_mirrored}")
    if not are_mirrored or reused[1] <= reused[0] or min(right) < 0.98 * len(pairs):
        raise SystemExit(f"{command} failed: {reused[1]} tokens reused to {reused[0]}, {min(right)} answers right")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = commands.Parser("router", __doc__)
    parser.add_argument("--quick", action="store_true", help="few questions: a test of the demo")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    for extra in ("wires", "serve"):
        commands.check_extra(parser, extra)
    more = ["--no-compile-cache"] if args.no_compile_cache else []
    servers = {name: ServerProcess(*options(*more)) for name in NAMES}
    play("router", Fleet(servers), questions(*(4, 4) if args.quick else (6, 12)), at_once=1)


if __name__ == "__main__":
    main()
