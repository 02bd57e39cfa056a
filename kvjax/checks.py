# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments while a function is traced. Errors name the argument, the value given and the value wanted."""

from __future__ import annotations

import contextlib
import functools
import inspect
import reprlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._arrays import alive
from kvjax._compile import log, own_transfers
from kvjax.layers import is_integer as is_integer
from kvjax.layers import static_int as static_int
from kvjax.spec import CacheSpec
from kvjax.state import CacheState


def on_state[F: Callable[..., Any]](verb: F) -> F:
    """Makes a function of a state raise a ValueError for any other argument, such as the `Cache` around a state.

    It also refuses a donated state, except inside your own jitted call, because jax has read the arguments before.
    """
    is_verb = verb.__module__.startswith("kvjax.verbs.")

    @functools.wraps(verb)
    @own_transfers()
    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state, CacheState):
            check_alive(state, name="state")
            if is_verb and not _is_traced(state.seqs.length, args, kwargs):
                _count_verb(verb, kwargs)
            return verb(state, *args, **kwargs)
        kind = type(state).__name__
        name = verb.__name__
        wanted = "a CacheState, such as kvjax.init makes"
        if isinstance(getattr(state, "state", None), CacheState):
            method = f", or the method cache.{name}" if hasattr(state, name) else ""
            wanted = f"its state: cache.state{method}"
        raise ValueError(f"state: got a {kind}, wanted {wanted}")

    return cast(F, call)


_eager_calls: dict[str, int] = {}  # of each verb in this process


class _Counting(threading.local):
    is_off = False  # inside of a call that is counted by its own name


_counting = _Counting()


@contextlib.contextmanager
def counted_as(name: str, static: tuple[str, ...], *arguments: Any) -> Iterator[None]:
    """Counts the verbs called inside as a single call of a function of kvjax, outside jit."""
    if not _is_traced(arguments):
        _count_eager_call(name, f"kvjax.{name}", static)
    before = _counting.is_off
    _counting.is_off = True
    try:
        yield
    finally:
        _counting.is_off = before


def _count_verb(verb: Callable[..., Any], options: dict[str, Any]) -> None:
    """Counts a call of a verb outside jit."""
    if _counting.is_off:
        return
    name = verb.__name__
    homes = [home for home in ("kvjax", "kvjax.tiers", "kvjax.stores") if hasattr(sys.modules.get(home), name)]
    static = tuple(option for option in static_options(verb) if option in options)
    _count_eager_call(name, f"{homes[0] if homes else verb.__module__}.{name}", static)


def _count_eager_call(name: str, path: str, static: tuple[str, ...]) -> None:
    """Counts a call outside jit. The second call is reported in the log: jax compiles each of them anew."""
    _eager_calls[name] = _eager_calls.get(name, 0) + 1
    if _eager_calls[name] != 2:
        return
    static_argnames = f", static_argnames={static!r}" if static else ""
    log.warning(
        "%s was called outside jit a second time, and each such call compiles for seconds. Write once "
        "%s = jax.jit(%s%s), or the same with kvjax.Cache.%s, and call the result",
        *(name, name, path, static_argnames, name),
    )


class MadeByCreate:
    """A class with a method `create` that takes a spec. Calling the class itself with a spec is a ValueError."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raises a ValueError for a spec."""
        del kwargs
        if args and isinstance(args[0], CacheSpec):
            raise ValueError(
                f"{cls.__name__}: got a spec, wanted {cls.__name__}.create(spec), which makes an empty cache"
            )
        return super().__new__(cls)


def check_alive(*trees: Any, name: str = "cache") -> None:
    """Raises a ValueError if an array of a cache, or of another argument, has been donated."""
    if not alive(trees):
        raise ValueError(f"{name}: was donated to an earlier call: go on with the result of that call")


def check_on_host(name: str, arguments: Any, instead: str) -> None:
    """Raises a ValueError if called while a program is traced. Under `vmap` only the arguments show it."""
    if _is_traced(arguments):
        raise ValueError(f"{name}: got a call inside a program (jit, vmap, shard_map), wanted host code: {instead}")


def _is_traced(*arguments: Any) -> bool:
    """Whether a program is traced at present. Under `vmap` only the arguments show it."""
    return any(isinstance(leaf, Tracer) for leaf in [*jax.tree.leaves(arguments), jnp.empty(())])


def array_of(name: str, value: Any, wanted: str) -> jax.Array:
    """Returns `value` as an array, or raises a ValueError with its name for text, ragged lists and so on."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {value!r:.80}, wanted {wanted}{_HINTS.get(name, '')}") from error


def check_32_bits(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raises a ValueError if an argument has integers beyond 32 bits, for host code calling a jitted `verb`.

    jax would drop their upper bits before `integers` sees them: image 2**40 + 5 would become image 5.
    """
    arguments = _signature(verb).bind(*args, **kwargs).arguments
    for name, value in arguments.items():
        if not isinstance(value, CacheState):
            for leaf in jax.tree.leaves(value):
                _check_width(name, leaf)


_signature = functools.cache(inspect.signature)
_HINTS = {"namespace": "; kvjax.Namespaces numbers salts and LoRAs"}


def _check_width(name: str, value: Any) -> None:
    """Raises a ValueError if integers on the host, or 64-bit integers on a device, do not fit into 32 bits."""
    if isinstance(value, list | tuple):
        for part in value:
            _check_width(name, part)
        return
    if isinstance(value, int) and not isinstance(value, bool):
        low = high = value
    elif _may_be_wide(value) and np.size(value):
        numbers = np.asarray(value)
        low = int(numbers.min())
        high = int(numbers.max())
    else:
        return
    if low < -(2**31) or high >= 2**31:
        raise ValueError(f"{name}: got numbers from {low} to {high}, wanted 32-bit integers")


