# SPDX-License-Identifier: Apache-2.0
"""Replicas on Ray while a cluster changes: more and fewer of them, other weights, two nodes, and batches."""

import asyncio
import os
import pathlib
import re
import signal
import threading
import time
import types
import warnings

import httpx
import pytest
import yaml

from models import recall
from models.recall import CHECKPOINT
from tests.drive import ROOT
from tests.models.cluster_kit import (
    KEY,
    ON,
    PATIENCE,
    SIZES,
    XLA_FLAGS,
    Running,
    answer_of,
    free_port,
    hit_rate,
    other_weights,
    processes,
    questions,
    wait_for,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="needs ray: make test-cluster")
    from ray import serve as ray_serve
    from ray.cluster_utils import Cluster
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    from models import cluster, commands
    from models.cluster_weights import Wanted, read_config

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
HEADERS = {"authorization": f"Bearer {KEY}"}
PAGE = ROOT / "docs/howto/cluster.md"
VARIABLES = cluster.VARIABLES | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "XLA_FLAGS": XLA_FLAGS,
}


@pytest.fixture(scope="module")
def local_ray():
    """A Ray of this machine for four actors."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray_serve.shutdown()
        ray.shutdown()


class Served(Running):
    """The address of an application that this process runs."""

    def __init__(self):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        ray_serve.start(http_options={"host": "127.0.0.1", "port": self.port}, proxy_location="HeadOnly")

    def run(self, replicas, args=None, **options):
        """Deploys a config as `serve deploy` does, and waits. Returns the last state of the application.

        `args` are further options of the server, and `options` those of the replicas' deployment.
        """
        app = {
            "name": "kvjax",
            "route_prefix": "/",
            "import_path": "models.cluster:application",
            "args": {**SIZES, "checkpoint": str(CHECKPOINT), "replicas": 1, **(args or {})},
            "deployments": [{"name": "replica", "num_replicas": replicas, **options}],
        }
        schema = ServeDeploySchema.model_validate({"applications": [app]})
        _get_global_client().deploy_apps(schema, _blocking=False)
        wait_for(lambda: ray_serve.status().applications["kvjax"].status != "DEPLOYING", 2 * PATIENCE)
        return ray_serve.status().applications["kvjax"]

    @property
    def weights(self):
        """The number of updates of each replica's weights."""
        return [int(count) for count in self.metric("kvjax_weights_version").values()]

    def answer(self, text, salt):
        """The first words of an answer."""
        body = {"model": "recall", "prompt": text, "max_tokens": 5, "temperature": 0, "cache_salt": salt, **ON}
        response = httpx.post(f"{self.url}/v1/completions", json=body, headers=HEADERS, timeout=60)
        return tuple(response.json()["choices"][0]["text"].split())


class Load:
    """Asks questions one after the other on a thread until the end of a `with`, and collects what is no answer."""

    def __init__(self, url):
        self._url, self._stop = url, threading.Event()
        self.num_answered, self.errors = 0, list[str]()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        pairs = questions(2, 20)
        with httpx.Client(headers=HEADERS, timeout=60) as client:
            while not self._stop.is_set():
                text, _ = pairs[self.num_answered % len(pairs)]
                body = {"model": "recall", "prompt": text, "max_tokens": 20}
                response = client.post(f"{self._url}/v1/completions", json=body)
                self.num_answered += 1
                if response.status_code != 200:
                    self.errors.append(response.text)
                time.sleep(0.02)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def cached_tokens(url, text):
    body = {"model": "recall", "prompt": text, "max_tokens": 1}
    response = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60)
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def served(local_ray):
    return Served()


def test_more_and_fewer_replicas_and_other_weights_cost_no_answer(served, tmp_path):
    store = {"store": str(tmp_path / "store")}
    served.run(1, store)
    (first,) = served.replicas
    with Load(served.url) as load:
        served.run(2, store)
        wait_for(lambda: len(served.replicas) == 2)
        assert first in served.replicas  # which goes on, with its cache
        served.run(1, store)
        wait_for(lambda: len(served.replicas) == 1)
    print(f"1 -> 2 -> 1 replicas: {load.num_answered} answers, errors {load.errors[:3]}")
    assert not load.errors and load.num_answered > 20
    served.run(2, store)
    wait_for(lambda: len(served.replicas) == 2)
    text, _ = questions(1, 1, seed=3)[0]
    assert [cached_tokens(served.url, text) for _ in range(2)] == [0, 243]
    folder = other_weights(tmp_path / "recall")
    replace(served, store | {"checkpoint": str(folder)})
    assert [cached_tokens(served.url, text) for _ in range(2)] == [0, 243]
    replace(served, store)  # their caches are empty, and the store has whole blocks of these weights
    assert [cached_tokens(served.url, text) for _ in range(2)] == [240, 243]


