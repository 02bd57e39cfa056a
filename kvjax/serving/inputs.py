# SPDX-License-Identifier: Apache-2.0
"""The arguments of a generation as numpy arrays, checked so that errors name the argument."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax._checks import host_integers
from kvjax.blocks.keys import Namespaces
from kvjax.policies.retention import UNSTATED, Retention
from kvjax.serving.sampling import Sampling

LINE = 4096  # tokens of prompts that are submitted together, at least: fewer compile no other program


def prompt_ids(prompts: Any) -> list[np.ndarray]:
    """The ids of each prompt, [tokens]."""
    if getattr(prompts, "ndim", 1) > 1:  # its padding would be read as tokens
        raise ValueError(
            f"prompts: got an array {list(np.shape(prompts))}, wanted a list for each prompt, without padding: "
            "[row[:length] for row, length in zip(array, lengths)]"
        )
    return [_ids(prompt, number) for number, prompt in enumerate(prompts)]


def _ids(prompt: Any, number: int) -> np.ndarray:
    wanted = "wanted a list of token ids for each prompt"
    if isinstance(prompt, str):
        raise ValueError(f"prompts: got the text {reprlib.repr(prompt)} for prompt {number}, {wanted}")
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"prompts: got {reprlib.repr(prompt)} for prompt {number}, {wanted}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"prompts: got {reprlib.repr(prompt)} for prompt {number}, {wanted}")
    return ids


def of_each(name: str, given: Any, prompts: int, dtype: Any, wanted: str, of: str = "prompts") -> np.ndarray:
    """A number for each prompt, [prompts]; errors say of what else if not `of` prompts."""
    numbers = host_integers(name, given, dtype, f"{wanted} for each of {prompts} {of}")
    if numbers.shape != (prompts,):
        raise ValueError(f"{name}: got {numbers.size}, wanted one for each of {prompts} {of}")
    return numbers


def known_namespaces(given: Any, prompts: int, names: Namespaces | None) -> np.ndarray:
    """The namespace of each prompt, i32[prompts]: 0 for None, else numbers that `names`, if there is one, gave out."""
    if not isinstance(names, Namespaces | None):
        raise ValueError(f"names: got {reprlib.repr(names)}, wanted a kvjax.Namespaces or None")
    given = [0] * prompts if given is None else given
    numbers = of_each("namespaces", given, prompts, np.int32, "a number, as kvjax.Namespaces gives,")
    for prompt, number in enumerate(numbers.tolist()):
        if names is not None and number not in names:
            raise ValueError(
                f"namespaces: got {number} for prompt {prompt}, wanted one that names gave out, 0..{len(names) - 1}; "
                "a saved cache needs the names saved with it (Namespaces.from_dict)"
            )
    return numbers


def retentions(given: Any, prompts: int, has_retention: bool) -> Retention | None:
    """The prompts' retentions as one: ranges [prompts, K, 4], decode [prompts, 2]; None if all are None."""
    given = [given] * prompts if given is None or isinstance(given, Retention) else list(given)
    if len(given) != prompts:
        raise ValueError(f"retention: got {len(given)}, wanted one for each of {prompts} prompts")
    if all(one is None for one in given):
        return None
    if not has_retention:
        raise ValueError("retention: got one, wanted None (the spec was made with retention=False)")
    each = [Retention.of() if one is None else one for one in given]
    ranges = np.full((prompts, bucket(max(len(one.ranges) for one in each), 1), 4), UNSTATED, np.int32)
    ranges[:, :, :2] = 0  # empty ranges, so that prompts with few and with many share programs
    for i, one in enumerate(each):
        ranges[i, : len(one.ranges)] = one.ranges
    return Retention(ranges, np.stack([np.asarray(one.decode, np.int32) for one in each]))


def samplings(given: Any, prompts: int) -> Sampling | None:
    """The prompts' samplings as one of numpy arrays [prompts]; None: all are greedy without `min_tokens`.

    On a CPU those too have arrays: the program that samples is as fast for them, and no other one is compiled. On a GPU
    it has more kernels.
    """
    stacked = given if isinstance(given, Sampling) else _stacked(given, prompts)
    leaves = {}
    for field in dataclasses.fields(Sampling):
        leaf = np.asarray(getattr(stacked, field.name))
        if leaf.shape not in ((), (prompts,)):
            raise ValueError(f"sampling.{field.name}: got shape {list(leaf.shape)}, wanted [] or [{prompts}]")
        leaves[field.name] = np.broadcast_to(leaf, (prompts,))
    checked = Sampling(**leaves)  # checks what was a jax array
    samples = np.any((checked.temperature > 0) | (checked.min_tokens > 0))
    return checked if samples or jax.default_backend() == "cpu" else None


def _stacked(given: Any, prompts: int) -> Sampling:
    """A sampling, or None for greedy, for each prompt as one of arrays [prompts]."""
    if not isinstance(given, Iterable | None):
        raise ValueError(f"sampling: got {reprlib.repr(given)}, wanted a kvjax.Sampling, or one for each prompt")
    each = [None] * prompts if given is None else list(given)
    if len(each) != prompts:
        raise ValueError(f"sampling: got {len(each)}, wanted one for each of {prompts} prompts")
    for number, one in enumerate(each):
        if not isinstance(one, Sampling | None) or any(map(np.ndim, jax.tree.leaves(one))):
            raise ValueError(
                f"sampling: got {reprlib.repr(one)} for prompt {number}, wanted a kvjax.Sampling of numbers or None"
            )
    off = Sampling()
    return jax.tree.map(lambda off, *leaves: np.array(leaves, off.dtype), off, *[one or off for one in each])