def _may_be_wide(value: Any) -> bool:
    """Whether the value is an array of readable integers, on the host or of 64 bits on a device."""
    if isinstance(value, jax.Array):
        return not isinstance(value, Tracer) and value.dtype in (np.int64, np.uint64)
    return isinstance(value, np.ndarray | np.integer) and np.issubdtype(value.dtype, np.integer)


def integers(name: str, value: Any, shape: tuple[int | str, ...] | None = None) -> jax.Array:
    """Returns `value` as i32 of the wanted shape (a string stands for any size), or raises a ValueError."""
    _check_width(name, value)
    array = array_of(name, value, "integers")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: got dtype {array.dtype}, wanted integers")
    if shape is not None and (
        array.ndim != len(shape)
        or any(isinstance(size, int) and size != got for got, size in zip(array.shape, shape, strict=True))
    ):
        raise ValueError(f"{name}: got shape {list(array.shape)}, wanted [{', '.join(map(str, shape))}]")
    return array.astype(jnp.int32)


def host_integers(name: str, value: Any, dtype: Any, wanted: str) -> np.ndarray:
    """Returns `value` as a numpy array [K] of a dtype with this range, or raises a ValueError."""
    try:
        numbers = np.asarray(list(value) if isinstance(value, Iterable) else value)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{name}: got {reprlib.repr(value)}, wanted {wanted}") from error
    info = np.iinfo(dtype)
    fits = numbers.ndim == 1 and (not numbers.size or numbers.dtype.kind in "iu")
    if not fits or np.any((numbers < info.min) | (numbers > info.max)):
        raise ValueError(f"{name}: got {reprlib.repr(value)}, wanted {wanted}")
    return numbers.astype(dtype)


def check_bool(name: str, value: Any) -> None:
    """Raises a ValueError unless the value is a bool."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: got {value!r:.80}, wanted a bool")


def static_int32(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as a Python int of at least `minimum` that fits into 32 bits, like all numbers of a state."""
    try:
        value = static_int(name, value, minimum)
    except ValueError as error:
        raise ValueError(f"{error}{_HINTS.get(name, '')}") from error
    _check_width(name, value)
    return value


def one_or_more(name: str, value: Any) -> jax.Array:
    """Returns `value` as i32[] or i32[R]."""
    array = integers(name, value)
    return array if array.ndim == 0 else integers(name, array, ("R",))


def each_row(name: str, value: Any, rows: tuple[int, ...]) -> jax.Array:
    """Returns `value` as i32 of shape `rows`. A single number stands for all rows."""
    array = integers(name, value)
    return jnp.broadcast_to(array, rows) if array.ndim == 0 else integers(name, array, rows)


def most_tokens(num_tokens: Any, max_tokens: Any) -> int:
    """Returns `max_tokens` as an int of at least 1. None means `num_tokens` if it is a static number for all rows."""
    if max_tokens is not None:
        return static_int32("max_tokens", max_tokens, 1)
    if isinstance(num_tokens, jax.Array | np.ndarray | Sequence) and not isinstance(num_tokens, str):
        got = f"None with num_tokens i32{list(integers('num_tokens', num_tokens).shape)}"
        raise ValueError(f"max_tokens: got {got}, wanted an int: the largest number of tokens of a row")
    return static_int32("num_tokens", num_tokens, 1)


def check_functions(**functions: Any) -> None:
    """Raises a ValueError if a value is neither None nor callable."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}: got {value!r:.80}, wanted a function or None")


def floats(name: str, value: Any) -> jax.Array:
    """Returns `value` as an array of floating numbers."""
    array = array_of(name, value, "an array of floating numbers")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name}: got {array.dtype}, wanted a floating dtype")
    return array


def flags(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns `value` as bool of the wanted shape. Without its first axis it stands for every entry of that axis."""
    wanted = f"bool[{', '.join(map(str, shape))}]"
    array = array_of(name, value, wanted)
    if array.dtype != jnp.bool_ or array.shape not in (shape, shape[1:]):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}, wanted {wanted}")
    return jnp.broadcast_to(array, shape)


def row_mask(name: str, value: Any, rows: int) -> jax.Array:
    """Returns `value` as bool[rows]."""
    array = array_of(name, value, f"bool[{rows}]")
    if array.dtype != jnp.bool_ or array.shape != (rows,):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}, wanted bool[{rows}]")
    return array


def static_options(verb: Callable[..., Any]) -> tuple[str, ...]:
    """The static options of a verb: numbers and tiers, which callers pass by keyword."""
    options = [p for p in inspect.signature(verb).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return tuple(p.name for p in options if str(p.annotation).startswith(("int", "tuple")))


def face(method: Callable[..., Any], verb: Callable[..., Any], **options: Any) -> Any:
    """Gives a method the name, docstring and parameters of the verb that it calls with these options."""
    signature = inspect.signature(functools.partial(verb, **options))
    (name, state), *rest = signature.parameters.items()
    assert name == "state"
    returns = signature.return_annotation.replace("CacheState", "Self")
    method = functools.update_wrapper(own_transfers()(method), verb)
    vars(method)["__signature__"] = signature.replace(
        parameters=[state.replace(name="self", annotation=state.empty), *(parameter for _, parameter in rest)],
        return_annotation=returns,
    )
    return method
