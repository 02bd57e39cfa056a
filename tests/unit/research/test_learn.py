# SPDX-License-Identifier: Apache-2.0
"""A learned policy: its counts and hit densities. It is the same each time, and can beat LRU."""

import contextlib
import os
import pickle
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.research import Learned, compare_learned, learn_policy, lru_curve, make_trace, replay
from kvjax.research.learning import learned as module
from kvjax.research.learning.learned import (
    CLASSES,
    NUM_AGES,
    NUM_CLASSES,
    age_limits,
    age_range,
    class_number,
    count,
    counted,
    density,
    releases,
)
from kvjax.testing import check_policy
from tests.oracle import research
from tests.oracle import research_learned as oracle
from tests.unit.research import cases

BLOCK = 4


def sessions_and_one_shots(number=400):
    """Eight sessions in turn with prompts of 3 blocks, and between them prompts of 6 blocks that occur once."""
    prompts, unused = [], iter(range(24, 10**6))
    for turn in range(number // 2):
        prompts += [[turn % 8 * 3 + column for column in range(3)], [next(unused) for _ in range(6)]]
    return make_trace(range(len(prompts)), [BLOCK * len(p) for p in prompts], [0] * len(prompts), prompts, BLOCK)


def hits_of(learned, trace, size, rule):
    return oracle.learned_hits(trace, size, rule, learned.table, learned.lengths.tolist())


def test_ages_are_cut_into_two_ranges_an_octave():
    ages = sorted({max(at + step, 0) for k in range(31) for at in (2**k, 3 * 2**k // 2) for step in (-1, 0, 1)})
    ages = [*ages, 2**31 - 1]
    found = np.asarray(age_range(np.array(ages, np.int64).astype(np.int32)))
    assert found.tolist() == [oracle.age_range(age) for age in ages]
    limits = age_limits()
    assert limits[0] == 0 and limits[-1] == 2**31 and found[-1] == NUM_AGES - 1
    assert all(limits[own] <= age < limits[own + 1] for own, age in zip(found, ages, strict=True))


def test_classes_are_numbered():
    lengths = np.arange(2, 16, 2)
    cases_ = [(hits, length, last) for hits in range(6) for length in range(1, 18) for last in (False, True)]
    hits, length, last = map(np.array, zip(*cases_, strict=True))
    found = class_number(hits, length, last, lengths)
    assert found.tolist() == [oracle.label(*case, lengths) for case in cases_]
    assert set(found.tolist()) == set(range(NUM_CLASSES))
    assert len(set(CLASSES)) == NUM_CLASSES
    assert CLASSES[found[cases_.index((2, 5, True))]] == (2, 2, True)


@given(st.integers(0, 2**32 - 1))
def test_the_hit_density_is_the_best_of_all_horizons(seed):
    rng = np.random.default_rng(seed)
    hazard = rng.random((3, NUM_AGES)) ** rng.choice([0.2, 1, 5, 50], (3, 1))
    found = density(hazard)
    limits = age_limits()
    np.testing.assert_allclose(found, [oracle.density(np.minimum(own, 1 - 1e-6), limits) for own in hazard], rtol=1e-9)


@pytest.mark.parametrize("rule", ["full", "papers"])
def test_what_became_of_all_blocks_is_what_plain_python_counts(rule):
    trace = cases.cut(200)
    all_releases = releases(trace, rule)
    assert (np.diff(all_releases.lengths) >= 0).all()
    for first, last in ((0, 200), (0, 120), (120, 200)):
        found = count(all_releases, first, last)
        used, seen = oracle.counts(trace, rule, all_releases.lengths, first, last)
        np.testing.assert_array_equal(found.used, used)
        np.testing.assert_array_equal(found.seen, seen)
        assert used.sum() > 0


def test_a_counted_hazard_is_a_share_smoothed_by_that_of_all_classes():
    counts = count(releases(cases.cut(200), "full"), 0, 200)
    own, age = np.unravel_index(np.argmax(counts.used), counts.used.shape)
    together = counts.used[:, age].sum() / counts.seen[:, age].sum()
    wanted = (counts.used[own, age] + 7 * together) / (counts.seen[own, age] + 7)
    assert counted(counts, 7.0)[own, age] == pytest.approx(wanted)


@pytest.mark.slow
def test_equal_arguments_learn_equal_policies():
    first, again = (learn_policy(cases.cut(200), rule="papers", seed=1) for _ in range(2))
    other = learn_policy(cases.cut(200), rule="papers", hazard="counted")
    assert first.table.tobytes() == again.table.tobytes() and first.notes == again.notes
    assert first.policy == again.policy != other.policy and hash(first.policy) == hash(again.policy)
    assert 1 <= first.notes["steps"] <= 1000 and first.notes["seed"] == 1
    assert np.all(first.table > 0) and np.all(np.isfinite(first.table))


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([[0], [0]], id="nothing is held out", marks=pytest.mark.slow),
        pytest.param([[0], [1], [2], [2]], id="the first fit sees no use", marks=pytest.mark.slow),
    ],
)
def test_a_trace_may_say_little(prompts):
    number = len(prompts)
    learned = learn_policy(make_trace(range(number), [BLOCK] * number, [0] * number, prompts, BLOCK))
    assert np.all(learned.table > 0)


@pytest.mark.parametrize("hazard", ["counted", pytest.param("mlp", marks=pytest.mark.slow)])
def test_a_learned_policy_keeps_what_comes_back(hazard):
    """LRU finds nothing in the second half: a one-shot prompt is newer than every session."""
    trace, size = sessions_and_one_shots(), 40
    learned = learn_policy(trace[:200], hazard=hazard)
    plain = research.lru(cases.prompts_of(trace), trace.full.tolist(), size, "full")
    hits = hits_of(learned, trace, size, "full")
    assert sum(plain[200:]) == 0 and sum(hits[200:]) > 0.9 * 100 * 2


@pytest.mark.long
def test_what_was_fitted_explains_what_was_held_out_better_than_what_was_counted():
    trace = cases.cut(600)
    all_releases = releases(trace, "papers")
    seen, held_out = count(all_releases, 0, 400), count(all_releases, 400, 600)
    share = np.clip(counted(seen), 1e-9, 1 - 1e-9)
    used, all_seen = held_out
    loss = -np.sum(used * np.log(share) + (all_seen - used) * np.log1p(-share)) / all_seen.sum()
    assert learn_policy(trace, rule="papers").notes["held_out_loss"] < loss


def test_a_learned_policy_is_saved_and_loaded(tmp_path):
    learned = learn_policy(cases.cut(200), hazard="counted")
    learned.save(tmp_path / "learned.npz")
    again = Learned.load(tmp_path / "learned.npz")
    assert again.policy == learned.policy and again.notes == learned.notes
    assert again.table.tobytes() == learned.table.tobytes() and again.lengths.tolist() == learned.lengths.tolist()
    assert pickle.loads(pickle.dumps(learned.policy)) == learned.policy
    np.savez(tmp_path / "other.npz", table=learned.table)
    (tmp_path / "text.npz").write_text("no zip")
    for name in ("other.npz", "text.npz"):
        with pytest.raises(ValueError, match="got no learned policy, wanted a file of Learned"):
            Learned.load(tmp_path / name)
    with np.load(tmp_path / "learned.npz") as file:
        saved = dict(file)
    np.savez(tmp_path / "later.npz", **saved | {"format": "kvjax densities 9"})
    with pytest.raises(ValueError, match="got kvjax densities 9, wanted kvjax densities 1"):
        Learned.load(tmp_path / "later.npz")


ARRAYS = {
    "format": np.array(module._FORMAT), "lengths": np.arange(2, 16, 2, dtype=np.int32),
    "table": np.ones((NUM_CLASSES, NUM_AGES), np.float32), "notes": np.array("{}"),
}  # fmt: skip
HEADER = b"\x93NUMPY\x01\x00v\x00"


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in ARRAYS), {"table": np.ones(3, np.float32)}, {"table": ARRAYS["table"] * np.nan},
        {"table": ARRAYS["table"].astype(">f4")}, {"table": ARRAYS["table"].astype(object)},
        {"lengths": np.arange(7.0)}, {"notes": np.array("{")}, {"notes": np.array("[1]")},
        {"notes": np.array("[" * 100_000)}, {"notes": np.array([1, 2])}, {"format": np.array([module._FORMAT] * 2)},
        {"format": np.array(3)},
    ],
)  # fmt: skip
def test_a_file_with_other_arrays_is_no_learned_policy(tmp_path, change):
    arrays = {name: value for name, value in (ARRAYS | change).items() if value is not None}
    np.savez(tmp_path / "policy", allow_pickle=True, **arrays)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/policy.npz: got .*, wanted "):
        Learned.load(tmp_path / "policy.npz")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_file_is_no_learned_policy(tmp_path, compression):
    """Each cut, bytes that are changed, and members that are none, too large, or say that they are."""
    path = tmp_path / "policy.npz"
    Learned(ARRAYS["lengths"], ARRAYS["table"], {"a": 1}).save(path)
    members = {name: zipfile.ZipFile(path).read(name) for name in zipfile.ZipFile(path).namelist()}

    def write(**changes):
        with zipfile.ZipFile(path, "w", compression) as file:
            for name, data in (members | {f"{name}.npy": data for name, data in changes.items()}).items():
                file.writestr(name, data)
        return path.read_bytes()

    whole, rng = write(), np.random.default_rng(0)
    assert Learned.load(path).notes == {"a": 1}
    huge = HEADER + f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**15},)}}".encode().ljust(117) + b"\n"
    for wrong in (b"", b"text", huge, b"\x93NUMPY\x09\x00", bytes(module._MEMBER_BYTES + 1)):
        write(table=wrong)
        with pytest.raises(ValueError, match="got no learned policy, wanted a file of Learned"):
            Learned.load(path)
    for cut in sorted({0, 1, 30, *rng.integers(len(whole), size=40).tolist()}):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="got no learned policy, wanted a file of Learned"):
            Learned.load(path)
    for at in rng.integers(len(whole), size=200).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ int(rng.integers(1, 256))]) + whole[at + 1 :])
        with contextlib.suppress(ValueError):  # nothing else; the zip file's own notes may be anything
            assert Learned.load(path).table.tobytes() == ARRAYS["table"].tobytes()


