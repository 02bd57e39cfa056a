# SPDX-License-Identifier: Apache-2.0
"""The options `--store` and `--save` of commands: folders with the blocks of earlier runs.

A folder belongs to the weights of a checkpoint, and `checkpoint_name` names them.
"""

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
from .shared_store import SharedStore

DEFAULT_BYTES = 10 << 30
READER_PATIENCE_MS = 30_000  # for a process which finds most of its blocks in the store
_PIECE = 16 << 20  # bytes for a thread to hash at a time
_THREADS = 8


def add_store(parser: commands.Parser) -> None:
    """Adds the options for `check` and `opened`."""
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="folder to write whole blocks of prompts to, unencrypted, and to find blocks of earlier runs in",
    )
    write_options = parser.add_mutually_exclusive_group()
    write_options.add_argument(
        "--store-bytes",
        metavar="SIZE",
        type=commands.size,
        help="limit on the size of the blocks there, such as 500MB (10GiB)",
    )
    write_options.add_argument("--store-readonly", action="store_true", help="find blocks that another process writes")


def check(parser: commands.Parser, args: Namespace) -> None:
    """Refuses a store's options without `--store`, and `--store` without its packages."""
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
    """Opens the store of the options, for caches like `spec` of the checkpoint in a folder. None without --store."""
    if args.store is None:
        yield None
        return
    max_bytes = DEFAULT_BYTES if args.store_bytes is None else args.store_bytes
    has_replicas = getattr(args, "replicas", None) is not None and not args.store_readonly
    try:
        make: Any = SharedStore if has_replicas else DiskStore
        store = make(
            pathlib.Path(args.store) if has_replicas else args.store,
            spec,
            model=checkpoint_name(folder),
            names=names or kvjax.Namespaces(),
            read_timeout_ms=READER_PATIENCE_MS if args.store_readonly else patience_ms,
            max_bytes=None if args.store_readonly else max_bytes,
            readonly=args.store_readonly,
        )
    except (OSError, ValueError) as error:
        message = commands.reason(error, args.store)
        if message.startswith("max_bytes: "):
            parser.error(message.replace("max_bytes", "--store-bytes", 1))
        parser.error(f"--store: {message.removeprefix('location: ')}")
    with store:
        yield store


@dataclasses.dataclass
class Saved:
    """A cache with a folder to save it in.

    Attributes:
      cache: the latest cache; None if it is lost.
      loaded: whether the cache began with the blocks of an earlier run.
    """

    cache: Any
    loaded: bool = False


@contextlib.contextmanager
def saved(
    parser: commands.Parser, args: Namespace, cache: Any, names: kvjax.Namespaces, note: Callable[[str], None]
) -> Iterator[Saved]:
    """Loads the blocks in the folder of `--save` into a cache, and saves the cache there at the end of the `with`.

    A replica whose save cannot be loaded, for example because other weights saved it, begins with the empty cache.
    """
    if args.save is None:
        yield Saved(cache)
        return
    options: Any = {"names": names, "model": checkpoint_name(args.checkpoint)}
    try:
        folder = check_folder(args.save)
        result = Saved(cache, loaded=folder.has_save)
        if folder.interrupted:
            note(f"--save: {args.save}: {folder.interrupted} files of an interrupted save are deleted")
        if result.loaded:
            result.cache, blocks = load(cache, args.save, **options)
            note(f"{blocks.taken:,} blocks are loaded{f', {blocks.broken:,} are broken' if blocks.broken else ''}")
        else:
            note(f"--save: {args.save}: the folder has no save yet, and the cache begins empty")
    except (OSError, ValueError) as error:
        reason = _reason(error, args.save)
        if args.replicas is None:
            parser.error(f"--save: {reason}")
        note(f"--save: {args.save} is not loaded: {reason}")
        result = Saved(cache)
    yield result
    if result.cache is None:
        return
    try:
        note(f"{save(result.cache, args.save, **options):,} blocks are saved")
    except (OSError, ValueError) as error:
        parser.error(f"--save: {_reason(error, args.save)}; the cache is not saved")


def _reason(error: Exception, folder: str) -> str:
    return commands.reason(error, folder).removeprefix("folder: ")


def checkpoint_name(folder: str | os.PathLike) -> str:
    """Returns a name which all copies of a checkpoint share, and no other checkpoint: a hash of config and weights."""
    paths = open_checkpoint(folder).files()
    pieces = [(path, start) for path in paths for start in range(0, path.stat().st_size, _PIECE)]
    checkpoint_hash = hashlib.blake2b(digest_size=16, person=b"kvjax-weights")
    with ThreadPoolExecutor(_THREADS) as threads:
        for (path, start), digest in zip(pieces, threads.map(_digest, pieces), strict=True):
            checkpoint_hash.update(f"{path.name}\0{start}\0".encode() + digest)
    return f"checkpoint {checkpoint_hash.hexdigest()}"


def _digest(piece: tuple[pathlib.Path, int]) -> bytes:
    path, start = piece
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(_PIECE)).digest()
