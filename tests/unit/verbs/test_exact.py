# SPDX-License-Identifier: Apache-2.0
"""Sparse caches: after a commit that does not call its K/V exact, a row publishes nothing."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.pools import select_blocks, sparse_attention
from tests.drive import METHODS, PLAIN, Driver

SPEC = dataclasses.replace(PLAIN, sparse=True)
SIZE = SPEC.block_size
TEXT = list(range(1, 21))
EXACT = np.ones(SPEC.max_seqs, bool)


def admitted(text, spec=SPEC):
    driver = Driver(kvjax.init(spec))
    assert driver.admit(0, text) == ["OK"]
    return driver


def stored(driver):
    return [event["block"] for event in kvjax.to_list(driver.events) if event["kind"] == "stored"]


def test_exact_kv_are_found_and_others_are_not():
    driver = admitted(TEXT[:16])
    driver.write({0: TEXT[:10]}, exact=EXACT)
    assert len(stored(driver)) == 10 // SIZE
    driver.write({0: TEXT[10:16]})
    assert not stored(driver)
    driver.do("release", 0)
    assert not stored(driver)
    assert driver.found(TEXT) == 10 // SIZE * SIZE


def test_a_row_stays_approximate_and_so_do_its_forks():
    driver = admitted(TEXT[:8])
    driver.write({0: TEXT[:3]})
    driver.write({0: TEXT[3:8]}, exact=EXACT)
    driver.do("fork", 0, 1)
    driver.do("truncate", 0, 4)
    driver.grow(4, 4, 0, 0)
    driver.write({0: TEXT[4:8], 1: TEXT[8:12]}, exact=EXACT)
    for seq in (0, 1):
        driver.do("release", seq)
        assert not stored(driver)
    assert driver.found(TEXT) == 0 and not np.any(driver.state.seqs.approximate)


def test_a_tail_of_exact_kv_is_stored_at_release():
    driver = admitted(TEXT[:10])
    driver.write({0: TEXT[:10]}, exact=EXACT)
    driver.do("release", 0)
    assert driver.found(TEXT) == 10


def test_a_row_is_exact_again_when_another_request_has_it():
    driver = admitted(TEXT[:8])
    driver.write({0: TEXT[:8]})
    driver.do("release", 0)
    assert driver.admit(0, TEXT[:8]) == ["OK"]
    driver.write({0: TEXT[:8]}, exact=EXACT)
    assert driver.found(TEXT) == 8


def test_rows_are_told_apart():
    driver = admitted(TEXT[:8])
    assert driver.admit(1, TEXT[8:16]) == ["OK"]
    driver.write({0: TEXT[:8], 1: TEXT[8:16]}, exact=np.arange(SPEC.max_seqs) == 1)
    assert driver.found(TEXT[:9]) == 0 and driver.found([*TEXT[8:16], 1]) == 8
    assert driver.state.seqs.approximate.tolist()[:2] == [True, False]


def test_a_refused_row_and_one_without_tokens_stay_as_they_were():
    driver = admitted(TEXT[:8])
    assert driver.write({0: TEXT[:9]})[0] == "BAD_REQUEST"
    driver.write({})
    assert not np.any(driver.state.seqs.approximate)


def test_a_duplicate_of_approximate_kv_is_not_merged():
    driver = admitted(TEXT[:8])
    driver.write({0: TEXT[:8]}, exact=EXACT)
    assert driver.admit(1, [*TEXT[:4], 99]) == ["OK"]
    driver.do("truncate", 1, 4)
    driver.grow(0, 4, 0, 0)
    before = driver.state.groups[0].table[1]
    driver.write({1: TEXT[4:8]})
    np.testing.assert_array_equal(driver.state.groups[0].table[1], before)


@pytest.mark.parametrize("exact", [np.ones(3, bool), np.ones(SPEC.max_seqs, np.int32), 1])
def test_exact_is_a_mask_of_rows(exact):
    state = kvjax.init(SPEC)
    with pytest.raises(ValueError, match=r"^exact: got "):
        kvjax.commit(state, np.zeros((SPEC.max_seqs, 2), np.int32), np.zeros(SPEC.max_seqs, np.int32), exact=exact)


@pytest.mark.long
def test_a_context_of_sparse_attention_wants_a_sparse_cache_and_no_exact_step():
    layer = kvjax.LayerSpec(1, 4)
    sizes = {"num_blocks": 4, "max_seqs": 1, "max_length": 16, "block_size": 4, "dtype": "float32"}

    def model(tokens, pools, view, *, last):
        kv = jax.numpy.ones((*tokens.shape, 1, 4))
        pools = kvjax.write(pools, 0, kv, kv, view)
        return kvjax.attend(kv, pools, 0, view)[:, -1, 0], pools

    def run(sparse, **options):
        cache = kvjax.Cache.create(kvjax.make_spec([layer], sparse=sparse, **sizes))
        if not options:
            cache, _ = METHODS["admit"](cache, np.int32(0), np.arange(8, dtype=np.int32), np.int32(8))
        with sparse_attention(lambda q, pools, layer, view, **_: select_blocks(view, np.zeros(4, bool))):
            return kvjax.step(jax.tree_util.Partial(model), cache, np.arange(8)[None], np.array([8]), **options)

    with pytest.raises(ValueError, match=r"^view: got one of a cache with sparse=False, wanted make_spec"):
        run(False, logits="last")
    with pytest.raises(ValueError, match=r"^exact: got True in a context of sparse_attention, wanted None"):
        run(True, exact=True)
    cache, _, events = run(True)
    assert cache.state.seqs.approximate.tolist() == [True] and not np.any(events.kind)
