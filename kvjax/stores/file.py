# SPDX-License-Identifier: Apache-2.0
"""`save` and `load`: a cache's findable blocks in a folder, for a process that starts later.

    kvjax.stores.save(cache, "cache", names=names, model="gemma-3-4b, revision 2")
    cache, loaded = kvjax.stores.load(cache, "cache", names=names, model="gemma-3-4b, revision 2")

The K/V are in safetensors files, as words of their size; tokens, parents and the like in one more, the index. No block
number is written, and no key: a block is a prefix. Rows are not saved.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import secrets
import zlib
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from kvjax._arrays import unreadable
from kvjax._compile import own_transfers
from kvjax.blocks.keys import Namespaces
from kvjax.cache import Cache
from kvjax.checks import integers
from kvjax.pools.host import HostPools
from kvjax.spec import CacheSpec
from kvjax.state import CacheState
from kvjax.stores.contents import Contents, checked_contents, contents_of, root_crc
from kvjax.stores.layout import check_layout, layout_of, leaves_of
from kvjax.stores.manifest import (
    MANIFEST,
    PartWriter,
    broken,
    checked_folder,
    commit_manifest,
    open_file,
    part_name,
    read_manifest,
    write_part,
    written_by_one,
)
from kvjax.stores.restore import Loaded, Saved, open_part, restore, tensor_name
from kvjax.stores.transport import checksum, read
from kvjax.tiered import TieredCache

PART_BYTES = 256 * 10**6  # the most of a file, unless one block has more


@own_transfers()
def save(
    cache: Cache | TieredCache, folder: Any, *, names: Namespaces | None = None, model: str,
    loras: Mapping[int, str] | None = None,
) -> int:  # fmt: skip
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
      ImportError: without safetensors, which `pip install "kvjax[stores]"` brings.
    """
    require_safetensors("save")
    pools_of(cache)
    names = Namespaces() if names is None else names
    path, loras = checked_folder(folder), checked_names(names, model, loras)
    state = jax.device_get(cache.state)
    contents, ids = contents_of(state)
    starts = contents.starts(_roots(contents, names, loras))
    with written_by_one(path):
        _write(path, cache, state, contents, ids, starts, {
            "namespaces": names.to_dict(), "loras": {str(number): name for number, name in loras.items()},
            "model": model, "layout": layout_of(state.spec),
        })  # fmt: skip
    return len(starts)


def require_safetensors(name: str) -> None:
    """Raises an ImportError that names the extra, unless safetensors can be imported."""
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(f'kvjax.stores.{name}: needs safetensors (pip install "kvjax[stores]")')


def pools_of(cache: Any) -> HostPools | None:
    """The host pools of a cache that can be saved or loaded, if it has any; ValueError for any other."""
    if not isinstance(cache, Cache | TieredCache):
        raise ValueError(f"cache: got a {type(cache).__name__}, wanted a Cache or a TieredCache")
    if why := unreadable(cache):
        raise ValueError(f"cache: got one that is {why}, wanted one of this process, whose arrays can be read")
    if np.ndim(cache.state.groups[0].num_empty):
        raise ValueError("cache: got a batch of caches, wanted one")
    if isinstance(cache, TieredCache):
        return cache.host
    if cache.state.spec.host_groups:
        raise ValueError("cache: got a Cache whose spec has a host tier, wanted the TieredCache, which has its bytes")
    return None


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


def _roots(contents: Contents, names: Namespaces, loras: Mapping[int, str]) -> dict[int, int]:
    """The checksum before the roots of each namespace of the contents."""
    roots = {}
    for number in np.unique(contents.namespace).tolist():
        if number not in names:
            raise ValueError(
                f"names: got none for namespace {number}, which has blocks, wanted those of the cache's rows"
            )
        salt, lora = names.describe(number)
        if lora is not None and lora not in loras:
            raise ValueError(f"loras: got {loras!r:.200}, wanted a name for LoRA {lora}, which has blocks")
        roots[number] = root_crc(salt, None if lora is None else loras[lora])
    return roots


