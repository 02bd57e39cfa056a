# SPDX-License-Identifier: Apache-2.0
"""Decoding in blocks of steps against single steps, with a model that reads every byte that its rows can see."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving.decode import decode
from tests import drive
from tests.oracle import single_steps
from tests.oracle.decoding import (
    BLOCKS,
    MODEL,
    NUM_STEPS,
    SIZE,
    VOCAB,
    WIDTH,
    Decoding,
    S,
    Start,
    in_blocks,
    make_spec,
    single,
)

STEPS = 6  # of one call of a loop: more than a block, and no multiple of one
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
EVICTS = "blocks are evicted"
FOUR = {0: TEXT[:5], 1: [*TEXT[:4], 9, 9], 2: TEXT[3:], 3: [7]}
STARTS = {
    "rows stop inside blocks": Start(FOUR, left=[20] * S, stop=(2, 5, 7)),
    "rows have enough inside blocks": Start(FOUR, left=(1, 2, 5, 11)),
    "rows fill up": Start({row: [row] * n for row, n in enumerate((20, 21, 22, 23))}, left=[9] * S),
    "a row has no room": Start({0: [5] * 24, 1: [3]}),
    "last blocks are shared": Start({0: TEXT[:6], 2: TEXT[:6]}, forks=((0, 1), (2, 3)), left=(9, 3, 8, 1)),
    "a full last block is shared": Start({0: TEXT[:8]}, forks=((0, 1), (0, 3))),
    "twins fill equal blocks": Start({0: TEXT[:5], 1: TEXT[:5], 3: TEXT[:5]}, left=(9, 9, 9, 4)),
    "a twin is ahead": Start({0: TEXT[:5], 1: TEXT[:5]}, ahead={1: 3}, left=(9, 4, 0, 0)),
    "a free row and idle ones": Start({0: TEXT, 1: TEXT[2:], 3: [8]}, idle=(1,), left=[9] * S),
    "one row is active": Start({2: TEXT}, left=[30] * S),
    "the text is cached": None,
    EVICTS: Start(FOUR, served=[[10] * 11, [11, *TEXT], [12] * 8], left=[20] * S, stop=(0,)),
}
# (k, steps, options): by default blocks of P steps. Each takes a program for each cache.
OTHERS = {
    "k=1": (1, STEPS), "k=3, 11 steps": (3, 11), "fixed": (SIZE, STEPS, ("fixed_steps", True)), "k=3": (3, STEPS),
    "a block a call": (SIZE, SIZE),
}  # fmt: skip
LOOPS = [
    pytest.param((SIZE, STEPS), id="k=P"),
    *[pytest.param(loop, marks=pytest.mark.slow, id=name) for name, loop in OTHERS.items()],
]
GROUPS = ["full", *[pytest.param(name, marks=pytest.mark.slow) for name in ("windows", "narrow")]]
every_loop = pytest.mark.parametrize("loop", LOOPS)
ONE = "full", "k=P"
ALL = [(layers, name) for layers in ("full", "windows", "narrow") for name in ("k=P", *OTHERS)]
one_by_default = pytest.mark.parametrize(
    ("loop", "layers"),
    [
        pytest.param(
            {"k=P": (SIZE, STEPS), **OTHERS}[name], layers, id=f"{name}-{layers}",
            marks=() if (layers, name) == ONE else pytest.mark.slow,
        )
        for layers, name in ALL
    ],
)  # fmt: skip


@functools.cache
def alone(layers, name, num_blocks=BLOCKS):
    """The decoding by single steps."""
    return Decoding(make_spec(layers), num_blocks).begin(start_of(layers, name)).run(single(STEPS))


@functools.cache
def start_of(layers, name):
    """A start by its name. In one of them rows come to write blocks that are already cached."""
    if name != "the text is cached":
        return STARTS[name]
    decoding = Decoding(make_spec(layers)).begin(Start({0: TEXT[:3]}, left=[12] * S))
    first, text = int(decoding.rows.token[0]), decoding.run(single(STEPS)).texts[0]
    text = [*TEXT[:3], first, *[token for token, _ in text]]
    return Start({0: text[:3], 1: text[:6]}, served=[text], left=[8] * S)


def jitted(k, steps, *options):
    return in_blocks(k, steps, **dict(options))


def assert_same(blocks, one):
    """Asserts that both chose the same tokens, and left the same cache except for evictions."""
    assert blocks.texts == one.texts
    assert blocks.rows_left() == one.rows_left()
    assert blocks.bytes() == one.bytes()
    assert blocks.held() == one.held()
    if not (blocks.evicts or one.evicts):
        assert blocks.recorded == one.recorded
        assert index_of(blocks) == index_of(one)


def index_of(decoding):
    return kvjax.events.index_of(decoding.cache.state)


def most_written(decoding):
    return max(map(len, decoding.texts))


@pytest.mark.long
@pytest.mark.parametrize("layers", GROUPS)
@pytest.mark.parametrize("name", [name for name in STARTS if name != EVICTS])
@every_loop
def test_blocks_choose_what_single_steps_choose(loop, name, layers):
    one, blocks = alone(layers, name), Decoding(make_spec(layers)).begin(start_of(layers, name)).run(jitted(*loop))
    assert_same(blocks, one)
    assert not one.evicts and not blocks.evicts
    assert one.out_of_blocks == (name == "a row has no room")
    if len(loop) == 2:
        assert blocks.steps == most_written(blocks)  # calls of the model: no step is computed needlessly
    else:
        assert blocks.steps % SIZE == 0 and blocks.steps >= most_written(blocks)


@pytest.mark.long
@pytest.mark.parametrize("layers", GROUPS)
@pytest.mark.parametrize("name", ["last blocks are shared", "twins fill equal blocks", EVICTS])
def test_a_block_of_one_step_is_a_single_step_bit_for_bit(name, layers):
    num_blocks = 13 if name == EVICTS else BLOCKS
    one, block = (Decoding(make_spec(layers), num_blocks).begin(start_of(layers, name)) for _ in range(2))
    for _ in range(2):
        for decoding, loop in ((one, single(STEPS)), (block, in_blocks(1, STEPS))):
            decoding.call(loop)
        chex.assert_trees_all_equal(block.cache.state, one.cache.state)
        chex.assert_trees_all_equal(block.rows, one.rows)
        assert np.array_equal(block.records, one.records)
    assert_same(block, one)
    assert block.evicts == (name == EVICTS)


SIZES = [*range(7, 21)]


@one_by_default
@pytest.mark.parametrize(
    "num_blocks",
    [pytest.param(n, marks=pytest.mark.long if n == 11 else pytest.mark.slow) for n in SIZES],
)
def test_a_pool_that_runs_out_ends_both_at_the_same_token(num_blocks, loop, layers):
    one = alone(layers, EVICTS, num_blocks)
    blocks = Decoding(make_spec(layers), num_blocks).begin(start_of(layers, EVICTS)).run(jitted(*loop))
    assert_same(blocks, one)
    if len(loop) == 2:
        assert blocks.steps == most_written(blocks)


@pytest.mark.long
@pytest.mark.parametrize("layers", ["full", pytest.param("windows", marks=pytest.mark.slow)])
def test_pools_of_these_sizes_run_out_and_do_not(layers):
    ends = [alone(layers, EVICTS, n) for n in (SIZES[0], 11, SIZES[-1])]
    assert [(end.evicts, end.out_of_blocks) for end in ends] == [(False, True), (True, True), (True, False)]


@pytest.mark.long
@one_by_default
def test_a_log_too_small_for_a_block_makes_it_shorter(loop, layers):
    """The log holds the events of a single step. Four rows share a block, and each would enter two in four steps."""
    spec = make_spec(layers)
    start = Start({0: TEXT[:6]}, forks=((0, 1), (0, 2), (0, 3)), left=(9, 8, 7, 6))
    one, blocks = Decoding(spec).begin(start).run(single(STEPS)), Decoding(spec).begin(start)
    blocks.log_room = single_steps.most_events(spec)
    blocks.run(jitted(*loop))
    assert_same(blocks, one)
    assert blocks.counted[0] == 2 < 4
    never = Decoding(spec).begin(start)
    never.log_room = single_steps.most_events(spec) - 1
    assert never.call(jitted(*loop)) == 0 and not never.out_of_blocks  # like single steps, which never begin either


def unevictable(num_blocks):
    """A row of 5 tokens, and a cached block that is unevictable, since its child is on the host."""
    decoding = Decoding(make_spec("full", num_host_blocks=8), num_blocks)
    decoding.begin(Start({1: TEXT[:5]}, served=[[9] * 8], left=[14] * S))
    group = decoding.cache.state.groups[0]
    child = np.flatnonzero((np.asarray(group.blocks.fill) > 0) & (np.asarray(group.blocks.depth) == 1)).astype(np.int32)
    child = drive.padded(child[np.asarray(group.blocks.refcount)[child] == 0], 2, kvjax.state.NO_BLOCK)
    state, events = drive.VERBS["offload"](decoding.cache.state, child)
    decoding.follow(kvjax.to_list(events))
    state, done = drive.VERBS["complete"](state, events.transfer, True)
    assert bool(events.ok) and bool(done.ok)
    decoding.cache = decoding.cache.replace(state=state)
    return decoding


@pytest.mark.slow
@every_loop
@pytest.mark.parametrize(("num_blocks", "written"), [(4, 7), (5, 11), (6, 14)])
def test_a_loop_whose_block_is_refused_goes_on_by_single_steps(num_blocks, written, loop):
    """It uses every free slot, although a block of steps would be refused again and again."""
    one, blocks = unevictable(num_blocks), unevictable(num_blocks)
    assert_same(blocks.run(jitted(*loop)), one.run(single(STEPS)))
    assert most_written(blocks) == written and blocks.out_of_blocks == (written < 14)
    if len(loop) == 2:
        assert blocks.steps == written


@pytest.mark.slow
def test_unevictable_blocks_with_host_children_are_counted_in_vain():
    decoding = unevictable(4)
    decoding.activate([1], [4] * S)
    state = decoding.run(single(STEPS)).cache.state
    assert state.seqs.length.tolist() == [0, 9, 0, 0] and int(state.groups[0].num_empty) == 0
    one, want = np.arange(S) == 1, np.array([0, SIZE, 0, 0], np.int32)
    assert int(NUM_STEPS(state, want, SIZE, 200)) == SIZE
    for tokens, status in ((SIZE, "NO_BLOCKS"), (1, "OK")):
        _, events = drive.VERBS["extend"](state, one, np.minimum(want, tokens), max_tokens=drive.MOST)
        assert drive.names(events)[1] == status


def retention_of(decode_ttl=None):
    return kvjax.Retention.of([(0, 4, 80, 25), (4, None, 20)], decode_priority=60, decode_ttl=decode_ttl)


@pytest.mark.slow
@every_loop
@pytest.mark.parametrize("num_blocks", [11, 14, BLOCKS])
def test_stated_priorities_and_times_to_live(num_blocks, loop):
    options = {"retention": retention_of(15), "now": np.int32(3)}
    start = Start(FOUR, served=[[10] * 11, [11, *TEXT]], left=[12] * S, options=options)
    spec, ends = make_spec("full", retention=True), []
    for decoded in (single(STEPS), jitted(loop[0], STEPS, *loop[2:])):
        decoding = Decoding(spec, num_blocks, kvjax.policies.priority()).begin(start)
        for now in itertools.count(10, 10):
            if decoding.out_of_blocks or not np.any(decoding.rows.active):
                break
            decoding.call(decoded, now)
        ends.append(decoding)
    one, blocks = ends
    assert_same(blocks, one)
    assert one.evicts == (num_blocks < BLOCKS)
    priorities = np.asarray(blocks.cache.state.groups[0].blocks.retention)[..., 0]
    assert 60 in priorities[np.asarray(blocks.cache.state.groups[0].table[0])]


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["windows", pytest.param("narrow", marks=pytest.mark.slow)])
@every_loop
def test_beams_between_calls(loop, layers):
    """Several rows continue one row, each with a token of its own, and share its last block until they write."""
    ends = []
    for decoded in (single(STEPS), jitted(loop[0], STEPS, *loop[2:])):
        decoding = Decoding(make_spec(layers)).begin(Start({0: TEXT[:5], 1: TEXT[:5], 3: TEXT[:2]}, left=[16] * S))
        for parents in ([1, 1], [0, 1], [0, 0]):
            decoding.call(decoded)
            decoding.ask("beam_step", np.arange(2, dtype=np.int32), np.array(parents, np.int32))
            token = decoding.rows.token
            first, second = (token[parent] for parent in parents)
            token = token.at[0].set(first).at[1].set((second + int(parents[0] == parents[1])) % VOCAB)
            decoding.rows = decoding.rows.replace(token=token)
        ends.append(decoding)
    assert_same(*reversed(ends))
    assert not ends[0].evicts and ends[0].texts[0] != ends[0].texts[1]


def no_token_twice(logits, tokens, positions):
    """Masks a third of the vocabulary by the position, and the last token."""
    ids = jnp.arange(VOCAB, dtype=jnp.int32)[None]
    shut = ((ids + positions[:, None]) % 3 == 0) | (ids == tokens[:, None])
    return jnp.where(shut, -1e9, logits)


# Rows have four samplings, two with `min_tokens`, of which one token was generated before the first step.
SAMPLINGS = kvjax.Sampling([1.3, 0, 0.8, 2.5], top_k=[9, 0, 0, 4], top_p=[1, 1, 0.9, 1], min_tokens=[6, 0, 0, 5])


@pytest.mark.slow
@every_loop
def test_random_choices_and_a_users_function_do_not_depend_on_k(loop):
    options, how = {"logits_fn": no_token_twice}, {"sampling": SAMPLINGS}
    start = dataclasses.replace(STARTS["last blocks are shared"], stop=(2, 5, 7, 11))
    one = Decoding(make_spec("full")).begin(start).run(single(STEPS, **options), **how)
    blocks = Decoding(make_spec("full")).begin(start).run(in_blocks(*loop[:2], **options, **dict(loop[2:])), **how)
    assert_same(blocks, one)
    for text, least in zip(one.texts, SAMPLINGS.min_tokens.tolist(), strict=True):
        tokens = [token for token, _ in text]
        assert all(a != b for a, b in itertools.pairwise(tokens))
        assert not set(start.stop) & set(tokens[: max(least - 1, 0)])
    assert len(one.texts[0]) > 5 and min(map(len, one.texts)) < 5  # without `min_tokens` a row stops earlier


def test_a_wrong_k_is_named():
    decoding = Decoding(make_spec("full"))
    options = {"steps": 2, "stop": decoding.stop, "sampling": None}
    for k, wanted in (
        (0, "an int of at least 1"),
        (SIZE + 1, "at most the block size, 4"),
        (1.5, "an int"),
        (True, "an"),
    ):
        with pytest.raises(ValueError, match=rf"^k: got {k}, wanted {wanted}"):
            jax.eval_shape(
                lambda cache, k=k: decode(None, cache, decoding.rows, decoding.log, k=k, **options), decoding.cache
            )
    assert WIDTH % SIZE == 0


def test_rows_that_do_not_say_where_their_prompts_end_cannot_be_sampled():
    decoding = Decoding(make_spec("full"))
    rows, options = decoding.rows.replace(prompt=None), {"steps": 2, "stop": decoding.stop}
    with pytest.raises(
        ValueError, match=r"^rows\.prompt: got None, wanted the tokens of each row's prompt, or sampling"
    ):
        jax.eval_shape(
            lambda cache: decode(MODEL, cache, rows, decoding.log, sampling=kvjax.Sampling(), **options), decoding.cache
        )