def replace(served, args):
    """Replaces both replicas, since they get other options."""
    before = served.replicas
    with Load(served.url) as load:
        served.run(2, args)
        wait_for(lambda: len(served.replicas) == 2 and not served.replicas & before)
    print(f"other options: {load.num_answered} answers, errors {load.errors[:3]}")
    assert not load.errors and load.num_answered > 20


def test_new_weights_in_place_cost_no_answer(served, tmp_path):
    served.run(2)
    wait_for(lambda: len(served.replicas) == 2)
    before = served.replicas
    folder = other_weights(tmp_path / "recall")
    wanted = {"weights": str(folder), "in_flight": "recompute"}
    start = time.monotonic()
    with Load(served.url) as load:
        served.run(2, user_config=wanted)
        wait_for(lambda: served.weights == [1, 1])
    print(f"in place after {time.monotonic() - start:.1f} s: {load.num_answered} answers, errors {load.errors[:3]}")
    assert not load.errors and load.num_answered > 5 and served.replicas == before
    check_hits(served)
    text, _ = questions(1, 1, seed=3)[0]
    answers = {str(folder): answer_of(folder, text, 5), str(CHECKPOINT): answer_of(CHECKPOINT, text, 5)}
    assert answers[str(folder)] != answers[str(CHECKPOINT)]
    assert {served.answer(text, salt) for salt in "abcd"} == {tuple(answers[str(folder)])}
    os.kill(processes()[0], signal.SIGKILL)
    wait_for(lambda: len(served.replicas) == 2 and served.replicas != before)
    assert served.weights == [1, 1]  # the new replica too
    start = time.monotonic()
    with Load(served.url) as load:
        wrong = {"weights": str(tmp_path / "nowhere")}
        failed = served.run(2, user_config=wrong, max_constructor_retry_count=2)
    print(f"a wrong folder: {time.monotonic() - start:.1f} s, {load.num_answered} answers, errors {load.errors[:3]}")
    message = failed.deployments["replica"].message
    assert not load.errors and failed.status == "DEPLOY_FAILED" and "nowhere" in message, message
    assert {served.answer(text, salt) for salt in "efgh"} == {tuple(answers[str(folder)])}
    assert served.run(2).status == "RUNNING"
    wait_for(lambda: len(served.replicas) == 2)
    assert {served.answer(text, salt) for salt in "ijkl"} == {tuple(answers[str(CHECKPOINT)])}
    ray_serve.delete("kvjax")


def check_hits(served):
    """Each of six documents stays in a cache, as soon as the front knows the names of the weights."""

    async def main():
        async with served.client() as client:
            start = time.monotonic()
            for seed in range(100, 140):
                rate, _ = await hit_rate(client, questions(6, 6, seed), 1)
                if rate >= 0.80 or time.monotonic() - start > 30:
                    return rate, time.monotonic() - start

    rate, seconds = asyncio.run(main())
    print(f"the cached share is {rate:.3f} within {seconds:.1f} s after the update")
    assert rate >= 0.80


def test_batches_of_ray_data_keep_their_order_and_survive_an_actor(local_ray):
    from models.ray_batches import map_prompts

    pairs = questions(12, 20)
    sizes = {"num_blocks": 112, "max_seqs": 4, "max_length": 320, "block_size": 8}
    killed = list[int]()

    def kill():
        wait_for(lambda: len(processes(b"ray::MapWorker")) == 2, PATIENCE)
        time.sleep(8)
        killed.extend(processes(b"ray::MapWorker")[:1])
        os.kill(killed[0], signal.SIGKILL)

    texts = [text for text, _ in pairs]
    thread = threading.Thread(target=kill)
    thread.start()
    start = time.monotonic()
    rows = map_prompts(str(CHECKPOINT), texts, max_new_tokens=2, actors=2, batch_size=20, **sizes)
    thread.join()
    assert [row["prompt"] for row in rows] == texts
    num_right = sum(row["answer"].split()[0] == place for row, (_, place) in zip(rows, pairs, strict=True))
    num_cached = sum(row["cached_tokens"] for row in rows) / sum(len(recall.encode(text)) for text in texts)
    print(f"ray.data: {time.monotonic() - start:.1f} s, cached {num_cached:.3f}, right {num_right} of {len(pairs)}")
    assert killed and num_right >= 0.97 * len(pairs) and num_cached > 0.85


