# SPDX-License-Identifier: Apache-2.0
"""Caches whose contents are known, for the tests that look at them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import LayerSpec, make_spec
from kvjax.events import Totals
from tests import drive

WIDTH = 24
STATIC = {"extend": "num_tokens"}
VERBS = {
    verb: jax.jit(
        drive.verb(verb), static_argnames=STATIC.get(verb), compiler_options={"xla_backend_optimization_level": 0}
    )
    for verb in (
        "admit",
        "commit",
        "complete",
        "extend",
        "fork",
        "offload",
        "onboard",
        "release",
        "swap_in",
        "swap_out",
    )
}
PLAIN = make_spec(num_blocks=12, max_seqs=4, max_length=WIDTH, block_size=4)
TIERS = make_spec(
    [LayerSpec(1, 4), LayerSpec(1, 4, window=8, sink_tokens=2)], num_blocks=12, max_seqs=4, max_length=WIDTH,
    block_size=4, num_host_blocks={None: 10, 8: 8},
)  # fmt: skip


class Story:
    """A cache driven through the verbs, with the totals of its events."""

    def __init__(self, spec=PLAIN, num_blocks=None):
        self.state, self.totals = kvjax.init(spec, num_blocks=num_blocks), Totals()

    def do(self, verb, *args, complete=True, **options):
        self.state, events = VERBS[verb](self.state, *args, **options)
        self.totals = self.totals.add(events)
        assert bool(events.ok), events.status
        if events.transfer is not None and complete:
            self.state, _ = VERBS["complete"](self.state, events.transfer, True)

    def start(self, seq, tokens, **options):
        self.admit(seq, tokens, **options)
        self.write(seq, tokens[int(self.state.seqs.committed[seq]) :])

    def admit(self, seq, tokens, namespace=0):
        padded = np.zeros(WIDTH, np.int32)
        padded[: len(tokens)] = tokens
        self.do("admit", seq, padded, len(tokens), namespace=namespace)

    def write(self, seq, tokens):
        padded = np.zeros((1, WIDTH), np.int32)
        padded[0, : len(tokens)] = tokens
        self.do("commit", padded, jnp.array([len(tokens)]), seqs=jnp.array([seq]))


@functools.cache
def plain() -> Story:
    """Rows 0 and 3 fork one prompt, row 1 shares its first block, row 2 is of another tenant; two blocks are cached."""
    story = Story()
    prompt = [11, 12, 13, 14]
    story.start(0, [*prompt, 15, 16])
    story.start(1, [*prompt, 21, 22, 23, 24, 25])
    story.start(2, [*prompt, 31, 32, 33, 34, 35])
    story.do("release", 2)
    story.do("fork", 0, 3)
    story.start(2, [7, 7], namespace=3)
    story.do("extend", jnp.array([True, False, False, False]), 3)
    return story


@functools.cache
def tiers() -> Story:
    """Row 0 is longer than its window; 1 is not yet written; 2 rests on the host, 3 is on its way there.

    Two texts are cached: one that begins like row 0, with a part of its own, and one that is on the host.
    """
    story = Story(TIERS)
    text = list(range(11, 30))
    story.start(0, text)
    story.start(1, [*text[:12], 77, 77, 77])
    story.do("release", 1)
    story.start(2, list(range(41, 60)))
    story.do("swap_out", 2)
    story.start(3, [81, 82, 83, 84, 85])
    story.do("swap_out", 3)
    story.do("release", 3)
    story.start(3, [91, 92, 93, 94, 95, 96])
    story.do("swap_out", 3, complete=False)
    story.admit(1, [7, 7], namespace=3)
    return story
