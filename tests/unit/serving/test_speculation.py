# SPDX-License-Identifier: Apache-2.0
"""With a drafter, each request has the answer that it has without one, whatever the drafts are.

The contract's way "drafts" runs all its cases with random drafts, and `oracle/engines.py` compares all bytes.
"""

import pytest

import kvjax
from kvjax.serving import RunOptions, Sampling
from tests.drafters import RANDOM, RIGHT, WRONG, Guesses
from tests.serving_kit import BASE, MODEL, NEW, VOCAB, ask, make_cache, prompts_of, wanted
from tests.unit.serving.test_contract import assert_alike

PROMPTS = [*prompts_of(1), [1, 2, 3], [4] * 9, prompts_of(1)[0]]
SAMPLINGS = [None, Sampling(1.0), Sampling(0.7, top_k=4), Sampling(1.3, top_p=0.8), Sampling(1.0, min_tokens=7)]
REQUESTS = [
    ask(prompt, max_new_tokens=2 * NEW, sampling=sampling, stop_tokens=[11])
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
]


def run(drafter, kind="plain", requests=REQUESTS, num_blocks=16, **options):
    """The outputs, and the cache after it was checked."""
    options = RunOptions(**BASE | {"drafter": drafter} | options)
    outputs, cache, events = kvjax.run_batch(MODEL, make_cache(num_blocks, kind=kind), requests, options)
    kvjax.check(cache.state, rows=())
    assert kvjax.fold(events).index == kvjax.events.index_of(cache.state)
    return outputs, cache


@pytest.mark.parametrize(("mode", "accepted"), [(RIGHT, 1.0), (WRONG, 0.0), (RANDOM, None)])
def test_answers_are_those_without_drafts(mode, accepted):
    outputs, _ = run(Guesses.of(MODEL, VOCAB, mode))
    assert_alike(outputs, wanted(REQUESTS))
    drafted, right = (sum(getattr(o, name) for o in outputs) for name in ("drafted_tokens", "accepted_tokens"))
    assert drafted > 0
    if accepted is None:
        assert 0 < right < drafted
    elif accepted == 0:
        assert right == 0
    else:  # a draft after a stop token is not accepted
        assert right >= 0.9 * drafted
