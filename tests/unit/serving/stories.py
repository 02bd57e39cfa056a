# SPDX-License-Identifier: Apache-2.0
"""Small stories of a scheduler: a cache and its requests, step by step."""

import jax
import numpy as np

import kvjax
from kvjax import Cache, Status
from kvjax.events.log import init_log
from kvjax.serving import cancel, init_serving, submit
from kvjax.serving.requests import Stage
from tests import drive
from tests.oracle.bytes_machine import SIZE
from tests.oracle.serving import COLUMNS, LINE, LOG, MODEL, OPTIONS, ROWS, SLOTS, config, program

OVERCOMMITS = OPTIONS["num_tokens"]
_submit = jax.jit(submit, static_argnames="scheduler")


class Desk:
    """Requests to a scheduler, over a cache of so many blocks, of which some are cached and pinned."""

    def __init__(self, scheduler=OVERCOMMITS, num_blocks=24, pins=0):
        self.scheduler = scheduler
        cache = Cache.create(config("full").spec(), num_blocks=np.int32(num_blocks))
        if pins:
            state, _ = kvjax.admit(cache.state, 0, np.arange(pins * SIZE, dtype=np.int32), pins * SIZE)
            counts = np.array([pins * SIZE, 0, 0, 0], np.int32)
            state, _ = kvjax.commit(state, np.tile(np.arange(pins * SIZE, dtype=np.int32), (ROWS, 1)), counts)
            state, _ = kvjax.pin(state, state.groups[0].table[0, :pins])
            cache = cache.replace(state=kvjax.release(state, 0)[0])
        self.serving = init_serving(cache, [COLUMNS * SIZE + 1] * SLOTS)

    def submit(self, *prompts, new=4, priority=0, sample_of=-1):
        """Statuses, slots and generations of up to three requests."""
        lengths = drive.padded([len(prompt) for prompt in prompts], 3)
        columns = {"priority": priority, "sample_of": sample_of}
        self.serving, *answers = _submit(
            self.serving, drive.padded([token for prompt in prompts for token in prompt], LINE), lengths,
            np.full(3, new, np.int32), scheduler=self.scheduler, stop_tokens=np.full((3, 1), -1, np.int32),
            **{name: np.full(3, column, np.int32) for name, column in columns.items()},
        )  # fmt: skip
        status, slots, generations = (np.asarray(answer).tolist()[: len(prompts)] for answer in answers)
        return [Status(code).name for code in status], slots, generations

    def step(self, number=1):
        for _ in range(number):
            self.serving, _, served = program(self.scheduler)(MODEL, self.serving, init_log(LOG, SIZE))
            kvjax.check(self.serving.cache.state)
        return jax.device_get(served)

    def steps(self):
        """The `Served` of each step, until all requests are over."""
        for _ in range(200):
            if not bool(self.serving.busy):
                return
            yield self.step()
        raise AssertionError("requests do not end")

    def cancel(self, slot, generation):
        self.serving, status = cancel(self.serving, np.array([slot], np.int32), np.array([generation], np.int32))
        return Status(int(status[0])).name

    def stage(self, slot):
        return Stage(int(self.serving.requests.stage[slot]))

    @property
    def rows(self):
        """The request of each row."""
        return np.asarray(self.serving.row).tolist()

    @property
    def num_pending(self):
        """The number of uncommitted tokens of each row's request."""
        num_tokens = np.asarray(self.serving.requests.num_tokens)[self.serving.row]
        return np.where(np.array(self.rows) >= 0, num_tokens - self.serving.cache.state.seqs.committed, 0).tolist()

    @property
    def held(self):
        return int(np.sum(np.asarray(self.serving.cache.state.groups[0].blocks.refcount) > 0))
