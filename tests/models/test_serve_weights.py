# SPDX-License-Identifier: Apache-2.0
"""New weights, sleep and wake by HTTP: with the operator's key, from the operator's folder, and nothing else."""

import contextlib
import os
import shutil

import httpx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import load, serve
from models.recall import CHECKPOINT
from tests.models.serve_kit import GREEDY, KEY, PATIENCE, PEOPLE, Running, idle, prompt_of

pytestmark = pytest.mark.long
OPERATOR = "an operator's secret"
BODY = {**GREEDY, "prompt": prompt_of(PEOPLE[0]), "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with other weights, a broken one, one of another shape, and a link that leads out of it."""
    root = tmp_path_factory.mktemp("root")
    allowed = root / "allowed"
    for name in ("step-1", "broken"):
        shutil.copytree(CHECKPOINT, allowed / name)
    file = next((allowed / "step-1").glob("*.safetensors"))
    tensors = load_file(file)
    save_file({name: np.ascontiguousarray(-x if "embed" in name else x) for name, x in tensors.items()}, file)
    next((allowed / "broken").glob("*.safetensors")).write_bytes(b"broken")
    shutil.copytree(CHECKPOINT, root / "outside")
    os.symlink(root / "outside", allowed / "link")
    return allowed


@pytest.fixture(scope="module")
def server(folders):
    with contextlib.closing(Running(CHECKPOINT, "--weights", str(folders), "--operator-key", OPERATOR)) as server:
        yield server


def operate(server, path, body, key=OPERATOR):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE)


def health(server):
    return httpx.get(f"{server.url}/health", timeout=PATIENCE).json()


def text_of(server):
    response = server.post(BODY)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_only_the_operator_has_these_paths(server):
    for path in ("/v1/weights", "/sleep", "/wake"):
        for key in (KEY, "", "wrong"):
            assert operate(server, path, {}, key).status_code == 401
    assert server.post(BODY, authorization=f"Bearer {OPERATOR}").status_code == 401
    assert health(server) == {"asleep": False, "weights": 0}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"path": "missing"}, 404),
        ({"path": "../outside"}, 404),
        ({"path": "link"}, 404),
        ({"path": "/etc"}, 404),
        ({"path": "."}, 404),
        ({"path": "a\0b"}, 400),
        ({"path": 3}, 400),
        ({}, 400),
        ({"path": "broken"}, 400),
        ({"path": "step-1", "in_flight": "now"}, 400),
        ({"path": "step-1", "forget": 1}, 400),
        ({"path": "step-1", "folder": "x"}, 400),
    ],
)
def test_folders_that_do_not_load_leave_the_old_weights(server, body, status):
    before, version = text_of(server), health(server)["weights"]
    response = operate(server, "/v1/weights", body)
    assert response.status_code == status and response.json()["error"]["message"]
    assert "outside" not in response.text or body["path"] == "../outside"
    assert health(server)["weights"] == version and text_of(server) == before


def test_new_weights_answer_after_the_update(server, folders):
    before = text_of(server)
    version = health(server)["weights"]
    for number, mode in enumerate(("recompute", "finish", "continue"), 1):
        response = operate(server, "/v1/weights", {"path": "step-1", "in_flight": mode})
        assert response.json() == {"weights": version + number}
        assert text_of(server) != before
    model, _ = load(folders / "step-1")
    engine_leaves = jax.tree.leaves(server.engine._thread.model)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(model), engine_leaves, strict=True))
    metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    assert f"kvjax_weights_version {version + 3:.1f}" in metrics and "kvjax_asleep 0.0" in metrics
    idle(server)


def test_a_sleeping_server_keeps_requests_until_it_wakes(server):
    before = text_of(server)
    assert operate(server, "/sleep", {"keep": "disk"}).status_code == 400
    assert operate(server, "/sleep", {"keep": "host"}).status_code == 400  # the server has no host tier
    assert operate(server, "/sleep", {}).json()["asleep"] is True
    assert health(server)["asleep"] is True
    headers = {"authorization": f"Bearer {KEY}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=0.3)
    assert operate(server, "/wake", {}).json()["asleep"] is False
    assert text_of(server) == before
    idle(server)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "."], "--weights: got a folder without a key"),
        (["--weights", "/no/folder", "--operator-key", "x"], "--weights: /no/folder is no folder"),
        (["--operator-key", "é"], "--operator-key: got a key that no header can have"),
    ],
)
def test_options_that_would_open_the_server_are_refused(options, message, capsys, monkeypatch):
    monkeypatch.delenv("KVJAX_OPERATOR_KEY", raising=False)
    with pytest.raises(SystemExit):
        serve.main(["--checkpoint", str(CHECKPOINT), *options])
    assert message in capsys.readouterr().err
