# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: in every form of a view a text in pieces is the whole text, and nothing wrong is silent."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import Cache, LayerSpec, make_spec
from kvjax.spec import StateArray
from pallas_kernels.schedule import block_tiles, tile_width
from tests.drive import VERBS
from tests.mesh import collectives, mesh_of

SIZE, ROWS, LENGTH, MOST = 4, 3, 32, 8
STATE = {"state": (2, 3), "last": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
LAYERS = [LayerSpec(1, 4), LayerSpec.recurrent(STATE), LayerSpec.recurrent(STATE), LayerSpec(1, 4, window=4)]
SPEC = make_spec(LAYERS, num_blocks=40, max_seqs=ROWS, max_length=LENGTH, block_size=SIZE, dtype="float32")
GROUP = len(SPEC.groups) - 1
EMBED = jnp.asarray(np.random.default_rng(0).standard_normal((50, 2, 3)), jnp.float32)
TEXTS = np.random.default_rng(1).integers(0, 50, (ROWS, LENGTH))


def cell(states, inputs, count):
    """A decayed sum, and the last input; the output is both."""

    def step(states, at):
        x, real = inputs[:, at], (at < count)[:, None, None]
        total = jnp.where(real, 0.9 * states["state"] + x, states["state"])
        last = jnp.where(real[..., 0], x[:, 0].astype(jnp.bfloat16), states["last"])
        return {"state": total, "last": last}, total + states["last"].astype(jnp.float32)[:, None]

    states, outputs = jax.lax.scan(step, states, jnp.arange(inputs.shape[1]))
    return jnp.moveaxis(outputs, 0, 1), states


def whole(text):
    """The outputs [T, 2, 3] of the layer over a whole text."""
    states = {"state": jnp.zeros((1, 2, 3)), "last": jnp.zeros((1, 3), jnp.bfloat16)}
    return np.asarray(cell(states, EMBED[text][None], jnp.full((1,), len(text), jnp.int32))[0][0])


def poisoned(cache):
    """The cache with NaN in all pools; a snapshot says to be after as many tokens as it may."""

    def nan(x):
        return jnp.full_like(x, SIZE if x.dtype == jnp.int32 else jnp.nan)

    return cache.replace(pools=jax.tree.map(nan, cache.pools))


@functools.partial(jax.jit, static_argnames=("form", "width"))
def run(cache, tokens, counts, form="padded", width=64):
    """The layers' outputs for the next counts i32[S] of tokens i32[S, MOST], [S, MOST, ...]; and the cache."""
    if form == "padded":
        view, index = cache.view(counts, MOST), None
    elif form == "ragged":
        view = cache.ragged(counts, ROWS * MOST)
        index = view.starts
    else:  # the first row decodes, the others have chunks
        decode = jnp.arange(ROWS) == 0
        view = cache.mixed(decode & (counts > 0), jnp.arange(1, ROWS), counts[1:], (ROWS - 1) * MOST)
        index = jnp.concatenate([view.starts[:1], view.starts[ROWS:]])
    if index is None:
        inputs = EMBED[tokens]
    else:
        at = jnp.arange(view.positions.shape[1])
        owner = jnp.sum(at[:, None] >= index[None], axis=1) - 1
        inputs = EMBED[tokens[owner, jnp.clip(at - index[owner], 0, MOST - 1)]][None]
    pools = cache.pools
    for layer in (1, 2):
        outputs, pools = kvjax.recur(cell, pools, layer, view, inputs, width=width)
    if index is not None:
        where = jnp.minimum(index[:, None] + jnp.arange(MOST)[None], outputs.shape[1] - 1)
        outputs = outputs[0][where]
    return outputs, cache.replace(pools=pools)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "width"), [("padded", 3), ("ragged", 1), ("mixed", 2), ("padded", 64), ("ragged", 64)]
)
def test_a_text_in_pieces_is_the_whole_text(form, width):
    rng, done, cache = np.random.default_rng(2), np.zeros(ROWS, np.int64), poisoned(Cache.create(SPEC))
    wanted = [whole(text) for text in TEXTS]
    state = cache.state
    for row in range(ROWS):
        state, _ = VERBS["admit"](state, row, TEXTS[row, :LENGTH], LENGTH)
    cache = cache.replace(state=state)
    while done.min() < LENGTH - 8:
        counts = np.minimum(rng.integers(0, MOST + 1, ROWS), LENGTH - done)
        counts[0] = min(counts[0], 1) if form == "mixed" else counts[0]
        tokens = np.stack([np.resize(text[at : at + MOST], MOST) for text, at in zip(TEXTS, done, strict=True)])
        outputs, cache = run(cache, tokens, np.asarray(counts, np.int32), form, width)
        state, events = VERBS["commit"](cache.state, tokens, np.asarray(counts, np.int32))
        assert bool(events.ok)
        cache = cache.replace(state=state)
        for row in range(ROWS):
            part = slice(done[row], done[row] + counts[row])
            np.testing.assert_allclose(outputs[row, : counts[row]], wanted[row][part], atol=1e-5)
        done += counts
        if form == "mixed" and done[1:].min() >= LENGTH - 8:
            break
    kvjax.check(cache.state)


