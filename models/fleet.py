# SPDX-License-Identifier: Apache-2.0
"""Replicas in Ray actors, on one machine or several: each prompt goes where most of it is cached, by published events.

    driver     prompts ──> a rule, by a mirror of each cache ──> calls of actors, as many at a time as there are
                                     ^                                   │
    an actor   Publisher ────────────┘          the model, a cache and `generate`

Ray starts an actor that ends anew; its prompts go to the others. The new process publishes at the same address, and its
first message clears the mirror.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ipaddress
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from . import commands, demo, router
from .generate import INTERRUPTED
from .replica import Replica

Choice = Callable[[list[int], Collection[str]], str]  # of a replica: by a prompt and those that are down
LOOPBACK = "127.0.0.1"
LAG = 10.0  # seconds that a mirror gets to follow its cache
LOSSES = 3  # replicas that may end over the same prompt


class Fleet:
    """Replicas in actors, and a router in front of them.

    Args:
      names: of the replicas.
      host: the IPv4 address that each one publishes at; 0.0.0.0 is all of its machine's.
      curve: whether events are encrypted, with new keys, which Ray brings to the actors.
      gpus: of each replica.
      keep_programs: whether programs are cached on disk.

    Attributes:
      actors: {name: actor}.
      router: has a mirror of what each publishes.
    """

    def __init__(
        self, names: Iterable[str], host: str = LOOPBACK, *, curve: bool = False, gpus: float = 0.0,
        keep_programs: bool = True,
    ):  # fmt: skip
        import ray  # pyright: ignore[reportMissingImports]
        import zmq

        from kvjax.interop.vllm import Curve

        from .prefix_router import Router

        self._ray, server, self._options = ray, None, dict[str, Any]()
        if curve:
            keys, own = zmq.curve_keypair(), zmq.curve_keypair()
            server, self._options = Curve(*keys), {"curve": Curve(*own, keys[0])}
        # Without retries: Ray would give the prompts of a process that ended to the next one.
        restarts = {"max_restarts": -1, "max_task_retries": 0}
        actor = ray.remote(**restarts, num_cpus=0, num_gpus=gpus, scheduling_strategy="SPREAD")(Replica)
        self.actors = {name: actor.remote(host, server, keep_programs) for name in names}
        self.router, self._addresses = Router({}), dict[str, tuple[str, str]]()
        # Calls that have not returned, of the replicas that are down.
        self._starts = {one.publish.remote(): name for name, one in self.actors.items()}
        for ref in list(self._starts):
            self._welcome(ref)

    @property
    def down(self) -> set[str]:
        """The replicas that Ray is starting."""
        return set(self._starts.values())

    def answer(self, prompts: Sequence[list[int]], choose: Choice) -> list[tuple[str, router.Answer]]:
        """Puts each prompt to a replica; one that ends leaves its prompts to the others.

        Args:
          prompts: token ids.
          choose: the replica of a prompt, not one that is down.

        Returns:
          For each prompt the replica that answered, and its only answer.

        Raises:
          SystemExit: if several replicas ended over the same prompt, or none answers.
        """
        waiting, losses = collections.deque(range(len(prompts))), collections.Counter[int]()
        answers, calls = dict[int, tuple[str, router.Answer]](), dict[Any, tuple[str, int]]()
        while len(answers) < len(prompts):
            while waiting and len(calls) < len(self.actors) - len(self.down):
                at = waiting.popleft()
                name = choose(prompts[at], self.down)
                calls[self.actors[name].call.remote("ask", prompts[at])] = name, at
            done, _ = self._ray.wait([*calls, *self._starts], timeout=router.SECONDS)
            if not done:
                raise SystemExit(f"fleet failed: no replica answered within {router.SECONDS:.0f} s")
            if done[0] in self._starts:
                self._welcome(done[0])
                continue
            name, at = calls.pop(done[0])
            answer = self._result(done[0], name)
            if answer is not None:
                answers[at] = name, answer
                self.follow(name, answer.last)
                continue
            waiting.appendleft(at)
            losses[at] += 1
            if losses[at] == LOSSES:
                raise SystemExit(f"fleet failed: {LOSSES} replicas ended over prompt {at}")
        return [answers[at] for at in range(len(prompts))]

    def call(self, name: str, verb: str) -> Any:
        """Calls a method of a replica's engine; waits if it is down, and calls again if it ends."""
        found = None
        while found is None:
            for ref in [ref for ref, one in self._starts.items() if one == name]:
                self._welcome(ref)
            found = self._result(self.actors[name].call.remote(verb), name)
        return found

    def follow(self, name: str, last: int | None) -> bool:
        """Waits for a mirror; whether it has a message. One that lags costs reuse, and no answer."""
        return self.router.mirrors[name].wait(lambda one: one.complete and (one.last or 0) >= (last or 0), LAG)

    def is_mirrored(self, name: str) -> bool:
        """Whether the mirror of a replica equals its cache."""
        index, mirror = self.call(name, "index"), self.router.mirrors[name]
        return mirror.wait(lambda one: one.complete and {prefix.tokens for prefix in one.index} == index, LAG)

    def close(self) -> None:
        """Ends the replicas."""
        self.router.close()
        for actor in self.actors.values():
            self._ray.kill(actor)

    def _result(self, ref: Any, name: str) -> Any:
        """The result of a call; None if its process has ended: then the next one is to publish."""
        found = None
        with contextlib.suppress(self._ray.exceptions.RayActorError):  # if it was computed, it is lost all the same
            found = self._ray.get(ref, timeout=router.SECONDS)
        if found is None and name not in self.down:
            ports = tuple(address.rsplit(":", 1)[1] for address in self._addresses[name])
            # Ray repeats this call until a process of the actor has returned from it.
            self._starts[self.actors[name].publish.options(max_task_retries=-1).remote(ports)] = name
        return found

    def _welcome(self, ref: Any) -> None:
        """Takes a replica that publishes into the fleet, or back; its first message clears its mirror."""
        from kvjax.interop.vllm import Subscriber

        name, mirrors = self._starts[ref], self.router.mirrors
        is_first, (addresses, last) = name not in mirrors, self._ray.get(ref, timeout=router.SECONDS)
        if addresses != self._addresses.get(name):  # it is new, on another machine, or its ports were taken
            if not is_first:
                mirrors[name].close()
            mirrors[name], self._addresses[name] = Subscriber(*addresses, **self._options), addresses
            self.router.sent.setdefault(name, 0)
        if not self.follow(name, last) and is_first:  # later on it may have ended again
            raise SystemExit(f"fleet failed: replica {name}: nothing comes from {addresses[0]}; see --bind")
        del self._starts[ref]


