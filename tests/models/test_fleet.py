# SPDX-License-Identifier: Apache-2.0
"""Servers in Ray actors, and what becomes of prompts and mirrors when one of them ends (`make test-fleet`)."""

import concurrent.futures
import os
import re
import signal
import sys
import warnings

import pytest

import kvjax
from models import fleet, load, recall, router
from tests.drive import TIMEOUT, output_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="needs ray: make test-fleet")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
PROMPTS = [prompt for prompt, _ in router.questions(4, 3)]
NAMES = ("1", "2")


@pytest.fixture(scope="module")
def replicas():
    """Two servers in actors, on a cluster of this machine alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        with router.Fleet({name: fleet.Replica(*router.options()) for name in NAMES}) as found:
            yield found
        ray.shutdown()


@pytest.fixture(scope="module")
def alone():
    """The text of each answer by the model alone, which reuses nothing."""
    model, _ = load(recall.CHECKPOINT)
    sizes = {"num_blocks": 40, "max_seqs": 1, "max_length": 320, "block_size": router.BLOCK, "dtype": "float32"}
    spec, answers = kvjax.make_spec(model.layer_specs(), **sizes), list[str]()
    for prompt in PROMPTS:
        (output,), _, _ = kvjax.generate(model, kvjax.Cache.create(spec), [prompt], max_new_tokens=router.NEW)
        answers.append(f" {recall.decode(output.tokens)}")
    return answers


def texts(replies):
    return [reply.answer.text for reply in replies]


def processes_of(replica):
    """The ids of an actor's process and of its server's."""
    call = replica.actor.__ray_call__.options(max_task_retries=-1)
    return ray.get(call.remote(lambda server: (os.getpid(), server._process and server._process.pid)), timeout=TIMEOUT)


def test_the_command_reuses_more_by_the_router_than_in_turn():
    """Encrypted, at all addresses of this machine."""
    options = ("--quick", "--bind", "0.0.0.0", "--curve")
    out = output_of(sys.executable, "-m", "models.fleet", *options, RAY_USAGE_STATS_ENABLED="0")
    counts = [re.findall(rf"{name} +([\d,]+) +([\d,]+)", out)[0] for name in ("round robin", "router")]
    (_, first), (prompted, second) = [[int(count.replace(",", "")) for count in line] for line in counts]
    assert first < second < prompted
    assert "Each cache had what the router's mirror of it said: True" in out


def test_answers_are_those_of_the_model_alone(replicas, alone):
    """Reuse and the way that prompts take change no token."""
    for number in range(2):
        replies = replicas.answer(PROMPTS, lambda prompt, down: replicas.router.route(prompt, without=down))
        assert texts(replies) == alone
        assert number or all(reply.is_mirrored for reply in replies)  # an answer that is cached says less
    assert {reply.server for reply in replies} == set(NAMES)
    assert sum(reply.answer.num_cached for reply in replies) > sum(map(len, PROMPTS)) // 2
    assert all(len(mirror) for mirror in replicas.router.mirrors.values())


@pytest.mark.parametrize("ends", ["ray", "actor", "server"])
def test_prompts_of_a_replica_that_ends_go_to_others_and_it_comes_back_empty(replicas, alone, ends):
    victim, before = replicas.servers["1"], processes_of(replicas.servers["1"])
    kill = {
        "ray": lambda: ray.kill(victim.actor, no_restart=False),
        "actor": lambda: os.kill(before[0], signal.SIGKILL),
        "server": lambda: os.kill(before[1], signal.SIGKILL),
    }[ends]
    mirror, chosen = replicas.router.mirrors["1"], list[str]()

    def choose(prompt, down):
        chosen.append("2" if chosen else "1")
        if len(chosen) == 1:
            kill()
        return chosen[-1]

    replies = replicas.answer(PROMPTS, choose, at_once=1)
    assert texts(replies) == alone and len(chosen) == len(PROMPTS) + 1
    concurrent.futures.wait(replicas._starts.values(), TIMEOUT)
    assert not replicas.down
    after = processes_of(victim)
    assert after[1] != before[1] and (after[0] == before[0]) == (ends == "server")
    assert replicas.router.mirrors["1"] is not mirror and not len(replicas.router.mirrors["1"])
    replies = replicas.answer(PROMPTS, lambda *_: "1", at_once=1)
    assert texts(replies) == alone and all(reply.is_mirrored for reply in replies)
    assert replies[0].answer.num_cached == 0
