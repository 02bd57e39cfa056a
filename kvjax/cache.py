# SPDX-License-Identifier: Apache-2.0
"""A state together with its K/V. Its methods are the verbs, and they also make the copies of K/V."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from kvjax._arrays import Pytree
from kvjax._compile import own_transfers
from kvjax.checks import MadeByCreate, check_32_bits, check_alive, counted_as, face, integers
from kvjax.debug.counts import one_line
from kvjax.debug.text import page
from kvjax.events.records import Events
from kvjax.ledger import human, pool_bytes
from kvjax.model import Model, call, check_placement
from kvjax.pools.device import Pools, apply, init_pools
from kvjax.pools.host import HostPools
from kvjax.pools.selection import check_whole
from kvjax.pools.stage import Staged, check_staged, scatter
from kvjax.pools.views import mixed, ragged, view
from kvjax.spec import CacheSpec
from kvjax.state import CacheState, EvictionPolicy
from kvjax.verbs._request import TIERS
from kvjax.verbs.admit import admit, lookup
from kvjax.verbs.adopt import adopt, finish_adoption
from kvjax.verbs.commit import commit, is_refused
from kvjax.verbs.control import evict, forget_namespaces, pin, reset, unpin
from kvjax.verbs.extend import extend
from kvjax.verbs.fork import beam_step, fork
from kvjax.verbs.free_rows import free_rows
from kvjax.verbs.init import init
from kvjax.verbs.release import release
from kvjax.verbs.thin import thin
from kvjax.verbs.trim import trim
from kvjax.verbs.truncate import truncate


def _method[**P, C: AnyCache](
    verb: Callable[Concatenate[CacheState, P], tuple[CacheState, Events]],
) -> Callable[Concatenate[C, P], tuple[C, Events]]:
    """Turns a verb on states into a method, which each kind of cache calls in its own way."""

    def method(self: C, *args: Any, **kwargs: Any) -> tuple[C, Events]:
        return self._call(verb, *args, **kwargs)

    return face(method, verb)


def reader[**P, R](
    verb: Callable[Concatenate[CacheState, P], R], called: Callable[..., R] | None = None
) -> Callable[Concatenate[Any, P], R]:
    """Turns a function that reads a state into a method of a cache. `called` is the same function, jitted."""

    def method(self: Any, *args: Any, **kwargs: Any) -> R:
        check_alive(self.state)
        if called is not None:
            check_32_bits(verb, self.state, *args, **kwargs)
        return (called or verb)(self.state, *args, **kwargs)

    return face(method, verb)


class AnyCache(MadeByCreate):
    """A `Cache` or a `TieredCache`: the verbs of both as methods, and the parts of both.

    Attributes:
      state: the metadata.
      pools: the device's K/V.
      cache: the state and the pools together, which a jitted loop takes.
      host: the host's pools. None without a host tier.
    """

    state: CacheState
    pools: Pools
    cache: Cache
    host: HostPools | None
    _empty: Callable[..., Any]
    _call: Callable[..., Any]
    _adopted: Callable[..., Any]
    _stepped: Callable[..., Any]

    @classmethod
    def create(
        cls,
        spec: CacheSpec,
        policy: EvictionPolicy | None = None,
        num_blocks: ArrayLike | Mapping[int | str | None, ArrayLike] | None = None,
        *,
        policy_state: Any = None,
        mesh: Mesh | None = None,
        heads: str | None = None,
        context: str | None = None,
    ) -> Self:
        """Makes an empty cache with pools of zeros; see `init` and `init_pools` for the arguments.

        On a mesh every device has the whole state and a part of the pools.

        Raises:
          ValueError: if an argument is wrong, or for a `TieredCache` if the spec has no host tier.
        """
        return cls._empty(spec, policy, num_blocks, policy_state, {"mesh": mesh, "heads": heads, "context": context})

    admit = _method(admit)
    extend = _method(extend)
    commit = _method(commit)
    fork = _method(fork)
    truncate = _method(truncate)
    thin = _method(thin)
    trim = _method(trim)
    release = _method(release)
    beam_step = _method(beam_step)
    evict = _method(evict)
    forget_namespaces = _method(forget_namespaces)
    pin = _method(pin)
    unpin = _method(unpin)
    reset = _method(reset)
    lookup = reader(lookup)
    free_rows = reader(free_rows)
    view = reader(view)
    ragged = reader(ragged)
    mixed = reader(mixed)

    @own_transfers()
    def adopt(
        self,
        tokens: ArrayLike,
        length: ArrayLike,
        kv: Staged,
        have: ArrayLike,
        *,
        namespace: ArrayLike = 0,
        extra_ids: ArrayLike | None = None,
        requested_priority: ArrayLike = -1,
        hits: ArrayLike = 0,
        now: ArrayLike = 0,
    ) -> tuple[Self, Events]:
        """Adds K/V from outside for the uncached part of a prefix; see `kvjax.stores.adopt`.

        Args:
          tokens: i32[T]; a text, with any padding.
          length: i32[]; the number of its tokens.
          kv: F blocks of each group, in the order of the prefix. Blocks missing in `have` may hold anything.
          have: bool[G, F]; whether `kv` has each block.
          namespace: i32[]; see `Namespaces`.
          extra_ids: i32[T]; extra ids of the tokens, if the spec has them.
          requested_priority: i32[F, 2]; the priority and time to live of each block. -1 alone means the default for all
            blocks.
          hits: i32[F]; earlier uses of each block.
          now: i32[]; the time in ms.

        Returns:
          The cache, and events: removed, stored. Status BAD_REQUEST or NO_BLOCKS.
        """
        options = {"namespace": namespace, "extra_ids": extra_ids, "hits": hits, "now": now}
        options["requested_priority"] = requested_priority
        return self._adopted(tokens, length, kv, have, options)

    @own_transfers()
    def step(
        self,
        model: Model,
        tokens: jax.Array,
        count: jax.Array,
        seqs: jax.Array | None = None,
        *,
        now: ArrayLike = 0,
        logits: Literal["last", "all"] = "last",
        exact: ArrayLike | None = None,
    ) -> tuple[Self, jax.Array, Events]:
        """See `kvjax.step`."""
        return self._stepped(model, tokens, count, seqs, now, logits, exact)

    def _repr_html_(self) -> str:
        return page(self)


class Cache(AnyCache, Pytree):
    """A cache's state and the pools of its K/V as a single pytree, with the verbs as methods.

    Donate it to jitted steps: `jax.jit(step, donate_argnums=...)`. You cannot go back to a copy of the state from
    before such a step, because its pools are gone: `fork` the rows first if you want to return to them.

    Attributes:
      state: the metadata.
      pools: the K/V.

    Example:
      >>> spec = kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> cache, events = kvjax.Cache.create(spec).admit(0, np.arange(10), 10)
      >>> bool(events.ok), cache.state.seqs.length.tolist()
      (True, [10, 0])
    """

    state: CacheState
    pools: Pools

    host = None

    @property
    def cache(self) -> Cache:
        """The cache itself. A `TieredCache` returns its part without the host tier."""
        return self

    @classmethod
    def _empty(cls, spec: CacheSpec, policy: Any, num_blocks: Any, policy_state: Any, where: dict[str, Any]) -> Cache:
        state = init(spec, policy, num_blocks, policy_state=policy_state)
        pools = init_pools(spec, **where)
        if where["mesh"] is not None:
            state = jax.device_put(state, NamedSharding(where["mesh"], PartitionSpec()))
        return cls(state, pools)

    def _call(self, verb: Callable[..., tuple[CacheState, Events]], *args: Any, **kwargs: Any) -> tuple[Cache, Events]:
        """Calls a verb and executes its copies."""
        check_alive(self)
        if kwargs.get("tiers") == TIERS[-1]:  # the copies would run before the moves
            hint = "kvjax.tiers.TieredCache moves blocks, and the verbs on states leave moves and copies to you"
            raise ValueError(f"tiers: got {TIERS[-1]}, wanted {TIERS[0]}: a Cache moves no blocks; {hint}")
        state, events = verb(self.state, *args, **kwargs)
        pools = apply(self.pools, events) if verb in (admit, extend) else self.pools
        return Cache(state, pools), events

    def _adopted(self, tokens: Any, length: Any, kv: Staged, have: Any, options: Any) -> tuple[Cache, Events]:
        check_alive(self)
        state, events = adopt(self.state, tokens, length, have, **options)
        return self.replace(state=state)._finish_adoption(events, kv, have, now=options["now"])

    def _finish_adoption(
        self, events: Events, kv: Staged, arrived: ArrayLike, *, now: ArrayLike = 0
    ) -> tuple[Cache, Events]:
        """Writes the bytes of blocks reserved by `kvjax.stores.adopt`, and makes them findable.

        Args:
          events: the events of `adopt`.
          kv: F blocks of each group. Missing blocks may hold anything.
          arrived: bool[G, F]; whether `kv` has each block.
          now: i32[]; the time in ms.

        Returns:
          The cache, and the events of both calls together, without `adopted`.
        """
        adopted = events.adopted
        if adopted is None:
            raise ValueError("events: got events of another verb, wanted the events of kvjax.stores.adopt")
        check_staged(kv, self.state.spec, num_columns := adopted.fill.shape[0])
        column = jnp.arange(1, num_columns + 1, dtype=jnp.int32)
        counts = jnp.max(jnp.where(adopted.blocks >= 0, column[None], 0), axis=1)
        pools = scatter(self.pools, kv, adopted.pool_rows, counts)
        state, stored = finish_adoption(self.state, adopted, arrived, now=now)
        return Cache(state, pools), events.followed_by(stored)

    def _stepped(
        self, model: Model, tokens: Any, count: Any, seqs: Any, now: Any, logits: Any, exact: Any
    ) -> tuple[Cache, jax.Array, Events]:
        check_alive(self)
        check_placement(model, self)
        if logits not in ("last", "all"):
            raise ValueError(f"logits: got {logits!r}, wanted 'last' or 'all'")
        check_whole(exact)
        seqs = None if seqs is None else integers("seqs", seqs, ("R",))
        rows = (self.state.spec.max_seqs,) if seqs is None else seqs.shape
        tokens = integers("tokens", tokens, (*rows, "C"))
        count = integers("count", count, rows)
        last = jnp.maximum(count - 1, 0) if logits == "last" else None
        # The model writes nothing for a row that `commit` refuses: a recurrent layer would overwrite its snapshot.
        refused = is_refused(self.state, tokens, count, seqs)
        computable = jnp.where(refused, 0, count)
        computed, pools = call(model, tokens, self.pools, self.view(computable, tokens.shape[1], seqs), last)
        # NaN, so nobody takes the logits of a refused row for an answer. Without a barrier, XLA fuses the decision into
        # the model's last product, and that of jaxlib 0.11.2 fails to compile it for a single row on a GPU.
        refused = jax.lax.optimization_barrier(refused)
        computed = jnp.where(jnp.expand_dims(refused, range(1, computed.ndim)), jnp.nan, computed)
        static = ("logits",) if logits != "last" else ()
        with counted_as("step", static, self.state.seqs.length, tokens, count):
            after, events = Cache(self.state, pools).commit(tokens, count, seqs=seqs, exact=exact, now=now)
        return after, computed, events

    def __repr__(self) -> str:
        return one_line(self, self.state, f"{human(pool_bytes(self.state.spec)[0])} of K/V")
