# SPDX-License-Identifier: Apache-2.0
"""Replicas in Ray actors, on one or several machines. Each prompt goes to the replica with most of it cached.

    driver     prompts ──> a rule, by a mirror of each cache ──> calls of actors, one at a time for each
                                     ^                                   │
    an actor   `models.serve` ───────┘                         requests to `models.serve`

If an actor ends, Ray starts it again with a new server. Meanwhile its prompts go to the others.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Sequence
from typing import Any

from . import commands, router, wires
from .server_process import SECONDS, Answer, ServerEnded, ServerProcess

LOOPBACK = "127.0.0.1"


class Replica:
    """A `ServerProcess` with the same arguments, in a Ray actor with some GPUs, on any machine of the cluster."""

    def __init__(self, *options: str, gpus: float = 0.0, **variables: str):
        import ray  # pyright: ignore[reportMissingImports]

        # Disables retries, because Ray would give the prompts of an ended process to the next process.
        restarts = {"max_restarts": -1, "max_task_retries": 0}
        actor = ray.remote(**restarts, num_cpus=0, num_gpus=gpus, scheduling_strategy="SPREAD")(ServerProcess)
        self._ray = ray
        self.actor = actor.remote(*options, **variables)

    def ready(self) -> list[str]:
        """Waits until the actor's server answers. Returns its endpoints, with the address of its machine."""

        def endpoints(server: ServerProcess) -> list[str]:
            import ray  # pyright: ignore[reportMissingImports]

            address = ray.util.get_node_ip_address()
            return [endpoint.replace("0.0.0.0", address) for endpoint in server.ready()]

        # Ray repeats this call until a process of the actor completes it.
        return self._get(self.actor.__ray_call__.options(max_task_retries=-1).remote(endpoints))

    def complete(self, prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> Answer:
        """Completes a prompt, as `ServerProcess.complete` does. If the actor ends, its answer is lost."""
        return self._get(self.actor.complete.remote(prompt, max_tokens, salt))

    def close(self) -> None:
        """Ends the actor, and with it the server."""
        self._ray.kill(self.actor)

    def _get(self, ref: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref, timeout=SECONDS)
        except errors.RayTaskError as error:  # its text has a traceback
            raise error.cause from None
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            raise ServerEnded(str(error)) from error


def _address(text: str) -> ipaddress.IPv4Address:
    """The type of an argument with an address."""
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted an IPv4 address") from None


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = commands.Parser("fleet", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = parser.add_argument
    option("--replicas", metavar="N", type=commands.number(int, 2), default=2, help="actors (default: %(default)s)")
    option("--address", metavar="HOST:PORT", help="a cluster's, which is joined (default: Ray starts on this machine)")
    option(
        "--bind",
        metavar="IP",
        type=_address,
        default=ipaddress.IPv4Address(LOOPBACK),
        help="address that replicas publish at; 0.0.0.0 is all of a machine's (default: %(default)s)",
    )
    option("--curve", action="store_true", help="encrypt events, with new keys")
    option("--gpus", metavar="N", type=commands.number(float, 0), default=0, help="of each replica (default: none)")
    option("--quick", action="store_true", help="few questions: a test of the demo")
    commands.add_compile_cache(parser)
    args = parser.parse_args(arguments)
    if not args.curve and not args.bind.is_loopback:
        reason = "whoever reaches the port reads which prompts are cached"
        parser.error(f"--bind: got {args.bind} without --curve, wanted a loopback address or keys: {reason}")
    for extra in ("fleet", "serve"):
        commands.check_extra(parser, extra)
    import ray  # pyright: ignore[reportMissingImports]
    import zmq

    from kvjax.interop.vllm import Curve

    extra_options = ["--no-compile-cache"] if args.no_compile_cache else []
    extra_options += ["--curve"] if args.curve else []
    public_key, secret_key = zmq.curve_keypair()
    curve = Curve(*zmq.curve_keypair(), public_key) if args.curve else None
    num_documents, num_questions = (2, 4) if args.quick else (3, 12)  # a replica holds three documents
    pairs = router.questions(num_documents * args.replicas, num_questions)
    cluster = {"address": args.address or "local", **({} if args.address else {"include_dashboard": False})}
    try:
        ray.init(**cluster, logging_level="warning")
    except (ConnectionError, ValueError) as error:
        parser.error(f"--address: {error}")
    try:
        options = router.options(*extra_options, host=str(args.bind))
        names = [str(replica) for replica in range(1, args.replicas + 1)]
        replicas = {name: Replica(*options, gpus=args.gpus, **{wires.CURVE_KEY: secret_key.decode()}) for name in names}
        router.play("fleet", router.Fleet(replicas, curve), pairs)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
