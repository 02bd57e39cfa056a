# SPDX-License-Identifier: Apache-2.0
"""The option `--store` of commands: a folder with blocks of earlier runs, and the name of a checkpoint's weights."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kvjax
from kvjax.stores import DiskStore, check_folder, load, save

from . import commands
from .loading import open_checkpoint

DEFAULT_BYTES = 10 << 30
READER_PATIENCE_MS = 30_000  # of a process that is there to compute little
_PIECE, _THREADS = 16 << 20, 8  # bytes that a thread hashes at a time


def add_store(parser: commands.Parser) -> None:
    """The options that `check` and `opened` read."""
    parser.add_argument(
        "--store", metavar="DIR", help="write whole blocks of prompts there, in clear, and find those of earlier runs"
    )
    of_writers = parser.add_mutually_exclusive_group()
    of_writers.add_argument(
        "--store-bytes", metavar="SIZE", type=commands.size, help="the most that they take, such as 500MB (10GiB)"
    )
    of_writers.add_argument("--store-readonly", action="store_true", help="find blocks that another process writes")


def check(parser: commands.Parser, args: Namespace) -> None:
    """Refuses the options without what they need."""
    if args.store is not None:
        commands.check_extra(parser, "stores", "--store")
        return
    for option in ("store_bytes", "store_readonly", "store_sync"):
        if getattr(args, option, None) is not parser.get_default(option):
            parser.error(f"--{option.replace('_', '-')}: got one without --store")


@contextlib.contextmanager
def opened(
    parser: commands.Parser,
    args: Namespace,
    spec: kvjax.CacheSpec,
    folder: str | os.PathLike,
    patience_ms: int = 1000,
    names: kvjax.Namespaces | None = None,
) -> Iterator[DiskStore | None]:
    """The store that the options want, for caches like `spec` and the checkpoint in a folder; None without one."""
    if args.store is None:
        yield None
        return
    max_bytes = DEFAULT_BYTES if args.store_bytes is None else args.store_bytes
    try:
        store = DiskStore(
            args.store, spec, model=checkpoint_name(folder), names=names or kvjax.Namespaces(),
            read_timeout_ms=READER_PATIENCE_MS if args.store_readonly else patience_ms,
            max_bytes=None if args.store_readonly else max_bytes, readonly=args.store_readonly,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        message = commands.reason(error, args.store)
        if message.startswith("max_bytes: "):
            parser.error(message.replace("max_bytes", "--store-bytes", 1))
        parser.error(f"--store: {message.removeprefix('location: ')}")
    with store:
        yield store


@dataclasses.dataclass
class Saved:
    """A cache that is saved when it is over."""

    cache: Any  # the latest one; None if it is lost
    loaded: bool = False  # whether it began with what an earlier run had saved


@contextlib.contextmanager
def saved(
    parser: commands.Parser, args: Namespace, cache: Any, names: kvjax.Namespaces, note: Callable[[str], None]
) -> Iterator[Saved]:
    """A cache with what `--save` finds in its folder; the end of a `with` saves it there."""
    if args.save is None:
        yield Saved(cache)
        return
    options: Any = {"names": names, "model": checkpoint_name(args.checkpoint)}
    try:
        folder = check_folder(args.save)
        found = Saved(cache, loaded=folder.has_save)
        if folder.interrupted:
            note(f"--save: {args.save}: {folder.interrupted} files of a save that was interrupted are deleted")
        if found.loaded:
            found.cache, blocks = load(cache, args.save, **options)
            note(f"{blocks.taken:,} blocks are loaded{f', {blocks.broken:,} are broken' if blocks.broken else ''}")
        else:
            note(f"--save: {args.save}: no save is there yet, and the cache begins empty")
    except (OSError, ValueError) as error:
        parser.error(f"--save: {_reason(error, args.save)}")
    yield found
    if found.cache is None:
        return
    try:
        note(f"{save(found.cache, args.save, **options):,} blocks are saved")
    except (OSError, ValueError) as error:
        parser.error(f"--save: {_reason(error, args.save)}; the cache is not saved")


def _reason(error: Exception, folder: str) -> str:
    return commands.reason(error, folder).removeprefix("folder: ")


def checkpoint_name(folder: str | os.PathLike) -> str:
    """A name that every copy of a checkpoint has, and no other checkpoint: a hash of its config and of all weights."""
    paths = open_checkpoint(folder).files()
    pieces = [(path, start) for path in paths for start in range(0, path.stat().st_size, _PIECE)]
    whole = hashlib.blake2b(digest_size=16, person=b"kvjax-weights")
    with ThreadPoolExecutor(_THREADS) as threads:
        for (path, start), digest in zip(pieces, threads.map(_digest, pieces), strict=True):
            whole.update(f"{path.name}\0{start}\0".encode() + digest)
    return f"checkpoint {whole.hexdigest()}"


def _digest(piece: tuple[pathlib.Path, int]) -> bytes:
    path, start = piece
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(_PIECE)).digest()
