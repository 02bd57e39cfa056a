# SPDX-License-Identifier: Apache-2.0
"""`store=`: prefixes come from a disk instead of being computed, and every answer is the one without it.

With `canonical=True` the log-probabilities of the whole vocabulary are compared bit by bit, in caches full of NaN.
"""

import shutil
import time

import jax
import numpy as np
import pytest

import kvjax
from kvjax.stores import DiskStore
from models import load
from tests import drive
from tests.mesh import mesh_of
from tests.serving_kit import (
    DIM,
    LENGTH,
    MODEL,
    OPTIONS,
    ROWS,
    SIZE,
    VOCAB,
    assert_chained,
    batched,
    make_cache,
    make_spec,
    state_of,
    together,
)
from tests.unit.serving import canonical_kit as canonical
from tests.unit.serving.canonical_kit import KINDS, make_prompts

TEXT = np.random.default_rng(0).integers(0, 40, 3 * 96).tolist()


def store_in(folder, spec=None, **options):
    options = {"model": "m", "names": kvjax.Namespaces(), "max_bytes": 1 << 30, "read_timeout_ms": 60_000, **options}
    return DiskStore(folder, spec or make_spec(), **options)


def opened(folder, kind):
    return store_in(folder, state_of(canonical.make_cache(kind)).spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_all_kinds_are_those_without_a_store_bit_for_bit(kind, tmp_path):
    """`tests/oracle/` compares all bytes of random histories with a store."""
    rng, restored = np.random.default_rng(1), 0
    prompts = make_prompts(kind, rng)
    cold = [
        canonical.run(kind, canonical.make_cache(kind), [prompt], [number])[0][0]
        for number, prompt in enumerate(prompts)
    ]
    for turn in range(5):
        chosen = rng.permutation(len(prompts))[: rng.integers(1, len(prompts) + 1)].tolist() if turn else [0]
        with opened(tmp_path, kind) as store:
            bits, _, cache = canonical.run(
                kind, canonical.make_cache(kind), [prompts[n] for n in chosen], chosen, store=store
            )
            assert bits == [cold[n] for n in chosen]
            restored += store.counters["read"]
        kvjax.check(state_of(cache), rows=())
    assert restored > 0


# Without `canonical`: reuse ends anywhere, and what is reused is counted.

NEW = 3
DOCUMENT, OTHER = ([token % VOCAB for token in text] for text in (TEXT[: 4 * SIZE], TEXT[96 : 96 + 3 * SIZE + 2]))


def generate(cache, prompts, store, **options):
    return together(cache, prompts, store=store, **{"max_new_tokens": NEW, **options})


def run_batch(prompts, store, **options):
    return batched(make_cache(), prompts, store=store, max_new_tokens=NEW, **options)


def outputs_of(prompts, store=None, cache=None, **options):
    """Pairs (cached, stored) of prompt tokens, after a comparison with the tokens that come without a store."""
    outputs, cache, _ = generate(make_cache() if cache is None else cache, prompts, store, **options)
    assert_chained(prompts, outputs)
    return [(output.cached_tokens, output.stored_tokens) for output in outputs], cache


@pytest.mark.long
def test_a_restart_computes_no_whole_block_that_was_stored(tmp_path):
    prompts = [DOCUMENT, [*DOCUMENT, 1, 2, 3], OTHER]
    with store_in(tmp_path) as store:
        found, cache = outputs_of(prompts, store)
        assert all(stored == 0 for _, stored in found)
        assert outputs_of(prompts, store, cache)[0] == [(15, 0), (18, 0), (13, 0)]
        assert store.counters["read"] == 0, "the cache has it all"
    with store_in(tmp_path, readonly=True) as store:
        found, cache = outputs_of(prompts, store)
        assert found == [(15, 15), (16, 16), (12, 12)]  # of a prompt of whole blocks all tokens but the last
        assert store.counters["read"] == 7, "each block once"
        longer = [[*OTHER, 7], [*DOCUMENT[:5], 9]]
        found, cache = outputs_of(longer, store, cache)
        assert found == [(14, 0), (5, 0)], "the cache has them already"
        kvjax.check(state_of(cache), rows=())
    with store_in(tmp_path, readonly=True) as store:
        (output,), _, _ = generate(make_cache(), [DOCUMENT], None)
        assert outputs_of([[*DOCUMENT, *output.tokens, 3]], store)[0] == [(16, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_of_all_kinds_a_restart_finds_whole_prompts(kind, tmp_path):
    """Of window groups all blocks are read that the next token sees: also where that is a prompt's last one."""
    model, prompts = canonical.model_of(kind), [TEXT[:length] for length in (64, 67, 81, 97)]
    for turn in range(2):
        with opened(tmp_path, kind) as store:
            outputs, cache, _ = drive.run_batch(
                model, canonical.make_cache(kind), prompts, max_new_tokens=NEW, store=store
            )
        found = [output.stored_tokens for output in outputs]
        whole = state_of(cache).spec.partial_reuse
        assert found == ([63 if whole else 48, 64, 80, 96] if turn else [0] * 4)


@pytest.mark.long
def test_generated_blocks_are_stored_too(tmp_path):
    with store_in(tmp_path) as store:
        outputs, _, _ = generate(make_cache(), [DOCUMENT], store, max_new_tokens=2 * SIZE)
    turn = [*DOCUMENT, *outputs[0].tokens[:-1], 5]
    with store_in(tmp_path) as store:
        assert outputs_of([turn], store)[0] == [(5 * SIZE, 5 * SIZE)]


@pytest.mark.long
def test_the_end_of_a_text_leaves_the_store_before_its_beginning(tmp_path):
    with store_in(tmp_path) as store:
        for _ in range(2):
            outputs, _, _ = generate(make_cache(), [DOCUMENT[:7]], store, max_new_tokens=2 * SIZE + 3)
            assert store.flush()
            names = [store.values.name(block, 0) for block in store.blocks([*DOCUMENT[:7], *outputs[0].tokens])]
            assert list(store._names) == names[:0:-1] + names[:1]


@pytest.mark.long
def test_blocks_of_parents_that_the_cache_had_before_are_stored(tmp_path):
    _, cache, _ = generate(make_cache(), [DOCUMENT], None)
    with store_in(tmp_path) as store:
        _, cache, _ = generate(cache, [[*DOCUMENT, *OTHER[:5]]], store)
        assert store.flush()
        assert store.counters["written"] == 1, "the others were computed without the store"
        block = store.blocks(np.array([*DOCUMENT, *OTHER[:SIZE]]))[-1]
        assert store.has(block, 0)
        assert outputs_of([[*DOCUMENT, *OTHER[:5]]], store)[0] == [(0, 0)], "its parents are not in the store"
        _, cache, _ = generate(make_cache(), [DOCUMENT], None)
        assert outputs_of([[*DOCUMENT, *OTHER[:5]]], store, cache)[0] == [(20, 4)]


@pytest.mark.long
def test_tenants_and_loras_never_share_and_find_their_own_after_a_restart(tmp_path):
    names, loras = kvjax.Namespaces(), {3: "french"}
    numbers = [names("a"), names("b"), names("a", 3)]
    with store_in(tmp_path, names=names, loras=loras) as store:
        outputs_of([DOCUMENT], store, namespace=numbers[:1], names=names)
        found, _ = outputs_of([DOCUMENT] * 2, store, namespace=numbers[1:], names=names)
        assert found == [(0, 0), (0, 0)] and store.counters["read"] == 0
    after, loras = kvjax.Namespaces(), {0: "french", 3: "german"}
    numbers = [after("c"), after("b"), after("a", 0), after("a", 3), after("a")]
    with store_in(tmp_path, names=after, loras=loras) as store:
        found, _ = outputs_of([DOCUMENT] * 5, store, namespace=numbers)
        assert found == [(0, 0), (15, 15), (15, 15), (0, 0), (15, 15)]
    with store_in(tmp_path, names=after, loras=loras, model="another") as store:
        assert outputs_of([DOCUMENT], store, namespace=numbers[-1:])[0] == [(0, 0)]


def test_samples_and_equal_prompts_read_once(tmp_path):
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT], store)
    with store_in(tmp_path) as store:
        outputs, cache, _ = run_batch([DOCUMENT] * 2, store, samples=2)
        assert store.counters["read"] == 4
        assert [output.stored_tokens for output in outputs] == [15, 16] * 2
        kvjax.check(state_of(cache), rows=())


def test_prompts_of_high_priority_are_read_first(tmp_path, monkeypatch):
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT, OTHER], store)
        store.flush()
        read, order = store.read, []
        monkeypatch.setattr(store, "read", lambda block, number: (order.append(block), read(block, number))[1])
        run_batch([DOCUMENT, OTHER], store, priority=[0, 1])
        assert order == [*store.blocks(np.array(OTHER)), *store.blocks(np.array(DOCUMENT))]


