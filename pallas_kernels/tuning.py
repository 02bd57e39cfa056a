# SPDX-License-Identifier: Apache-2.0
"""Chooses implementations and tile sizes by chip and shape, and gives the reasons.

Nothing here has been measured on a GPU yet. The figures come from the compiler's reports of registers and shared
memory, and from measurements by others. `make gpu` measures them, and other tile sizes.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import jax

SWITCHES = "KVJAX_KERNELS"  # the variable of `switched`
# The implementations allowed in the variable, for each function.
_SWITCHED: dict[str, tuple[str, ...]] = dict.fromkeys(
    [
        "decode_attention",
        "prefill_attention",
        "append_kv",
        "rope_append",
        "copy_blocks",
        "gather_blocks",
        "scatter_blocks",
    ],
    ("triton", "mosaic", "xla"),
)


def switched(text: str) -> dict[str, str]:
    """The implementation of each function named in a variable: "decode_attention=xla,append_kv=xla".

    It overrides the usual choice, in case a kernel is wrong or hangs on a machine. The variable is read only once,
    because earlier traces would not change.

    Raises:
      ValueError: naming the variable, if a function has no such implementation.
    """
    choices = {}
    for part in filter(None, text.split(",")):
        name, _, implementation = part.partition("=")
        if implementation not in _SWITCHED.get(name, ()):
            wanted = "; ".join(f"{name}={'|'.join(kinds)}" for name, kinds in _SWITCHED.items())
            raise ValueError(f"{SWITCHES}: got {part!r}, wanted some of {wanted}")
        choices[name] = implementation
    return choices


SWITCHED = switched(os.environ.get(SWITCHES, ""))
# Products never limit decode, and Triton's kernel serves every chip and dtype. In prefill, only Mosaic's wgmma reaches
# the full rate of a Hopper GPU.
FIRST = {"prefill_attention": "mosaic", **SWITCHED}


def chip() -> str | None:
    """The kind of GPU for which a program is being traced, or None if it is not a known GPU.

    The mesh in use decides, even an abstract mesh. Without a mesh it is the default device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        default = jax.local_devices()[0]
        device = default if default.platform == "gpu" else None
    kind = getattr(device, "device_kind", "")
    for chip, names in {"hopper": ("H100", "H200", "H800", "H20", "GH200"), "ampere": ("A100", "A800")}.items():
        if any(name in kind for name in names):
            return chip
    return None


def _multiprocessors() -> int:
    return {"hopper": 132, "ampere": 108}.get(chip() or "hopper", 132)


def decode_programs() -> int:
    """Mosaic's decode cuts a batch into this number of pieces times kv heads: four per multiprocessor."""
    return 4 * _multiprocessors()


# The slots of a part if a row's parts must not depend on the other rows. Rows of a few thousand tokens still fill a
# chip.
FIXED_SPLIT = 512

# The bytes of a block that a program moves at a time: eight times 16 bytes for each of 128 threads.
CHUNK_BYTES = 16_384


def move_programs() -> int:
    """The number of programs that share the chunks of all blocks to move: eight per multiprocessor."""
    return 8 * _multiprocessors()


# Chunks of a program in shared memory at once: three are on their way while a fourth is written.
MOSAIC_MOVE_STAGES = 4
# Parts of a row in shared memory at once, of 16 KB each.
MOSAIC_MERGE_STAGES = 4


class Programs(NamedTuple):
    """Triton programs.

    Attributes:
      slots: the number of slots of K/V in a tile.
      rows: the rows of the products, queries x G.
      warps: the number of warps in a program.
      stages: the stages of the pipeline that loads tiles ahead.
      resident: the number of programs that a multiprocessor runs at once, by their registers and shared memory.
    """

    slots: int
    rows: int
    warps: int
    stages: int = 2
    resident: int = 1


def resident_programs(programs: Programs) -> int:
    """The number of programs in parallel on the GPU."""
    return programs.resident * _multiprocessors()


def triton_decode(width: int, q_bytes: int, kv_bytes: int, in_words: bool = False) -> Programs:
    """Tiles of 16 KB of K and 16 KB of V, or half of this in words, because the bytes in flight decide the speed.

    Five stages load two tiles ahead of the current tile. An Ampere's shared memory holds fewer. With wide heads or
    float32 longer tiles would spill, and from a width of 1,024 on would not fit.
    """
    stages = 3 if chip() == "ampere" else 5
    if q_bytes > 2:
        return Programs(32, 16, 4, resident=2) if width <= 128 else Programs(32, 16, 8)
    if width > 512:
        return Programs(32, 16, 8)
    if width > 256:
        return Programs(32, 16, 4, stages, resident=2 if in_words else 1)
    if width > 128:
        return Programs(64, 16, 8, resident=1 if in_words else 2)
    if in_words:  # 64 bytes are 16 words, too narrow for products by several warps
        return Programs(64, 16, 4, stages, resident=3) if width > 64 else Programs(64, 16, 1, 3, resident=8)
    return Programs(64, 16, 4, stages, resident=3) if kv_bytes > 1 else Programs(128, 16, 8)


def triton_prefill(width: int, q_bytes: int, kv_bytes: int) -> Programs:
    """As many rows as registers allow (fewer on Ampere), because each tile of K/V is read once for all of them.

    Above a width of 256 shared memory is the limit: 64 x 64 at 512, Gemma 4's width, would take 320 KB of a Hopper's
    227.
    """
    if q_bytes > 2:
        return Programs(32, 16, 4 if width <= 128 else 8)
    if width > 256:
        return Programs(32, 32 if width <= 512 else 16, 8)
    return Programs(64, 128, 8) if width <= 128 and kv_bytes > 1 else Programs(64, 64, 8)


# For decode and prefill of latents. With 64 rows or 64 slots, 512 + 64 columns would spill registers. The rows are the
# query heads that share a read of a latent.
TRITON_LATENTS = Programs(32, 32, 8)
# The largest number of columns, padded, that do not spill, by the bytes of an element of q.
WIDEST_LATENT = {2: 704, 4: 160}


class Tiles(NamedTuple):
    """The slots of a K/V tile, the tiles of K and of V in shared memory at once, and the warpgroups that use them."""

    slots: int
    stages: int
    workers: int


def mosaic_decode(width: int) -> Tiles:
    """A multiprocessor fits a single thread block, so all memory besides Q and the result holds K/V in flight."""
    return Tiles(64, 4, 1) if width <= 128 else Tiles(64, 2, 1)


def mosaic_prefill(width: int, size: int) -> Tiles:
    """The widest tiles whose registers do not spill, for two workers of 64 rows each.

    The loader can hold the ids of at most 64 slots in blocks of 8.
    """
    if width > 128:
        return Tiles(64, 2, 2)
    return Tiles(64, 4, 2) if size < 16 else Tiles(128, 2, 2)