def one_row(counts, cache=None):
    """Row 0 with its text computed in these pieces, and the outputs of the last one."""
    cache = poisoned(Cache.create(SPEC)) if cache is None else cache
    state, _ = VERBS["admit"](cache.state, 0, TEXTS[0], LENGTH)
    cache, done, outputs = cache.replace(state=state), int(state.seqs.committed[0]), None
    for count in counts:
        cache, outputs = piece(cache, done, count)
        done += count
    return cache, outputs


def piece(cache, start, count, commit=True, text=TEXTS[0]):
    tokens = np.stack([np.resize(text[start:], MOST)] * ROWS)
    counts = np.asarray([count, 0, 0], np.int32)
    outputs, cache = run(cache, tokens, counts)
    state, events = VERBS["commit"](cache.state, tokens, counts) if commit else (cache.state, None)
    assert events is None or bool(events.ok)
    return cache.replace(state=state), np.asarray(outputs[0, :count])


@pytest.mark.long
def test_a_token_that_was_computed_twice_is_seen():
    cache, _ = one_row([5])
    cache, first = piece(cache, 5, 2, commit=False)
    _, second = piece(cache, 5, 2)
    np.testing.assert_allclose(first, whole(TEXTS[0])[5:7], atol=1e-5)
    assert np.isnan(second).all()


def last_output(tokens, pools, view, *, last):
    """A model whose answer is the sums of layer 1 after the last tokens. It writes the other layers too."""
    zeros = jnp.zeros((*tokens.shape, 1, 4))
    pools = kvjax.write(pools, 0, zeros, zeros, view)
    outputs, pools = kvjax.recur(cell, pools, 1, view, EMBED[tokens])
    _, pools = kvjax.recur(cell, pools, 2, view, EMBED[tokens])
    pools = kvjax.write(pools, 3, zeros, zeros, view)
    return outputs[np.arange(len(tokens)), last].reshape(len(tokens), -1), pools


REFUSED = {
    "more than is reserved": (TEXTS[:1, 5:9], [4], [0]),
    "a negative token": (np.array([[6, -1, 0, 0]]), [2], [0]),
    "a negative count": (TEXTS[:1, 5:9], [-1], [0]),
    "named twice": (TEXTS[:2, 5:9], [1, 2], [0, 0]),
    "named twice, once without tokens": (TEXTS[:2, 5:9], [0, 2], [0, 0]),
}


