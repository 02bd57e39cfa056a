# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: a cache's findable blocks in a folder, for a process that starts later.

    kvjax.stores.save(cache, "cache", names=names, model="gemma-3-4b, revision 2")
    cache, loaded = kvjax.stores.load(cache, "cache", names=names, model="gemma-3-4b, revision 2")

`manifest.py` says which files a save has, and `values.py` what stands in them. No block number is written, and no key:
a block is a prefix. Rows are not saved.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

import jax
import numpy as np

from kvjax._arrays import unreadable
from kvjax._compile import own_transfers
from kvjax._files import open_regular
from kvjax.blocks.hashes import namespace_root
from kvjax.blocks.keys import Namespaces
from kvjax.cache import AnyCache, Cache
from kvjax.checks import integers
from kvjax.pools.host import HostPools
from kvjax.spec import CacheSpec
from kvjax.state import CacheState
from kvjax.stores.contents import Contents, contents_of, num_bytes
from kvjax.stores.layout import check_layout, layout_of
from kvjax.stores.manifest import (
    INDEX,
    MANIFEST,
    VALUES,
    broken,
    checked_folder,
    commit_manifest,
    new_file,
    read_manifest,
    written_by_one,
)
from kvjax.stores.restore import Loaded, Saved, restore
from kvjax.stores.transport import read
from kvjax.stores.values import Block, Values
from kvjax.tiered import TieredCache


@own_transfers()
def save(
    cache: Cache | TieredCache,
    folder: Any,
    *,
    names: Namespaces | None = None,
    model: str,
    loras: Mapping[int, str] | None = None,
) -> int:
    """Saves all findable blocks of a cache, on both tiers, in place of the folder's older save.

    Until the end the older save is the folder's, and after it the new one, whatever ends the process. Reads a few
    blocks at a time, and leaves the cache as it is. Files of an interrupted save are deleted by the next one.

    Args:
      cache: with nothing on the move; not shared by several processes.
      folder: a path; it is made if there is none. One save at a time writes to it.
      names: the namespaces of the cache's rows; None: no row had one.
      model: the name of the model and its weights, which `load` has to give again.
      loras: the names of the LoRAs, by the numbers that `names` knows them by; needed for those that have blocks.

    Returns:
      How many blocks it has saved.

    Raises:
      ValueError: naming the argument, before anything is written.
    """
    pools_of(cache)
    names = Namespaces() if names is None else names
    path = checked_folder(folder)
    loras = checked_names(names, model, loras)
    state = jax.device_get(cache.state)
    contents, ids = contents_of(state)
    namespaces = np.unique(contents.namespace).tolist()
    values = Values(state.spec)
    roots = {number: namespace_root(number, names, loras, model, b"") for number in namespaces}
    blocks = contents.blocks(values, roots)
    with written_by_one(path):
        name = secrets.token_hex(8)
        index = contents.to_bytes()
        _write_values(path / (name + VALUES), cache, state, values, blocks, ids)
        with new_file(path / (name + INDEX)) as file:
            file.write(index)
        commit_manifest(
            path,
            {
                "model": model,
                "layout": layout_of(state.spec),
                "namespaces": names.to_dict(),
                "loras": {str(number): lora for number, lora in loras.items()},
                "num_blocks": len(blocks),
                "name": name,
                "crc32": zlib.crc32(index),
            },
        )
    return len(blocks)


def pools_of(cache: Any) -> HostPools | None:
    """The host pools of a cache that can be saved or loaded, if it has any; ValueError for any other."""
    if not isinstance(cache, AnyCache):
        raise ValueError(f"cache: got a {type(cache).__name__}, wanted a Cache or a TieredCache")
    if why := unreadable(cache):
        raise ValueError(f"cache: got one that is {why}, wanted one of this process, whose arrays can be read")
    if np.ndim(cache.state.groups[0].num_empty):
        raise ValueError("cache: got a batch of caches, wanted one")
    if isinstance(cache, Cache) and cache.state.spec.host_groups:
        raise ValueError("cache: got a Cache whose spec has a host tier, wanted the TieredCache, which has its bytes")
    return cache.host


def checked_names(names: Any, model: Any, loras: Any) -> dict[int, str]:
    """The names of LoRAs by number; ValueError if one of the arguments is not what it has to be."""
    if not isinstance(names, Namespaces):
        raise ValueError(f"names: got {names!r:.80}, wanted the kvjax.Namespaces of the cache's rows")
    if not isinstance(model, str) or not model:
        raise ValueError(f"model: got {model!r:.80}, wanted the name of the model and its weights")
    if not isinstance(loras, Mapping | None):
        raise ValueError(f"loras: got {loras!r:.80}, wanted {{number: name}} or None")
    loras = dict(loras or {})
    for number, name in loras.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not isinstance(name, str):
            raise ValueError(f"loras: got {number!r:.80}: {name!r:.80}, wanted numbers with names")
    if len(set(loras.values())) < len(loras):
        raise ValueError(f"loras: got {loras!r:.200}, wanted a name of its own for each")
    return {int(number): name for number, name in loras.items()}