def slow(store, monkeypatch, seconds):
    """Lets each read take so long."""
    read = store._read
    monkeypatch.setattr(store, "_read", lambda *args: (time.sleep(seconds), read(*args))[1])


def test_the_first_loop_waits_no_longer_than_the_patience(tmp_path, monkeypatch):
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT, OTHER], store)
        outputs_of([DOCUMENT], store)
    with store_in(tmp_path, read_timeout_ms=100) as store:
        slow(store, monkeypatch, 0.5)
        began = time.monotonic()
        assert outputs_of([DOCUMENT, OTHER], store)[0] == [(0, 0), (0, 0)]
        assert time.monotonic() - began < 5
        assert store._in_flight == 0


def test_what_has_come_by_then_is_adopted(tmp_path, monkeypatch):
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT], store)
    with store_in(tmp_path, read_timeout_ms=300) as store:
        fast, read = store.blocks(np.array(DOCUMENT))[:2], store._read
        monkeypatch.setattr(store, "_read", lambda *args: (time.sleep(1 if args[0] not in fast else 0), read(*args))[1])
        assert outputs_of([DOCUMENT], store)[0] == [(8, 8)]


@pytest.mark.slow
def test_what_comes_later_is_adopted_between_loops(tmp_path, monkeypatch):
    """The last prompt waits for a row meanwhile, and finds blocks that nobody needs."""
    prompts = [[n, *OTHER[:5]] for n in range(ROWS)] + [DOCUMENT[:13]]
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT], store)
    with store_in(tmp_path, read_timeout_ms=0) as store:
        slow(store, monkeypatch, 0.05)
        first = True

        def wait(events):
            nonlocal first
            if first:
                time.sleep(0.6)
            first = False

        outputs, _, _ = generate(make_cache(), prompts, store, max_new_tokens=14, listener=wait)
        assert [output.stored_tokens for output in outputs] == [0] * ROWS + [12]