def play(fleet: Fleet, pairs: Sequence[demo.Question], choose: Choice) -> router.Tally:
    """Puts the questions, beginning with empty caches."""
    for name in fleet.actors:
        fleet.follow(name, fleet.call(name, "empty"))
    answers = fleet.answer([prompt for prompt, _ in pairs], choose)
    return router.count(fleet.actors, pairs, answers, all(map(fleet.is_mirrored, fleet.actors)))


def in_turn(names: Iterable[str]) -> Choice:
    """The rule that sends a prompt to the next replica."""
    cycle = itertools.cycle(names)
    return lambda _, down: next(name for name in cycle if name not in down)


def run(parser: commands.Parser, args: argparse.Namespace, pairs: Sequence[demo.Question]) -> dict[str, router.Tally]:
    """Puts the questions twice: to the replicas in turn, and by the router."""
    import ray  # pyright: ignore[reportMissingImports]

    cluster = {"address": args.address or "local", **({} if args.address else {"include_dashboard": False})}
    try:
        ray.init(**cluster, logging_level="warning")
    except (ConnectionError, ValueError) as error:
        parser.error(f"--address: {error}")
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        names = [str(number) for number in range(1, args.replicas + 1)]
        fleet = Fleet(names, str(args.bind), curve=args.curve, gpus=args.gpus, keep_programs=not args.no_compile_cache)
        stack.callback(fleet.close)
        fleet.answer([pairs[0][0]] * len(names), in_turn(names))  # they compile at the same time
        return {
            "round robin": play(fleet, pairs, in_turn(names)),
            "router": play(fleet, pairs, lambda prompt, down: fleet.router.route(prompt, without=down)),
        }


def _address(text: str) -> ipaddress.IPv4Address:
    """A type of an argument."""
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an IPv4 address") from None


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help.

    Raises:
      SystemExit: if the demo failed.
    """
    parser = commands.Parser("fleet", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = parser.add_argument
    option("--replicas", metavar="N", type=commands.number(int, 2), default=2, help="actors (default: %(default)s)")
    option("--address", metavar="HOST:PORT", help="a cluster's, which is joined (default: Ray starts on this machine)")
    option("--bind", metavar="IP", type=_address, default=ipaddress.IPv4Address(LOOPBACK),
           help="address that replicas publish at; 0.0.0.0 is all of a machine's (default: %(default)s)")  # fmt: skip
    option("--curve", action="store_true", help="encrypt events, with new keys")
    option("--gpus", metavar="N", type=commands.number(float, 0), default=0, help="of each replica (default: none)")
    option("--quick", action="store_true", help="few questions: a test of the demo")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    if not args.curve and not args.bind.is_loopback:
        why = "whoever reaches the port reads which prompts are cached"
        parser.error(f"--bind: got {args.bind} without --curve, wanted a loopback address or keys: {why}")
    commands.check_extra(parser, "fleet")
    each = (2, 4) if args.quick else (3, 12)  # documents for each replica, which holds three; questions about each
    pairs = router.questions(each[0] * args.replicas, each[1])
    try:
        router.report("fleet", run(parser, args, pairs), len(pairs))
    except OSError as error:
        message = str(getattr(error, "cause", error))  # of a replica's error, into which Ray puts a traceback
        if message.startswith("bind: "):
            parser.error(f"--{message}")
        raise SystemExit(f"fleet failed: {message}") from error
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
