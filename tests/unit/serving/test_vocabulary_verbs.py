# SPDX-License-Identifier: Apache-2.0
"""Rows of the vocabulary's page that verbs alone reach; a test may have several rows, of several systems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Status
from tests import drive
from tests.drive import PLAIN, TIERS, Driver, holders, table

ROWS, SIZE = PLAIN.max_seqs, PLAIN.block_size
A, B, C = [1, 2, 0, 1, 1, 2, 2, 0], [2, 0, 1, 1, 2, 2, 0, 0], [0, 0, 2, 1, 0, 1, 2, 2]


def row(*theirs):
    """Marks the test of rows of the page, by the texts of their left columns (`test_vocabulary.py` compares them)."""
    del theirs
    return pytest.mark.long


def of_blocks(number):
    """A cache of so many blocks."""
    return Driver(kvjax.init(PLAIN, num_blocks=np.int32(number)))


@row("v1 `allocate_slots`: None", "`prefetch`, `alloc`", "`allocate_for_seq`")
def test_all_blocks_of_a_request_come_or_none_and_nothing_changes():
    driver = of_blocks(3)  # it compares the states around a refusal
    driver.start(0, A)
    assert driver.admit(1, B) == ["NO_BLOCKS"] and int(driver.events.shortfall) == 1
    assert driver.admit(1, [*A, 1]) == ["OK"]  # two blocks of three are shared
    driver.do("release", 1)
    driver.start(1, C[:4])
    count = np.array([1, 1, 0, 0], np.int32)
    assert driver.status("extend", count > 0, count, max_tokens=drive.MOST)[:2] == ["NO_BLOCKS"] * 2
    assert int(driver.events.shortfall) == 2 and (len(table(driver, 0)), len(table(driver, 1))) == (2, 1)
    driver.do("release", 1)
    assert driver.grow(1, 0, 0, 0) == ["OK"] * 4 and len(table(driver, 0)) == 3  # by the block that the other gave back


@row("v0 `append_slots`")
def test_a_block_is_taken_when_the_last_one_is_full_and_copied_when_it_is_shared():
    driver = of_blocks(12)
    driver.start(0, A[:6])
    for text, number in ((A[6:], 2), ([1], 3)):
        count = np.array([len(text), 0, 0, 0], np.int32)
        driver.do("extend", count > 0, count, max_tokens=drive.MOST)
        driver.write({0: text})
        assert len(table(driver, 0)) == number
    driver.do("fork", 0, 1)
    shared = table(driver, 0)[2]
    assert driver.grow(1, 1, 0, 0) == ["OK"] * 4
    (copy,) = [event for event in driver.recorded if event["kind"] == "copied"]
    ours, theirs = table(driver, 0), table(driver, 1)
    assert ours[:2] == theirs[:2] and {ours[2], theirs[2]} == {shared, copy["block"]} and copy["source"] == shared


@row("v0 `fork`", "`clone_pages_from`")
def test_a_fork_shares_the_last_block_too_until_somebody_writes():
    driver = of_blocks(3)
    driver.start(0, [*A, 1])
    driver.do("fork", 0, 1)
    assert table(driver, 1) == table(driver, 0) and holders(driver, 0) == [2, 2, 2]  # although no block is free
    assert driver.grow(0, 1, 0, 0)[1] == "NO_BLOCKS"  # its copy needs one
    driver.do("release", 0)
    assert driver.grow(0, 1, 0, 0) == ["OK"] * 4  # it writes alone


@row("`free`", "`free_pages`", "`free_pages_for_finished`", "`release`", "`cache_finished_req`")
def test_freed_blocks_are_found_again_those_of_others_stay_held_and_a_second_release_is_refused():
    driver = of_blocks(12)
    driver.start(0, [*A, 1])
    driver.do("fork", 0, 1)
    driver.do("release", 0)
    assert holders(driver, 1) == [1, 1, 1]
    driver.start(2, B)
    driver.do("release", np.array([1, 2], np.int32))
    assert not np.any(driver.state.groups[0].blocks.refcount)
    assert driver.found([*A, 1, 1]) == 9  # also in the last block, of which a part is filled
    assert driver.status("release", 1) == ["BAD_REQUEST"] and driver.start(1, [*A, 2]) == 8


@row("v0 `mark_blocks_as_computed`", "`step`", "`cache_unfinished_req`")
def test_a_block_is_found_once_it_is_committed_and_equal_ones_become_one():
    driver = of_blocks(12)
    for seq in (0, 1):
        driver.admit(seq, [*A, 1, 1])
    assert driver.found([*A, 1]) == 0 and not set(table(driver, 0)) & set(table(driver, 1))
    driver.do("commit", *drive.lines({0: A, 1: A}, ROWS, PLAIN.max_length))
    assert driver.found([*A, 1]) == 8
    assert table(driver, 0)[:2] == table(driver, 1)[:2] and holders(driver, 0)[:2] == [2, 2]


@row("v0 `get_block_table`", "`fetch`, `runtime_inputs`", "`PageBatchInfo`")
def test_a_view_has_the_tables_positions_lengths_and_destinations_of_new_tokens():
    driver = of_blocks(12)
    driver.start(0, A)
    driver.admit(1, [*B[:6], 2])
    seen = jax.device_get(kvjax.pools.view(driver.state, np.array([0, 7, 0, 0], np.int32), 7))
    blocks = table(driver, 1)
    assert seen.tables[0][1].tolist() == [*blocks, 12, 12, 12]  # the scratch row for a column without a block
    assert (seen.tables[0][2:] == 12).all()
    assert seen.positions[1].tolist() == [*range(7)] and seen.lengths.tolist() == [0, 7, 0, 0]
    assert seen.slots[0][1].tolist() == [blocks[at // SIZE] * SIZE + at % SIZE for at in range(7)]


@pytest.mark.slow
@row("v0 `swap_out`, `swap_in`")
def test_a_row_goes_to_the_host_and_comes_back_as_a_whole():
    driver = Driver(kvjax.init(TIERS, num_blocks=np.int32(4)))
    driver.start(0, [*A, 1])
    device = table(driver, 0)
    orders = driver.do("swap_out", 0).transfer
    sources = [int(s) for s, b in zip(orders.source, orders.block, strict=True) if b >= 0]
    assert set(device) <= set(sources)  # (source, target) of each move
    driver.start(1, [*C, 1])
    assert driver.status("swap_in", 0) == ["NO_BLOCKS"]  # 1 block of 4 is free: none moves
    driver.do("release", 1)
    driver.do("swap_in", 0)
    assert not np.asarray(driver.state.seqs.swapped_out).any()
    assert driver.grow(1, 0, 0, 0) == ["OK"] * 4


@row("`match_prefix`")
def test_a_question_changes_nothing_and_leaves_the_last_token():
    driver = of_blocks(12)
    driver.start(0, A)
    before = jax.tree.map(np.array, driver.state)
    lookup = driver.found
    assert (lookup([*A, 1]), lookup([*A[:6], 1]), lookup(A)) == (8, 6, 7)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, driver.state))
    driver.admit(1, [*A[:6], 1])
    assert int(driver.state.seqs.committed[1]) == 6


@row("`inc_lock_ref`, `dec_lock_ref`")
def test_blocks_of_rows_and_pins_are_not_evicted():
    driver = of_blocks(3)
    driver.start(0, [*A, 1])
    blocks = np.array(table(driver, 0)[:2], np.int32)
    assert driver.admit(1, B) == ["NO_BLOCKS"]
    driver.do("pin", blocks)
    driver.do("release", 0)
    assert driver.admit(1, B) == ["NO_BLOCKS"]  # one block of three can be evicted
    driver.do("unpin", blocks)
    assert driver.admit(1, B) == ["OK"]


@row("`evict`")
def test_eviction_is_a_part_of_what_needs_blocks_and_takes_children_first():
    driver = of_blocks(3)
    driver.start(0, [*A, 1])
    blocks = table(driver, 0)
    driver.do("release", 0)
    driver.do("admit", 1, drive.padded(B, PLAIN.max_length + 1), len(B), namespace=0)
    removed = [event["block"] for event in driver.recorded if event["kind"] == "removed"]
    assert removed == blocks[:0:-1] and driver.found([*A, 1]) == 4
    next_token = np.array([False, True, False, False]), np.array([0, 1, 0, 0], np.int32)
    driver.do("extend", *next_token, max_tokens=drive.MOST)
    assert driver.found([*A, 1]) == 0

    driver = of_blocks(12)
    driver.start(0, A)
    blocks = table(driver, 0)
    driver.do("release", 0)
    driver.do("evict", np.array(blocks[:1], np.int32))
    assert [event["block"] for event in driver.recorded if event["kind"] == "removed"] == blocks[::-1]


@row("`extra_key`")
def test_prompts_of_other_namespaces_share_nothing():
    driver, names = of_blocks(12), kvjax.Namespaces()
    ours, theirs = names(salt="ours"), names(salt="theirs")
    assert [driver.start(seq, [*A, 1], namespace=ns) for seq, ns in enumerate((ours, theirs, ours))] == [0, 0, 8]


@row("`reset`")
def test_a_cache_in_use_is_not_reset():
    driver = of_blocks(12)
    driver.start(0, A)
    assert driver.status("reset") == [Status.HELD.name] and driver.found([*A, 1]) == 8
    driver.do("release", 0)
    driver.do("reset")
    assert driver.found([*A, 1]) == 0 and driver.recorded[-1]["kind"] == "cleared"


@row("`take_events`")
def test_each_transition_returns_its_events_which_give_the_index():
    driver, mirror = of_blocks(3), kvjax.fold([])
    for seq, text in enumerate((A, B)):
        admission = "admit", seq, drive.padded(text, PLAIN.max_length + 1), len(text)
        for verb, *args in (admission, ("commit", *drive.lines({seq: text}, ROWS, PLAIN.max_length)), ("release", seq)):
            events = driver.do(verb, *args, **({"namespace": 0} if verb == "admit" else {}))
            mirror = kvjax.fold(kvjax.to_list(events), mirror)
    assert mirror.index == kvjax.events.index_of(driver.state) and len(mirror.index) == 3


@row("`PageTable.init`")
def test_a_spec_has_the_sizes_and_a_state_the_arrays():
    spec = kvjax.make_spec(num_blocks=12, max_seqs=4, max_length=20, block_size=4)
    state = kvjax.init(spec)
    assert spec == PLAIN and hash(spec) == hash(PLAIN)
    assert state.groups[0].table.shape == (4, 5) and state.groups[0].blocks.refcount.shape == (12,)


@row("`assign_seq_id_to_seq`")
def test_the_caller_chooses_a_free_row():
    driver = of_blocks(12)
    driver.start(0, A)
    assert driver.admit(0, B) == ["HELD"]
    (seq,), status = kvjax.serving.free_rows(driver.state, 1)
    assert (seq, status) == (1, kvjax.Status.OK) and driver.admit(int(seq), B) == ["OK"]


@row("`_run_generation_loop`")
def test_blocks_are_reserved_inside_a_loop_of_one_program():
    driver = of_blocks(12)
    driver.start(0, A)

    @jax.jit
    def generate(state):
        def one(number, carry):
            state, ok = carry
            state, events = kvjax.extend(state, jnp.arange(ROWS) == 0, 1)
            text = jnp.full((ROWS, 1), number % 3, jnp.int32)
            state, _ = kvjax.commit(state, text, (jnp.arange(ROWS) == 0).astype(jnp.int32))
            return state, ok & events.ok

        return jax.lax.fori_loop(0, 9, one, (state, jnp.bool_(True)))

    state, ok = generate(driver.state)
    kvjax.check(state)
    assert ok and int(state.seqs.committed[0]) == 17 and np.sum(np.asarray(state.groups[0].table[0]) >= 0) == 5