def _write_values(
    path: pathlib.Path,
    cache: Cache | TieredCache,
    state: CacheState,
    values: Values,
    blocks: Sequence[Block],
    ids: np.ndarray,
) -> None:
    """Writes the values of blocks, of which the groups have ids i32[G, n], to a file: group by group."""
    host = pools_of(cache)
    starts = values.starts(ids >= 0)
    with new_file(path) as file:
        for number, group in enumerate(state.groups):
            if not values.has_bytes(number):
                continue
            (saved,) = np.nonzero(ids[number] >= 0)
            pool_rows = np.asarray(group.pool_row(ids[number, saved]))
            for piece, arrays in read(cache.pools, host, number, pool_rows):
                for index, *block_arrays in zip(saved[piece].tolist(), *arrays, strict=True):
                    file.seek(starts[number, index])
                    file.writelines(values.encode(blocks[index], number, block_arrays))


@own_transfers()
def load[C: (Cache, TieredCache)](
    cache: C,
    folder: Any,
    *,
    names: Namespaces | None = None,
    model: str,
    loras: Mapping[int, str] | None = None,
    now: int = 0,
) -> tuple[C, Loaded]:
    """Adopts the blocks of a saved cache: whole prefixes, the least recently released first.

    Sizes, tiers, policy, devices and the numbers of `names` may differ from those of the saved cache; its layout and
    model may not. A smaller cache takes the blocks that were released last. Times to live begin anew. What the cache
    has beforehand counts as released before. No events come of it: `kvjax.events.snapshot` has the contents after it.

    Args:
      cache: usually an empty one. It is donated: go on with the returned one.
      folder: a folder that `save` has written.
      names: gets the saved salts' numbers, its own or new ones; None: the save has blocks without salt and LoRA alone.
      model: as given to `save`.
      loras: the names of this process' LoRAs by number; blocks of others are left.
      now: ms, as of the verbs.

    Returns:
      The cache; and how many blocks it has taken.

    Raises:
      ValueError: naming the argument, before the cache is touched: for a folder that is no save or has a broken
        manifest or index, for one of another version of kvjax, and for another layout or model.
      FailedTransfer: if a move between the tiers fails; it has the cache to go on with.
    """
    pools_of(cache)
    own_names = Namespaces() if names is None else names
    path = checked_folder(folder)
    loras = checked_names(own_names, model, loras)
    time = np.asarray(integers("now", now, ()))
    spec = cache.state.spec
    with contextlib.ExitStack() as stack:
        save, contents, file = _opened(path, spec, model, stack)
        roots, namespaces = _translated(path, save, contents, own_names, loras)
        if names is None and any(namespaces.values()):
            raise ValueError("names: got None, wanted a kvjax.Namespaces: the save has blocks of salts or LoRAs")
        saved = Saved(Values(spec), contents, roots, file)
        return cast(Any, restore(cache, saved, namespaces, time))


def _opened(
    folder: pathlib.Path, spec: CacheSpec, model: str, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], Contents, IO[bytes]]:
    """A save with this model and the spec's layout, its contents, and the open file of its values."""
    while True:
        save = read_manifest(folder)
        if model != save["model"]:
            raise ValueError(f"model: got {model!r:.200}, wanted that of the save, {save['model']!r:.200}")
        check_layout(save["layout"], layout_of(spec))
        path = folder / (save["name"] + INDEX)
        try:
            contents = _read_index(path, save, spec)
            path = path.with_suffix(VALUES)
            return save, contents, stack.enter_context(open_regular(path, "rb"))
        except (OSError, ValueError, MemoryError) as error:
            if read_manifest(folder)["name"] == save["name"]:
                raise broken(path, f"contents that cannot be read ({error})") from error
            # Else another save has come in between, and has deleted these files.


def _read_index(path: pathlib.Path, save: Mapping[str, Any], spec: CacheSpec) -> Contents:
    """The contents of a save."""
    wanted = num_bytes(spec, save["num_blocks"])
    with open_regular(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) != wanted:
            raise ValueError(f"{size} bytes, not {wanted}")
        data = file.read()
    if zlib.crc32(data) != save["crc32"]:
        raise ValueError("another checksum")
    return Contents.from_bytes(data, spec, save["num_blocks"])


def _translated(
    folder: pathlib.Path, save: Mapping[str, Any], contents: Contents, names: Namespaces, loras: Mapping[int, str]
) -> tuple[dict[int, bytes], dict[int, int]]:
    """Of each saved namespace the hash of its empty prefix, and its number in `names` if this process has its LoRA."""
    model = save["model"]
    numbers = np.unique(contents.namespace).tolist()
    try:
        saved = Namespaces.from_dict(save["namespaces"])
        saved_loras = checked_names(saved, model, {int(number): name for number, name in save["loras"].items()})
        roots = {number: namespace_root(number, saved, saved_loras, model, b"") for number in numbers}
    except ValueError as error:
        raise broken(folder / MANIFEST, f"namespaces that do not fit its blocks ({error})") from error
    number_of = {name: number for number, name in loras.items()}
    namespaces = {}
    for number in numbers:
        salt, lora = saved.describe(number)
        if lora is None:
            namespaces[number] = names.numbered(salt, None)
        elif saved_loras[lora] in number_of:
            namespaces[number] = names.numbered(salt, number_of[saved_loras[lora]])
    return roots, namespaces