def _write(
    folder: pathlib.Path, cache: Cache | TieredCache, state: CacheState, contents: Contents, ids: np.ndarray,
    starts: np.ndarray, described: dict[str, Any],
) -> None:  # fmt: skip
    """Writes the files of a save, and at the end its manifest."""
    token, parts, host, spec = secrets.token_hex(8), [], pools_of(cache), state.spec
    crc = np.broadcast_to(starts, ids.shape).copy()
    for number, (group, own) in enumerate(zip(state.groups, ids, strict=True)):
        (saved,), leaves = np.nonzero(own >= 0), leaves_of(spec, number)
        pool_rows = np.asarray(group.pool_row(own[saved]))
        most = max(1, PART_BYTES // max(1, spec.groups[number].block_bytes(spec.block_size)))
        for first in range(0, len(saved) if leaves else 0, most):
            some = saved[first : first + most]
            path = folder / part_name(token, 1 + len(parts))
            shapes = {tensor_name(at): (leaf.shape, leaf.word) for at, leaf in enumerate(leaves)}
            with PartWriter(path, len(some), shapes) as part:
                for start, arrays in read(cache.pools, host, number, pool_rows[first : first + most]):
                    piece = some[start : start + len(arrays[0])]
                    words = [leaf.cut(x, contents.fill[piece]) for leaf, x in zip(leaves, arrays, strict=True)]
                    for at, blocks in enumerate(words):
                        part.write(tensor_name(at), start, blocks)
                    crc[number, piece] = [
                        checksum(int(starts[at]), [blocks[row] for blocks in words])
                        for row, at in enumerate(piece.tolist())
                    ]
            parts.append({**part.written, "group": number, "first": first, "count": len(some)})
    path = folder / part_name(token, 0)
    index = write_part(path, {**contents._asdict(), "crc32": crc}) | {"crc32": zlib.crc32(path.read_bytes())}
    commit_manifest(folder, {**described, "num_blocks": len(starts), "index": index, "parts": parts})


@own_transfers()
def load[C: (Cache, TieredCache)](
    cache: C, folder: Any, *, names: Namespaces | None = None, model: str, loras: Mapping[int, str] | None = None,
    now: int = 0,
) -> tuple[C, Loaded]:  # fmt: skip
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
        manifest or index, and for another layout or model.
      ImportError: without safetensors, which `pip install "kvjax[stores]"` brings.
      FailedTransfer: if a move between the tiers fails; it has the cache to go on with.
    """
    require_safetensors("load")
    pools_of(cache)
    own_names = Namespaces() if names is None else names
    path, loras = checked_folder(folder), checked_names(own_names, model, loras)
    time = np.asarray(integers("now", now, ()))
    spec = cache.state.spec
    with contextlib.ExitStack() as stack:
        manifest, index, parts = _opened(path, spec, model, stack)
        contents, crc = index
        roots, namespaces = _translated(path, manifest, contents, own_names, loras)
        if names is None and any(namespaces.values()):
            raise ValueError("names: got None, wanted a kvjax.Namespaces: the save has blocks of salts or LoRAs")
        saved = Saved(spec, contents, contents.starts(roots), crc, parts)
        return cast(Any, restore(cache, saved, namespaces, time))


def _opened(
    folder: pathlib.Path, spec: CacheSpec, model: str, stack: contextlib.ExitStack
) -> tuple[dict[str, Any], tuple[Contents, np.ndarray], list[tuple[dict[str, Any], Any]]]:
    """The manifest, the index and the open files of a save with this model and the spec's layout."""
    while True:
        manifest = read_manifest(folder)
        if model != manifest["model"]:
            raise ValueError(f"model: got {model!r:.200}, wanted that of the save, {manifest['model']!r:.200}")
        check_layout(manifest["layout"], layout_of(spec))
        parts = [(part, open_part(folder, part, stack)) for part in manifest["parts"]]
        try:
            index = _read_index(folder, manifest, spec)
        except ValueError:
            if read_manifest(folder)["index"] == manifest["index"]:
                raise
            continue
        if all(opened is not None for _, opened in parts) or read_manifest(folder)["index"] == manifest["index"]:
            return manifest, index, parts
        # Another save has come in between, and has deleted what is missing.


def _read_index(folder: pathlib.Path, manifest: dict[str, Any], spec: CacheSpec) -> tuple[Contents, np.ndarray]:
    """The contents of a save, and the checksums u32[G, n] of its blocks; a ValueError with the file if it is broken."""
    from safetensors.numpy import load as loads

    index = manifest["index"]
    path = folder / index["file"]
    try:
        with open_file(path, index["bytes"]) as file:
            data = file.read()
        if zlib.crc32(data) != index["crc32"]:
            raise ValueError("another checksum")
        return checked_contents(loads(data), spec, manifest["num_blocks"])
    except Exception as error:  # whatever safetensors raises
        raise broken(path, f"contents that cannot be read ({error})") from error


def _translated(
    folder: pathlib.Path, manifest: dict[str, Any], contents: Contents, names: Namespaces, loras: Mapping[int, str]
) -> tuple[dict[int, int], dict[int, int]]:
    """Of each namespace in a save the checksum of its root, and its number in `names`, if this process has its LoRA."""
    try:
        saved = Namespaces.from_dict(manifest["namespaces"])
        pairs = {number: saved.describe(number) for number in np.unique(contents.namespace).tolist()}
        lora_names = {lora: manifest["loras"][str(lora)] for _, lora in pairs.values() if lora is not None}
    except (KeyError, ValueError) as error:
        raise broken(folder / MANIFEST, f"namespaces that do not fit its blocks ({error})") from error
    number_of, roots, namespaces = {None: None} | {name: number for number, name in loras.items()}, {}, {}
    for number, (salt, lora) in pairs.items():
        name = None if lora is None else lora_names[lora]
        roots[number] = root_crc(salt, name)
        if name in number_of:
            namespaces[number] = names.numbered(salt, number_of[name])
    return roots, namespaces
