# SPDX-License-Identifier: Apache-2.0
"""Copies on the host of blocks that stay on the device. `tests/oracle` compares them with plain Python, and bytes."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.blocks.backups import LEFT
from kvjax.serving import Scheduler, init_serving
from tests.drive import BOTH, Driver

OPTIONS = {"max_seqs": 3, "max_length": 12, "block_size": 4, "dtype": "float32"}
COPIES = {**OPTIONS, "num_blocks": 4, "num_host_blocks": 4, "backups": True}
LAYERS = [kvjax.LayerSpec(1, 1)]
ONE = kvjax.make_spec(LAYERS, **{**COPIES, "backups": False})


def of_documents(number, policy=None, **options):
    """A cache that has as many documents of a block each, the first one the oldest; and their blocks."""
    cache = Driver(kvjax.init(kvjax.make_spec(LAYERS, **{**COPIES, **options}), policy))
    for n in range(number):
        serve(cache, n)
    first = np.asarray(cache.state.groups[0].blocks.tokens)[:, 0].tolist()
    return cache, [first.index(10 * n + 1) for n in range(number)]


def changes(events):
    return [(event["kind"], event["block"]) for event in kvjax.to_list(events)]


def findable(cache):
    return set(np.flatnonzero(np.asarray(cache.state.groups[0].blocks.fill)).tolist())


def serve(cache, document, **options):
    cache.start(0, [10 * document + 1] * 4, **options)
    cache.do("release", 0)


def tokens_on(cache, document):
    """The tokens of a document found on the device and on both tiers."""
    prompt = [*[10 * document + 1] * 4, 5]
    return cache.found(prompt, tiers=BOTH[:1]), cache.found(prompt, tiers=BOTH)


def backed(cache):
    """The blocks that have backups."""
    group = jax.device_get(cache.state.groups[0])
    return set(np.flatnonzero((group.host.backup >= 0) & (group.blocks.fill > 0)).tolist())


@pytest.mark.slow
def test_a_block_with_a_copy_leaves_in_a_loop_and_others_are_lost():
    cache, ids = of_documents(4)
    events = cache.do("backup", max_blocks=2)
    assert np.sum(np.asarray(events.transfer.block) >= 0) == 2 and backed(cache) == set(ids[:2])
    assert kvjax.debug.stats(cache.state).host_backup_blocks == 2
    for document in (7, 8, 9):  # as in a loop
        serve(cache, document)
    kinds = [(event["kind"], event["block"]) for event in cache.recorded if event["kind"] in ("updated", "removed")]
    assert kinds == [("updated", ids[0]), ("updated", ids[1]), ("removed", ids[2])]
    assert [tokens_on(cache, document) for document in range(4)] == [(0, 4), (0, 4), (0, 0), (4, 4)]
    assert not any(event["kind"] == "removed" and event["block"] in ids[:2] for event in cache.recorded)
    assert (np.asarray(cache.state.groups[0].host.backup)[ids[:2]] == LEFT).all()


@pytest.mark.slow
def test_a_block_that_comes_back_keeps_its_copy_while_the_host_has_others():
    cache, ids = of_documents(4)
    cache.do("backup", max_blocks=4)
    serve(cache, 7)
    assert tokens_on(cache, 0) == (0, 4)
    assert cache.start(0, [1, 1, 1, 1, 9], tiers=BOTH) == 4  # the next victims leave for it by their copies
    cache.do("release", 0)
    assert backed(cache) >= {ids[0]} and tokens_on(cache, 0) == (4, 4)
    assert not np.any(np.asarray(cache.state.groups[0].host.backup) == LEFT)


@pytest.mark.slow
def test_a_copy_on_the_move_belongs_to_no_block_once_its_block_has_left():
    """A fault of a prototype: the copy's arrival was completed for whatever had its row by then."""
    cache, ids = of_documents(2)
    copies = cache.ask("backup", max_blocks=2, complete=False).transfer
    moves = cache.do("offload", np.array([*ids, -1, -1], np.int32), complete=False).transfer
    cache.do("complete", copies, True)
    cache.do("complete", moves, True)
    assert [tokens_on(cache, document) for document in range(2)] == [(0, 4)] * 2 and not backed(cache)
    cache, ids = of_documents(2)
    copies = cache.ask("backup", max_blocks=2, complete=False).transfer
    cache.do("offload", np.array([*ids, -1, -1], np.int32))
    cache.do("complete", copies, False)
    assert findable(cache) == set(ids)


@pytest.mark.slow
def test_a_copy_that_fails_costs_the_copy_alone():
    cache, ids = of_documents(3)
    copies = cache.ask("backup", max_blocks=2, complete=False).transfer
    assert cache.status("reset") == ["HELD"]
    cache.do("complete", copies, False)
    assert findable(cache) == set(ids) and not backed(cache)
    assert int(cache.state.groups[0].host.num_empty) == 4
    cache.do("backup", max_blocks=2)
    assert backed(cache) == set(ids[:2])


