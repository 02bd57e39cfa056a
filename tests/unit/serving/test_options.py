# SPDX-License-Identifier: Apache-2.0
"""Options that do not fit a generation: each is named, and nothing is donated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving import Scheduler
from kvjax.serving.request import read_clock
from tests import drive

SPEC = kvjax.make_spec([kvjax.LayerSpec(1, 4)], num_blocks=8, max_seqs=2, max_length=16, block_size=4, dtype="float32")
VOCAB = 8


def even(tokens, pools, view, *, last):
    """A model with constant logits."""
    return jnp.zeros((*last.shape, VOCAB)), pools


def streamed(*args, **options):
    return list(drive.stream(*args, **options))


def refused(use, message, **options):
    cache = kvjax.Cache.create(SPEC)
    with pytest.raises(ValueError, match=f"^{message}"):
        use(jax.tree_util.Partial(even), cache, [[1, 2]], **options)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize("use", [kvjax.generate, streamed, drive.run_batch])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listener": "log.txt"}, "listener: got 'log.txt', wanted a function or None"),
        ({"clock": 5}, "clock: got 5, wanted a function or None"),
        ({"clock": lambda: 0.5}, r"clock: got 0\.5, wanted an int of milliseconds"),
        ({"clock": lambda: None}, "clock: got None, wanted an int of milliseconds"),
        ({"clock": lambda: True}, "clock: got True, wanted an int of milliseconds"),
        ({"logits_fn": np.ones(VOCAB)}, "logits_fn: got array"),
        ({"steps": "9"}, "steps: got '9', wanted an int of at least 1"),
        ({"canonical": 1}, "canonical: got 1, wanted a bool"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_does_not_fit_is_named_before_anything_is_donated(use, options, message):
    refused(use, message, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_logprobs": VOCAB + 1}, "top_logprobs: got 9, wanted at most the vocabulary, 8"),
        ({"top_logprobs": -1}, "top_logprobs: got -1, wanted an int of at least 0"),
        ({"top_logprobs": "3"}, "top_logprobs: got '3', wanted an int of at least 0"),
        ({"scheduler": "num_tokens"}, "scheduler: got 'num_tokens', wanted a kvjax.serving.Scheduler"),
        ({"scheduler": ""}, "scheduler: got '', wanted a kvjax.serving.Scheduler"),
        ({"scheduler": Scheduler(budget=2)}, "budget: got 2, wanted more than the 2 rows"),
        ({"progress": 1}, "progress: got 1, wanted a function or None"),
        ({"scheduler": Scheduler(chunk=6), "canonical": True}, "chunk: got 6, wanted a multiple of the block size, 4"),
        ({"scheduler": Scheduler(budget=9), "canonical": True}, "budget: got 9 with canonical=True, wanted None"),
        (
            {"scheduler": Scheduler(reserve="num_tokens"), "canonical": True},
            "reserve: got 'num_tokens' with canonical=True, wanted 'max_tokens' or 'batch'",
        ),
    ],
)
def test_so_is_one_that_only_run_batch_takes(options, message):
    refused(drive.run_batch, message, **options)


INTS = ("chunk", "chunk_rows", "k_waiting", "patience", "max_skips", "min_onboard", "min_swap", "coalesce", "watermark")


@pytest.mark.parametrize(
    "name", [*INTS, "budget", "k", "reserve", "chunks", "preempt", "wait_for_prefix", "canonical", "order"]
)
@pytest.mark.parametrize("value", ["9", 1.5, -1, ["fcfs"], {}])
def test_an_option_of_another_type_makes_no_scheduler(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got .*wanted "):
        Scheduler(**{name: value})


def test_a_clock_may_have_any_ints():
    """They may exceed 32 bits, or be numpy's, because only differences count."""
    assert [read_clock(lambda x=x: x) for x in (2**32 + 5, -1, 2**31, np.int64(2**40), np.int32(-3))] == [
        5, -1, -(2**31), 0, -3
    ]  # fmt: skip
