# SPDX-License-Identifier: Apache-2.0
"""Published traces as values. A line that is not what its format says is refused, with its file and number."""

from __future__ import annotations

import csv
import datetime
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from kvjax.research import _lines
from kvjax.research.logs import read_events
from kvjax.research.sessions import NO_CONTENTS, Sessions, blocks_of
from kvjax.research.traces import Trace, make_trace

TwoParents = Literal["refuse", "rename"]


def read_mooncake(path: str | pathlib.Path, *, block_size: int = 512, two_parents: TwoParents = "refuse") -> Trace:
    """Reads a trace of Mooncake's form: JSON lines with `timestamp` (ms), lengths and `hash_ids`.

    Args:
      path: of the file.
      block_size: tokens that an id stands for.
      two_parents: as for `make_trace`; Mooncake's ids name whole prefixes, so an id with two parents is a mistake.

    Raises:
      ValueError: for a line that is none of such a trace.

    Source: github.com/kvcache-ai/Mooncake, FAST25-release.
    """
    time, lengths, answers, prompts, where = [], [], [], [], []
    for place, found in _lines.entries(path):
        time.append(_lines.moment(place, found, "timestamp"))
        lengths.append(_lines.count(place, found, "input_length"))
        answers.append(_lines.count(place, found, "output_length"))
        prompts.append(_lines.hashes(place, found))
        where.append(place)
    _check_some(path, where)
    return make_trace(time, lengths, answers, prompts, block_size, two_parents=two_parents, where=where)


def read_bailian(path: str | pathlib.Path, *, block_size: int = 16, two_parents: TwoParents = "rename") -> Trace:
    """Reads a trace of Qwen-Bailian's form: JSON lines as Mooncake's with seconds, chats and types.

    An id is a hash of its block alone, so equal ids after different blocks are different prefixes. A request's session
    is the chat that `parent_chat_id` leads back to, as far as the file has it; its class is its `type`.

    Args:
      path: of the file.
      block_size: tokens that an id stands for.
      two_parents: as for `make_trace`.

    Raises:
      ValueError: for a line that is none of such a trace.

    Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
    """
    time, lengths, answers, prompts, where = [], [], [], [], []
    kinds, sessions = [], []
    roots: dict[int, int] = {}
    for place, found in _lines.entries(path):
        chat, parent = (_integer(place, found, name) for name in ("chat_id", "parent_chat_id"))
        roots[chat] = chat if parent < 0 else roots.get(parent, parent)
        sessions.append(roots[chat])
        kinds.append(str(_lines.field(place, found, "type")))
        time.append(1000 * _lines.moment(place, found, "timestamp"))
        lengths.append(_lines.count(place, found, "input_length"))
        answers.append(_lines.count(place, found, "output_length"))
        prompts.append(_lines.hashes(place, found))
        where.append(place)
    _check_some(path, where)
    return make_trace(
        time, lengths, answers, prompts, block_size, two_parents=two_parents, kind=kinds, session=sessions, where=where
    )


def read_azure(path: str | pathlib.Path, *, sessions: Sessions | None = None, block_size: int = 16) -> Trace:
    """Reads a trace of Azure's LLM inference: a table of TIMESTAMP, ContextTokens and GeneratedTokens.

    It does not say what prompts have in common. Without a model of sessions every block is its own and nothing hits;
    with one, reuse is drawn at random. The trace's `notes` say which.

    Args:
      path: of the file.
      sessions: the model; None: no reuse.
      block_size: tokens of a block.

    Raises:
      ValueError: for a line that is none of such a trace.

    Source: github.com/Azure/AzurePublicDataset.
    """
    time, lengths, answers, where = [], [], [], []
    for place, row in _rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        time.append(_clock(place, row["TIMESTAMP"]))
        lengths.append(_lines.count(place, row, "ContextTokens"))
        answers.append(_lines.count(place, row, "GeneratedTokens"))
        where.append(place)
    _check_some(path, where)
    time = [moment - time[0] for moment in time]
    return _without_contents(time, lengths, answers, where, block_size, sessions, None, None)


