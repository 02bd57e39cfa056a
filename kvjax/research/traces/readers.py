# SPDX-License-Identifier: Apache-2.0
"""Readers of published traces. An invalid record is an error with its file and line."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from kvjax.research.traces import records
from kvjax.research.traces.event_log import read_events
from kvjax.research.traces.generator import Sessions, blocks_of
from kvjax.research.traces.trace import Trace, make_trace

TwoParents = Literal["refuse", "rename"]


def read_mooncake(path: str | pathlib.Path, *, block_size: int = 512, two_parents: TwoParents = "refuse") -> Trace:
    """Reads a trace in Mooncake's form: JSON lines with `timestamp` (ms), lengths and `hash_ids`.

    Args:
      path: path of the file.
      block_size: tokens per id.
      two_parents: see `make_trace`. Mooncake's ids stand for whole prefixes, so an id with two parents is a mistake.

    Raises:
      ValueError: for an invalid record.

    Source: github.com/kvcache-ai/Mooncake, FAST25-release.
    """
    columns = _Columns()
    for where, record in records.objects(path):
        columns.add(where, record, records.timestamp(where, record, "timestamp"), "input_length", "output_length")
        columns.hash_ids.append(records.integers(where, record, "hash_ids"))
    return columns.trace(path, block_size, two_parents=two_parents)


def read_bailian(path: str | pathlib.Path, *, block_size: int = 16, two_parents: TwoParents = "rename") -> Trace:
    """Reads a trace in Qwen-Bailian's form: JSON lines like Mooncake's, with seconds, chats and types.

    An id is a hash of only its own block, so equal ids after different blocks are different prefixes. A request's
    session is the first chat in its chain of `parent_chat_id`, as far as the file contains the chain. Its class is its
    `type`.

    Args:
      path: path of the file.
      block_size: tokens per id.
      two_parents: see `make_trace`.

    Raises:
      ValueError: for an invalid record.

    Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
    """
    columns = _Columns()
    sessions = []
    roots: dict[int, int] = {}
    for where, record in records.objects(path):
        chat, parent = (records.integer(where, record, name) for name in ("chat_id", "parent_chat_id"))
        roots[chat] = chat if parent < 0 else roots.get(parent, parent)
        sessions.append(roots[chat])
        columns.kinds.append(str(records.field(where, record, "type")))
        time = 1000 * records.timestamp(where, record, "timestamp")
        columns.add(where, record, time, "input_length", "output_length")
        columns.hash_ids.append(records.integers(where, record, "hash_ids"))
    return columns.trace(path, block_size, two_parents=two_parents, session=sessions)


def read_azure(
    path: str | pathlib.Path, *, sessions: Sessions | None = None, block_size: int = 16, max_blocks: int = 1 << 23
) -> Trace:
    """Reads a trace of Azure's LLM inference: a table of TIMESTAMP, ContextTokens and GeneratedTokens.

    The table lacks the blocks shared by prompts. Without a model of sessions every block is unique and nothing hits.
    With a model, reuse is random. The trace's `notes` tell which applies.

    Args:
      path: path of the file.
      sessions: the model of sessions; None disables reuse.
      block_size: tokens of a block.
      max_blocks: the maximum number of blocks of all prompts; an id takes some 250 bytes.

    Raises:
      ValueError: for an invalid record.

    Source: github.com/Azure/AzurePublicDataset.
    """
    columns = _Columns()
    for where, row in _rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        columns.add(where, row, _date(where, row["TIMESTAMP"]), "ContextTokens", "GeneratedTokens")
    columns.time = [time - columns.time[0] for time in columns.time]
    return _without_contents(columns, path, block_size, max_blocks, sessions, None)


def read_burst(
    path: str | pathlib.Path, *, sessions: Sessions | None = None, block_size: int = 16, max_blocks: int = 1 << 23
) -> Trace:
    """Reads a trace in BurstGPT's form: a table with Timestamp (s), lengths, Model and Log Type.

    The table lacks the blocks shared by prompts. Without a model of sessions every block is unique and nothing hits.
    With a model, reuse is random, or follows the column Session ID if the file has it. The trace's `notes` tell which
    applies. A request's class is its model and log type. A failed request has an answer of 0 tokens.

    Args:
      path: path of the file.
      sessions: the model of sessions; None disables reuse.
      block_size: tokens of a block.
      max_blocks: the maximum number of blocks of all prompts; an id takes some 250 bytes.

    Raises:
      ValueError: for an invalid record.

    Source: github.com/HPMLL/BurstGPT.
    """
    columns = _Columns()
    source_sessions = []
    for where, row in _rows(path, ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")):
        columns.add(where, row, 1000 * records.timestamp(where, row, "Timestamp"), "Request tokens", "Response tokens")
        total = columns.input_length[-1] + columns.output_length[-1]
        if "Total tokens" in row and records.count(where, row, "Total tokens") != total:
            raise ValueError(f"{where}: Total tokens: got {row['Total tokens']}, wanted {total}")
        columns.kinds.append(f"{row['Model']}, {row['Log Type']}")
        # A request without a session gets its own session, because no other request has the same file and line.
        source_sessions.append(row.get("Session ID", "").strip() or where)
    has_sessions = source_sessions != columns.where
    return _without_contents(columns, path, block_size, max_blocks, sessions, source_sessions if has_sessions else None)


@dataclasses.dataclass
class _Columns:
    """The requests of a file so far, a list for each argument of `make_trace`. Without `kinds` there are no classes."""

    time: list[float] = dataclasses.field(default_factory=list)
    input_length: list[int] = dataclasses.field(default_factory=list)
    output_length: list[int] = dataclasses.field(default_factory=list)
    hash_ids: list[list[int]] = dataclasses.field(default_factory=list)  # if the source has them
    kinds: list[str] = dataclasses.field(default_factory=list)
    where: list[str] = dataclasses.field(default_factory=list)

    def add(self, where: str, record: Mapping[str, Any], time: float, input_name: str, output_name: str) -> None:
        """Adds a request at `time` (ms), with its lengths in the fields of these names."""
        self.time.append(time)
        self.input_length.append(records.count(where, record, input_name))
        self.output_length.append(records.count(where, record, output_name))
        self.where.append(where)

    def trace(self, path: str | pathlib.Path, block_size: int, **options: Any) -> Trace:
        """The requests as a trace, which needs at least one."""
        if not self.where:
            raise ValueError(f"{path}: got no requests, wanted at least one")
        return make_trace(
            self.time,
            self.input_length,
            self.output_length,
            self.hash_ids,
            block_size,
            kind=self.kinds or None,
            where=self.where,
            **options,
        )


def _without_contents(
    columns: _Columns,
    path: str | pathlib.Path,
    block_size: int,
    max_blocks: int,
    model: Sessions | None,
    source_sessions: list[str] | None,
) -> Trace:
    """A trace with ids made here, by the sessions of a model or of the source."""
    for where, tokens in zip(columns.where, columns.input_length, strict=True):
        if tokens < 1:
            raise ValueError(f"{where}: got a prompt of {tokens} tokens, wanted at least 1")
    if block_size < 1:
        raise ValueError(f"block_size: got {block_size}, wanted at least 1 token")
    num_blocks = [-(-tokens // block_size) for tokens in columns.input_length]
    records.check_blocks(zip(columns.where, num_blocks, strict=True), max_blocks)
    sessions: Sequence[Any] | None = None
    if model is None:
        note = "The source lacks the blocks shared by prompts: every block is unique, and nothing can hit."
    elif source_sessions is not None:
        sessions = source_sessions
        note = "Reuse is assumed: each prompt begins with the full blocks of the prompt before it in its Session ID."
    else:
        sessions = model.draw(columns.input_length)
        note = f"Reuse is not measured but random: {model}."
    columns.hash_ids = blocks_of(sessions, columns.input_length, block_size)
    return columns.trace(path, block_size, session=source_sessions if sessions is None else sessions, notes=[note])


FORMATS: dict[str, Callable[..., Trace]] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "azure": read_azure,
    "burst": read_burst,
    "events": read_events,
}


def read_trace(path: str | pathlib.Path, format: str | None = None, **options: Any) -> Trace:
    """Reads a trace in any supported format.

    Args:
      path: path of the file.
      format: a key of `FORMATS`; defaults to the form of the first line.
      **options: options of the form's reader.

    Raises:
      ValueError: for an unknown form, and for a file refused by the reader. Use `make_trace` for requests in another
        form.

    Example:
      >>> import pathlib, tempfile
      >>> from kvjax import research
      >>> line = '{"timestamp": 0, "input_length": 6, "output_length": 2, "hash_ids": [7, 8]}'
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "trace.jsonl")
      ...     _ = path.write_text(line)
      ...     trace = research.read_trace(path, "mooncake", block_size=4)
      >>> trace.lengths.tolist(), trace.full.tolist()
      ([2], [1])
    """
    format = _format_of(path) if format is None else format
    if format not in FORMATS:
        raise ValueError(f"format: got {format!r}, wanted one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[format](path, **options)


def _format_of(path: str | pathlib.Path) -> str:
    """The format of a file, from its first line."""
    where, line = next(records.lines(path), (f"{path}:1", ""))
    if line.startswith(("{", "[")):
        record = records.parse_batch(where, line)
        if isinstance(record, list) or "events" in record:
            return "events"
        if "hash_ids" in record:
            return "bailian" if "chat_id" in record else "mooncake"
    columns = _cells(where, line)
    if "TIMESTAMP" in columns and "ContextTokens" in columns:
        return "azure"
    if "Timestamp" in columns and "Request tokens" in columns:
        return "burst"
    raise ValueError(
        f"{where}: got {line[:60]!r}, wanted the first line of {', '.join(FORMATS)}; use kvjax.research.make_trace for "
        "requests in any other form"
    )


def _rows(path: str | pathlib.Path, wanted: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """(file:line, {column: text}) of every row of a table. The first line has the names of the columns."""
    columns: list[str] = []
    for where, line in records.lines(path):
        cells = _cells(where, line)
        if not columns:
            columns = cells
            missing = [name for name in wanted if name not in columns]
            if missing:
                raise ValueError(f"{where}: got the columns {line:.80}, wanted {', '.join(missing)} too")
        elif len(cells) != len(columns):
            raise ValueError(f"{where}: got {len(cells)} cells, wanted {len(columns)}")
        else:
            yield where, dict(zip(columns, cells, strict=True))


def _cells(where: str, line: str) -> list[str]:
    """The cells of a row. Any cell may be quoted."""
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise ValueError(f"{where}: got {line:.60}, wanted cells: {error}") from error


def _date(where: str, text: str) -> float:
    """Milliseconds since 1970 of a date and time. Without a zone it is UTC. Fractions below 1 us are dropped."""
    try:
        date = datetime.datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ValueError(f"{where}: TIMESTAMP: got {text!r:.40}, wanted a date and time") from error
    return 1000 * date.replace(tzinfo=date.tzinfo or datetime.UTC).timestamp()
