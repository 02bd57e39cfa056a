# SPDX-License-Identifier: Apache-2.0
"""Trials of models: the same text in several forms must give the same logits, and a difference is traced to its layer.

A model sees a text all at once, token by token, in chunks, together with other rows, and after a cached prefix.
Unwritten slots hold NaN. The first array of a layer with a difference from the run all at once tells the mistake.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.model import call, described, forward
from kvjax.model import check_model as check_pytree
from kvjax.pools.device import Pools, init_pools
from kvjax.pools.lineage import Probe
from kvjax.pools.views import View, mixed, ragged, view
from kvjax.spec import CacheSpec
from kvjax.state import NO_BLOCK, CacheState
from kvjax.verbs.init import init

BLOCK_SIZE = 4
ROWS = 3
CHUNK = 3  # splits blocks
_MAX_WINDOW = 48  # a longer window has no edge in a short text
# Of the largest logit. The coarsest dtype counts, of the pools, the model's arrays and the arrays that it computes.
TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2, "int8": 1e-1, "float8_e4m3fn": 3e-1}


def check_model(
    model: Any,
    spec: CacheSpec,
    *,
    reference: Callable[[jax.Array], jax.Array] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Runs a model on a small cache in several ways, which must give the same logits, and names a mistake.

        def test_my_model():
            kvjax.testing.check_model(model, spec)

    A random text goes through the model all at once. Then it goes token by token, in chunks of parts of blocks, after
    a cached prefix, together with other rows in two orders, and in ragged and mixed views. The text is longer than a
    window of at most 48 tokens, and blocks outside of the window hold NaN. The error names the argument or the layer:
    "positions", "last", "attend of layer 3", or lost pools. It takes some 35 s for four small layers
    on two CPU cores.

    Without a `reference` the model is only compared with itself. Mistakes with the same effect in every form, such as
    exchanged keys and values, then stay unknown.

    Args:
      model: see `kvjax.serving.Model`, in evaluation mode.
      spec: the spec of your cache. Its layers and dtypes count: the trial makes a small cache of its own.
      reference: from tokens i32[1, T] to logits f32[1, T, V] without a cache, such as your forward pass for training.
        It runs outside of jit.
      tolerance: the largest difference of logits, relative to the largest logit. None means 1e-3 in float32, 2e-2 in
        float16, 6e-2 in bfloat16, 0.1 in int8 and 0.3 in float8, by the coarsest dtype of the pools and of the arrays
        that the model has and computes.
      seed: the seed of the text.

    Returns:
      The largest relative difference in each form.

    Raises:
      AssertionError: for a mistake, with its argument or layer, and the form of the text.

    Example:
      >>> from kvjax.testing import check_model
      >>> spec = kvjax.make_spec([kvjax.LayerSpec(1, 8)], num_blocks=8, max_seqs=2, max_length=32, block_size=4)
      >>> def forgets_the_view(embed, tokens, pools, view, *, last):
      ...     x = embed[tokens] + 0.1 * jnp.arange(float(tokens.shape[1]))[None, :, None]
      ...     pools = kvjax.write(pools, 0, x[:, :, None], x[:, :, None], view)
      ...     x = kvjax.attend(x[:, :, None], pools, 0, view)[:, :, 0]
      ...     return x[jnp.arange(x.shape[0]), last] @ embed.T, pools
      >>> model = jax.tree_util.Partial(forgets_the_view, jnp.eye(8))
      >>> try:
      ...     check_model(model, spec)
      ... except AssertionError as error:
      ...     print(str(error).split(":")[0])
      positions
    """
    check_pytree(model)
    with jax.debug_nans(False), jax.debug_infs(False):  # unwritten slots hold NaN
        trial = _Trial(model, spec, tolerance, seed)
        trial.run_all_at_once()
        if reference is not None:
            trial.compare_with(reference)
        trial.run_in_chunks(1, "one token at a time")
        trial.run_in_chunks(CHUNK, f"in chunks of {CHUNK} tokens")
        trial.run_after_a_hit()
        trial.run_with_neighbours()
        trial.run_flat()
    return trial.errors