def test_two_nodes_serve_and_follow_each_other_by_their_addresses(monkeypatch):
    """After the tests of `local_ray`, whose Ray has to be gone."""
    ray_serve.shutdown()
    ray.shutdown()
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=1)
        with Running("--address", nodes.address) as running:

            async def main():
                async with running.client() as client:
                    return await hit_rate(client, questions(6, 6), 6)

            rate, num_right = asyncio.run(main())
            print(f"two nodes: cached share {rate:.3f}")
            assert rate >= 0.80 and num_right >= 35 and len(running.replicas) == 2
            notes = [line for line in running.lines if "publishing at" in line]
            assert len(notes) == 2 and not any("127.0.0.1" in note for note in notes), notes
            homes = {parent_of(process) for process in processes(b"ray::ServeReplica:kvjax:replica")}
            assert len(homes) == 2  # a raylet for each
    finally:
        nodes.shutdown()


def parent_of(process):
    """The id of a process's parent."""
    text = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"^PPid:\t(\d+)$", text, re.M)[1])


# Parts which need Ray's package, and no running Ray.


def test_an_engine_that_hangs_fails_the_check_of_its_replica(monkeypatch):
    monkeypatch.setattr(cluster, "PATIENCE", 0.1)
    hanging = threading.Event()

    class Engine:
        @property
        def state(self):
            hanging.wait(60)

    replica = types.SimpleNamespace(_server=types.SimpleNamespace(engine=Engine()), _ends=False)

    async def check():
        try:
            await cluster.Replica.check_health(replica)
        finally:
            hanging.set()

    with pytest.raises(TimeoutError):
        asyncio.run(check())
    asyncio.run(cluster.Replica.check_health(replica))


def test_a_replica_saves_to_the_folder_of_its_rank():
    """Ray gives the ranks anew when a replica has ended."""
    replica = object.__new__(cluster.Replica)
    configs = []
    replica._save, replica._args = "/saved", types.SimpleNamespace(save="/saved/1")
    replica._updates = types.SimpleNamespace(update=configs.append)
    asyncio.run(replica.reconfigure({"weights": "/a"}, types.SimpleNamespace(rank=0)))
    assert replica._args.save == "/saved/0" and configs == [{"weights": "/a"}]


def test_the_config_of_the_page_makes_an_application(tmp_path):
    text, in_place = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (config,) = yaml.safe_load(text)["applications"]
    assert config["import_path"] == "models.cluster:application"
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    options = {**config["args"], "checkpoint": str(CHECKPOINT), "api-keys": str(keys)}
    made = call_user_app_builder_with_args_if_necessary(cluster.application, options)
    front = made._bound_deployment
    replicas, args = front.init_args
    assert (front.name, replicas._bound_deployment.name) == ("front", "replica")
    assert args.api_key == ["one", "two"] and args.api_keys is None and args.budget == 60 << 30
    assert replicas._bound_deployment.num_replicas == 4
    assert {one["name"] for one in config["deployments"]} <= {"front", "replica"}
    (deployment,) = yaml.safe_load(in_place)["deployments"]
    assert deployment["name"] == "replica"
    assert read_config(deployment["user_config"], "/models/m") == Wanted("/models/step-7", "recompute")
    for wrong, message in (({"rows": 0}, "--rows: got '0'"), ({"publish": "tcp://*:1"}, "--publish: got one with")):
        with pytest.raises(ValueError, match=message):
            cluster.application({**options, **wrong})


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Traceback\n  raise\nmodels.cluster.StartError: --rows: too many\nThe end", "--rows: too many"),
        ("Traceback\n  raise\nMemoryError: no memory\n", "the replicas do not start: MemoryError: no memory"),
    ],
)
def test_the_reason_of_a_failed_start_is_the_line_of_the_command(message, line, monkeypatch, capsys):
    deployments = {"replica": types.SimpleNamespace(message=message)}
    made = types.SimpleNamespace(applications={"kvjax": types.SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(cluster.ray_serve, "status", lambda: made)
    with pytest.raises(SystemExit), cluster._one_line(commands.Parser("serve", None)):
        raise RuntimeError("Deploying application kvjax failed: Failed to update the deployments ['replica'].")
    assert capsys.readouterr().err == f"python -m models.serve: {line}\n"