@pytest.mark.long
@pytest.mark.parametrize("why", REFUSED)
def test_a_step_that_is_refused_leaves_the_snapshot(why):
    """The row goes on as if there had been no such step: with the same pools, bit for bit but for the scratch row."""
    model, step = jax.tree_util.Partial(last_output), jax.jit(kvjax.step)
    tokens, count, seqs = REFUSED[why]
    before, _ = one_row([5])
    before = before.replace(state=VERBS["truncate"](before.state, 0, 8)[0])
    after, _, events = step(model, before, tokens, np.asarray(count), np.asarray(seqs))
    assert not events.ok and int(after.state.seqs.committed[0]) == 5
    for one, other in zip(jax.tree.leaves(before.pools), jax.tree.leaves(after.pools), strict=True):
        assert np.asarray(one[:-1]).tobytes() == np.asarray(other[:-1]).tobytes()
    _, outputs, events = step(model, after, TEXTS[:1, 5:9], np.array([3]), np.array([0]))
    assert events.ok
    np.testing.assert_allclose(np.asarray(outputs).reshape(2, 3), whole(TEXTS[0])[7], atol=1e-5)


@pytest.mark.long
def test_draft_tokens_leave_no_snapshot_behind():
    cache, _ = one_row([5])
    view = cache.view(np.asarray([2, 0, 0], np.int32), 2)
    outputs, pools = kvjax.recur(cell, cache.pools, 1, view, EMBED[TEXTS[:, 5:7]], keep=False)
    np.testing.assert_allclose(outputs[0], whole(TEXTS[0])[5:7], atol=1e-5)
    assert pools is cache.pools
    np.testing.assert_allclose(piece(cache, 5, 2)[1], whole(TEXTS[0])[5:7], atol=1e-5)


def test_reuse_begins_at_the_end_of_a_block():
    cache, _ = one_row([8, 8, 6])
    state, _ = VERBS["release"](cache.state, 0)
    prompt = np.concatenate([TEXTS[0, :22], TEXTS[1, :10]])
    match = VERBS["lookup"](state, prompt, 23)
    assert (int(match.cached_tokens), int(match.unusable_tokens)) == (20, 0)
    state, events = VERBS["admit"](state, 0, prompt, 32)
    assert int(np.max(events.cached)) == 20
    _, outputs = piece(cache.replace(state=state), 20, 8, text=prompt)
    np.testing.assert_allclose(outputs, whole(prompt)[20:28], atol=1e-5)


@pytest.mark.long
def test_a_cut_is_made_where_a_snapshot_is():
    cache, _ = one_row([8, 7])
    state = cache.state
    for length, status in ((14, "BAD_REQUEST"), (13, "BAD_REQUEST"), (12, "OK"), (8, "OK"), (5, "BAD_REQUEST")):
        state, events = VERBS["truncate"](state, 0, length)
        assert kvjax.Status(int(np.max(events.status))).name == status
    state, _ = VERBS["extend"](state, np.arange(ROWS) == 0, np.asarray([4, 0, 0], np.int32), max_tokens=4)
    _, outputs = piece(cache.replace(state=state), 8, 4)
    np.testing.assert_allclose(outputs, whole(TEXTS[0])[8:12], atol=1e-5)


@pytest.mark.long
def test_reserved_tokens_are_cut_anywhere():
    state = one_row([5])[0].state
    state, events = VERBS["truncate"](state, 0, 7)
    assert bool(events.ok) and int(state.seqs.committed[0]) == 5


def conversation(state, text, length):
    """Row 0 computes a text and lets go of it; the state, and the tokens that were cached."""
    state, events = VERBS["admit"](state, 0, text, length)
    cached = int(np.max(events.cached))
    new = np.stack([np.resize(text[cached:], LENGTH)] * ROWS)
    state, _ = VERBS["commit"](state, new, np.asarray([length - cached, 0, 0], np.int32))
    return VERBS["release"](state, 0)[0], cached


def snapshots(state):
    """The depths of the cached snapshots."""
    tree, group = state.groups[0].blocks, state.groups[GROUP]
    return sorted(np.asarray(tree.depth)[np.asarray(group.group0_block)[np.asarray(group.blocks.fill) > 0]].tolist())


