# SPDX-License-Identifier: Apache-2.0
"""The arguments of a generation, checked once; errors name the argument."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax._arrays import unreadable
from kvjax._compile import own_transfers
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.checks import check_alive, check_functions, check_on_host, host_integers, static_int
from kvjax.events.listeners import Listener, Listeners
from kvjax.model import Model, check_model, check_placement
from kvjax.policies.retention import UNSTATED, Retention
from kvjax.serving.decode import LogitsFn, check_cache
from kvjax.serving.options import Scheduler
from kvjax.serving.sampling import Sampling, check_logprobs, output_seeds
from kvjax.stores.disk import DiskStore
from kvjax.tiered import TieredCache

MIN_TOKENS = 4096  # tokens of prompts that are submitted together, at least: fewer compile no other program


@dataclasses.dataclass
class RunOptions:
    """The options of a generation that concern all its prompts; see `generate` and `run_batch`."""

    scheduler: Scheduler
    steps: int
    fixed_steps: bool
    clock: Callable[[], int] | None
    logits_fn: LogitsFn | None
    log_events: bool
    listener: Listener | None
    top_logprobs: int = 0
    logprobs: str = "raw"
    loop: bool = True
    store: DiskStore | None = None

    def __post_init__(self):
        self.steps = static_int("steps", self.steps, 1)
        self.top_logprobs = static_int("top_logprobs", self.top_logprobs, 0)
        check_logprobs(self.logprobs)
        check_functions(logits_fn=self.logits_fn, clock=self.clock, listener=self.listener)
        self.listeners = None if self.listener is None else Listeners.of(self.listener)
        if not isinstance(self.store, DiskStore | None):
            raise ValueError(f"store: got {self.store!r:.80}, wanted a kvjax.stores.DiskStore or None")
        if self.clock is not None:
            read_clock(self.clock)


class Inputs[C: (Cache, TieredCache)]:
    """The checked arguments of `run_batch`; those of each prompt are arrays [outputs], an output for each sample."""

    @own_transfers()
    def __init__(
        self,
        model: Model,
        cache: C,
        options: RunOptions,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling | None] | None,
        seed: int | jax.Array | None,
        seeds: Sequence[int] | None,
        stop_tokens: Sequence[int],
        namespaces: Sequence[int] | None,
        names: Namespaces | None,
        retention: Retention | Sequence[Retention | None] | None,
        priorities: Sequence[int] | None = None,
        samples: int | Sequence[int] = 1,
    ):
        check_model(model)
        check_cache(cache)
        check_placement(model, cache)
        lists = prompts, max_new_tokens, sampling, seeds, stop_tokens, namespaces, retention, priorities, samples
        instead = "inside one use kvjax.serving.serve or kvjax.serving.decode"
        check_on_host("generation", (model, cache.state, cache.pools, lists), instead)
        self.model, self.cache, self.options, self.spec = model, cache, options, cache.state.spec
        check_alive(cache)
        options.scheduler.check(self.spec)
        self.own_rows = np.asarray(cache.state.seqs.length) == 0  # bool[S]; rows that the generation may use

        checked = check_prompts(prompts)
        number = len(checked)
        most = positive("max_new_tokens", max_new_tokens, number)
        copies = positive("samples", samples, number)
        of_prompt = np.repeat(np.arange(number), copies)
        outputs = len(of_prompt)
        whose = "prompts" if outputs == number else f"outputs, or None ({number} prompts with samples={samples})"

        def each(values: Any) -> Any:
            """Values of each prompt, for each output."""
            return jax.tree.map(lambda x: x[of_prompt], values)

        self.prompts = [checked[n] for n in of_prompt]
        self.first_sample = each(np.cumsum(copies) - copies)  # the output that is the first one of the same prompt
        self.max_new_tokens = each(most)
        self.sampling: Sampling | None = each(samplings(sampling, number))
        self.seeds = seeds_of(seed, seeds, outputs, whose)
        self.namespaces = each(_namespaces(namespaces, number, names))
        if options.store is not None:
            if why := unreadable(cache):
                raise ValueError(f"cache: got one that is {why}, wanted one of this process with store=")
            options.store.check(self.spec, np.unique(self.namespaces).tolist(), names)
        self.priorities = each(of_each("priorities", priorities, number, default=[0] * number))
        stop = host_integers("stop_tokens", stop_tokens, np.int32, "a list of token ids")
        self.stop_tokens = np.pad(stop, (0, bucket(len(stop), 4) - len(stop)), constant_values=-1)  # i32[K]
        self.retention: Retention | None = each(retentions(retention, number, self.spec.retention))


def read_clock(clock: Callable[[], int]) -> int:
    """A clock's reading as i32. Only differences of readings count, so they may be of any size."""
    reading = clock()
    if not isinstance(reading, int | np.integer) or isinstance(reading, bool):
        raise ValueError(f"clock: got {reading!r:.80}, wanted an int of milliseconds")
    return int(np.uint32(int(reading) & 0xFFFFFFFF).view(np.int32))