def _stop_tokens(given: Any) -> np.ndarray:
    """The stop tokens, and -1 up to the next of a few numbers of them."""
    stop = host_integers("stop_tokens", given, np.int32, "a list of token ids")
    return np.pad(stop, (0, bucket(len(stop), 4) - len(stop)), constant_values=-1)


def bucket(size: int, smallest: int) -> int:
    """`size` rounded up to `smallest` times a power of two, so that few shapes are compiled."""
    return smallest << max(-(-size // smallest) - 1, 0).bit_length()


@dataclasses.dataclass
class Inputs:
    """The checked arguments of a generation, for each output: each sample of each prompt.

    Attributes:
      prompts: token ids.
      first: the output that is the first sample of the same prompt.
      max_new: tokens to generate, at most.
      sampling: arrays [outputs]; None: all greedy.
      seeds, namespaces, priorities: [outputs].
      stop: i32[K]; -1 is none.
      retention: arrays [outputs, ...], or None.
    """

    prompts: list[np.ndarray]
    first: np.ndarray
    max_new: np.ndarray
    sampling: Sampling | None
    seeds: np.ndarray
    namespaces: np.ndarray
    priorities: np.ndarray
    stop: np.ndarray
    retention: Retention | None

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        has_retention: bool,
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling | None] | None,
        seeds: Sequence[int] | None,
        stop_tokens: Sequence[int],
        namespaces: Sequence[int] | None,
        names: Namespaces | None,
        retention: Retention | Sequence[Retention | None] | None,
        priority: Sequence[int] | None = None,
        samples: int | Sequence[int] = 1,
    ) -> Inputs:
        """Checks the arguments of `run_batch`; `has_retention`: whether the spec has it."""
        ids = prompt_ids(prompts)
        number = len(ids)
        most = [max_new_tokens] * number if isinstance(max_new_tokens, int | np.integer) else max_new_tokens
        most = of_each("max_new_tokens", most, number, np.int32, "a number")
        if np.any(most < 1) or (isinstance(max_new_tokens, int) and max_new_tokens < 1):
            raise ValueError(f"max_new_tokens: got {max_new_tokens}, wanted at least 1")
        copies = [samples] * number if isinstance(samples, int | np.integer) else samples
        copies = of_each("samples", copies, number, np.int32, "a number")
        if np.any(copies < 1):
            raise ValueError(f"samples: got {samples}, wanted at least 1")
        of_prompt = np.repeat(np.arange(number), copies)
        outputs = len(of_prompt)
        priority = [0] * number if priority is None else priority
        whose = "prompts" if outputs == number else f"outputs, or None ({number} prompts with samples={samples})"

        def each(values: Any) -> Any:
            return jax.tree.map(lambda x: x[of_prompt], values)

        return cls(
            [ids[n] for n in of_prompt], each(np.cumsum(copies) - copies), each(most),
            each(samplings(sampling, number)),
            of_each("seeds", range(outputs) if seeds is None else seeds, outputs, np.uint32, "a number", whose),
            each(known_namespaces(namespaces, number, names)),
            each(of_each("priorities", priority, number, np.int32, "a number")),
            _stop_tokens(stop_tokens),
            each(retentions(retention, number, has_retention)),
        )  # fmt: skip

    def requests(
        self, outputs: Sequence[int], goals: np.ndarray, number: int, rows: int
    ) -> tuple[dict[str, Any], np.ndarray]:
        """Arguments of `submit` for some outputs, i32[number] each, padded.

        Samples run at the same time, in a row each; if they are more than the rows, in several parties.

        Returns:
          The arguments; and i32[outputs], how far each is behind the first of its party.
        """

        def padded(values: np.ndarray) -> np.ndarray:
            return np.pad(values, ((0, number - len(values)), *[(0, 0)] * (values.ndim - 1)))

        def each(values: Any) -> Any:
            return jax.tree.map(lambda x: padded(x[outputs]), values)

        prompts = [self.prompts[n] for n in outputs]
        lengths, line = np.array([len(ids) for ids in prompts], np.int32), np.concatenate(prompts).astype(np.int32)
        behind = (np.array(outputs) - self.first[outputs]) % rows
        leader = np.full((number,), -1, np.int32)
        leader[: len(behind)] = np.where(behind > 0, np.arange(len(behind)) - behind, -1)
        given = {
            "tokens": np.pad(line, (0, bucket(len(line), LINE) - len(line))), "lengths": padded(lengths),
            "max_new_tokens": padded(goals - lengths), "slots": np.arange(number, dtype=np.int32),
            "priority": each(self.priorities), "namespace": each(self.namespaces), "seed": each(self.seeds),
            "sampling": each(self.sampling), "stop_tokens": self.stop, "retention": each(self.retention),
            "sample_of": leader,
        }  # fmt: skip
        return given, behind