@pytest.mark.slow
def test_ends_of_conversations_and_partings_stay():
    """Of 7 snapshots 4 are of a text of its own; those that a row has gone past leave before them."""
    numbers = {None: 40, 4: 40, "recurrent": 7}
    spec = make_spec(LAYERS, num_blocks=numbers, max_seqs=ROWS, max_length=LENGTH, block_size=SIZE)
    state, other = kvjax.init(spec), TEXTS[0].copy()
    other[8:] = TEXTS[1, 8:]
    state, _ = conversation(state, TEXTS[0], 16)
    assert snapshots(state) == [0, 1, 2, 3]
    state, cached = conversation(state, other, 16)  # parts after two blocks
    assert cached == 8 and snapshots(state) == [0, 1, 2, 2, 3, 3]
    state, _ = conversation(state, TEXTS[2], 12)  # two leave: the first block's, and one that was gone past
    assert snapshots(state) == [0, 1, 1, 2, 2, 3, 3] and [conversation(state, *of)[1] for of in (
        (TEXTS[0], 17), (other, 17), (np.concatenate([other[:8], TEXTS[2, :24]]), 17), (TEXTS[2], 13)
    )] == [16, 16, 8, 12]  # fmt: skip


@pytest.mark.slow
def test_tokens_without_a_snapshot_are_counted():
    """By lookup, by admission, and by a log."""
    numbers = {None: 40, 4: 40, "recurrent": 4}
    spec = make_spec(LAYERS, num_blocks=numbers, max_seqs=ROWS, max_length=LENGTH, block_size=SIZE)
    state, _ = conversation(kvjax.init(spec), TEXTS[0], 16)
    state, _ = conversation(state, TEXTS[2], 12)  # takes the place of the first three snapshots
    other = np.concatenate([TEXTS[0, :12], TEXTS[1, :20]])
    match = VERBS["lookup"](state, other, 15)
    assert (int(match.cached_tokens), int(match.unusable_tokens)) == (0, 12)
    state, events = VERBS["admit"](state, 0, other, 15)
    totals = kvjax.events.Totals().add(events)
    assert (totals.queried_tokens, totals.reused_tokens, totals.unusable_tokens) == (15, 0, 12)
    log = kvjax.events.append(kvjax.events.init_log(20, SIZE, recurrent=True), events, events)
    assert int(log.unusable) == 24 and kvjax.events.Totals().add(log).unusable_tokens == 24