def test_a_learned_policy_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(ValueError, match=rf"^{path}: got a folder, a pipe or a device, wanted a regular file"):
            Learned.load(path)
    np.save(tmp_path / "array.npy", ARRAYS["table"])
    with pytest.raises(ValueError, match="got no learned policy, wanted a file of Learned"):
        Learned.load(tmp_path / "array.npy")
    with pytest.raises(FileNotFoundError):
        Learned.load(tmp_path / "nothing.npz")


def test_without_optax_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    module._program.cache_clear()
    with pytest.raises(ImportError, match=r'learn_policy needs optax: pip install "kvjax\[learn\]"'):
        learn_policy(cases.cut(200))
    assert learn_policy(cases.cut(200), hazard="counted").notes["hazard"] == "counted"


def test_what_cannot_be_learned_is_refused():
    trace = cases.cut(200)
    with pytest.raises(ValueError, match="hazard: got 'tree', wanted"):
        learn_policy(trace, hazard="tree")
    with pytest.raises(ValueError, match="rule: got"):
        learn_policy(trace, rule="vllm")
    with pytest.raises(ValueError, match="got 1 requests without a reused block"):
        learn_policy(trace[:1])
    with pytest.raises(ValueError, match=r"table: got float32\[2\], wanted finite"):
        Learned(np.zeros(7, np.int32), np.zeros(2, np.float32), {})
    with pytest.raises(ValueError, match="seeds: got 0"):
        compare_learned(trace, [400], seeds=0)
    with pytest.raises(ValueError, match="trace: got 5 requests, wanted at least 6"):
        compare_learned(trace[:5], [400])


