# SPDX-License-Identifier: Apache-2.0
"""Every scenario file against the library and against the cache in plain Python, and the runner against itself."""

import collections
import functools
import json

import pytest

from tests.oracle import backends, scenarios

FILES = scenarios.scenario_files([scenarios.DATA])
LARGE, LARGEST = {"trt_batch_beams"}, {"trt_manager_beams"}  # for plain Python
LARGER = {"vllm0_append_blocks_1"}  # in blocks of steps


@functools.cache
def class_of(path):
    """Scenarios of one class share their programs."""
    return backends.spec_of(scenarios.size_of(json.loads(path.read_text(encoding="utf-8"))))


CLASSES = collections.Counter(map(class_of, FILES))
COMMON = dict(CLASSES.most_common(2))
RARE = {path.stem for path in FILES if class_of(path) not in COMMON}
RAREST = {path.stem for path in FILES if CLASSES[class_of(path)] <= 6}


def files(long=(), slow=()):
    """All scenario files, with marks on those that take long."""
    marks = {**dict.fromkeys(long, pytest.mark.long), **dict.fromkeys(slow, pytest.mark.slow)}
    return [pytest.param(path, marks=marks.get(path.stem, []), id=path.stem) for path in FILES]


@pytest.mark.parametrize("path", files(LARGE, LARGEST))
def test_scenario_on_the_oracle(path):
    result, why = scenarios.run_file(path, "oracle")
    assert result == "pass", why


@pytest.mark.parametrize("path", files(RARE, RAREST))
def test_scenario_on_the_library(path):
    result, why = scenarios.run_file(path, "library")
    assert result == "pass", why


GROWING = [path for path in FILES if '"op": "append"' in path.read_text(encoding="utf-8")]
STEPS = {"k=1": 1, "k=4": 4, "k=P": 2**30}


def growing(short=()):
    """(path, k): files that append. By default those of `short` in whole blocks; a night has more, and other k."""
    found = []
    for path in GROWING:
        for name, k in STEPS.items():
            if (path.stem, name) in short:
                marks = []
            elif short or path.stem in LARGEST | LARGER or name != "k=P":
                marks = pytest.mark.slow
            else:
                marks = pytest.mark.long
            found.append(pytest.param(path, k, marks=marks, id=f"{path.stem}, {name}"))
    return found


@pytest.mark.parametrize(("path", "k"), growing())
def test_scenario_in_blocks_of_steps_on_the_oracle(path, k):
    result, why = scenarios.run_file(path, "oracle", k)
    assert result == "pass", why


# Blocks are shared, refused, freed by a window, or evicted while cached.
SHORT = (
    "own_fork_full_pool",
    "own_refused_append_unchanged",
    "own_turns",
    "trt_decode_timed_eviction",
)


@pytest.mark.parametrize(("path", "k"), growing([(name, "k=P") for name in SHORT]))
def test_scenario_in_blocks_of_steps_on_the_library(path, k):
    result, why = scenarios.run_file(path, "library", k)
    assert result == "pass", why


@pytest.mark.parametrize("backend", ["oracle", "library"])
def test_a_block_of_steps_that_stops_early_may_evict_in_vain(backend, tmp_path):
    """No file depends on it: a cached block is evicted for a reservation that is then given back."""

    def story(removed):
        old = [
            {"op": op, "seq": "a"} | ({"tokens": list(range(8))} if op == "admit" else {})
            for op in ("admit", "compute")
        ]
        new = [{"op": "admit", "seq": "b", "tokens": [9, 9, 9]}, {"op": "compute", "seq": "b"}]
        last = {"op": "append", "seq": "b", "tokens": [9]}
        expect = {"events": {"removed": removed, "stored": 1}, "num_used": 1, "num_free": 2, "num_blocks": 1}
        return _steps(*old, {"op": "release", "seq": "a"}, *new, last | {"expect": expect}, num_blocks=3)

    file = tmp_path / "made.json"
    for k, removed in ((None, 0), (1, 0), (4, 1)):
        file.write_text(json.dumps(story(removed)))
        assert scenarios.run_file(file, backend, k) == ("pass", "")


def test_the_set_is_complete():
    assert len(FILES) == 103
    assert {path.stem for path in FILES} >= LARGE | LARGEST | LARGER
    assert sum(COMMON.values()) == len(FILES) - len(RARE) > 60


def _steps(*steps, **config):
    return {"name": "made", "config": {"block_size": 4, "num_blocks": 2, **config}, "steps": list(steps)}


ADMIT = {"op": "admit", "seq": "a", "tokens": [1, 2, 3, 4, 5]}
LIES = {
    "ok: got True": {"ok": False},
    "cached_tokens: got 0": {"cached_tokens": 4},
    "num_blocks: got 2": {"num_blocks": 1},
    "num_used: got 2": {"num_used": 1},
    "num_free: got 0": {"num_free": 2},
    "events stored: got 0": {"events": {"stored": 1}},
    "blocks: got": {"blocks": ["A", "A"]},
    "priorities: got [35, 35]": {"priorities": [35, 36]},
    "number of blocks": {"blocks": ["A"]},
    "null stands": {"blocks": ["A", None]},
    "unknown expectations": {"lenght": 5},
}


@pytest.mark.parametrize("message", LIES)
def test_the_runner_notices(message, tmp_path, capsys):
    file = tmp_path / "made.json"
    file.write_text(json.dumps(_steps(ADMIT | {"expect": LIES[message]})))
    assert scenarios.main(["--oracle", str(file)]) == 1
    out = capsys.readouterr().out
    assert "fail  made: step 0 (admit a)" in out
    assert message in out
    assert out.endswith("0 passed, 1 failed\n")


def test_an_unknown_op_fails(tmp_path):
    file = tmp_path / "made.json"
    file.write_text(json.dumps(_steps({"op": "check"})))
    assert scenarios.run_file(file, "oracle") == ("fail", "step 0 (check): unknown op")


def test_a_name_is_one_block_for_the_whole_file(tmp_path):
    file = tmp_path / "made.json"
    other = {"op": "admit", "seq": "b", "tokens": [7], "expect": {"blocks": ["A"]}}
    file.write_text(json.dumps(_steps(ADMIT | {"expect": {"blocks": ["A", "B"]}}, other, num_blocks=4)))
    assert scenarios.run_file(file, "oracle")[0] == "fail"


def test_a_refusal_that_changes_the_cache_fails(tmp_path, monkeypatch):
    refuse = scenarios.BACKENDS["oracle"].truncate

    def forgetful(self, row, length):
        self.cache.clock += 1
        return refuse(self, row, 99)

    monkeypatch.setattr(scenarios.BACKENDS["oracle"], "truncate", forgetful)
    file = tmp_path / "made.json"
    file.write_text(json.dumps(_steps(ADMIT, {"op": "truncate", "seq": "a", "length": 1, "expect": {"ok": False}})))
    assert "the state changed" in scenarios.run_file(file, "oracle")[1]


@pytest.mark.parametrize("text", ["{", "[]", '{"config": {}}', '{"config": {}, "steps": []}'])
def test_a_broken_file_fails_and_says_so(text, tmp_path):
    file = tmp_path / "broken.json"
    file.write_text(text)
    assert scenarios.run_file(file, "oracle")[0] == "fail"


def test_folders_are_searched_and_empty_ones_are_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        scenarios.main([str(tmp_path)])
    (tmp_path / "made.json").write_text(json.dumps(_steps(ADMIT)))
    assert scenarios.main(["--oracle", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("1 passed, 0 failed\n")
