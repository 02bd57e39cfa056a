# SPDX-License-Identifier: Apache-2.0
"""Caches with tables made by hand, and a step over them: writes through two views, attention, and a dense equivalent.

The numbers x of a step are "past" [parts, 4, 10, K, D], the K/V of the committed tokens of the four rows, of which
latents have a single part, "new" [parts, 4, 4, K, D], K/V of up to four tokens after them, their queries "q" [4, 4, Q,
D], "sinks", and maybe "angles", which rotate q and the new K.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import LayerSpec, make_spec
from kvjax.events.records import EventKind, Events, Records, joined, record
from kvjax.pools import attend, mixed, ragged, rope_write, view, write
from kvjax.state import Text
from pallas_kernels.quantise import quantise
from pallas_kernels.rotary import rotate

SIZES = {"num_blocks": 12, "max_seqs": 4, "max_length": 20, "block_size": 4, "dtype": "float32"}
SPEC = make_spec([LayerSpec(2, 16), LayerSpec(1, 32), LayerSpec(2, 16)], **SIZES)
# Rows with 6, 0, 9 and 20 reserved tokens, of which 3, 0, 9 and 10 are committed.
LENGTHS, COMMITTED = [6, 0, 9, 20], [3, 0, 9, 10]
TABLE = [[2, 0, -1, -1, -1], [-1] * 5, [5, 7, 1, -1, -1], [3, 4, 6, 8, 9]]
FORMS = {  # the view after the committed tokens, and its number of tokens of each row
    "decode": (lambda state: view(state, [1, 0, 0, 1], 1), [1, 0, 0, 1]),
    "padded": (lambda state: view(state, [2, 0, 0, 4], 4), [2, 0, 0, 4]),
    "ragged": (lambda state: ragged(state, [2, 0, 0, 4], 8), [2, 0, 0, 4]),
    "mixed": (lambda state: mixed(state, [False, False, False, True], [0, -1], [2, 1], 6), [2, 0, 0, 1]),
}
FORMS["mixed as ragged"] = lambda state: FORMS["mixed"][0](state).replace(decodes=0), FORMS["mixed"][1]
LAYERS = {**dict.fromkeys(("kv", "rope", "partial rope"), LayerSpec(2, 16)), "latents": LayerSpec.latent(24, 16)}
HEADS, QUANTISED = 4, ("int8", "float8_e4m3fn")


def hand_made_state(committed=COMMITTED, table=TABLE):
    state = kvjax.init(SPEC)
    group = state.groups[0].replace(table=jnp.asarray(table, jnp.int32))
    seqs = kvjax.state.Sequences(*(jnp.asarray(x, jnp.int32) for x in (LENGTHS, committed, [0] * 4)))
    return state.replace(groups=(group,), seqs=seqs)


def no_events(records):
    none = jnp.zeros(1, jnp.int32)
    text = Text(jnp.zeros((records.shape[0], SPEC.block_size), jnp.int32), None)
    return Events(records, text, none, none, none, none[0])


def copied(sources, targets, group=0):
    """Records of copies, with padding and other events between them."""
    published = record(
        EventKind.COPIED, jnp.ones(len(sources), bool),
        source=jnp.asarray(sources), block=jnp.asarray(targets), group=group, num_tokens=2,
    )  # fmt: skip
    removed = record(EventKind.REMOVED, jnp.asarray([True, False]), block=jnp.asarray([1, 0]))
    return joined(removed, *(joined(line, removed) for line in map(Records, published.records[:, None]))).records


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# A step.


def spec_of(kind, dtype="float32", window=None, **options):
    """A spec of three layers with this window, of which the first and the last are of a kind."""
    layers = [replace(layer, window=window) for layer in (LAYERS[kind], LayerSpec(2, 8), LAYERS[kind])]
    return make_spec(layers, **SIZES | {"dtype": dtype} | options)


def inputs(kind):
    """The numbers of a step. float32 holds products with angles exactly, so no compiler changes a bit of them."""
    layer, rng = LAYERS[kind], np.random.default_rng(0)

    def numbers(most, *shape):
        return jnp.asarray(rng.integers(-most, most + 1, shape) / (most + 1), jnp.float32)

    parts, kv = 1 if layer.values else 2, (layer.kv_heads, layer.head_dim)
    x = {"past": numbers(127, parts, 4, max(COMMITTED), *kv), "new": numbers(127, parts, 4, 4, *kv)}
    x |= {"q": numbers(127, 4, 4, HEADS, layer.head_dim), "sinks": numbers(127, HEADS)}
    pairs = {"rope": layer.head_dim // 2, "partial rope": layer.head_dim // 4}.get(kind)
    return x if pairs is None else x | {"angles": numbers(4095, 2, 4, 4, 1, pairs)}


@functools.cache
def views(form):
    """The view of the committed tokens, and the view of the tokens after them, for a cache of any layers."""
    with jax.ensure_compile_time_eval():
        make = jax.jit(lambda past, now: (view(past, COMMITTED, max(COMMITTED)), FORMS[form][0](now)))
        return [now.replace(spec=None) for now in make(hand_made_state([0] * 4), hand_made_state())]


def tokens_of(now):
    """The tokens of a view in the order of rows: (line, position) in it, and (row, number) among the new tokens."""
    slots = np.asarray(now.slots[0])
    line, position = np.nonzero(slots < SPEC.groups[0].num_blocks * 4)
    row, column = np.array([np.argwhere(np.asarray(TABLE) == slot // 4)[0] for slot in slots[line, position]]).T
    token_index = column * 4 + slots[line, position] % 4 - np.asarray(COMMITTED)[row]
    order = np.lexsort((token_index, row))
    return (line[order], position[order]), (row[order], token_index[order])


def on_lines(x, form, padding=jnp.nan):
    """The numbers of a step where its view has the tokens, and `padding` elsewhere."""
    now = views(form)[1]
    positions, tokens = tokens_of(now)

    def scattered(rows):
        return jnp.full((*now.positions.shape, *rows.shape[2:]), padding).at[positions].set(rows[tokens])

    lines = {name: jnp.stack([scattered(part) for part in x[name]]) for name in ("new", "angles") if name in x}
    return {**x, **lines, "q": scattered(x["q"])}


def paged(lines, pools, form, options=None, layer=2, index=None, implementation=None):
    """The pools after both writes, and attention with its log-sum-exp, in the form of the view."""
    num_groups = len(pools.spec.groups)  # each with the same table
    past, now = (seen.replace(tables=seen.tables * num_groups, slots=seen.slots * num_groups) for seen in views(form))
    attend_options, options = {"index": index, "implementation": implementation}, dict(options or {})
    options.pop("window", None)  # the layer has it

    def k_and_v(parts):
        return parts[0], parts[1] if len(parts) > 1 else None

    pools, q = write(pools, layer, *k_and_v(lines["past"]), past, **attend_options), lines["q"]
    if "angles" in lines:
        q, pools = rope_write(pools, layer, q, *k_and_v(lines["new"]), tuple(lines["angles"]), now, **attend_options)
    else:
        pools = write(pools, layer, *k_and_v(lines["new"]), now, **attend_options)
    if options.get("sinks"):
        options["sinks"] = lines["sinks"]
    return pools, attend(q, pools, layer, now, return_lse=True, **options, **attend_options)


def in_order(results, form):
    """Arrays in the form of the view, of its tokens alone in the order of rows."""
    positions, _ = tokens_of(views(form)[1])
    return [x[positions] for x in results]


def rotated(x):
    """A step's numbers with q and K rotated."""
    if "angles" not in x:
        return x
    q, k = (rotate(part, tuple(x["angles"])) for part in (x["q"], x["new"][0]))
    return {**x, "q": q, "new": jnp.stack([k, x["new"][1]])}


