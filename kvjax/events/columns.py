# SPDX-License-Identifier: Apache-2.0
"""The columns and flags of a row of the index's table (`index.py`), and the hashes of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

GENERATION, PARENT, PARENT_GENERATION, FILL, LEVEL, PRIORITY, NAMESPACE, DEPTH, FLAGS = range(9)
HASH = 9
ABOVE = 13
SIZE = 17
TEXT = 18
# Flags. All except PARTIAL describe the whole prefix, so a wire that skips a block also skips its children.
PARTIAL, UNKNOWN, SALT, LORA, EXTRA, COLLISION = (1 << bit for bit in range(6))


def hashes_of(rows: np.ndarray, column: int = HASH) -> np.ndarray:
    """u64[n]; the first 64 bits of the hashes of rows i32[n, W]. With ABOVE: the hashes of the prefixes before them."""
    hashes = np.ascontiguousarray(rows[:, column : column + 2]).view(">u8")[:, 0].astype(np.uint64)
    return np.maximum(hashes, np.uint64(1))


def chains_of(rows: np.ndarray, *columns: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) of consecutive rows of the same prefix, with equal values in some columns."""
    follows = (hashes_of(rows, ABOVE)[1:] == hashes_of(rows)[:-1]) & (rows[1:, DEPTH] > 0)
    for column in columns:
        follows &= rows[1:, column] == rows[:-1, column]
    return itertools.pairwise([0, *(np.flatnonzero(~follows) + 1).tolist(), len(rows)])
