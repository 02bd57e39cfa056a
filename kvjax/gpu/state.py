# SPDX-License-Identifier: Apache-2.0
"""The arrays of a state by name, as a kernel has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from kvjax.state import CacheState, Text

TEXT = ("tokens", "extra_ids")
_LINKS, _RING, _SEQS = ("next", "prev"), ("order", "stamp", "head", "tail"), ("length", "committed", "namespace")
_GROUP = ("empty", "num_empty", "num_cached", "table")


def arrays_of(state: CacheState, names: Sequence[str]) -> dict[str, jax.Array]:
    """The arrays with these names of a state with one group and the policy `lru()`; extra ids if there are any."""
    (group,) = state.groups
    homes = vars(group.blocks) | group.blocks.text.parts() | vars(group.links) | group.policy._asdict()
    homes |= {name: getattr(group, name) for name in _GROUP} | {name: getattr(state.seqs, name) for name in _SEQS}
    return {name: homes[name] for name in names if name in homes}


def with_arrays(state: CacheState, arrays: Mapping[str, jax.Array]) -> CacheState:
    """The state with those of its arrays replaced that are among these; the inverse of `arrays_of`."""
    (group,), blocks = state.groups, state.groups[0].blocks

    def known(home: Mapping[str, object] | Sequence[str]) -> dict[str, jax.Array]:
        return {name: arrays[name] for name in home if name in arrays}

    text = Text(**{"extra_ids": None, **blocks.text.parts(), **known(TEXT)})
    blocks = blocks.replace(text=text, **known(vars(blocks)))
    group = group.replace(
        blocks=blocks,
        links=group.links.replace(**known(_LINKS)),
        policy=group.policy._replace(**known(_RING)),
        **known(_GROUP),
    )
    return state.replace(groups=(group,), seqs=state.seqs.replace(**known(_SEQS)))
