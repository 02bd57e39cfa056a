# SPDX-License-Identifier: Apache-2.0
"""Servers publish the contents of their caches, and a router sends each question to the server with the most of it.

Each cache holds three documents, and there are three documents for each server. If the servers get questions in turn,
every server gets questions about all documents, which evict each other from its cache. Each server is a separate
process with `models.serve`. The router is in prefix_router.py.
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
BLOCK = 8
BLOCKS = 112  # three documents of 30 blocks, with the questions about them
NEW = 5  # tokens of an answer, which fills a block with its question, except for its last token
LAG = 10.0  # seconds for a mirror to catch up with its cache
LOSSES = 3  # servers allowed to end over the same prompt

Choice = Callable[[list[int], Collection[str]], str]  # (prompt, names of servers that are down) -> a server's name


class Reply(NamedTuple):
    """The answer to a prompt."""

    server: str  # its name
    answer: Answer
    is_mirrored: bool  # whether the server found the same number of whole blocks as its mirror


class Fleet:
    """Servers by name, with a router in front of them. The end of a `with` ends them all.

    Args:
      servers: {name: a `ServerProcess`, or an object with its methods on another machine}.
      curve: keys for reading encrypted events; None reads unencrypted events.
    """

    def __init__(self, servers: Mapping[str, Any], curve: Any = None):
        from .prefix_router import Router

        self.servers = servers
        self._curve = curve
        self.router = Router({})  # with a mirror of each server's cache
        self._threads = ThreadPoolExecutor(len(servers))
        self._starts: dict[str, Future[None]] = {}
        self._choosing = threading.Lock()
        self._turns = {name: threading.Lock() for name in servers}  # a server gets one prompt at a time

    @property
    def down(self) -> set[str]:
        """The servers still starting, and the servers that failed to start."""
        return {name for name, start in self._starts.items() if not start.done() or start.exception()}

    def __enter__(self) -> Fleet:
        """Starts the servers.

        Raises:
          ServerEnded: a server cannot start, or publishes nothing.
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
        """Sends each prompt to a server. If a server ends, another server gets its prompt.

        Args:
          prompts: token ids.
          choose: the rule for choosing a server.
          salt: prompts find only blocks cached under the same salt, where None counts as a salt.
          at_once: number of prompts to answer at a time; None defaults to the number of servers.

        Raises:
          ServerEnded: several servers ended over the same prompt, or none is up.
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
        # The last token of a prompt is always computed.
        num_mirrored = min(mirror.lookup(prompt, salt).tokens, len(prompt) - 1)
        answer = self.servers[name].complete(prompt, NEW, salt)
        # The last whole block is published after all evictions. A late mirror only costs reuse.
        computed = [*prompt, *recall.encode(answer.text)][:-1]
        num_published = len(computed) // BLOCK * BLOCK
        mirror.wait(lambda mirror: mirror.lookup(computed, salt).tokens == num_published, LAG)
        return Reply(name, answer, num_mirrored // BLOCK == answer.num_cached // BLOCK)

    def _start(self, name: str) -> None:
        """Waits until a server answers, and mirrors its cache from the beginning."""
        from kvjax.interop.vllm import Subscriber

        publish, replay = self.servers[name].ready()
        mirror = Subscriber(publish, replay, curve=self._curve)
        if not mirror.wait(lambda mirror: mirror.complete, LAG):
            mirror.close()
            raise ServerEnded(f"nothing comes from {publish}, where server {name} publishes")
        old_mirror = self.router.mirrors.get(name)
        self.router.mirrors[name] = mirror
        self.router.sent.setdefault(name, 0)
        if old_mirror is not None:
            old_mirror.close()


def options(*extra: str, host: str = "127.0.0.1") -> list[str]:
    """Options of `models.serve` for the bundled model and a cache for three documents, and extra options."""
    model = ("--checkpoint", str(recall.CHECKPOINT), "--dtype", "float32")
    sizes = ("--rows", "1", "--blocks", str(BLOCKS), "--block-size", str(BLOCK), "--max-length", str(BLOCK * 40))
    return [*model, *sizes, "--publish", f"tcp://{host}:*", "--replay", f"tcp://{host}:*", *extra]


def questions(num_documents: int, num_questions: int) -> list[demo.Question]:
    """Questions about documents, `num_questions` about each, in random order."""
    rng = np.random.default_rng(7)
    documents = [recall.make_document(rng, demo.FACTS) for _ in range(num_documents)]
    pairs = []
    for document in documents:
        pairs += demo.questions(document, list(document.facts)[:num_questions])
    return [pairs[index] for index in rng.permutation(len(pairs))]


def in_turn(names: Iterable[str]) -> Choice:
    """A rule that sends each prompt to the next server."""
    cycle = itertools.cycle(names)
    return lambda _, down: next(name for name in cycle if name not in down)


def play(command: str, fleet: Fleet, pairs: Sequence[demo.Question], at_once: int | None = None) -> None:
    """Sends the questions to the servers in turn, then by the router, and prints the tokens reused each time.

    Raises:
      SystemExit: a server or a mirror failed, the router reuses no more tokens, or too many answers are wrong.
    """
    ways: dict[str, Choice] = {
        "round robin": in_turn(fleet.servers),
        "router": lambda prompt, down: fleet.router.route(prompt, "router", without=down),
    }
    prompts = [prompt for prompt, _ in pairs]
    try:
        with fleet:  # each time with another salt, so it finds no blocks of the other
            replies = {way: fleet.answer(prompts, choose, way, at_once) for way, choose in ways.items()}
    except ServerEnded as error:
        raise SystemExit(f"{command} failed: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(commands.INTERRUPTED) from None
    lines: list[tuple[str, list[str]]] = []
    reused: list[int] = []
    right: list[int] = []
    num_prompted = sum(map(len, prompts))
    for way, way_replies in replies.items():
        by_server = {name: np.zeros(2, np.int64) for name in fleet.servers}
        for prompt, (name, answer, _) in zip(prompts, way_replies, strict=True):
            by_server[name] += answer.num_cached, len(prompt)
        reused.append(sum(reply.answer.num_cached for reply in way_replies))
        words = [recall.encode(reply.answer.text)[0] for reply in way_replies]
        right.append(sum(word == wanted for word, (_, wanted) in zip(words, pairs, strict=True)))
        parts = [f"{cached:,} of {prompted:,}" for cached, prompted in by_server.values()]
        counts = [f"{count:,}" for count in (num_prompted, reused[-1], num_prompted - reused[-1])]
        lines.append((way, [*counts, *parts, f"{right[-1]} of {len(pairs)}"]))
    heads = ("prompted", "reused", "computed", *(f"reused by {name}" for name in fleet.servers), "right")
    console = rich.console.Console(width=120, highlight=False)
    console.print(demo.table(f"{len(pairs)} questions, {len(fleet.servers)} caches", heads, lines), "")
    are_mirrored = all(reply.is_mirrored for way_replies in replies.values() for reply in way_replies)
    console.print(f"Each cache had what the router's mirror of it said: {are_mirrored}")
    if not are_mirrored or reused[1] <= reused[0] or min(right) < 0.98 * len(pairs):
        raise SystemExit(f"{command} failed: {reused[1]} tokens reused to {reused[0]}, {min(right)} answers right")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = commands.Parser("router", __doc__)
    parser.add_argument("--quick", action="store_true", help="few questions: a test of the demo")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    for extra in ("wires", "serve"):
        commands.check_extra(parser, extra)
    extra_options = ["--no-compile-cache"] if args.no_compile_cache else []
    servers = {name: ServerProcess(*options(*extra_options)) for name in NAMES}
    pairs = questions(4, 4) if args.quick else questions(6, 12)
    play("router", Fleet(servers), pairs, at_once=1)


if __name__ == "__main__":
    main()