def test_few_bytes_in_flight_are_enough_for_long_prompts(tmp_path):
    prompts = [DOCUMENT, [3, *OTHER], [4, *DOCUMENT]]
    with store_in(tmp_path) as store:
        outputs_of(prompts, store)
    with store_in(tmp_path) as store:
        size = store.values.sizes[0]
    with store_in(tmp_path, max_in_flight=2 * size) as store:
        assert outputs_of(prompts, store)[0] == [(15, 15), (12, 12), (16, 16)]


@pytest.mark.parametrize("when", ["reading", "computing"])
def test_an_interruption_drops_reads_and_leaves_a_whole_cache(when, tmp_path, monkeypatch):
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT, OTHER], store)
    with store_in(tmp_path) as store:

        class Stop(BaseException):
            pass

        def stop(*args):
            raise Stop

        if when == "reading":
            slow(store, monkeypatch, 0.2)
            monkeypatch.setattr("kvjax.serving.interrupt.CtrlC.act", stop)
            options = {}
        else:
            options = {"listener": stop}
        with pytest.raises(kvjax.serving.GenerationInterrupted) as caught:
            generate(make_cache(), [DOCUMENT, OTHER, [1, *OTHER]], store, **options)
        monkeypatch.undo()
        cache = caught.value.cache
        kvjax.check(state_of(cache), rows=())
        assert outputs_of([DOCUMENT, OTHER], store, cache)[0][1][0] >= 12