@pytest.mark.slow
def test_blocks_that_leave_by_a_copy_and_by_a_move_keep_their_order_on_the_host():
    """A fault of a prototype: the host saw all blocks with moves first, whatever their turn."""
    cache, ids = of_documents(4, num_host_blocks=3)
    cache.do("backup", max_blocks=1)  # of the oldest
    assert cache.admit(0, [*range(90, 102)], tiers=BOTH) == ["OK"]  # the oldest leaves by its copy, two by moves
    assert [tokens_on(cache, document)[1] for document in range(3)] == [4, 4, 4]
    cache.do("release", 0)
    for document in (6, 7, 8, 9):
        serve(cache, document, tiers=BOTH)
    gone = [event["block"] for event in cache.recorded if event["kind"] == "removed"]
    assert gone[:1] == [ids[0]]


@pytest.mark.slow
def test_a_call_looks_at_so_many_victims():
    """With 0 victims a driver compiles the program, and changes nothing."""
    cache, ids = of_documents(4, num_host_blocks=1)
    cache.do("offload", np.array([ids[0], -1, -1, -1], np.int32))
    cache.do("backup", 0, max_blocks=4)
    assert not backed(cache) and findable(cache) == set(ids)
    cache, ids = of_documents(4)
    cache.do("backup", 3, max_blocks=4)
    assert backed(cache) == set(ids[:3])


@pytest.mark.slow
def test_the_source_of_a_copy_waits_on_the_host_after_it_has_left_in_a_loop():
    """Its holder, the copy, does not count as one: without a turn on the host it would never leave it."""
    cache, ids = of_documents(4, num_host_blocks=2)
    cache.do("backup", max_blocks=1)
    serve(cache, 7)
    assert np.asarray(cache.state.groups[0].host.backup)[ids[0]] == LEFT
    assert cache.start(0, [1, 1, 5, 5], tiers=BOTH) == 2  # half of the block is copied, and the second one leaves
    cache.do("release", 0)
    serve(cache, 8, tiers=BOTH)
    assert [tokens_on(cache, document)[1] for document in range(3)] == [2, 4, 4]  # of the first one the copied half


@pytest.mark.slow
def test_a_policy_that_names_too_few_victims_of_the_host_evicts_none():
    """A fault of a prototype: the blocks that were named left the policy's order, and stayed."""
    lru = kvjax.lru()

    def victims(*args):
        ids, pstate = lru.victims(*args)
        return ids.at[1:].set(kvjax.state.NO_BLOCK), pstate

    lazy = lru._replace(victims=victims, name="")
    cache, ids = of_documents(2, lazy, num_host_blocks=2)
    cache.do("offload", np.array([*ids, -1, -1], np.int32))
    cache.start(0, [5, 5, 5, 5, 6, 6, 6, 6])  # a chain: its end is a victim, and needs two copies
    cache.do("release", 0)
    events = cache.do("backup", max_blocks=4)
    assert not changes(events) and not backed(cache)
    assert [tokens_on(cache, document)[1] for document in range(2)] == [4, 4]
    assert not np.any(np.asarray(events.transfer.block) >= 0)


@pytest.mark.slow
def test_copies_give_way_from_the_block_that_will_leave_last():
    cache, ids = of_documents(4, num_host_blocks=3)
    cache.do("backup", max_blocks=3)
    assert backed(cache) == set(ids[:3])
    cache.start(0, [11] * 4)  # the oldest leaves for it by its copy, and the second is held, so it will leave last
    assert backed(cache) == set(ids[1:3]) and tokens_on(cache, 0) == (0, 4)
    cache.do("offload", np.array([ids[3], -1, -1, -1], np.int32))
    assert backed(cache) == {ids[2]} and findable(cache) >= set(ids)


def test_errors_of_copies_name_the_argument():
    with pytest.raises(ValueError, match=r"^backups: got True without blocks on the host"):
        kvjax.make_spec(num_blocks=4, backups=True, **OPTIONS)
    with pytest.raises(ValueError, match=r"^state: got a cache without backups, wanted make_spec\(backups=True\)"):
        kvjax.tiers.backup(kvjax.init(ONE), max_blocks=1)
    with pytest.raises(ValueError, match=r"^max_blocks: got 0"):
        kvjax.tiers.backup(kvjax.init(kvjax.make_spec(LAYERS, **COPIES)), max_blocks=0)
    with pytest.raises(ValueError, match=r"^stop_before_loss: got True, wanted False"):
        Scheduler(chunk=4, stop_before_loss=True).check(ONE)
    Scheduler(chunk=4, stop_before_loss=True).check(dataclasses.replace(ONE, backups=True))
    with pytest.raises(ValueError, match=r"^cache: got a TieredCache without backups"):
        init_serving(kvjax.tiers.TieredCache.create(ONE), [8])
