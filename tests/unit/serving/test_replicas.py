# SPDX-License-Identifier: Apache-2.0
"""Replicas: answers are those of one cache, prompts go where they are cached, and a failure is one replica's."""

import collections
import dataclasses
import warnings

import jax
import numpy as np
import pytest

import kvjax
from kvjax.serving import GenerationInterrupted, Replicas, RunOptions, make_requests, replica
from kvjax.serving.routing import CachedPrefixes, choose_replica, hashes_of
from kvjax.stores import DiskStore
from models import load
from tests import drive
from tests.mesh import mesh_of

SIZE, NEW, ROWS = 8, 6, 4
MODEL = load("tests/data/goldens/llama")[0]
OPTIONS = {"max_seqs": ROWS, "max_length": 96, "block_size": SIZE, "dtype": "float32"}
SPEC = kvjax.make_spec(MODEL.layer_specs(), num_blocks=40, **OPTIONS)
DEVICES = jax.devices()[:2]
RNG = np.random.default_rng(0)
DOCUMENTS = RNG.integers(0, 200, (4, 40)).tolist()
PROMPTS = [[*DOCUMENTS[n % 4][: 24 + n % 3 * 8], *RNG.integers(0, 200, 5).tolist()] for n in range(12)]
REQUESTS = make_requests(PROMPTS, max_new_tokens=NEW)


def test_the_rule_takes_what_is_cached_less_the_price_of_load_and_ends_ties_by_load():
    for cached, loads, price, wanted in (
        ([8, 16, 0], [0, 0, 0], 0.0, 1),
        ([8, 8, 8], [3, 1, 2], 0.0, 1),
        ([0, 0], [0, 0], 0.0, 0),
        ([16, 0], [10, 0], 1.0, 0),
        ([16, 0], [17, 0], 1.0, 1),
        ([20, 0], [30, 10], 0.0, 0),
        ([20, 0], [61, 0], 0.0, 0),
        ([20, 0, 0], [61, 0, 0], 0.0, 1),  # more than twice its share
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


@pytest.fixture(scope="module")
def made():
    return Replicas(MODEL, SPEC, DEVICES)


@pytest.fixture(scope="module")
def wanted():
    outputs, _, _ = drive.run_batch(MODEL, kvjax.Cache.create(SPEC), PROMPTS, max_new_tokens=NEW)
    return [output.tokens for output in outputs]


@pytest.mark.slow
def test_answers_are_those_of_one_cache_and_prompts_stay_where_they_are_cached(made, wanted):
    seen = [[], []]
    outputs = made.run_batch(REQUESTS, RunOptions(listener=lambda number, events: seen[number].append(events)))
    assert [output.tokens for output in outputs] == wanted
    first = {n % 4: output.replica for n, output in enumerate(outputs)}
    assert set(first.values()) == {0, 1}
    assert all(output.replica == first[n % 4] for n, output in enumerate(outputs))  # of one document
    for number, cache in enumerate(made.caches):
        kvjax.check(cache.state, rows=())
        assert {leaf.device for leaf in jax.tree.leaves(cache)} == {DEVICES[number]}
        events = [event for one in seen[number] for event in kvjax.to_list(one)]
        assert kvjax.fold(events).index == kvjax.events.index_of(cache.state)
    routes = made.route(REQUESTS)
    assert [route.replica for route in routes] == [output.replica for output in outputs]
    again = made.run_batch(make_requests(PROMPTS, max_new_tokens=NEW, samples=2))
    assert [output.tokens for output in again[::2]] == wanted
    for output, route in zip(again[::2], routes, strict=True):
        assert output.cached_tokens >= route.tokens >= 24 and output.replica == route.replica


@pytest.mark.slow
def test_replicas_that_fail_at_random_cost_no_answer(wanted, monkeypatch):
    """Three replicas. The run ends with an error if all fail at a time, or if a prompt's second replica fails too."""
    made, whole, ends = Replicas(MODEL, SPEC, jax.devices()[:3]), replica.run_batch, set()
    for run in range(10):
        rng = np.random.default_rng(run)
        # By the number of a replica: readings of the clock until it fails, once.
        left = {n: int(rng.integers(1, 4)) for n in range(3) if run == 9 or rng.random() < 0.4}
        failed, times = [], collections.Counter()

        def failing(model, cache, requests, options, left=left, failed=failed, times=times):
            number = jax.devices().index(cache.state.seqs.length.device)
            if (readings := left.pop(number, None)) is not None:
                options = dataclasses.replace(options, clock=lambda counted=[0] * readings: counted.pop())
            try:
                return whole(model, cache, requests, options)
            except GenerationInterrupted:
                failed.append(number)
                times.update(tuple(request.prompt.tolist()) for request in requests)
                raise

        monkeypatch.setattr(replica, "run_batch", failing)
        ended = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outputs = made.run_batch(REQUESTS)
            except GenerationInterrupted as error:
                ended, outputs = error, error.outputs
        assert (ended is not None) == (len(failed) == 3 or max(times.values(), default=0) == 2)
        ends.add("all" if ended else len(failed))
        if ended is None:
            assert [output.tokens for output in outputs] == wanted and len(caught) == bool(failed)
        else:
            assert isinstance(ended.__cause__, GenerationInterrupted)
            assert ended.cache == made.caches and any(output.finish is None for output in outputs)
        for cache in made.caches:
            kvjax.check(cache.state, rows=())
        monkeypatch.setattr(replica, "run_batch", whole)
    assert ends >= {"all", 0, 1, 2}
    assert [output.tokens for output in made.run_batch(REQUESTS)] == wanted


@pytest.mark.slow
def test_replicas_share_a_store(wanted, tmp_path):
    """All write to it, and others begin with what they have written."""
    options = {"model": "llama", "names": kvjax.Namespaces(), "max_bytes": 1 << 30, "patience_ms": 60_000}
    for turn, devices in enumerate((DEVICES, jax.devices()[1:3])):
        made = Replicas(MODEL, SPEC, devices)
        with DiskStore(tmp_path, SPEC, **options) as store:
            outputs = made.run_batch(REQUESTS, RunOptions(store=store))
            assert {output.replica for output in outputs} == {0, 1}
            assert not any(store.counters[name] for name in ("broken", "failed", "dropped"))
        assert [output.tokens for output in outputs] == wanted
        assert (sum(output.stored_tokens for output in outputs) >= 4 * 24) == bool(turn)
        for cache in made.caches:
            kvjax.check(cache.state, rows=())


@pytest.mark.slow
def test_replicas_on_meshes(wanted):
    devices = jax.devices()
    with mesh_of(1, 2) as one:
        other = jax.make_mesh((1, 2), ("data", "heads"), axis_types=one.axis_types, devices=devices[2:4])
        made = Replicas(MODEL, SPEC, [one, other], heads="heads")
        outputs = made.run_batch(REQUESTS)
    assert [output.tokens for output in outputs] == wanted and {output.replica for output in outputs} == {0, 1}


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
            Replicas(MODEL, SPEC, devices, heads=heads)
