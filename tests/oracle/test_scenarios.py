# SPDX-License-Identifier: Apache-2.0
"""Every scenario file against the library and against the cache in plain Python, and the runner against itself."""

import json

import pytest

from tests.oracle import scenarios

FILES = scenarios.scenario_files([scenarios.DATA])
LARGE = {"trt_manager_beams"}  # for plain Python


def files(long=()):
    """All scenario files; those that take long are marked."""
    return [pytest.param(path, marks=pytest.mark.long if path.stem in long else [], id=path.stem) for path in FILES]


@pytest.mark.parametrize("path", files(LARGE))
def test_scenario_on_the_oracle(path):
    result, why = scenarios.run_file(path, "oracle")
    assert result == "pass", why


@pytest.mark.parametrize("path", files())
def test_scenario_on_the_library(path):
    result, why = scenarios.run_file(path, "library")
    assert result == "pass", why


def test_the_whole_set_is_here():
    assert len(FILES) == 103
    assert {path.stem for path in FILES} >= LARGE


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


@pytest.mark.parametrize("said", LIES)
def test_the_runner_notices(said, tmp_path, capsys):
    file = tmp_path / "made.json"
    file.write_text(json.dumps(_steps(ADMIT | {"expect": LIES[said]})))
    assert scenarios.main(["--oracle", str(file)]) == 1
    out = capsys.readouterr().out
    assert "fail  made: step 0 (admit a)" in out
    assert said in out
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
