# SPDX-License-Identifier: Apache-2.0
"""A request to a cache on trial (`Trial`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Required, TypedDict

from kvjax.spec import make_spec

SMALL = make_spec(num_blocks=12, max_seqs=4, max_length=20, block_size=4)
MAX_TOKENS = 6  # that one `extend` adds to a row


class Request(TypedDict, total=False):
    """One request to a cache on trial: a plain dict with "verb" and the fields of that verb, which JSON can hold.

        trial.do({"verb": "admit", "seq": 0, "tokens": [5, 6, 7], "namespace": 0})
        trial.do({"verb": "commit", "num_tokens": [20] * 4, "tokens": [[]] * 4})  # writes as much as there is room for
        trial.do({"verb": "release", "seq": 0})

    | verb | fields |
    |---|---|
    | admit | seq; tokens; namespace; extra_ids, one per token (where the spec has them) |
    | extend | num_tokens, one per row, 0 for a row that does not grow, as all free rows |
    | commit | num_tokens, one per row, cut to the row's room; tokens, extra_ids: lists, used after the prompt |
    | fork | src; dst |
    | truncate | seq; drop: how many tokens to cut off |
    | release | seq |
    | evict | block |
    | pin | seq; num_blocks: how many of the row's first blocks, those that are findable |
    | unpin | which: number of the pin among those that last, modulo how many these are |
    | reset | |

    Of caches with a host tier; there "admit" and "extend" also have host: whether both tiers are used.

    | verb | fields |
    |---|---|
    | offload, onboard | which: a bit for each of the first blocks that could go, in order; group |
    | watermark | empty; group |
    | swap_out, swap_in | seq |
    | complete | ok: whether the oldest moves were done, not heeded if something else was done since they were ordered |
    """

    verb: Required[str]
    seq: int
    src: int
    dst: int
    block: int
    tokens: Sequence[int] | Sequence[Sequence[int]]
    extra_ids: Sequence[int] | Sequence[Sequence[int]]
    num_tokens: Sequence[int]
    num_blocks: int
    namespace: int
    drop: int
    which: int
    group: int
    empty: int
    host: bool
    ok: bool


Fields = dict[str, Any]  # a request, to those who read its fields
