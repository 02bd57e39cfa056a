# SPDX-License-Identifier: Apache-2.0
"""Small stories of a scheduler: a cache and its requests."""

import jax
import numpy as np

import kvjax
from kvjax import Cache
from kvjax.events.log import init_log
from kvjax.serving import init_serving, results, submit
from tests import drive
from tests.oracle.bytes_machine import SIZE
from tests.oracle.serving import COLUMNS, LINE, LOG, MODEL, OPTIONS, ROWS, SLOTS, config, program

OVERCOMMITS = OPTIONS["num_tokens"]
CAPACITY = COLUMNS * SIZE
BY_DEFAULT = {"priority": 0, "sample_of": -1}
_submit = jax.jit(submit, static_argnames="scheduler")


class Story:
    """A cache of `num_blocks` blocks, and its requests."""

    def __init__(self, num_blocks=24, pins=0):
        cache = Cache.create(config("full").spec(), num_blocks=np.int32(num_blocks))
        if pins:
            state, _ = kvjax.admit(cache.state, 0, np.arange(pins * SIZE, dtype=np.int32), pins * SIZE)
            counts = np.array([pins * SIZE, 0, 0, 0], np.int32)
            state, _ = kvjax.commit(state, np.tile(np.arange(pins * SIZE, dtype=np.int32), (ROWS, 1)), counts)
            state, _ = kvjax.pin(state, state.groups[0].table[0, :pins])
            cache = cache.replace(state=kvjax.release(state, 0)[0])
        self.serving = init_serving(cache, [CAPACITY + 1] * SLOTS)

    def submit(self, *prompts, new=4, **options):
        """Statuses, slots and generations."""
        prompts = [list(prompt) for prompt in prompts] + [[]] * (3 - len(prompts))
        line = drive.padded([token for prompt in prompts for token in prompt], LINE)
        lengths, new = np.array(list(map(len, prompts)), np.int32), np.full(3, new, np.int32)
        priority, lead = (np.full(3, options.pop(name, none), np.int32) for name, none in BY_DEFAULT.items())
        assert not options
        self.serving, *answers = _submit(
            self.serving, line, lengths, new, scheduler=OVERCOMMITS, priority=priority,
            stop_tokens=np.full((3, 1), -1, np.int32), sample_of=lead,
        )  # fmt: skip
        return [np.asarray(answer).tolist() for answer in answers]

    def step(self, number=1):
        for _ in range(number):
            self.serving, _, served = program(OVERCOMMITS)(MODEL, self.serving, init_log(LOG, SIZE))
            kvjax.check(self.serving.cache.state)
        return served

    def until_done(self):
        for _ in range(200):
            if not bool(self.serving.busy):
                return results(self.serving)
            self.step()
        raise AssertionError("requests do not end")
