# SPDX-License-Identifier: Apache-2.0
"""Replicas: prompts go where they are cached, by the events alone. `test_contract.py` has answers and failures."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.serving import Replicas, RunOptions, make_requests
from kvjax.serving.routing import CachedPrefixes, choose_replica, hashes_of
from models import load
from tests import drive
from tests.mesh import mesh_of
from tests.serving_kit import BASE, MODEL, NEW, ask, assert_chained, make_spec

SIZE = 8  # of the histories below
DEVICES = jax.devices()[:2]
RNG = np.random.default_rng(0)
DOCUMENTS = RNG.integers(0, 31, (2, 16)).tolist()
REQUESTS = [ask([*DOCUMENTS[n % 2][: 8 + n % 3 * 4], n, 1, 2]) for n in range(6)]


def test_the_rule_takes_what_is_cached_less_the_price_of_load_and_ends_ties_by_load():
    for cached, loads, price, wanted in (
        ([8, 16, 0], [0, 0, 0], 0.0, 1),
        ([8, 8, 8], [3, 1, 2], 0.0, 1),
        ([0, 0], [0, 0], 0.0, 0),
        ([16, 0], [10, 0], 1.0, 0),
        ([16, 0], [17, 0], 1.0, 1),
        ([20, 0], [30, 10], 0.0, 0),
        ([20], [999], 0.0, 0),  # alone
        ([20, 0], [40, 0], 0.0, 0),
        ([20, 0], [41, 0], 0.0, 1),  # more than twice what the other one would have
        ([20, 0], [61, 10], 0.0, 1),
        ([20, 0, 0], [20, 0, 0], 0.0, 0),
        ([20, 0, 0], [21, 0, 0], 0.0, 1),  # more than twice the others' mean
    ):
        assert choose_replica(cached, loads, 20, load_price=price) == wanted


def lookups(cache, prompt, namespace):
    """The whole blocks of a prompt that `lookup` finds."""
    tokens = np.zeros((96,), np.int32)
    tokens[: len(prompt)] = prompt
    found = LOOKUP(cache.state, tokens, np.int32(len(prompt)), namespace=np.int32(namespace))
    return int(found.cached_tokens) // SIZE


LOOKUP = jax.jit(kvjax.lookup)
PLAIN, WINDOW = kvjax.LayerSpec(1, 4), kvjax.LayerSpec(1, 4, window=20)
KINDS = {
    "plain": [PLAIN],
    "extra_ids": [PLAIN],
    "windows": [PLAIN, WINDOW],
    "recurrent": [PLAIN, kvjax.LayerSpec.recurrent({"s": (2,)})],
}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "plain" else pytest.mark.slow) for kind in KINDS]
)
def test_prefixes_by_events_are_those_that_lookups_find(kind):
    """Over random histories with evictions."""
    spec = kvjax.make_spec(
        KINDS[kind], num_blocks=14, max_seqs=3, max_length=96, block_size=SIZE, dtype="float32",
        extra_ids=kind == "extra_ids",
    )  # fmt: skip
    cache, prefixes, rng = kvjax.Cache.create(spec), CachedPrefixes(spec), np.random.default_rng(1)
    admit, commit = jax.jit(kvjax.Cache.admit), jax.jit(kvjax.Cache.commit)
    release, evict = jax.jit(kvjax.Cache.release), jax.jit(kvjax.Cache.evict, static_argnames="max_removed")
    base, found, histories = rng.integers(0, 3, 80), 0, []
    for step in range(60):
        text = np.zeros((1, 96), np.int32)
        length = int(rng.integers(1, 80))
        text[0, :length] = np.where(rng.random(length) < 0.02, 7, base[:length])
        namespace, row = int(rng.integers(0, 2)), np.array([step % 3], np.int32)
        cache, events = admit(cache, row, text, np.array([length], np.int32), namespace=np.array([namespace], np.int32))
        prefixes.fold(events)
        if bool(events.ok):
            rest = np.maximum(length - np.asarray(events.cached), 0).astype(np.int32)
            tokens = np.roll(text, -int(events.cached[0]), axis=1)
            cache, events = commit(cache, tokens, rest, seqs=row)
            prefixes.fold(events)
            cache, events = release(cache, row)
            prefixes.fold(events)
        if step % 9 == 8:
            cache, events = evict(cache, rng.integers(0, 14, 3).astype(np.int32), max_removed=14)
            prefixes.fold(events)
        histories.append((text[0, :length], namespace))
        for prompt, number in [histories[rng.integers(len(histories))] for _ in range(4)]:
            for cut in (len(prompt), max(len(prompt) // 2, 1)):
                blocks = prefixes.whole_blocks(hashes_of(prompt[:cut], number, spec), cut)
                assert blocks == lookups(cache, prompt[:cut], number)
                found += blocks
    assert found > 100
    again = CachedPrefixes(spec)
    again.attach(cache.state)
    for prompt, number in histories:
        hashes = hashes_of(prompt, number, spec)
        assert again.whole_blocks(hashes, len(prompt)) == prefixes.whole_blocks(hashes, len(prompt))


@pytest.mark.long
def test_prompts_stay_where_they_are_cached():
    made = Replicas(MODEL, make_spec(), DEVICES)
    outputs = made.run_batch(REQUESTS, RunOptions(**BASE))
    first = {n % 2: output.replica for n, output in enumerate(outputs)}
    assert set(first.values()) == {0, 1}
    assert all(output.replica == first[n % 2] for n, output in enumerate(outputs))  # of one document
    for number, cache in enumerate(made.caches):
        assert {leaf.device for leaf in jax.tree.leaves(cache)} == {DEVICES[number]}
    routes = made.route(REQUESTS)
    assert [route.replica for route in routes] == [output.replica for output in outputs]
    again = made.run_batch(REQUESTS, RunOptions(**BASE))
    assert_chained([request.prompt for request in REQUESTS], again)
    for output, route in zip(again, routes, strict=True):
        assert output.cached_tokens >= route.tokens >= 8 and output.replica == route.replica


@pytest.mark.slow
def test_replicas_on_meshes():
    devices, model = jax.devices(), load("tests/data/goldens/llama")[0]
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=40, max_seqs=4, max_length=96, block_size=8, dtype="float32"
    )  # fmt: skip
    prompts = RNG.integers(0, 200, (6, 20)).tolist()
    wanted, _, _ = drive.run_batch(model, kvjax.Cache.create(spec), prompts, max_new_tokens=NEW)
    with mesh_of(1, 2) as one:
        other = jax.make_mesh((1, 2), ("data", "heads"), axis_types=one.axis_types, devices=devices[2:4])
        outputs = Replicas(model, spec, [one, other], heads="heads").run_batch(
            make_requests(prompts, max_new_tokens=NEW)
        )
    assert [output.tokens for output in outputs] == [output.tokens for output in wanted]
    assert {output.replica for output in outputs} == {0, 1}


def test_devices_that_cannot_be_are_named():
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    for devices, heads, message in (
        ([], None, "devices: got none"),
        ([DEVICES[0], DEVICES[0]], None, "devices: got .* twice"),
        ([mesh, DEVICES[1]], "heads", "devices: got .* twice"),
        ([mesh], "rows", "heads: got 'rows', wanted one of the mesh's axes"),
        ([mesh], None, "heads: got None, wanted one of the mesh's axes"),
        ([DEVICES[0]], "heads", "heads: got 'heads' without a mesh"),
        ([3], None, "devices: got 3, wanted devices and meshes"),
    ):
        with pytest.raises(ValueError, match=message):
            Replicas(MODEL, make_spec(), devices, heads=heads)
