# SPDX-License-Identifier: Apache-2.0
"""The verbs as programs that compile in a short time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from kvjax.verbs.admit import admit, lookup
from kvjax.verbs.commit import commit
from kvjax.verbs.control import evict, pin, reset, unpin
from kvjax.verbs.extend import extend
from kvjax.verbs.fork import fork
from kvjax.verbs.offload import complete, offload, onboard, watermark
from kvjax.verbs.release import release
from kvjax.verbs.swap import swap_in, swap_out
from kvjax.verbs.truncate import truncate

VERBS = (
    admit, lookup, extend, commit, fork, truncate, release, pin,
    unpin, evict, reset, offload, onboard, watermark,
    swap_out, swap_in, complete,
)  # fmt: skip


@functools.cache
def jitted_verbs() -> dict[str, Callable[..., Any]]:
    """The verbs by name, jitted for short compile times rather than speed."""
    static = {"admit": "tiers", "extend": ("max_tokens", "tiers"), "watermark": ("most", "group")}
    static |= dict.fromkeys(("offload", "onboard"), "group")
    return {
        verb.__name__: jax.jit(
            verb,
            static_argnames=static.get(verb.__name__),
            compiler_options={"xla_backend_optimization_level": 0},
        )
        for verb in VERBS
    }