def test_mistakes_get_an_error():
    cache = Cache.create(SPEC)
    view, inputs = cache.view(np.asarray([1, 1, 1], np.int32), 2), jnp.zeros((ROWS, 2, 2, 3))
    recur = functools.partial(kvjax.recur, cell)
    for message, call in {
        "layer: got 0, which has K/V, wanted a recurrent layer": lambda: recur(cache.pools, 0, view, inputs),
        r"inputs: got shape \(3, 1, 2, 3\), wanted \[3, 2,": lambda: recur(cache.pools, 1, view, inputs[:, :1]),
        "width: got 0, wanted an int of at least 1": lambda: recur(cache.pools, 1, view, inputs, width=0),
        r"cell: got states .*wanted {'last'": lambda: kvjax.recur(
            lambda states, x, count: (x, {"state": states["state"]}), cache.pools, 1, view, inputs
        ),
        "cell: got outputs of shape": lambda: kvjax.recur(
            lambda states, x, count: (x[:, 0], states), cache.pools, 1, view, inputs
        ),
        "arrays: got {}, wanted the shape": lambda: LayerSpec.recurrent({}),
        r"arrays\['a'\]: got \(\), wanted a shape": lambda: LayerSpec.recurrent({"a": ()}),
        r"arrays\['a'\]: got 0, wanted an int": lambda: LayerSpec.recurrent({"a": (2, 0)}),
        r"arrays\['a'\]: got int32, wanted a floating": lambda: LayerSpec.recurrent(
            {"a": jax.ShapeDtypeStruct((2,), jnp.int32)}
        ),
        "axes: got 'b', wanted one of the arrays": lambda: LayerSpec.recurrent({"a": (2,)}, axes={"b": 0}),
        r"axes\['a'\]: got 1, wanted an axis": lambda: LayerSpec.recurrent({"a": (2,)}, axes={"a": 1}),
        "values: got 9 of a latent of 8 columns": lambda: LayerSpec.latent(8, 9),
        "values: got 0, wanted an int of at least 1": lambda: LayerSpec.latent(8, 0),
        "partial_reuse: got True with recurrent layers": lambda: make_spec(
            LAYERS, num_blocks=4, max_seqs=1, max_length=8, partial_reuse=True
        ),
        "num_blocks: got a number for 'recurrent' without recurrent layers": lambda: make_spec(
            LAYERS[:1], num_blocks={None: 4, "recurrent": 3}, max_seqs=1, max_length=8
        ),
        "num_blocks: got .*, wanted a number for recurrent layers": lambda: make_spec(
            LAYERS[:2], num_blocks={None: 4}, max_seqs=1, max_length=8
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


@pytest.mark.slow
def test_two_devices_divide_the_states_without_a_word():
    """A decayed sum of four heads, all alike."""

    def decayed(states, inputs, count):
        def step(state, at):
            state = jnp.where((at < count)[:, None, None], 0.9 * state + inputs[:, at], state)
            return state, state

        state, outputs = jax.lax.scan(step, states["state"], jnp.arange(inputs.shape[1]))
        return jnp.moveaxis(outputs, 0, 1), {"state": state}

    layer = LayerSpec.recurrent({"state": (4, 3)}, axes={"state": 0})
    spec = make_spec([layer], num_blocks=40, max_seqs=ROWS, max_length=LENGTH, block_size=SIZE)
    inputs, outputs = jax.random.normal(jax.random.key(0), (ROWS, 12, 4, 3)), []
    step = jax.jit(lambda pools, view, x: kvjax.recur(decayed, pools, 0, view, x))
    with mesh_of(1, 2) as mesh:
        for placement in ({}, {"mesh": mesh, "heads": "heads"}):
            cache = Cache.create(spec, **placement).admit(0, np.arange(LENGTH), LENGTH)[0]
            view, x = cache.view(np.array([12, 0, 0], np.int32), 12), inputs
            if placement:
                x = jax.device_put(inputs, NamedSharding(mesh, P(None, None, "heads")))
                view = jax.device_put(view, NamedSharding(mesh, P()))
            compiled = step.lower(cache.pools, view, x).compile()
            assert not collectives(compiled)
            outputs.append(np.asarray(compiled(cache.pools, view, x)[0]))
    np.testing.assert_allclose(*outputs, rtol=1e-6)


def test_a_spec_says_what_its_blocks_are():
    pool = SPEC.groups[GROUP].pools[0]
    assert pool.layers == (1, 2) and pool.arrays[0] == StateArray("state", (2, 3)) and not SPEC.partial_reuse
    assert pool.block_bytes(SIZE) == 2 * (6 * 4 + 3 * 2 + 4)
    assert make_spec(LAYERS[:1], num_blocks=4, max_seqs=1, max_length=8).partial_reuse
    assert LayerSpec.latent(576, 512) == LayerSpec(1, 576, values=512)


@pytest.mark.parametrize(("size", "width"), [(4, 3), (16, 64), (96, 64), (7, 2), (1, 1), (100, 33)])
def test_tiles_end_at_block_ends(size, width):
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 3 * size + 3, 5).astype(np.int32)
    lengths = counts + rng.integers(0, 3 * size, 5).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
    own = tile_width(width, size)
    work, number = block_tiles(int(counts.sum()) + 3, lengths, starts, counts, int(counts.max()), own, size)
    tiles = [tuple(int(x[i]) for x in work[:4]) for i in range(int(number))]
    assert own <= width and all(0 < count <= own for _, _, count, _ in tiles)
    assert all(position // size == (position + count - 1) // size for _, _, count, position in tiles)
    covered = [(row, token + i, position + i) for row, token, count, position in tiles for i in range(count)]
    wanted = [(row, starts[row] + i, lengths[row] - counts[row] + i) for row in range(5) for i in range(counts[row])]
    assert covered == wanted
