# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: a cache's findable blocks in a folder, for a process that starts later.

    kvjax.stores.save(cache, "cache", names=names, model="gemma-3-4b, revision 2")
    cache, loaded = kvjax.stores.load(cache, "cache", names=names, model="gemma-3-4b, revision 2")

`manifest.py` describes the files of a save, and `values.py` their contents. A save has no block numbers and no keys,
because a block is identified by its prefix. Rows are not saved.
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
    """Saves all findable blocks of a cache, on both tiers, and replaces the folder's older save.

    The folder keeps the older save until the new save is complete, even if the process is killed in between. `save`
    reads a few blocks at a time, and leaves the cache unchanged. The next save deletes the files of an interrupted
    save.

    Args:
      cache: the cache. No move may be in progress, and it must not be shared by several processes.
      folder: a path; created if missing. Only a single save at a time may write to it.
      names: the namespaces of the cache's rows. None means no row had a namespace.
      model: the name of the model and its weights. Pass the same name to `load`.
      loras: the names of the LoRAs, by their numbers in `names`. Each LoRA with cached blocks needs a name.

    Returns:
      The number of saved blocks.

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
    roots = {namespace: namespace_root(namespace, names, loras, model, b"") for namespace in namespaces}
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
                "loras": {str(lora): lora_name for lora, lora_name in loras.items()},
                "num_blocks": len(blocks),
                "name": name,
                "crc32": zlib.crc32(index),
            },
        )
    return len(blocks)


def pools_of(cache: Any) -> HostPools | None:
    """The host pools of a cache, None without a host tier. Raises a ValueError if it cannot be saved or loaded."""
    if not isinstance(cache, AnyCache):
        raise ValueError(f"cache: got a {type(cache).__name__}, wanted a Cache or a TieredCache")
    if problem := unreadable(cache):
        raise ValueError(f"cache: got one that is {problem}, wanted one of this process with readable arrays")
    if np.ndim(cache.state.groups[0].num_empty):
        raise ValueError("cache: got a batch of caches, wanted a single one")
    if isinstance(cache, Cache) and cache.state.spec.host_groups:
        raise ValueError("cache: got a Cache whose spec has a host tier, wanted the TieredCache, which has its bytes")
    return cache.host


def checked_names(names: Any, model: Any, loras: Any) -> dict[int, str]:
    """The names of LoRAs by number. Raises a ValueError if an argument is invalid."""
    if not isinstance(names, Namespaces):
        raise ValueError(f"names: got {names!r:.80}, wanted the kvjax.Namespaces of the cache's rows")
    if not isinstance(model, str) or not model:
        raise ValueError(f"model: got {model!r:.80}, wanted the name of the model and its weights")
    if not isinstance(loras, Mapping | None):
        raise ValueError(f"loras: got {loras!r:.80}, wanted {{number: name}} or None")
    loras = dict(loras or {})
    for lora, name in loras.items():
        if isinstance(lora, bool) or not isinstance(lora, int | np.integer) or not isinstance(name, str):
            raise ValueError(f"loras: got {lora!r:.80}: {name!r:.80}, wanted numbers with names")
    if len(set(loras.values())) < len(loras):
        raise ValueError(f"loras: got {loras!r:.200}, wanted a different name for each")
    return {int(lora): name for lora, name in loras.items()}


def _write_values(
    path: pathlib.Path,
    cache: Cache | TieredCache,
    state: CacheState,
    values: Values,
    blocks: Sequence[Block],
    ids: np.ndarray,
) -> None:
    """Writes the values of blocks, with ids i32[G, n] in the groups, to a file: group by group."""
    host = pools_of(cache)
    starts = values.starts(ids >= 0)
    with new_file(path) as file:
        for group_index, group in enumerate(state.groups):
            if not values.has_bytes(group_index):
                continue
            (saved,) = np.nonzero(ids[group_index] >= 0)
            pool_rows = np.asarray(group.pool_row(ids[group_index, saved]))
            for piece, arrays in read(cache.pools, host, group_index, pool_rows):
                for index, *block_arrays in zip(saved[piece].tolist(), *arrays, strict=True):
                    file.seek(starts[group_index, index])
                    file.writelines(values.encode(blocks[index], group_index, block_arrays))


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

    Sizes, tiers, policy, devices and the numbers of `names` may differ from the saved cache. Layout and model must be
    the same. A smaller cache takes the most recently released blocks. Times to live start again. Blocks already in the
    cache count as released earlier. `load` makes no events: `kvjax.events.snapshot` describes the contents afterwards.

    Args:
      cache: usually an empty cache. It is donated: continue with the returned cache.
      folder: a folder written by `save`.
      names: gets the numbers of the saved salts, existing or new. None means the save has no block with a salt or LoRA.
      model: the name given to `save`.
      loras: the names of this process's LoRAs by number. Blocks of other LoRAs are skipped.
      now: the present time in ms, as in the verbs.

    Returns:
      The cache, and the numbers of adopted, skipped and broken blocks.

    Raises:
      ValueError: naming the argument, before the cache is touched: if the folder has no save, a save of another version
        of kvjax, or a broken manifest or index, or if the layout or the model differs.
      FailedTransfer: if a move between the tiers fails. The error has the cache to continue with.
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
            # Otherwise another save has replaced these files in the meantime. Read the new manifest.


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
    """Each saved namespace's root hash, and its number in `names` if this process has its LoRA."""
    model = save["model"]
    saved_numbers = np.unique(contents.namespace).tolist()
    try:
        saved = Namespaces.from_dict(save["namespaces"])
        saved_loras = checked_names(saved, model, {int(lora): name for lora, name in save["loras"].items()})
        roots = {
            saved_number: namespace_root(saved_number, saved, saved_loras, model, b"") for saved_number in saved_numbers
        }
    except ValueError as error:
        raise broken(folder / MANIFEST, f"namespaces that do not fit its blocks ({error})") from error
    lora_of_name = {name: lora for lora, name in loras.items()}
    namespaces = {}
    for saved_number in saved_numbers:
        salt, lora = saved.describe(saved_number)
        if lora is None:
            namespaces[saved_number] = names.numbered(salt, None)
        elif saved_loras[lora] in lora_of_name:
            namespaces[saved_number] = names.numbered(salt, lora_of_name[saved_loras[lora]])
    return roots, namespaces
