# SPDX-License-Identifier: Apache-2.0
"""A cache together with its host tier. A method calls a verb and makes its moves and copies, in host code."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax._compile import OutermostJit
from kvjax.cache import AnyCache, Cache, reader
from kvjax.checks import check_32_bits, check_alive, check_on_host, face, integers, static_options
from kvjax.debug.counts import one_line
from kvjax.events.records import Events, Status
from kvjax.ledger import human, pool_bytes
from kvjax.model import Model, check_model, check_placement
from kvjax.pools.device import Pools, apply
from kvjax.pools.host import HostPools, TransferError, init_host_pools, move
from kvjax.pools.stage import Staged, check_staged
from kvjax.processes import failed_anywhere
from kvjax.spec import CacheSpec
from kvjax.state import CacheState
from kvjax.verbs.admit import admit, lookup
from kvjax.verbs.adopt import adopt
from kvjax.verbs.backup import backup
from kvjax.verbs.extend import extend
from kvjax.verbs.offload import complete, offload, onboard, watermark
from kvjax.verbs.release import release
from kvjax.verbs.swap import swap_in, swap_out

_release = OutermostJit(release, donate_argnums=0)
_finish_adoption = OutermostJit(Cache._finish_adoption, donate_argnums=0)
_adoption_shapes: set[Any] = set()  # shapes for which it is compiled
_step = OutermostJit(Cache.step, donate_argnums=0, static_argnames="logits")


def _finish(cache: Cache, events: Events, ok: ArrayLike) -> tuple[Cache, Events]:
    """Finishes a verb after its moves: completes or fails them in the state, and executes the copies."""
    state, done = complete(cache.state, events.transfer, ok)
    return Cache(state, apply(cache.pools, events)), done


_finish = OutermostJit(_finish, donate_argnums=0)


class FailedTransfer(RuntimeError):
    """Failed moves between the tiers. No wrong bytes are findable, and rows that lost K/V have been released.

    A verb that only moves blocks (`offload`, `onboard`, `watermark`, `swap_out`, `swap_in`) is undone: its blocks and
    rows are where they were, and only blocks whose bytes a move may have overwritten are lost. A failed `backup` costs
    the copies alone.

    Attributes:
      tiered: the cache to go on with.
      lost: the released rows.
      events: events of the verb, which was done for all other rows. An undone verb has no events, no `transfer` and the
        status NO_BLOCKS.
      removed: events of removed blocks.
    """

    def __init__(self, message: str, tiered: TieredCache, lost: list[int], events: Events, removed: Events):
        super().__init__(message)
        self.tiered = tiered
        self.lost = lost
        self.events = events
        self.removed = removed


class _JittedVerb:
    """A jitted verb on states. Its static options stay static, and so does `num_tokens` if it is an int for all rows.

    Attributes:
      static: the names of the static options.
    """

    def __init__(self, verb: Callable[..., Any], donated: tuple[int, ...], **options: Any):
        """Jits the verb. `options` replace its defaults."""
        self._signature = inspect.signature(verb)
        self.static = static_options(verb)
        jit = functools.partial(OutermostJit, functools.partial(verb, **options), donate_argnums=donated)
        self._by_numbers = jit(static_argnames=self.static)
        self._by_int = jit(static_argnames=(*self.static, "num_tokens"))

    def program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[OutermostJit, tuple[str, ...]]:
        """Returns the program for a call with these arguments, and their static values."""
        given = self._signature.bind_partial(None, *args, **kwargs).arguments
        num_tokens = given.get("num_tokens")
        static = self.static
        is_int = isinstance(num_tokens, int | np.integer) and given.get("max_tokens") is None
        program = self._by_numbers
        if is_int and "max_tokens" in self._signature.parameters:
            program = self._by_int
            static = (*static, "num_tokens")
        return program, tuple(f"{name}={given[name]!r}" for name in static if name in given)


def _moving_method[**P](
    verb: Callable[Concatenate[CacheState, P], tuple[CacheState, Events]], *, undoes: bool = False, **options: Any
) -> Callable[Concatenate[TieredCache, P], tuple[TieredCache, Events]]:
    """Turns a verb on states into a jitted method that also makes its moves and copies.

    A verb that `undoes` orders no copies. It keeps the previous state, and returns to it if a move fails.
    """
    jitted = _JittedVerb(verb, () if undoes else (0,), **options)
    compiled: set[Any] = set()  # shapes and static values

    def method(self: TieredCache, *args: Any, **kwargs: Any) -> tuple[TieredCache, Events]:
        name = f"TieredCache.{verb.__name__}"
        arguments = (self.cache, self.host, args, kwargs)
        check_on_host(
            name, arguments, "it moves blocks; inside one use the verbs of its `cache`, or kvjax.serving.serve"
        )
        check_alive(self.cache, self.host)
        check_32_bits(verb, self.state, *args, **kwargs)
        program, static = jitted.program(args, kwargs)
        shapes = jax.tree.structure((self.cache, args, kwargs)), *map(np.shape, jax.tree.leaves((args, kwargs)))
        if (shapes, static) not in compiled:
            # Compiles `_finish` too before the verb takes the state, so that a compile error loses nothing.
            state, events = program.lower(self.state, *args, **kwargs).compile().out_info
            _finish.lower(Cache(state, self.pools), events, np.bool_(True)).compile()
            compiled.add((shapes, static))
        state, events = program(self.state, *args, **kwargs)
        return self._settle(state, events, undoes), events

    return face(method, verb, **options)


@functools.cache
def _jitted(verb: Callable[..., Any]) -> OutermostJit:
    """Jits a verb on states without moves and copies."""
    return OutermostJit(verb, donate_argnums=0, static_argnames=static_options(verb))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TieredCache(AnyCache):
    """A cache and its host tier, with the verbs of both as methods. Use it in host code, between loops. It is a pytree.

    Every verb is jitted and donates the object, so continue with the result. A verb starts its moves and does not wait
    for them. Later programs wait only for the bytes they need. Pass `cache` to a loop, and put its result back with
    `replace`.

    Attributes:
      cache: the state and the device's pools, which a jitted loop takes.
      host: the host's pools.
    """

    cache: Cache
    host: HostPools

    @classmethod
    def _empty(
        cls, spec: CacheSpec, policy: Any, num_blocks: Any, policy_state: Any, where: dict[str, Any]
    ) -> TieredCache:
        if not spec.has_host:
            raise ValueError("spec: got a spec without host blocks, wanted num_host_blocks above 0")
        sizes = list(num_blocks.values()) if isinstance(num_blocks, Mapping) else num_blocks
        check_on_host("TieredCache.create", (sizes, policy_state), "inside one make a Cache: it has no host pools")
        empty = Cache.create(spec, policy, num_blocks, policy_state=policy_state, **where)
        pools, host = init_host_pools(empty.pools)
        state = jax.tree.map(lambda x: jax.device_put(x, x.sharding), empty.state)  # committed like moved pools
        return cls(Cache(state, pools), host)

    def replace(self, cache: Cache) -> TieredCache:
        """Pairs this host tier with another cache, such as the result of a loop."""
        return TieredCache(cache, self.host)

    @property
    def state(self) -> CacheState:
        """The metadata of both tiers."""
        return self.cache.state

    @property
    def pools(self) -> Pools:
        """The device's K/V."""
        return self.cache.pools

    admit = _moving_method(admit, tiers=("device", "host"))
    extend = _moving_method(extend, tiers=("device", "host"))
    backup = _moving_method(backup)
    offload = _moving_method(offload, undoes=True)
    onboard = _moving_method(onboard, undoes=True)
    watermark = _moving_method(watermark, undoes=True)
    swap_out = _moving_method(swap_out, undoes=True)
    swap_in = _moving_method(swap_in, undoes=True)
    lookup = reader(lookup, OutermostJit(lookup, static_argnames=static_options(lookup)))
    _adopt = _moving_method(adopt, tiers=("device", "host"))

    def _call(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[TieredCache, Events]:
        check_alive(self.cache, self.host)
        check_32_bits(verb, self.state, *args, **kwargs)
        state, events = _jitted(verb)(self.state, *args, **kwargs)
        return self.replace(Cache(state, self.pools)), events

    def _adopted(self, tokens: Any, length: Any, kv: Staged, have: Any, options: Any) -> tuple[TieredCache, Events]:
        """Adopts K/V from outside. Blocks leaving the device to make room go to the host."""
        tokens = integers("tokens", tokens, ("T",))
        check_staged(kv, self.state.spec, -(-tokens.size // self.state.spec.block_size))
        check_32_bits(adopt, self.state, tokens, length, have, **options)
        now = options["now"]
        arguments = self.cache, tokens, length, kv, have, options
        shapes = jax.tree.structure(arguments), *map(np.shape, jax.tree.leaves(arguments))
        if shapes not in _adoption_shapes:
            # Compiled before anything is donated, so that a compile error loses nothing.
            reserve = functools.partial(adopt, tiers=("device", "host"))
            events = jax.eval_shape(reserve, self.state, tokens, length, have, **options)[1]
            _finish_adoption.lower(self.cache, events, kv, have, now=now).compile()
            _adoption_shapes.add(shapes)
        try:
            tiered, events = self._adopt(tokens, length, have, **options)
        except FailedTransfer as failure:
            tiered = failure.tiered
            events = failure.events
            cache, _ = _finish_adoption(tiered.cache, events, kv, np.zeros_like(have, np.bool_), now=now)
            tiered = tiered.replace(cache)
            raise FailedTransfer(str(failure), tiered, failure.lost, events, failure.removed) from failure
        cache, events = _finish_adoption(tiered.cache, events, kv, have, now=now)
        return tiered.replace(cache), events

    def __repr__(self) -> str:
        on_device, on_host = map(human, pool_bytes(self.state.spec))
        return one_line(self, self.state, f"{on_device} of K/V", f"{on_host} on the host")

    def _stepped(
        self, model: Model, tokens: Any, count: Any, seqs: Any, now: Any, logits: Any, exact: Any
    ) -> tuple[TieredCache, jax.Array, Events]:
        check_alive(self.cache, self.host)
        check_model(model)
        check_placement(model, self.cache)
        check_32_bits(Cache.step, None, None, tokens, count, seqs, now=now)
        cache, computed, events = _step(self.cache, model, tokens, count, seqs, now=now, logits=logits, exact=exact)
        return self.replace(cache), computed, events

    def _settle(self, state: CacheState, events: Events, undoes: bool) -> TieredCache:
        """Makes the moves and then the copies, and completes the moves in the state."""
        pools = self.pools
        host = self.host
        failure = None
        if events.transfer is not None:
            try:
                pools, host = move(pools, host, events.transfer)
            except TransferError as error:
                pools = error.pools
                host = error.host
                failure = error
            if failed_anywhere(state, failure is not None) and failure is None:
                failure = RuntimeError("a move failed in another process")
        undone = undoes and failure is not None
        cache, done = _finish(Cache(self.state if undone else state, pools), events, np.bool_(failure is None))
        if failure is None:
            return TieredCache(cache, host)
        if undone:
            status = np.asarray(events.status)
            status = np.where(status == Status.OK, np.int32(Status.NO_BLOCKS), status)
            events = events.only(jnp.bool_(False)).replace(status=status, transfer=None)
        lost = np.flatnonzero(np.asarray(done.status) == Status.HELD).tolist()
        for row in lost:
            state, _ = _release(cache.state, np.int32(row))  # publishes nothing: its blocks are not in the index
            cache = Cache(state, cache.pools)
        raise FailedTransfer(str(failure), TieredCache(cache, host), lost, events, done) from failure


def joined(cache: Cache, host: HostPools | None) -> Cache | TieredCache:
    """Joins a cache and its host tier, if there is any."""
    return cache if host is None else TieredCache(cache, host)
