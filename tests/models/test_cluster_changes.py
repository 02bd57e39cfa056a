# SPDX-License-Identifier: Apache-2.0
"""Replicas on Ray while a cluster changes: more and fewer of them, other weights, two nodes, and batches."""

import asyncio
import os
import pathlib
import re
import shutil
import signal
import threading
import time
import warnings

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from models import recall
from models.recall import CHECKPOINT
from tests.drive import ROOT
from tests.models.cluster_kit import KEY, SIZES, Running, free_port, hit_rate, processes, questions, wait_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="needs ray: make test-cluster")
    from ray import serve as ray_serve
    from ray.cluster_utils import Cluster

    from models import cluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PAGE = ROOT / "docs/howto/cluster.md"
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
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

    def run(self, replicas, checkpoint=CHECKPOINT):
        options = {**SIZES, "checkpoint": str(checkpoint), "replicas": replicas}
        ray_serve.run(cluster.application(options), name="kvjax", route_prefix="/")


class Load:
    """Asks questions one after the other on a thread until the end of a `with`, and collects what is no answer."""

    def __init__(self, url):
        self._url, self._stop = url, threading.Event()
        self.num_answered, self.errors = 0, list[str]()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        pairs = questions(2, 20)
        with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
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
    response = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_more_and_fewer_replicas_and_other_weights_cost_no_answer(local_ray, tmp_path):
    served = Served()
    served.run(1)
    (first,) = served.replicas
    with Load(served.url) as load:
        served.run(2)
        wait_for(lambda: len(served.replicas) == 2)
        assert first in served.replicas  # which goes on, with its cache
        served.run(1)
        wait_for(lambda: len(served.replicas) == 1)
    print(f"1 -> 2 -> 1 replicas: {load.num_answered} answers, errors {load.errors[:3]}")
    assert not load.errors and load.num_answered > 20
    served.run(2)
    wait_for(lambda: len(served.replicas) == 2)
    text, _ = questions(1, 1, seed=3)[0]
    assert [cached_tokens(served.url, text) for _ in range(2)] == [0, 242]
    folder = tmp_path / "recall"
    shutil.copytree(CHECKPOINT, folder)
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    save_file({**weights, name: weights[name] * 1.001}, folder / "model.safetensors", metadata={"format": "pt"})
    before = served.replicas
    with Load(served.url) as load:
        served.run(2, folder)
        wait_for(lambda: len(served.replicas) == 2 and not served.replicas & before)
    print(f"other weights: {load.num_answered} answers, errors {load.errors[:3]}")
    assert not load.errors and load.num_answered > 20
    assert [cached_tokens(served.url, text) for _ in range(2)] == [0, 242]
    ray_serve.delete("kvjax")


def test_batches_of_ray_data_keep_their_order_and_survive_an_actor(local_ray):
    (code,) = re.findall(r"^```python3\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names = {"__name__": "page"}
    exec(code, names)
    pairs = questions(12, 20)
    sizes = {"num_blocks": 112, "max_seqs": 4, "max_length": 320, "block_size": 8}
    killed = list[int]()

    def kill():
        wait_for(lambda: len(processes(b"ray::MapWorker")) == 2)
        time.sleep(8)
        killed.extend(processes(b"ray::MapWorker")[:1])
        os.kill(killed[0], signal.SIGKILL)

    texts = [text for text, _ in pairs]
    thread = threading.Thread(target=kill)
    thread.start()
    start = time.monotonic()
    rows = names["answers"](str(CHECKPOINT), texts, actors=2, batch_size=20, **sizes)
    thread.join()
    assert [row["prompt"] for row in rows] == texts
    num_right = sum(row["answer"].split()[0] == place for row, (_, place) in zip(rows, pairs, strict=True))
    num_cached = sum(row["cached"] for row in rows) / sum(len(recall.encode(text)) for text in texts)
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
