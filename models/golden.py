# SPDX-License-Identifier: Apache-2.0
"""Golden folders: a checkpoint in Hugging Face format, and reference outputs in golden.npz.

The file's arrays, for B prompts of up to T tokens, each continued by up to G:

    prompts        i32[B, T]       padded with -1
    lengths        i32[B]
    logits         f32[B, T, V]    at every token of the prompts
    greedy         i32[B, G]       the reference's greedy continuation, padded with -1
    greedy_logits  f32[B, G, V]    from which each greedy token was chosen
"""

from __future__ import annotations

import dataclasses
import pathlib
import zipfile
import zlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Golden:
    """Prompts and reference outputs: the arrays of the file."""

    prompts: np.ndarray
    lengths: np.ndarray
    logits: np.ndarray
    greedy: np.ndarray
    greedy_logits: np.ndarray

    def text(self, row: int) -> np.ndarray:
        """A prompt and its continuation, without padding: i32[...]."""
        return np.concatenate([self.prompts[row, : self.lengths[row]], self.greedy[row, : self.steps(row)]])

    def steps(self, row: int) -> int:
        """Tokens of a prompt's continuation, up to its padding."""
        padding = np.flatnonzero(self.greedy[row] == -1)
        return int(padding[0]) if len(padding) else self.greedy.shape[1]

    def reference(self, row: int, position: int) -> np.ndarray:
        """Logits f32[V] at a position of `text`."""
        prompt = int(self.lengths[row])
        if position < prompt:
            return self.logits[row, position]
        return self.greedy_logits[row, position - prompt + 1]


def read_golden(folder: pathlib.Path, vocab_size: int) -> Golden:
    """Reads and checks golden.npz.

    Raises:
      FileNotFoundError: the folder has no golden.npz.
      ValueError: an array does not fit. The message has its name.
    """
    path = folder / "golden.npz"
    try:
        with np.load(path) as file:
            arrays = dict(file)
    except FileNotFoundError:
        raise
    except (OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a readable npz file ({error})") from error
    names = [field.name for field in dataclasses.fields(Golden)]
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{path}: no array {', '.join(missing)}")
    golden = Golden(**{name: arrays[name] for name in names})
    _check(path, golden, vocab_size)
    return golden


def _check(path: pathlib.Path, golden: Golden, vocab_size: int) -> None:
    """Refuses arrays of wrong shapes or dtypes, impossible lengths, and tokens outside the vocabulary."""
    for name in ("prompts", "greedy"):
        shape = getattr(golden, name).shape
        if len(shape) != 2 or 0 in golden.prompts.shape:
            raise ValueError(f"{path}: {name}{list(shape)}, wanted two axes and at least one prompt")
    rows, width = golden.prompts.shape
    steps = golden.greedy.shape[1]
    wanted = {
        "prompts": ((rows, width), np.integer),
        "lengths": ((rows,), np.integer),
        "logits": ((rows, width, vocab_size), np.floating),
        "greedy": ((rows, steps), np.integer),
        "greedy_logits": ((rows, steps, vocab_size), np.floating),
    }
    for name, (shape, kind) in wanted.items():
        array = getattr(golden, name)
        if array.shape != shape or not np.issubdtype(array.dtype, kind):
            raise ValueError(f"{path}: {name} {array.dtype}{list(array.shape)}, wanted {kind.__name__}{list(shape)}")
    for row, length in enumerate(golden.lengths):
        if not 1 <= length <= width:
            raise ValueError(f"{path}: lengths[{row}] is {length}, wanted 1 to {width}")
        text = golden.text(row)
        if np.any((text < 0) | (text >= vocab_size)):
            raise ValueError(f"{path}: row {row} has a token id outside 0..{vocab_size - 1} before its padding")