def read_burst(path: str | pathlib.Path, *, sessions: Sessions | None = None, block_size: int = 16) -> Trace:
    """Reads a trace of BurstGPT's form: a table with Timestamp (s), lengths, Model and Log Type.

    It does not say what prompts have in common. Without a model of sessions every block is its own and nothing hits;
    with one, reuse is drawn at random, or follows the column Session ID where the file has it. The trace's `notes` say
    which. A request's class is its model and log type; a failed one has an answer of 0 tokens.

    Args:
      path: of the file.
      sessions: the model; None: no reuse.
      block_size: tokens of a block.

    Raises:
      ValueError: for a line that is none of such a trace.

    Source: github.com/HPMLL/BurstGPT.
    """
    time, lengths, answers, kinds, known, where = [], [], [], [], [], []
    for place, row in _rows(path, ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")):
        time.append(1000 * _lines.moment(place, row, "Timestamp"))
        lengths.append(_lines.count(place, row, "Request tokens"))
        answers.append(_lines.count(place, row, "Response tokens"))
        if "Total tokens" in row and _lines.count(place, row, "Total tokens") != lengths[-1] + answers[-1]:
            raise ValueError(f"{place}: Total tokens: got {row['Total tokens']}, wanted {lengths[-1] + answers[-1]}")
        kinds.append(f"{row['Model']}, {row['Log Type']}")
        # A request without a session is one of its own: its place is a name that no other has.
        known.append(row.get("Session ID", "").strip() or place)
        where.append(place)
    _check_some(path, where)
    told = known if known != where else None
    return _without_contents(time, lengths, answers, where, block_size, sessions, kinds, told)


def _without_contents(
    time: list[float],
    lengths: list[int],
    answers: list[int],
    where: list[str],
    block_size: int,
    model: Sessions | None,
    kinds: list[str] | None,
    told: list[str] | None,
) -> Trace:
    """A trace whose ids are made here; `told` has the sessions if the source tells them."""
    for place, tokens in zip(where, lengths, strict=True):
        if tokens < 1:
            raise ValueError(f"{place}: got a prompt of {tokens} tokens, wanted at least 1")
    if model is None:
        drawn, note = None, NO_CONTENTS
    elif told is not None:
        drawn = told
        note = "Reuse is assumed: each prompt begins with the full blocks of the one before it in its Session ID."
    else:
        drawn, note = model.draw(lengths), f"Reuse is not measured but drawn at random: {model}."
    session = told if drawn is None else drawn
    ids = blocks_of(drawn, lengths, block_size)
    return make_trace(time, lengths, answers, ids, block_size, kind=kinds, session=session, notes=[note], where=where)


FORMATS: dict[str, Callable[..., Trace]] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "azure": read_azure,
    "burst": read_burst,
    "events": read_events,
}


def read_trace(path: str | pathlib.Path, format: str | None = None, **options: Any) -> Trace:
    """Reads a trace of any form that has a reader.

    Args:
      path: of the file.
      format: one of `FORMATS`; None: told by the first line.
      **options: of that reader.

    Raises:
      ValueError: for a form that no reader has, and for what the reader refuses.
    """
    format = _told(path) if format is None else format
    if format not in FORMATS:
        raise ValueError(f"format: got {format!r}, wanted one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[format](path, **options)


def _told(path: str | pathlib.Path) -> str:
    """The format that the first line tells."""
    place, line = next(_lines.lines(path), (f"{path}:1", ""))
    if line.startswith(("{", "[")):
        found = _lines.entry(place, line)
        if isinstance(found, list) or "events" in found:
            return "events"
        if "hash_ids" in found:
            return "bailian" if "chat_id" in found else "mooncake"
    columns = [name.strip() for name in line.split(",")]
    if "TIMESTAMP" in columns and "ContextTokens" in columns:
        return "azure"
    if "Timestamp" in columns and "Request tokens" in columns:
        return "burst"
    raise ValueError(f"{place}: got {line[:60]!r}, wanted the first line of {', '.join(FORMATS)}")


def _rows(path: str | pathlib.Path, wanted: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """(file:line, {column: text}) of every row of a table whose first line names the columns."""
    columns: list[str] = []
    for place, line in _lines.lines(path):
        try:
            cells = next(csv.reader([line]))
        except csv.Error as error:
            raise ValueError(f"{place}: got {line:.60}, wanted cells: {error}") from error
        if not columns:
            columns = [name.strip() for name in cells]
            lacks = [name for name in wanted if name not in columns]
            if lacks:
                raise ValueError(f"{place}: got the columns {line:.80}, wanted {', '.join(lacks)} too")
        elif len(cells) != len(columns):
            raise ValueError(f"{place}: got {len(cells)} cells, wanted {len(columns)}")
        else:
            yield place, dict(zip(columns, cells, strict=True))


def _clock(place: str, text: str) -> float:
    """Milliseconds since 1970 of a date and time. One without a zone is of UTC; what is finer than 1 us is dropped."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ValueError(f"{place}: TIMESTAMP: got {text!r:.40}, wanted a date and time") from error
    zone = moment.tzinfo or datetime.UTC
    return 1000 * moment.replace(tzinfo=zone).timestamp()


def _integer(place: str, found: dict[str, Any], name: str) -> int:
    value = _lines.field(place, found, name)
    if type(value) is not int:
        raise ValueError(f"{place}: {name}: got {value!r:.40}, wanted an integer")
    return value


def _check_some(path: str | pathlib.Path, where: list[str]) -> None:
    if not where:
        raise ValueError(f"{path}: got no requests, wanted at least one")
