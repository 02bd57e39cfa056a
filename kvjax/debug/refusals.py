# SPDX-License-Identifier: Apache-2.0
"""`checked`: verbs raise for a refused request, and for a commit of other tokens than the row's prompt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from kvjax._arrays import alive
from kvjax.events.records import Status
from kvjax.state import CacheState


class RequestError(ValueError):
    """A request refused by a checked verb, with the `row` and the `status`."""

    def __init__(self, verb: str, row: int, status: Status, reason: str = ""):
        super().__init__(f"{verb}: row {row} of the request was refused with {status.name}{reason and f': {reason}'}")
        self.row = row
        self.status = status


def checked[**P, R: tuple[Any, ...]](
    verb: Callable[P, R], *, prompts: Mapping[int, Sequence[int]] | None = None
) -> Callable[P, R]:
    """Wraps a verb on states or caches, or `kvjax.step`, jitted or not. The wrapper raises for broken preconditions.

    A full pool or row is not an error: NO_BLOCKS and ROW_FULL come back as data. Inside a program of yours the wrapper
    reads the status in a `jax.debug.callback`, and jax raises a `JaxRuntimeError` with the same message.

    Args:
      verb: any function whose last result is `Events`, such as `kvjax.admit`, `kvjax.Cache.admit` or
        `jax.jit(kvjax.step)`.
      prompts: {seq: tokens}; the prompts of rows, for `commit` and `step`. You may change it between calls. A call
        with other tokens than the next tokens of the row's prompt is an error.

    Raises:
      RequestError: for BAD_REQUEST or HELD, with the row, the status and the row's tokens.
      ValueError: for tokens other than the next tokens of a prompt, and for an `extend` of a row whose last tokens
        wait for their `commit`. The verb has not been called then.

    Example:
      >>> admit = kvjax.debug.checked(kvjax.admit)
      >>> state = kvjax.init(kvjax.make_spec(num_blocks=8, max_seqs=2, max_length=32, block_size=4))
      >>> state, _ = admit(state, 0, np.arange(10), 10)
      >>> try:
      ...     admit(state, 0, np.arange(10), 10)
      ... except kvjax.debug.RequestError as error:
      ...     print(error)
      admit: row 0 of the request was refused with HELD: seq 0 had 10 reserved tokens, 0 of them committed
    """
    name = getattr(verb, "__name__", "verb")

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        request = _request(verb, args, kwargs)
        _on_host(functools.partial(_verify_prompts, name, prompts or {}), request)
        if name == "extend":
            _on_host(_verify_committed, request)
        result = verb(*args, **kwargs)
        _on_host(functools.partial(_verify_status, name), request, result[-1].status)
        return result

    return call


def _on_host(verify: Callable[..., None], *arguments: Any) -> None:
    """Calls `verify` with numpy arrays, now or when the present program runs."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments)):
        jax.debug.callback(verify, *arguments)
    else:
        verify(*jax.device_get(arguments))


def _request(verb: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a request to show in an error: its rows and tokens, and the earlier tokens of all rows."""
    try:
        given = inspect.signature(verb).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the verb raises an error of its own, or has no signature
        given = {}
    names = {
        "active": "active",
        "seqs": "seqs",
        "seq": "seqs",
        "count": "num_tokens",
        "num_tokens": "num_tokens",
        "tokens": "tokens",
    }
    request = {names[name]: value for name, value in given.items() if name in names and value is not None}
    candidates = [getattr(verb, "__self__", None), *args, *kwargs.values()]
    states = [state for part in candidates if isinstance(state := getattr(part, "state", part), CacheState)]
    if states and alive(states[0]):
        seqs = states[0].seqs
        request |= {"length": seqs.length, "committed": seqs.committed}
    # Copies: the verb may donate the state.
    return {name: value if isinstance(value, Tracer) else np.array(value) for name, value in request.items()}


def _rows(request: Mapping[str, np.ndarray], num_rows: int) -> np.ndarray:
    """i32[R]; the rows of a request, or all rows."""
    return np.atleast_1d(request.get("seqs", np.arange(num_rows)))


def _verify_prompts(verb: str, prompts: Mapping[int, Sequence[int]], request: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the request continues the prompt of each row."""
    if not prompts or not {"tokens", "num_tokens", "committed"} <= request.keys():
        return
    counts = np.atleast_1d(request["num_tokens"])
    for row, seq in enumerate(_rows(request, len(counts)).tolist()):
        if seq not in prompts or not 0 <= seq < len(request["committed"]):
            continue
        start = int(request["committed"][seq])
        wanted = np.asarray(prompts[seq])[start : start + max(int(counts[row]), 0)].tolist()
        got = np.asarray(request["tokens"])[row, : len(wanted)].tolist()
        if got != wanted:
            first = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(got))
            raise ValueError(
                f"{verb}: got tokens {got[first : first + 4]} for position {start + first} of seq {seq}, wanted "
                f"{wanted[first : first + 4]}, which continue its prompt; after a hit pass kvjax.rest(tokens, cached)"
            )


def _verify_committed(request: Mapping[str, Any]) -> None:
    """Raises a ValueError for an `extend` by no more tokens than the row still has to commit: a `commit` is missing."""
    if not {"active", "committed"} <= request.keys():
        return
    active = np.asarray(request["active"])
    counts = np.broadcast_to(request.get("num_tokens", 1), active.shape)
    for row, seq in enumerate(_rows(request, len(active)).tolist()):
        if not active[row] or not 0 <= seq < len(request["length"]) or request["committed"][seq] == 0:
            continue
        pending = int(request["length"][seq] - request["committed"][seq])
        if pending >= counts[row] > 0:
            raise ValueError(
                f"extend: seq {seq} has {pending} reserved tokens without a commit, wanted fewer than the "
                f"{int(counts[row])} new ones: commit the tokens of each step, or kvjax.trim the row"
            )


def _verify_status(verb: str, request: Mapping[str, Any], status: np.ndarray) -> None:
    """Raises a `RequestError` for the first refused row of a request."""
    for row, code in enumerate(np.asarray(status).tolist()):
        if code in (Status.BAD_REQUEST, Status.HELD):
            raise RequestError(verb, row, Status(code), _reason(request, row, len(status)))


def _reason(request: Mapping[str, Any], row: int, num_rows: int) -> str:
    """The earlier and the new tokens of a refused row in words, or "" if the request names no row."""
    seqs = _rows(request, num_rows)
    if "length" not in request or len(seqs) != num_rows:
        return ""
    seq = int(seqs[row])
    if not 0 <= seq < len(request["length"]):
        return f"seq {seq} is outside 0..{len(request['length']) - 1}"
    length = int(request["length"][seq])
    committed = int(request["committed"][seq])
    words = f"seq {seq} had {length} reserved tokens, {committed} of them committed"
    if "num_tokens" not in request:
        return words
    came = int(np.broadcast_to(request["num_tokens"], (num_rows,))[row])
    words += f", and {came} came"
    if "tokens" in request and came > length - committed:
        words += "; after a hit pass kvjax.rest(tokens, cached), and extend the row before you decode"
    return words
