# SPDX-License-Identifier: Apache-2.0
"""The pools along a model call: each write continues the write before, and the model returns the pools of the last.

`write`, `rope_write`, `recur` and `attend` report here while a model is called (`recording`). A call is traced once for
all programs of its shapes, so this costs nothing at run time. Pools are told apart by the identity of their arrays. A
transformation such as `scan` or `remat` makes new arrays: from there on only stale pools are found.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

_PACKAGE = str(pathlib.Path(__file__).parents[1])
_Key = tuple[int, int]  # group and pool


class _Write(NamedTuple):
    layer: Any  # the layer's number, or a traced value
    where: str  # file and line


class _Pool:
    """The history of a pool during a call."""

    def __init__(self, given: Any):
        self.given = given
        self.latest = given
        self.stale: dict[int, Any] = {}  # arrays by id, which also keeps the ids from being used again
        self.writes: list[_Write] = []
        self.is_complete = True  # whether all writes so far are known, with static layers
        self.skipped: set[int] = set()  # layers whose snapshots the call keeps as they are

    @property
    def layers(self) -> set[int]:
        """The layers written so far, if they are static."""
        return {write.layer for write in self.writes if not isinstance(write.layer, Tracer)}

    def check_fresh(self, array: Any, what: str) -> None:
        """Raises an error for an array from before the last write, or from outside of the call."""
        if isinstance(self.given, Tracer) and not isinstance(array, Tracer):
            raise _refusal(f"pools: {what} pools from outside of the model call, wanted its argument `pools`")
        if id(array) in self.stale:
            self.refuse(array, what)

    def refuse(self, array: Any, what: str) -> None:
        """Raises an error for an array without the last write."""
        if self.writes:
            kind = "the pools that the model was given" if array is self.given else "pools from before that"
            last = self.writes[-1]
            raise _refusal(
                f"pools: {what} {kind}, wanted the result of the last write, of {layer_name(last.layer)} at "
                f"{last.where}: pools = kvjax.write(pools, ...)"
            )


class Probe:
    """An experiment with a model call: notes the arrays of each layer, and may change them.

    Attributes:
      noted: {(name, layer): array}; q, k, v and the results of attention, and what recurrent layers take and give, in
        the order of the call. Arrays inside of a transformation such as `scan` are missing.
      reads: how often attention reads the K/V of each layer. Reads inside of a transformation are missing.
      uses_cache: whether the call has written or read K/V.
    """

    def __init__(self) -> None:
        self.noted: dict[tuple[str, Any], Any] = {}
        self.reads: Counter[int] = Counter()
        self.uses_cache = False

    def kv(self, layer: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """The keys and values to write."""
        del layer
        return k, v

    def scale(self, layer: Any, scale: float, width: int) -> float:
        """The factor on the scores."""
        del layer, width
        return scale


class Lineage:
    """The pools of a model call."""

    def __init__(self, pools: Any, probe: Probe | None):
        self.probe = probe
        self.trace = getattr(next((array for _, array in _arrays(pools)), None), "_trace", None)
        self._pools = {key: _Pool(array) for key, array in _arrays(pools)}
        self._spec = pools.spec
        self._is_used = False
        self.has_failed = False
        self._is_partial = _recordings.is_partial

    def write(self, pools: Any, written: Any, key: _Key, layer: Any) -> None:
        """Notes a write into a pool."""
        if pools.spec != self._spec:  # a cache of the model's own
            return
        self._use()
        for each_key, array in _arrays(pools):
            self._pools[each_key].check_fresh(array, f"the write of {layer_name(layer)} takes")
        pool = self._pools[key]
        array = dict(_arrays(pools))[key]
        new_array = dict(_arrays(written))[key]
        # A transformation may trace its function twice, with the same pools from outside.
        is_same_trace = getattr(array, "_trace", None) is getattr(new_array, "_trace", None)
        is_known = not isinstance(layer, Tracer) and is_same_trace and array is pool.latest
        pool.is_complete = pool.is_complete and is_known
        if pool.is_complete and layer in pool.layers:
            first = next(write.where for write in pool.writes if write.layer == layer)
            raise _refusal(
                f"layer: got {layer} a second time in a model call, first at {first}, wanted each layer's own number: "
                f"the model's layers are {sorted(self._layers(key))}"
            )
        if is_same_trace:
            pool.stale[id(array)] = array
        pool.latest = new_array
        pool.writes.append(_Write(layer, _line()))

    def _use(self) -> None:
        self._is_used = True
        if self.probe is not None:
            self.probe.uses_cache = True

    def skip(self, key: _Key, layer: Any) -> None:
        """Notes a layer whose snapshots the model keeps as they are."""
        self._pools[key].skipped.add(layer)

    def read(self, pools: Any, key: _Key, layer: Any) -> None:
        """Notes a read of a layer's K/V."""
        if pools.spec != self._spec:
            return
        self._use()
        pool = self._pools[key]
        array = dict(_arrays(pools))[key]
        pool.check_fresh(array, f"attend of {layer_name(layer)} takes")
        if self.probe is not None and not isinstance(layer, Tracer) and getattr(array, "_trace", None) is self.trace:
            self.probe.reads[layer] += 1
        is_known = pool.is_complete and array is pool.latest and not isinstance(layer, Tracer)
        if is_known and layer not in pool.layers:
            raise _refusal(f"layer: got {layer} in attend before its write, wanted kvjax.write of layer {layer} first")

    def check_result(self, pools: Any) -> None:
        """Raises an error unless a model returns the pools of its last write, with every layer written.

        A model may also leave the cache alone, and neither write nor read.
        """
        if not self._is_used or pools.spec != self._spec:
            return
        for key, array in _arrays(pools):
            pool = self._pools[key]
            pool.check_fresh(array, "the model returns")
            if self._is_partial:
                continue
            if array is pool.given and self._layers(key) - pool.skipped:
                pool.refuse(array, "the model returns")
            missing = self._layers(key) - pool.layers - pool.skipped
            is_known = array is pool.given or (pool.is_complete and array is pool.latest)
            if is_known and missing:
                raise _refusal(
                    f"model: got pools with layers {sorted(pool.layers)} written, {_missing(missing)}: a model writes "
                    "each layer with kvjax.write, and returns the pools of the last write"
                )

    def _layers(self, key: _Key) -> set[int]:
        group, pool = key
        return set(self._spec.groups[group].pools[pool].layers)


