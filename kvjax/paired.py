# SPDX-License-Identifier: Apache-2.0
"""A state together with its bytes, for those who do not want to think about copies."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from kvjax import beam, cache, control
from kvjax.events import Events
from kvjax.model import Model, forward
from kvjax.policies import EvictionPolicy
from kvjax.pool import Pools, apply, init_pools
from kvjax.show import one_line, page
from kvjax.spec import CacheSpec
from kvjax.state import CacheState
from kvjax.view import ragged, view


def alive(tree: Any) -> bool:
    """Whether no array of it has been donated."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, Tracer))
    return not any(x.is_deleted() for x in arrays)


def check_alive(*trees: Any) -> None:
    """Raises a ValueError if an array of a cache has been donated."""
    if not alive(trees):
        raise ValueError("cache: was donated to an earlier call: go on with what that call returned")


def face(method: Callable[..., Any], verb: Callable[..., Any], owner: str, **given: Any) -> Any:
    """The method with the name, the docstring and the parameters of the verb on states that it calls with `given`."""
    signature = inspect.signature(functools.partial(verb, **given))
    (name, state), *rest = signature.parameters.items()
    assert name == "state"
    returns = signature.return_annotation.replace("CacheState", owner)
    method = functools.update_wrapper(method, verb)
    vars(method)["__signature__"] = signature.replace(
        parameters=[state.replace(name="self", annotation=state.empty), *(parameter for _, parameter in rest)],
        return_annotation=returns,
    )
    return method


def _method[**P](
    verb: Callable[Concatenate[CacheState, P], tuple[CacheState, Events]],
) -> Callable[Concatenate[Cache, P], tuple[Cache, Events]]:
    """A verb on states as a method that also executes the copies it orders."""

    def method(self: Cache, *args: Any, **kwargs: Any) -> tuple[Cache, Events]:
        check_alive(self)
        state, events = verb(self.state, *args, **kwargs)
        pools = apply(self.pools, events) if verb in (cache.admit, cache.extend) else self.pools
        return Cache(state, pools), events

    return face(method, verb, "Cache")


def _reader[**P, R](verb: Callable[Concatenate[CacheState, P], R]) -> Callable[Concatenate[Cache, P], R]:
    """A question about a state as a method."""

    def method(self: Cache, *args: Any, **kwargs: Any) -> R:
        check_alive(self.state)
        return verb(self.state, *args, **kwargs)

    return face(method, verb, "Cache")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A cache's state and the pools that hold its K/V; a value like each of them, with the verbs as methods.

    Donate it to jitted steps: `jax.jit(step, donate_argnums=...)`. What a state was before such a step is then worth
    nothing without its pools; to go back and go on from there, `fork` the rows first.

    Attributes:
      state: the metadata.
      pools: the K/V.
    """

    state: CacheState
    pools: Pools

    @classmethod
    def create(
        cls,
        spec: CacheSpec,
        policy: EvictionPolicy | None = None,
        num_blocks: ArrayLike | None = None,
        *,
        policy_state: Any = None,
    ) -> Cache:
        """An empty cache with pools of zeros; see `init` for the arguments."""
        return cls(cache.init(spec, policy, num_blocks, policy_state=policy_state), init_pools(spec))

    admit = _method(cache.admit)
    extend = _method(cache.extend)
    commit = _method(cache.commit)
    fork = _method(cache.fork)
    truncate = _method(cache.truncate)
    release = _method(cache.release)
    beam_step = _method(beam.beam_step)
    evict = _method(control.evict)
    pin = _method(control.pin)
    unpin = _method(control.unpin)
    reset = _method(control.reset)
    lookup = _reader(cache.lookup)
    view = _reader(view)
    ragged = _reader(ragged)

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        return page(self)

    def step(
        self,
        model: Model,
        tokens: jax.Array,
        count: jax.Array,
        seqs: jax.Array | None = None,
        *,
        now: ArrayLike = 0,
        logits: Literal["last", "all"] = "last",
    ) -> tuple[Cache, jax.Array, Events]:
        """See `kvjax.step`."""
        check_alive(self)
        if logits not in ("last", "all"):
            raise ValueError(f"logits: got {logits!r}, wanted 'last' or 'all'")
        last = jnp.maximum(count - 1, 0) if logits == "last" else None
        computed, pools = forward(model, tokens, self.pools, self.view(count, tokens.shape[1], seqs), last)
        after, events = Cache(self.state, pools).commit(tokens, count, seqs=seqs, now=now)
        return after, computed, events
