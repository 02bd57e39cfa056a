# SPDX-License-Identifier: Apache-2.0
"""Words that drawings share: groups, rows, blocks and runs of their ids, and lines that fit."""

from __future__ import annotations

from collections.abc import Iterable

from kvjax._summary import Condition
from kvjax.debug.inspect import Inspection
from kvjax.state import NO_BLOCK


def runs(ids: Iterable[int]) -> list[str]:
    """Block ids with runs of three or more, upwards or downwards, and gaps shortened: 2 7-9 - x12, 4."""
    found: list[list[int]] = []
    for block in map(int, ids):
        run = found[-1] if found else []
        step = block - run[-1] if run else 0
        straight = abs(step) == 1 and min(block, run[-1]) >= 0 and (len(run) == 1 or run[1] - run[0] == step)
        if straight or (run and block == run[0] == NO_BLOCK):
            run.append(block)
        else:
            found.append([block])
    words: list[str] = []
    for run in found:
        if run[0] == NO_BLOCK:
            words += ["-"] if len(run) == 1 else [f"- x{len(run)},"]
        else:
            words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return words


def fit(words: list[str], width: int) -> str:
    """The words joined by blanks; where they are too wide, the middle is left out."""
    number, text = len(words), " ".join(words)
    while len(text) > max(width, 12) and number > 2:
        number -= 1
        text = " ".join([*words[: number - 1], "...", words[-1]])
    return text


def seqs(numbers: Iterable[int]) -> str:
    """Rows by number: seq 2, seqs 0 1 3."""
    numbers = list(numbers)
    return f"seq{'s' if len(numbers) > 1 else ''} {' '.join(runs(numbers))}"


def holders(number: str) -> str:
    """1 holder, 2 holders."""
    return f"{number} holder{'' if number == '1' else 's'}"


def tier_of(seen: Inspection, block: int) -> str:
    """The tier of a block, if it is not plainly on the device."""
    on_host = seen.condition[block] >= Condition.ON_HOST_EMPTY
    if seen.moving[block]:
        return ", on its way to the host" if on_host else ", on its way to the device"
    return ", on the host" if on_host else ""