@pytest.mark.slow
def test_caches_evict_what_plain_python_evicts():
    """The verbs run with two policies in one program."""
    trace, size = cases.cut(300), 600
    learned = [learn_policy(trace[:150], rule="kvjax", hazard=hazard) for hazard in ("mlp", "counted")]
    states = jax.tree.map(lambda *x: jnp.stack(x), *(each.state(size) for each in learned))
    found = replay(trace, learned[0].policy, [size] * 2, rule="kvjax", policy_state=states)
    wanted = [hits_of(each, trace, size, "kvjax") for each in learned]
    np.testing.assert_array_equal(found.blocks, wanted)
    assert wanted[0] != wanted[1] and sum(wanted[0]) > 0


@pytest.mark.slow
def test_a_learned_policy_conforms():
    learned = learn_policy(cases.cut(200), hazard="counted")
    with jax.numpy_dtype_promotion("strict"):
        assert check_policy(learned.policy)["removed"] > 50


@pytest.mark.slow
def test_a_comparison_is_what_plain_python_counts_in_each_part():
    trace, sizes = cases.cut(300), [250, 600]
    found = compare_learned(trace, sizes, rule="full", seeds=2, policies={"lru again": kvjax.lru()})
    assert found.parts == ((100, 200), (150, 300), (200, 300)) and found.learned_from == (100, 150, 200)
    lru = lru_curve(trace, sizes, "full").blocks
    for at, (first, last) in enumerate(found.parts):
        total = trace.lengths[first:last].sum()
        own = [learn_policy(trace[: found.learned_from[at]], seed=seed) for seed in range(2)]
        own = np.array([[hits_of(each, trace, size, "full") for size in sizes] for each in own])[..., first:last]
        base = lru[:, first:last].sum(-1)
        np.testing.assert_allclose(found.gains[at], own.sum(-1) / base - 1)
        np.testing.assert_allclose(found.rates["learned"][at], own.sum(-1).mean(0) / total)
        np.testing.assert_allclose(found.rates["lru"][at], base / total)
    np.testing.assert_array_equal(found.rates["lru"], found.rates["lru again"])
    assert (found.low <= found.gain).all() and (found.gain <= found.high).all()
    assert (found.rates["bound"] >= found.rates["learned"]).all()
    assert f"{found.gain[1, 1]:+.1%}" in str(found) and "no clean test" in str(found)
    assert found.as_json()["gain"] == found.gain.tolist()
    again = compare_learned(trace, sizes, rule="full", seeds=1, on=trace)
    assert again.parts == ((0, 300),) and again.learned_from == (300,)
    own = [sum(hits_of(learn_policy(trace), trace, size, "full")) for size in sizes]
    np.testing.assert_allclose(again.gains[0, 0], own / lru.sum(-1) - 1)
