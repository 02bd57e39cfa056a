# SPDX-License-Identifier: Apache-2.0
"""New weights of replicas while they serve, without Ray: the `user_config` of a deployment, and the front's mirrors."""

import re
import shutil

import pytest

from models import recall
from models.cluster_weights import Updates, Wanted, read_config
from models.recall import CHECKPOINT
from tests.models.cluster_kit import answer_of, other_weights
from tests.models.front_kit import asked, documents_of, fronted, hit_rate, num_found, post
from tests.models.serve_kit import ON, PEOPLE, prompt_of


@pytest.fixture(scope="module")
def front():
    """(a front's application, its replicas, their `Updates`)"""
    with fronted(CHECKPOINT) as (app, replicas):
        yield app, replicas, {name: Updates(server, str(CHECKPOINT)) for name, server in replicas.servers.items()}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A checkpoint with other weights, whose K/V and answers differ."""
    return other_weights(tmp_path_factory.mktemp("other") / "recall")


WRONG = {
    "weights": ("a text", "user_config: got 'a text', wanted weights and in_flight"),
    "names": ({"weights": "/a", "mode": 1, "folder": 2}, "user_config: got folder, mode, wanted weights and in_flight"),
    "none": ({}, "user_config: weights: got None, wanted the absolute path of a checkpoint"),
    "relative": ({"weights": "a"}, "user_config: weights: got 'a', wanted the absolute path of a checkpoint"),
    "mode": (
        {"weights": "/a", "in_flight": "abort"},
        "user_config: in_flight: got 'abort', wanted one of finish, recompute, continue",
    ),
}


@pytest.mark.parametrize(("user_config", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_config_is_refused_with_the_name_that_is_wrong(user_config, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_config(user_config, "/first")


def test_a_config_has_a_folder_and_may_have_a_mode():
    assert read_config(None, "/first") == Wanted("/first", "recompute")
    assert read_config({"weights": "/a/b/", "in_flight": "finish"}, "/first") == Wanted("/a/b", "finish")


@pytest.mark.long
def test_new_weights_answer_and_their_prompts_are_found(front, other):
    """After an update the mirrors look prompts up under the name of the weights. Without the name they find nothing."""
    app, replicas, updates = front
    documents = documents_of(seed=8)
    assert hit_rate(app, replicas, documents, "a") > 0.75
    for name, update in updates.items():
        assert update.update({"weights": str(other)})
        assert not update.update({"weights": f"{other}/", "in_flight": "finish"})  # in use already
        assert update.folder == str(other)
        replicas.router.weights[name] = update.name
    assert [server.engine.version for server in replicas.servers.values()] == [1, 1]
    assert len({update.name for update in updates.values()}) == 1  # so replicas share a store
    text = f"{documents[0].text} {recall.question(next(iter(documents[0].facts)))}"
    assert num_found(replicas, text, "a") == 0  # the K/V of the old weights
    assert hit_rate(app, replicas, documents, "a") > 0.75
    assert num_found(replicas, text, "a") >= 90
    names = replicas.router.weights
    replicas.router.weights = {}
    assert num_found(replicas, text, "a") == 0
    replicas.router.weights = names
    text = prompt_of(PEOPLE[0])
    (response,) = asked(app, post(prompt=text, max_tokens=12, **ON))
    answer = response.json()["choices"][0]["text"].split()
    assert answer == answer_of(other, text) != answer_of(CHECKPOINT, text)


def test_a_folder_that_does_not_load_leaves_the_weights(front, tmp_path):
    _, replicas, updates = front
    engine = replicas.servers["one"].engine
    before = engine.version, updates["one"].name
    broken = tmp_path / "broken"
    shutil.copytree(CHECKPOINT, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    for folder in (tmp_path / "nowhere", broken):
        with pytest.raises(ValueError, match=f"^user_config: weights: {re.escape(str(folder))}: ."):
            updates["one"].update({"weights": str(folder)})
    assert (engine.version, updates["one"].name) == before


def test_weights_that_come_back_have_a_new_name(front, other):
    """Their arrays are other ones, which an engine refuses under the same name."""
    update, names = front[2]["two"], []
    update.update(None)  # the first weights, which may be in use already
    for folder in (other, CHECKPOINT) * 2:
        assert update.update({"weights": str(folder), "in_flight": "continue"})
        names.append(update.name)
    assert len(set(names)) == 4
    kind, number, *count = names[0].split()
    again = int(count[0]) + 1 if count else 2
    assert names[2] == f"{kind} {number} {again}"
