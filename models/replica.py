# SPDX-License-Identifier: Apache-2.0
"""A replica of `fleet.py`: an engine that publishes what it caches, as an actor of Ray's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import commands, router

if TYPE_CHECKING:
    from kvjax.interop.vllm import Curve, Publisher

ANY_PORT = ("*", "*")


class Replica:
    """An engine, in a process of Ray's; Ray makes another one when that has ended.

    Args:
      host: the IPv4 address that it publishes at.
      curve: the publisher's keys; None: in clear.
      keep_programs: whether programs are cached on disk.
    """

    def __init__(self, host: str, curve: Curve | None, keep_programs: bool):
        commands.keep_programs(keep_programs)
        self._host, self._curve, self._engine = host, curve, None

    def publish(self, ports: tuple[str, str] = ANY_PORT) -> tuple[tuple[str, str], int | None]:
        """Begins with an empty cache, unless it has begun.

        Args:
          ports: for events and for replays; where they cannot be had it takes others.

        Returns:
          The addresses of both, and the number of the last message.
        """
        import ray  # pyright: ignore[reportMissingImports]

        if self._engine is None:
            model, spec = router.bundled()
            try:
                source = self._open(spec, ports)
            except OSError:
                source = self._open(spec, ANY_PORT)
            self._engine = router.Engine(model, source, spec)
        source, address = self._engine.source, ray.util.get_node_ip_address()
        source.flush(router.SECONDS)
        events, replays = (str(one).replace("0.0.0.0", address) for one in (source.endpoint, source.replay_endpoint))
        return (events, replays), source.last

    def _open(self, spec: Any, ports: tuple[str, str]) -> Publisher:
        from kvjax.interop.vllm import Publisher

        bind, replay = (f"tcp://{self._host}:{port}" for port in ports)
        return Publisher(spec, bind=bind, replay=replay, curve=self._curve)

    def call(self, verb: str, *args: Any) -> Any:
        """Calls a method of the engine; None in a process that Ray has just started, which does not publish yet."""
        return None if self._engine is None else getattr(self._engine, verb)(*args)
