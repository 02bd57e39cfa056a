# SPDX-License-Identifier: Apache-2.0
"""Replicas in Ray actors, and what becomes of prompts and mirrors when one of them ends (`make test-fleet`)."""

import os
import re
import signal
import socket
import sys
import threading
import time
import warnings

import pytest

import kvjax
from models import fleet, router
from tests.drive import TIMEOUT, output_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="needs ray: make test-fleet")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
PROMPTS = [prompt for prompt, _ in router.questions(4, 3)]
NAMES = ("1", "2")


@pytest.fixture(scope="module")
def cluster():
    """A cluster of this machine alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def replicas(cluster):
    found = fleet.Fleet(NAMES)
    yield found
    found.close()


@pytest.fixture(scope="module")
def alone():
    """The tokens of each prompt by the model alone, which reuses nothing."""
    model, spec = router.bundled()
    answers = {}
    for prompt in PROMPTS:
        (output,), _, _ = kvjax.generate(model, kvjax.Cache.create(spec), [prompt], max_new_tokens=2)
        answers[tuple(prompt)] = output.tokens
    return answers


def assert_right(answers, alone, prompts=PROMPTS):
    assert [answer.tokens for _, answer in answers] == [alone[tuple(prompt)] for prompt in prompts]


def process_of(actor):
    """The id of an actor's process."""
    return ray.get(actor.__ray_call__.options(max_task_retries=-1).remote(lambda _: os.getpid()), timeout=TIMEOUT)


def end(actor):
    """Kills the process of an actor, and waits for the next one, which does not publish yet."""
    before = process_of(actor)
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT
    while process_of(actor) == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ray.get(actor.call.options(max_task_retries=-1).remote("index"), timeout=TIMEOUT) is None


def test_the_command_reuses_more_by_the_router_than_in_turn():
    """Encrypted, at all addresses of this machine."""
    options = ("--quick", "--bind", "0.0.0.0", "--curve")
    out = output_of(sys.executable, "-m", "models.fleet", *options, RAY_USAGE_STATS_ENABLED="0")
    first, second = (re.findall(rf"{name}.*", out)[0].split("│") for name in ("round robin", "router "))
    prompted, reused = (int(second[column].replace(",", "")) for column in (1, 2))
    assert int(first[2].replace(",", "")) < reused < prompted
    assert "The router's mirrors equal the caches: True" in out


def test_answers_are_those_of_the_model_alone(replicas, alone):
    """Reuse and the way that prompts take change no token."""
    by_router = lambda prompt, down: replicas.router.route(prompt, without=down)  # noqa: E731
    for _ in range(2):
        answers = replicas.answer(PROMPTS, by_router)
        assert_right(answers, alone)
        assert all(map(replicas.is_mirrored, NAMES))
    assert {name for name, _ in answers} == set(NAMES)
    assert sum(answer.cached for _, answer in answers) > sum(map(len, PROMPTS)) // 2
    assert all(len(mirror) for mirror in replicas.router.mirrors.values())


@pytest.mark.parametrize("restart", ["ray", "kill"])
def test_prompts_of_an_actor_that_ends_go_to_others_and_are_answered_once(replicas, alone, restart):
    """Two prompts are in flight when it ends. Its mirror is cleared by the next process, and follows that."""
    replicas.answer(PROMPTS[:4], fleet.in_turn(NAMES))
    victim, choices, mirror = replicas.actors["1"], [], replicas.router.mirrors["1"]
    assert len(mirror) > 0
    before = process_of(victim)
    kill = {"ray": lambda: ray.kill(victim, no_restart=False), "kill": lambda: os.kill(before, signal.SIGKILL)}[restart]
    victim.__ray_call__.remote(lambda _: time.sleep(TIMEOUT))  # so that the prompts that follow wait
    timer = threading.Timer(1.0, kill)
    timer.start()

    def choose(prompt, down):
        name = "1" if len(choices) < 2 else "2"
        assert name not in down
        choices.append((tuple(prompt), name))
        return name

    answers = replicas.answer(PROMPTS, choose)
    timer.join()
    assert_right(answers, alone)
    assert {name for name, _ in answers} == {"2"}
    assert sorted(choices) == sorted([(tuple(p), "2") for p in PROMPTS] + [(tuple(p), "1") for p in PROMPTS[:2]])
    assert replicas.call("1", "index") == set() and process_of(victim) != before and not replicas.down
    assert mirror is replicas.router.mirrors["1"] and mirror.complete and len(mirror) == 0
    assert_right(replicas.answer(PROMPTS, lambda *_: "1"), alone)
    assert replicas.is_mirrored("1") and len(mirror) > 0


def test_a_process_that_ray_has_started_meanwhile_gets_no_prompt_before_it_publishes(replicas, alone):
    replicas.answer(PROMPTS[:2], lambda *_: "1")
    end(replicas.actors["1"])
    choices = []

    def choose(prompt, down):
        choices.append("2" if "1" in down else "1")
        return choices[-1]

    assert_right(replicas.answer(PROMPTS, choose), alone)
    assert choices[0] == "1" and choices.count("2") > 0 and len(choices) > len(PROMPTS)
    assert all(map(replicas.is_mirrored, NAMES))


def test_a_replica_whose_port_is_taken_gets_another_one_and_a_new_mirror(replicas, alone):
    mirror = replicas.router.mirrors["1"]
    port = int(mirror.endpoint.rsplit(":", 1)[1])
    end(replicas.actors["1"])
    with socket.create_server(("127.0.0.1", port)):
        assert replicas.call("1", "index") == set()
    assert replicas.router.mirrors["1"] is not mirror and replicas.router.mirrors["1"].endpoint != mirror.endpoint
    assert_right(replicas.answer(PROMPTS, lambda *_: "1"), alone)
    assert replicas.is_mirrored("1")


def test_failures_are_named(replicas, monkeypatch):
    """A prompt over which replicas end, and a replica from which nothing comes. Nothing follows: calls are left."""
    monkeypatch.setattr(fleet, "LOSSES", 1)
    end(replicas.actors["1"])
    with pytest.raises(SystemExit, match="fleet failed: 1 replicas ended over prompt 0"):
        replicas.answer(PROMPTS[:1], lambda *_: "1")
    monkeypatch.setattr(fleet, "LAG", 0.0)
    with pytest.raises(
        SystemExit, match=r"fleet failed: replica 3: nothing comes from tcp://127.0.0.1:\d+; see --bind"
    ):
        fleet.Fleet(["3"])