def test_a_store_that_is_closed_meanwhile_is_as_good_as_none(tmp_path, monkeypatch):
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT], store)
    with store_in(tmp_path) as store:
        read = store.read
        monkeypatch.setattr(store, "read", lambda *args: (read(*args), store._readers.shutdown(cancel_futures=True))[0])
        outputs, _, _ = generate(make_cache(), [DOCUMENT[:5]], store)
        assert outputs[0].finish == "length"


@pytest.mark.slow
def test_a_closed_stream_drops_its_reads(tmp_path):
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT, OTHER], store)
        stream = drive.stream(MODEL, make_cache(), [DOCUMENT, OTHER], **OPTIONS, store=store)
        progress = next(stream)
        stream.close()
        kvjax.check(state_of(progress.cache), rows=())
        assert outputs_of([DOCUMENT], store, progress.cache)[0] == [(15, 0)]


@pytest.mark.slow
def test_what_one_loop_stores_and_evicts_is_not_written(tmp_path):
    prompts = [[n, *DOCUMENT] for n in range(4)]
    with store_in(tmp_path) as store:
        generate(make_cache(6), prompts, store, steps=64)
        assert store.flush() and 0 < store.counters["written"] <= 6


class Broken:
    """A KvStore of which nothing can be read or written."""

    def read(self, name):
        raise OSError("input/output error")

    def write(self, name, value):
        raise OSError("no space left")


def test_a_location_that_fails_costs_nothing_but_the_hits(tmp_path):
    with store_in(tmp_path) as store:
        outputs_of([DOCUMENT], store)
        assert store.flush()
        store._location.kv, whole = Broken(), store._location.kv
        with pytest.warns(RuntimeWarning, match="not read or not written: OSError: input/output error"):
            found, _ = outputs_of([DOCUMENT, OTHER], store)
        assert found == [(0, 0), (0, 0)] and store.counters["failed"] >= 1
        store._location.kv = whole


def test_bad_input_is_refused_before_anything_is_donated(tmp_path):
    names = kvjax.Namespaces()
    other = kvjax.make_spec(
        [kvjax.LayerSpec(1, DIM)], num_blocks=8, max_seqs=ROWS, max_length=LENGTH, block_size=8, dtype="float32"
    )
    cache = make_cache()
    with store_in(tmp_path, names=names) as store, store_in(tmp_path / "8", other) as of_8:
        for change, message in [
            ({"store": "folder"}, r"store: got 'folder', wanted a kvjax.stores.DiskStore or None"),
            ({"store": of_8}, r"cache: got one with block_size=4, wanted that of the store, 8"),
            ({"namespace": 1}, r"prompt 0: names: got no entry for namespace 1, wanted the Namespaces"),
            ({"names": kvjax.Namespaces()}, r"names: got others than the store's"),
        ]:
            with pytest.raises(ValueError, match=message):
                generate(**{"cache": cache, "prompts": [DOCUMENT], "store": store, **change})
    with pytest.raises(ValueError, match="store: got one that is closed"):
        generate(cache, [DOCUMENT], store)
    assert generate(cache, [DOCUMENT], None)[0][0].finish == "length"
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_from_a_mesh_to_one_device_and_back(shape, tmp_path):
    """The first axis, if longer than one, divides blocks by token."""
    model, prompt = load("tests/data/goldens/llama_heads")[0], TEXT[:40]
    spec = kvjax.make_spec(model.layer_specs(), num_blocks=30, max_seqs=2, max_length=64, block_size=8, dtype="float32")
    wanted = kvjax.generate(model, kvjax.Cache.create(spec), [prompt], max_new_tokens=9)[0][0].tokens
    for turn, divided in enumerate([True, False, True]):
        axes = {"heads": "heads"} | ({"context": "context"} if shape[0] > 1 else {})
        with (
            mesh_of(*shape, names=("context", "heads")) as mesh, store_in(tmp_path, spec, max_bytes=1 << 30) as store,
        ):  # fmt: skip
            where = {"mesh": mesh, **axes} if divided else {}
            loaded = load("tests/data/goldens/llama_heads", **where)[0]
            (output,), _, _ = kvjax.generate(
                loaded, kvjax.Cache.create(spec, **where), [prompt], max_new_tokens=9, store=store
            )
            assert output.tokens == wanted and output.stored_tokens == (39 if turn else 0)
    jax.clear_caches()