def rows_of(x, form):
    """Of each row the K/V [parts, T, K, D] of all its tokens after the step."""
    return [
        jnp.concatenate([x["past"][:, row, : COMMITTED[row]], x["new"][:, row, :count]], axis=1)
        for row, count in enumerate(FORMS[form][1])
    ]


def stored(kv, dtype):
    """K/V as a pool has them, and their scales, None in a pool of floats."""
    return quantise(kv, dtype) if dtype in QUANTISED else (kv.astype(dtype), None)


def dense(x, form, options=None, values=None, dtype="float32"):
    """Attention and log-sum-exp of the new tokens in the order of rows, over rotated K/V as a pool has them."""
    out, x, options = [], rotated(x), options or {}
    for row, (kv, count) in enumerate(zip(rows_of(x, form), FORMS[form][1], strict=True)):
        if not count:
            continue
        words, scales = stored(kv, dtype)
        kv = words.astype(jnp.float32) * (1 if scales is None else scales.reshape(*kv.shape[:3], 1))
        keys, content = (jnp.repeat(part, HEADS // kv.shape[2], axis=1) for part in (kv[0], kv[-1, ..., :values]))
        score = jnp.einsum("cqd,tqd->qct", x["q"][row, :count], keys)
        score = score * options.get("scale", kv.shape[3] ** -0.5)
        if cap := options.get("soft_cap"):
            score = cap * jnp.tanh(score / cap)
        distance = COMMITTED[row] + np.arange(count)[:, None] - np.arange(kv.shape[1])[None]
        score = jnp.where((distance >= 0) & (distance < options.get("window", 99)), score, -jnp.inf)
        if options.get("sinks"):
            score = jnp.concatenate([score, jnp.broadcast_to(x["sinks"][:, None, None], (*score.shape[:2], 1))], axis=2)
        weight = jax.nn.softmax(score, axis=-1)[:, :, : kv.shape[1]]
        out.append((jnp.einsum("qct,tqd->cqd", weight, content), jax.nn.logsumexp(score, axis=-1).T))
    return [jnp.concatenate(parts) for parts in zip(*out, strict=True)]