class _Run(NamedTuple):
    """The result of a call: the logits, the pools, and the noted arrays of layers."""

    logits: np.ndarray
    pools: Pools
    noted: dict[tuple[str, Any], np.ndarray]


class _Edit(Probe):
    """A probe with a change in some layers, to find the mistake of a difference from a reference."""

    def __init__(self, kind: str, layers: Sequence[Any] | None) -> None:
        super().__init__()
        self.kind = kind
        self.layers = layers

    def _is_changed(self, layer: Any) -> bool:
        return self.layers is None or layer in self.layers

    def kv(self, layer: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """See `Probe`."""
        return (v, k) if self.kind == "k and v" and self._is_changed(layer) else (k, v)

    def scale(self, layer: Any, scale: float, width: int) -> float:
        """See `Probe`."""
        return width**-0.5 if self.kind == "scale" and self._is_changed(layer) else scale


class _Trial:
    """The ways to run a text, and the results of the run all at once."""

    def __init__(self, model: Any, spec: CacheSpec, tolerance: float | None, seed: int):
        windows = [group.window for group in spec.groups if group.window and not group.recurrent]
        longest = max([window for window in windows if window <= _MAX_WINDOW], default=0)
        # A model may have learned positions, for rows of the cache alone.
        self.length = min(max(3 * BLOCK_SIZE + 2, longest + BLOCK_SIZE + 2), spec.max_length)
        self.columns = -(-self.length // BLOCK_SIZE) + 1
        self.spec = _small(spec, self.columns)
        self.model = model
        self.empty: CacheState = jax.device_get(init(self.spec))
        self.rng = np.random.default_rng(seed)
        self.errors: dict[str, float] = {}
        self._programs: dict[Any, Any] = {}
        self._probe = Probe()  # of the last traced call
        self._unread: list[int] = []  # layers with K/V that no attention reads
        pools = jax.eval_shape(lambda: init_pools(self.spec))
        tokens = np.zeros((1, self.length), np.int32)
        last = np.zeros(1, np.int32)
        try:
            program, (logits, _) = jax.make_jaxpr(forward, return_shape=True)(
                model, tokens, pools, self._view({0: self.length}), last
            )
        except ValueError as error:
            is_outside = str(error).startswith("view: got one of a cache with")  # the trial has a cache of its own
            outside = "pools: the model takes pools from outside of its call, wanted its argument `pools`"
            raise AssertionError(outside if is_outside else str(error)) from error
        self.tolerance = _tolerance(model, spec, str(program)) if tolerance is None else tolerance
        self.vocabulary = logits.shape[-1]
        self.text = self.rng.integers(0, self.vocabulary, self.length).astype(np.int32)
        self.others = [self.rng.integers(0, self.vocabulary, self.length).astype(np.int32) for _ in range(ROWS - 1)]

    # Views and calls.

    def _state(self, lengths: dict[int, int], committed: dict[int, int], shared: int = 0) -> CacheState:
        """A state with these rows. Row r has blocks r * M to (r + 1) * M - 1. The `shared` first blocks are row 0's."""
        spec = self.spec
        counts = [np.array([rows.get(row, 0) for row in range(ROWS)], np.int32) for rows in (lengths, committed)]
        groups = []
        for group, group_spec in zip(self.empty.groups, spec.groups, strict=True):
            column = np.arange(self.columns, dtype=np.int32)
            table = np.arange(ROWS, dtype=np.int32)[:, None] * self.columns + column
            table = np.where((column < shared) & (np.arange(ROWS)[:, None] > 0), column, table)
            keeps = np.asarray(group_spec.keeps(column[None], counts[1][:, None], BLOCK_SIZE))
            is_kept = keeps | group_spec.recurrent
            groups.append(group.replace(table=np.where(is_kept, table, NO_BLOCK).astype(np.int32)))
        seqs = self.empty.seqs.replace(length=counts[0], committed=counts[1])
        return self.empty.replace(groups=tuple(groups), seqs=seqs)

    def _view(self, lengths: dict[int, int], committed: dict[int, int] | None = None, **options: Any) -> View:
        """A padded view of row 0 by default."""
        committed = committed or {}
        rows = options.pop("rows", [0])
        shared = options.pop("shared", 0)
        width = options.pop("width", self.length)
        counts = np.array([lengths[row] - committed.get(row, 0) for row in rows], np.int32)
        return view(self._state(lengths, committed, shared), counts, width, np.array(rows, np.int32))

    def _poisoned(self) -> Pools:
        return jax.tree.map(_poison, init_pools(self.spec))

    def _call(self, tokens: np.ndarray, pools: Pools, view: View, last: Any, edit: _Edit | None = None) -> _Run:
        """Calls the model in a jitted program, and notes the arrays of its layers."""
        key = tokens.shape, view.starts is None, view.decodes, len(last), edit
        if key not in self._programs:
            order: list[tuple[str, Any]] = []

            def run(model, tokens, pools, view, last):
                probe = edit or Probe()
                logits, pools = call(model, tokens, pools, view, last, probe)
                order[:] = probe.noted
                self._probe = probe
                return logits, pools, list(probe.noted.values())

            quick = {"xla_backend_optimization_level": 0}
            self._programs[key] = jax.jit(run, compiler_options=quick), order
        program, order = self._programs[key]
        try:
            logits, pools, noted = program(self.model, tokens, pools, view, np.asarray(last, np.int32))
        except ValueError as error:  # a mistake in calls of this shape alone
            if edit is not None:
                raise
            raise AssertionError(f"{error}, in a call with tokens i32{list(tokens.shape)}") from error
        arrays = [np.asarray(array, np.float32) for array in jax.device_get(noted)]
        return _Run(np.asarray(logits, np.float32), pools, dict(zip(order, arrays, strict=True)))

    def _padded(self, *texts: np.ndarray) -> np.ndarray:
        width = max(map(len, texts))
        return np.stack([np.pad(text, (0, width - len(text))) for text in texts])

    # The ways.

    def run_all_at_once(self) -> None:
        """The logits of every position, by calls of a single program. All other forms are compared with these."""
        fresh = self._view({0: self.length})
        runs = [self._call(self.text[None], self._poisoned(), fresh, [t]) for t in range(self.length)]
        self.base = _Run(np.stack([run.logits[0] for run in runs]), runs[-1].pools, runs[-1].noted)
        self.size = _size(self.base.logits)
        if np.isnan(self.base.logits).any():
            raise AssertionError(f"{self._first_nan()}: NaN, from weights, or from slots that nobody has written")
        again = self._call(self.text[None], self._poisoned(), fresh, [self.length - 1])
        if not np.array_equal(again.logits[0], self.base.logits[-1]):
            raise AssertionError(
                "model: got two results for the same call, wanted a model in evaluation mode (dropout?)"
            )
        self._check_written(self.base.pools)
        reads = self._probe.reads
        self._unread = sorted({layer for name, layer in self.base.noted if name == "k"} - reads.keys())
        layer, num_reads = next(iter(reads.most_common(1)), (0, 0))
        if self._unread and num_reads > 1:
            raise AssertionError(
                self._missing_attend(self._unread[0], f", and those of layer {layer} {num_reads} times")
            )

    def _missing_attend(self, layer: int, words: str) -> str:
        return (
            f"attend of layer {layer}: is missing. The model writes the K/V of layer {layer} and never reads "
            f"them{words}: use kvjax.attend(q, pools, {layer}, view)"
        )

    def _check_written(self, pools: Pools) -> None:
        """Raises an error for layers whose slots of the text are still poisoned, if the model writes at all.

        A trace finds them too, but not inside of a scan.
        """
        whole_blocks = slice(self.length // BLOCK_SIZE)
        missing: list[int] = []
        num_layers = 0
        for group, arrays in zip(self.spec.groups, pools.arrays, strict=True):
            for pool, array in zip(group.pools, () if group.recurrent else arrays, strict=False):
                values = np.asarray(array[whole_blocks]).astype(np.float32)
                is_poison = np.isnan(values) | (values == -128)
                is_missing = is_poison.swapaxes(0, 1).reshape(len(pool.layers), -1).all(axis=1)
                missing += np.array(pool.layers)[is_missing].tolist()
                num_layers += len(pool.layers)
        names = f"layer{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}"
        if missing and len(missing) < num_layers:
            raise AssertionError(
                f"layer: the model never writes {names}, wanted each layer's own number in kvjax.write and "
                "kvjax.attend, in a scan one of jnp.arange(layers)"
            )
        if missing and self._probe.uses_cache:
            raise AssertionError(
                f"pools: the model returns pools without the writes of {names}, wanted the result of the last "
                "kvjax.write, in a scan as its carry"
            )

    def run_in_chunks(self, width: int, form: str) -> None:
        """The text in chunks. Blocks outside of a window hold NaN."""
        pools = self._poisoned()
        for start in range(0, self.length, width):
            end = min(start + width, self.length)
            tokens = self._padded(self.text[start:end], np.zeros(width, np.int32))[:1]
            now = self._view({0: end}, {0: start}, width=width)
            run = self._call(tokens, self._without_released(pools, start), now, [end - start - 1])
            pools = run.pools
            positions = {(0, i): start + i for i in range(end - start)}
            self._compare(form, run, positions, [(0, end - 1)])

    def run_after_a_hit(self) -> None:
        """A row with two cached blocks of row 0 computes the rest."""
        num_blocks = min(2, (self.length - 1) // BLOCK_SIZE)
        cached = num_blocks * BLOCK_SIZE
        tokens = self._padded(self.text[cached:], np.zeros(self.length, np.int32))[:1]
        now = self._view({0: self.length, 1: self.length}, {1: cached}, rows=[1], shared=num_blocks)
        run = self._call(tokens, self.base.pools, now, [self.length - cached - 1])
        positions = {(0, i): cached + i for i in range(self.length - cached)}
        self._compare("after a cached prefix", run, positions, [(0, self.length - 1)])

    def run_with_neighbours(self) -> None:
        """The text as the first and as the last of three rows, the others shorter."""
        for row in (0, ROWS - 1):
            texts = [self.others[0][:5], self.others[1][:9]]
            texts.insert(row, self.text)
            lengths = {seq: len(text) for seq, text in enumerate(texts)}
            now = self._view(lengths, rows=list(range(ROWS)))
            run = self._call(self._padded(*texts), self._poisoned(), now, [len(text) - 1 for text in texts])
            positions = {(row, i): i for i in range(self.length)}
            self._compare(f"in row {row} of {ROWS} rows", run, positions, [(row, self.length - 1)])

    def run_flat(self) -> None:
        """Rows on a common axis, and mixed with a decoding row."""
        other = self.others[0][:5]
        num_others = len(other)
        tokens = np.concatenate([other, self.text, np.zeros(3, np.int32)])[None]
        counts = np.array([num_others, self.length], np.int32)
        now = ragged(self._state(dict(enumerate(counts)), {}), counts, tokens.shape[1], np.array([0, 1], np.int32))
        positions = {(0, num_others + i): i for i in range(self.length)}
        run = self._call(tokens, self._poisoned(), now, [num_others - 1, num_others + self.length - 1])
        self._compare("in a ragged view", run, positions, [(1, self.length - 1)])
        # Row 0 decodes its last token, and row 1 computes the whole text.
        state = self._state({0: self.length, 1: self.length}, {0: self.length - 1})
        before = self._view({0: self.length - 1})
        run = self._call(self.text[None], self._poisoned(), before, [max(self.length - 2, 0)])
        pools = self._without_released(run.pools, self.length - 1)
        tokens = np.concatenate([[self.text[-1]], np.zeros(ROWS - 1, np.int32), self.text])[None].astype(np.int32)
        decodes = np.arange(ROWS) == 0
        now = mixed(state, decodes, np.array([1], np.int32), np.array([self.length], np.int32), self.length)
        run = self._call(tokens, pools, now, [0, ROWS + self.length - 1])
        positions = {(0, 0): self.length - 1} | {(0, ROWS + i): i for i in range(self.length)}
        self._compare("in a mixed view", run, positions, [(0, self.length - 1), (1, self.length - 1)])

    def _without_released(self, pools: Pools, committed: int) -> Pools:
        """Pools with NaN in the blocks of row 0 outside of their windows."""
        for index, group in enumerate(self.spec.groups):
            if group.window is None or group.recurrent:
                continue
            keeps = np.asarray(group.keeps(np.arange(self.columns, dtype=np.int32), np.int32(committed), BLOCK_SIZE))
            released = np.flatnonzero(~keeps).astype(np.int32)
            for pool, array in enumerate(pools.arrays[index]) if released.size else ():
                scales = pools.scales_of(index, pool)
                spoilt = [None if x is None else x.at[released].set(_poison(x[released])) for x in (array, scales)]
                pools = pools.with_pool(index, pool, *spoilt)
        return pools

    # Comparisons.

    def _error(self, got: np.ndarray, wanted: np.ndarray) -> float:
        is_same = got == wanted  # also -inf, for tokens that the model excludes
        difference = np.where(is_same, 0, np.abs(np.where(is_same, 0, got) - wanted))
        return float("inf") if np.isnan(difference).any() else float(difference.max(initial=0)) / self.size

    def _compare(
        self, form: str, run: _Run, positions: dict[tuple[int, int], int], logits: list[tuple[int, int]]
    ) -> None:
        """Compares logits, pairs of (row, position), and raises an error with the first different array of a layer."""
        error = max(self._error(run.logits[row], self.base.logits[position]) for row, position in logits)
        self.errors[form] = max(self.errors.get(form, 0.0), error)
        if error > self.tolerance:
            raise AssertionError(self._diagnosis(form, run, positions))

    def _diagnosis(self, form: str, run: _Run, positions: dict[tuple[int, int], int]) -> str:
        """The first array of a layer with a difference from the run all at once, in the user's words."""
        different = {}
        for (name, layer), array in self.base.noted.items():
            if (run_array := run.noted.get((name, layer))) is None:
                continue
            scale = max(float(np.nanmax(np.abs(array))), 1e-6)
            for (row, index), position in positions.items():
                difference = np.abs(run_array[row, index] - array[0, position])
                if np.isnan(difference).any() or difference.max() > self.tolerance * scale:
                    different.setdefault((name, layer), position)
        ends = f"The logits of the text differ {form}"
        if not self.base.noted:
            return self._without_layers(ends)
        agreeing = list(itertools.takewhile(lambda key: key not in different, self.base.noted))
        for layer in self._unread:
            if ("k", layer) in agreeing:
                return self._missing_attend(layer, f". {ends}")
        if not different:
            return f"last: {ends}, though all layers agree: take the positions `last`, x[jnp.arange(x.shape[0]), last]"
        name, layer = list(self.base.noted)[len(agreeing)]
        position = different[name, layer]
        where = f"{ends}, first {name} of layer {layer} at position {position}"
        same_v = ("v", layer) in self.base.noted and ("v", layer) not in different
        if name in ("q", "k") and same_v:
            return f"positions: {where}, though its v is the same: rotate q and k of layer {layer} by view.positions"
        if name not in ("out", "outputs") and self._ignores_positions():
            return f"positions: {where}, and the model does not use view.positions: use them in place of jnp.arange"
        if name == "out":
            return f"attend of layer {layer}: {where}, though q, k and v are the same: its mask, scale or pools differ"
        if name == "outputs":
            return (
                f"recur of layer {layer}: {where}, though its inputs are the same: its cell must not change the states "
                "by tokens after the first `count`"
            )
        return (
            f"layer {layer}: {where}: the arrays before its write depend on more than the token and view.positions, "
            "such as other tokens of the call, their number or the row"
        )

    def _without_layers(self, ends: str) -> str:
        """A diagnosis for a scan or remat, whose arrays cannot be noted."""
        if self._ignores_positions():
            return f"positions: {ends}, and the model does not use view.positions: use them in place of jnp.arange"
        return f"layer: {ends}. The layers are inside of a scan or remat: check view.positions, `index=` and the mask"

    def _ignores_positions(self) -> bool:
        """Whether the logits stay the same if all positions are shifted unevenly."""
        fresh = self._view({0: self.length})
        shifted = fresh.replace(positions=fresh.positions * 3 + 1)
        run = self._call(self.text[None], self._poisoned(), shifted, [self.length - 1])
        return self._error(run.logits[0], self.base.logits[-1]) == 0

    def _first_nan(self) -> str:
        for (name, layer), array in self.base.noted.items():
            if np.isnan(array).any():
                return f"layer {layer}: its {name} has"
        return "logits"

    def compare_with(self, reference: Callable[[jax.Array], jax.Array]) -> None:
        """Compares all logits with a model without a cache. Tries changes to explain a difference."""
        result = reference(jnp.asarray(self.text[None]))
        shape = (1, self.length, self.vocabulary)
        if np.shape(result) != shape:
            raise ValueError(f"reference: got {described(result)}, wanted logits f32{list(shape)}")
        wanted = np.asarray(result, np.float32)[0]
        form = "all at once, from the reference"
        errors = [self._error(got, want) for got, want in zip(self.base.logits, wanted, strict=True)]
        self.errors[form] = max(errors)
        if max(errors) <= self.tolerance:
            return
        layers = [layer for name, layer in self.base.noted if name == "v"]
        words = {
            "k and v": "k: the text agrees with the reference if k and v of {} are exchanged in write",
            "scale": "scale: the text agrees with the reference if attend of {} has the scale 1 / sqrt(D), its default",
        }
        for kind, explanation in words.items():
            for changed in ([layer] for layer in layers):
                if self._explains(_Edit(kind, changed), wanted):
                    raise AssertionError(explanation.format(f"layer {changed[0]}"))
            if self._explains(_Edit(kind, None), wanted):
                raise AssertionError(explanation.format("all layers"))
        first = next(position for position, error in enumerate(errors) if error > self.tolerance)
        cause = "values, weights or norms" if first == 0 else "keys: rotation, norms of k before the write, or the mask"
        raise AssertionError(f"logits: {_REFERENCE} from position {first} on, in every form alike; look at {cause}")

    def _explains(self, edit: _Edit, wanted: np.ndarray) -> bool:
        """Whether a changed model agrees with the reference at the last position."""
        try:
            run = self._call(self.text[None], self._poisoned(), self._view({0: self.length}), [self.length - 1], edit)
        except ValueError:  # the change does not fit, such as latents without v
            return False
        return self._error(run.logits[0], wanted[-1]) <= self.tolerance


_REFERENCE = "the logits differ from the reference"


def _small(spec: CacheSpec, columns: int) -> CacheSpec:
    """A small cache for the same layers."""
    groups = [dataclasses.replace(group, num_blocks=ROWS * columns, num_host_blocks=0) for group in spec.groups]
    return dataclasses.replace(
        spec,
        groups=tuple(groups),
        block_size=BLOCK_SIZE,
        max_seqs=ROWS,
        max_blocks_per_seq=columns,
        extra_ids=False,
        retention=False,
    )


def _size(logits: np.ndarray) -> float:
    """The largest logit of [T, V], without those that are the same for all tokens, such as -inf for padding."""
    varies = (logits != logits[:1]).any(axis=0)
    sizes = np.abs(logits[:, varies] if varies.any() else logits)
    return max(float(sizes.max(initial=0, where=np.isfinite(sizes))), 1e-6)


def _poison(array: jax.Array) -> jax.Array:
    """NaN in every slot, or wrong numbers. The counters of snapshots stay: they say no snapshot is there."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.full_like(array, jnp.nan)
    return jnp.full_like(array, -128) if array.dtype == jnp.int8 else array


def _tolerance(model: Any, spec: CacheSpec, program: str) -> float:
    """The tolerance for the coarsest dtype of the pools, of the model's arrays, and of the arrays of its program."""
    dtypes = {pool.dtype for group in spec.groups for pool in group.pools if not pool.arrays}
    dtypes |= {str(leaf.dtype) for leaf in jax.tree.leaves(model) if hasattr(leaf, "dtype")}
    dtypes |= {dtype for dtype, short in (("bfloat16", ":bf16["), ("float16", ":f16[")) if short in program}
    return max([TOLERANCES[dtype] for dtype in dtypes if dtype in TOLERANCES], default=TOLERANCES["float32"])