def bucket(size: int, smallest: int) -> int:
    """`size` rounded up to `smallest` times a power of two, so that few shapes are compiled."""
    return smallest << max(-(-size // smallest) - 1, 0).bit_length()


def check_prompts(prompts: Any) -> list[np.ndarray]:
    """The prompts as arrays [tokens]."""
    if getattr(prompts, "ndim", 1) > 1:  # its padding would be read as tokens
        raise ValueError(
            f"prompts: got an array {list(np.shape(prompts))}, wanted a list for each prompt, without padding: "
            "[row[:length] for row, length in zip(array, lengths)]"
        )
    checked, wanted = [], "wanted a list of token ids for each prompt"
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise ValueError(f"prompts: got the text {reprlib.repr(prompt)} for prompt {number}, {wanted}")
        try:
            tokens = np.asarray(prompt)
        except ValueError:  # lists of different lengths
            tokens = None
        if tokens is None or tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(f"prompts: got {reprlib.repr(prompt)} for prompt {number}, {wanted}")
        checked.append(tokens)
    return checked


def of_each(
    name: str, values: Any, number: int, dtype: Any = np.int32, *, default: Any = None, wanted="a number", of="prompts"
) -> np.ndarray:
    """A number for each of `number` prompts, or of what else `of` names, [number]; `default`: the numbers for None."""
    values = default if values is None else values
    numbers = host_integers(name, values, dtype, f"{wanted} for each of {number} {of}")
    if numbers.shape != (number,):
        raise ValueError(f"{name}: got {numbers.size}, wanted one for each of {number} {of}")
    return numbers


def positive(name: str, value: int | Sequence[int], number: int) -> np.ndarray:
    """A number of at least 1 for each prompt, [number], from one for all or a list."""
    is_one = isinstance(value, int | np.integer)
    numbers = of_each(name, [value] * number if is_one else value, number)
    if np.any(numbers < 1) or (is_one and value < 1):
        raise ValueError(f"{name}: got {value}, wanted at least 1")
    return numbers


def seeds_of(seed: Any, seeds: Sequence[int] | None, outputs: int, of: str) -> np.ndarray:
    """The seed of each output, u32[outputs]: given, made of one for all, or 0, 1, and so on."""
    if seed is not None and seeds is not None:
        raise ValueError(f"seed: got {seed!r:.80} and seeds, wanted one of them")
    default = range(outputs) if seed is None else jax.device_get(output_seeds(seed, outputs))
    return of_each("seeds", seeds, outputs, np.uint32, default=default, of=of)


def _namespaces(namespaces: Any, number: int, names: Namespaces | None) -> np.ndarray:
    """The namespace of each prompt, i32[number]: 0 for None, else numbers that `names`, if there is one, gave out."""
    if not isinstance(names, Namespaces | None):
        raise ValueError(f"names: got {reprlib.repr(names)}, wanted a kvjax.Namespaces or None")
    wanted = "a number, as kvjax.Namespaces gives,"
    checked = of_each("namespaces", namespaces, number, default=[0] * number, wanted=wanted)
    for prompt, namespace in enumerate(checked.tolist()):
        if names is not None and namespace not in names:
            raise ValueError(
                f"namespaces: got {namespace} for prompt {prompt}, wanted one of {len(names):,} that names gave out; "
                "a saved cache needs the names saved with it (Namespaces.from_dict)"
            )
    return checked


def retentions(retention: Any, number: int, has_retention: bool) -> Retention | None:
    """The prompts' retentions as one: ranges [number, K, 4], decode [number, 2]; None if all are None."""
    each = [retention] * number if isinstance(retention, Retention | None) else list(retention)
    if len(each) != number:
        raise ValueError(f"retention: got {len(each)}, wanted one for each of {number} prompts")
    if all(one is None for one in each):
        return None
    if not has_retention:
        raise ValueError("retention: got one, wanted None (the spec was made with retention=False)")
    each = [Retention.of() if one is None else one for one in each]
    ranges = np.full((number, bucket(max(len(one.ranges) for one in each), 1), 4), UNSTATED, np.int32)
    ranges[:, :, :2] = 0  # empty ranges, so that prompts with few and with many share programs
    for i, one in enumerate(each):
        ranges[i, : len(one.ranges)] = one.ranges
    return Retention(ranges, np.stack([np.asarray(one.decode, np.int32) for one in each]))


def samplings(sampling: Any, number: int) -> Sampling | None:
    """The prompts' samplings as one of numpy arrays [number]; None: all are greedy without `min_tokens`."""
    stacked = sampling if isinstance(sampling, Sampling) else _stacked(sampling, number)
    leaves = {}
    for field in dataclasses.fields(Sampling):
        leaf = np.asarray(getattr(stacked, field.name))
        if leaf.shape not in ((), (number,)):
            raise ValueError(f"sampling.{field.name}: got shape {list(leaf.shape)}, wanted [] or [{number}]")
        leaves[field.name] = np.broadcast_to(leaf, (number,))
    checked = Sampling(**leaves)  # checks what was a jax array
    # On a CPU the program that samples is as fast for greedy rows, and no other one is compiled.
    samples = np.any((checked.temperature > 0) | (checked.min_tokens > 0))
    return checked if samples or jax.default_backend() == "cpu" else None


def _stacked(sampling: Any, number: int) -> Sampling:
    """A sampling, or None for greedy, for each prompt as one of arrays [number]."""
    if not isinstance(sampling, Iterable | None):
        raise ValueError(f"sampling: got {reprlib.repr(sampling)}, wanted a kvjax.Sampling, or one for each prompt")
    each = [None] * number if sampling is None else list(sampling)
    if len(each) != number:
        raise ValueError(f"sampling: got {len(each)}, wanted one for each of {number} prompts")
    for prompt, one in enumerate(each):
        if not isinstance(one, Sampling | None) or any(map(np.ndim, jax.tree.leaves(one))):
            raise ValueError(
                f"sampling: got {reprlib.repr(one)} for prompt {prompt}, wanted a kvjax.Sampling of numbers or None"
            )
    greedy = Sampling()
    return jax.tree.map(
        lambda off, *leaves: np.array(leaves, off.dtype), greedy, *[greedy if one is None else one for one in each]
    )