def _arrays(pools: Any) -> list[tuple[_Key, Any]]:
    """An array of each pool, which stands for the pool."""
    return [
        ((group, pool), jax.tree.leaves(array)[0])
        for group, arrays in enumerate(pools.arrays)
        for pool, array in enumerate(arrays)
    ]


def layer_at(pools: Any, key: _Key, layer: Any, index: Any) -> Any:
    """The number of a layer, given by itself or by its index in a pool, or a traced value."""
    if present() is None:  # nobody asks for it
        return layer
    if isinstance(index, Tracer):
        return index
    if index is not None:
        group, pool = key
        layers = pools.spec.groups[group].pools[pool].layers
        return layers[min(max(int(index), 0), len(layers) - 1)]
    return layer if isinstance(layer, Tracer) else int(layer)


def layer_name(layer: Any) -> str:
    """A layer in an error."""
    return "a traced layer" if isinstance(layer, Tracer) else f"layer {layer}"


def _missing(layers: set[int]) -> str:
    return f"wanted layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, sorted(layers)))} too"


def _line() -> str:
    """The file and the line of the caller outside of the library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _refusal(message: str) -> ValueError:
    """The error for lost K/V, and for K/V read before they are written."""
    if (lineage := present()) is not None:
        lineage.has_failed = True
    return ValueError(message)


class _Recordings(threading.local):
    """The model calls of this thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[Lineage] = []
        self.is_partial = False  # whether models write some layers only


_recordings = _Recordings()


@contextlib.contextmanager
def recording(lineage: Lineage) -> Iterator[None]:
    """Records the writes and reads of a model call."""
    _recordings.calls.append(lineage)
    try:
        yield
    finally:
        _recordings.calls.pop()


@contextlib.contextmanager
def partial_models() -> Iterator[None]:
    """Allows models of some layers, such as the first layers of a model that drafts."""
    before = _recordings.is_partial
    _recordings.is_partial = True
    try:
        yield
    finally:
        _recordings.is_partial = before


def present() -> Lineage | None:
    """The innermost model call of this thread. None outside of a call."""
    return _recordings.calls[-1] if _recordings.calls else None


def note(layer: Any, **trees: Any) -> None:
    """Notes arrays of a layer, if a probe wants them."""
    lineage = present()
    if lineage is None or lineage.probe is None or isinstance(layer, Tracer):
        return
    for name, tree in trees.items():
        for path, array in jax.tree_util.tree_leaves_with_path(tree):
            if getattr(array, "_trace", None) is lineage.trace:
                lineage.probe.noted[name + jax.tree_util.keystr(path), layer] = array


def probed_kv(layer: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """The keys and values to write: the model's own, unless a probe changes them."""
    lineage = present()
    k, v = (k, v) if lineage is None or lineage.probe is None else lineage.probe.kv(layer, k, v)
    note(layer, k=k, v=v)
    return k, v


def probed_scale(layer: Any, scale: float, width: int) -> float:
    """The factor on the scores: the model's own, unless a probe changes it."""
    lineage = present()
    return scale if lineage is None or lineage.probe is None else lineage.probe.scale(layer, scale, width)


def note_write(pools: Any, written: Any, key: _Key, layer: Any) -> Any:
    """Notes a write of the present model call. Returns the written pools."""
    if (lineage := present()) is not None:
        lineage.write(pools, written, key, layer)
    return written


def note_skipped(key: _Key, layer: Any) -> None:
    """Notes a layer whose snapshots the present model call keeps as they are."""
    if (lineage := present()) is not None:
        lineage.skip(key, layer)


def note_read(pools: Any, key: _Key, layer: Any) -> None:
    """Notes a read of the present model call."""
    if (lineage := present()) is not None:
        lineage.read(pools, key, layer)
