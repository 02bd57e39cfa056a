# SPDX-License-Identifier: Apache-2.0
"""Options that no way of serving takes, as `test_contract.py` has those that all refuse."""

import re

import numpy as np
import pytest

import kvjax
from kvjax.serving import Scheduler, make_requests
from kvjax.serving.request import read_clock
from tests.serving_kit import MODEL, make_cache

INTS = (
    "chunk",
    "chunk_rows",
    "k_waiting",
    "max_deferrals",
    "max_skips",
    "min_onboard",
    "min_swap",
    "coalesce",
    "watermark",
)


@pytest.mark.parametrize(
    "name",
    [*INTS, "budget", "k", "reserve", "chunks", "preempt", "wait_for_prefix", "stop_before_loss", "canonical", "order"],
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scheduler(budget=9, canonical=True), "budget: got 9 with canonical=True, wanted None"),
        (
            lambda: Scheduler(reserve="num_tokens", canonical=True),
            "reserve: got 'num_tokens' with canonical=True, wanted 'max_tokens' or 'batch'",
        ),
        (lambda: make_requests([[1]], samples=[1, 2]), "samples: got 2, wanted a value for each of 1 prompts"),
        (
            lambda: make_requests([[1], [2]], retention=[None]),
            "retention: got 1, wanted a value for each of 2 prompts",
        ),
        (lambda: kvjax.run_batch(MODEL, make_cache(), [], progress=1), "progress: got 1, wanted a function or None"),
        (lambda: kvjax.run_batch(MODEL, make_cache(), [[1]]), "requests: got a list as number 0, wanted"),
    ],
)
def test_options_that_do_not_go_together_are_named(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make()
