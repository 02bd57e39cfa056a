# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of replicas on Ray: the server's command, its replicas' processes, a client, and questions."""

import asyncio
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import openai
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.serving import make_requests
from models import load, recall
from models.recall import CHECKPOINT
from tests.drive import ROOT

KEY = "a secret"
PATIENCE = 240  # seconds for a start on a busy machine
SIZES = {"rows": 4, "max-length": 320, "blocks": 112, "block-size": 8, "name": "recall", "api-key": KEY}
ON = {"ignore_eos": True}  # goes on after the model's stop token
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # a thread for each engine
_TITLE = b"ray::ServeReplica:kvjax:replica"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Running:
    """The server's command, once it serves. The end of a `with` ends it by SIGTERM. With None it has no replicas."""

    def __init__(self, *options, replicas=2, devices=1):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        sizes = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "models.serve", "--checkpoint", str(CHECKPOINT), *sizes]
        command += [*(["--replicas", str(replicas)] if replicas else []), "--port", str(self.port), *options]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
        env |= {"XLA_FLAGS": XLA_FLAGS, "JAX_NUM_CPU_DEVICES": str(devices)}
        self.process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines = list[str]()
        self._serves = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith("serving at "):
                self._serves.set()
        self._serves.set()

    def __enter__(self):
        if not self._serves.wait(PATIENCE) or f"serving at {self.url}/v1" not in self.lines:
            self.__exit__()
            raise AssertionError("\n".join(self.lines[-20:]))
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self._reader.join()
            self.process.stderr.close()

    def pages(self, path="/metrics"):
        return httpx.get(f"{self.url}{path}", headers={"authorization": f"Bearer {KEY}"}, timeout=30).text

    def metric(self, name):
        """{replica: the sum of a metric's samples}."""
        found = dict[str, float]()
        for line in self.pages().splitlines():
            if line.startswith(f"{name}{{"):
                replica = line.split('replica="')[1].split('"')[0]
                found[replica] = found.get(replica, 0.0) + float(line.split()[-1])
        return found

    @property
    def replicas(self):
        """The names of the replicas that answer."""
        return set(self.metric("kvjax_queried_tokens_total"))

    @contextlib.asynccontextmanager
    async def client(self, **options):
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, **options) as client:
            yield client


def processes(title=_TITLE):
    """The ids of the processes on this machine whose command line begins with a title, by default the replicas'."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(title):
                found.append(int(path.parent.name))
    return sorted(found)


def questions(num_documents, num_questions, seed=7):
    """(text, answer) of questions about documents, in any order."""
    rng = np.random.default_rng(seed)
    pairs = []
    for document in [recall.make_document(rng, 48) for _ in range(num_documents)]:
        people = list(document.facts)[:num_questions]
        pairs += [(f"{document.text} {recall.question(person)}", document.facts[person]) for person in people]
    return [pairs[index] for index in rng.permutation(len(pairs))]


async def hit_rate(client, pairs, at_once):
    """The cached share of the tokens of questions, and how many answers are right."""
    gate = asyncio.Semaphore(at_once)

    async def ask(text, place):
        async with gate:
            response = await client.completions.create(model="recall", prompt=text, max_tokens=1, temperature=0)
        usage = response.usage
        is_right = response.choices[0].text.strip() == place
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens, is_right

    found = np.array(await asyncio.gather(*[ask(*pair) for pair in pairs]))
    num_cached, num_tokens, num_right = found.sum(0).tolist()
    return num_cached / num_tokens, num_right


def other_weights(folder):
    """Makes a checkpoint in a new folder whose weights, K/V and answers differ from the bundled one's."""
    shutil.copytree(CHECKPOINT, folder)
    weights = load_file(folder / "model.safetensors")
    changed = "model.layers.0.self_attn.v_proj.weight"
    save_file({**weights, changed: -weights[changed]}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answer_of(folder, text, num_tokens=12):
    """The next words of a checkpoint's model alone."""
    model, tokenizer = load(folder)
    sizes = {"num_blocks": 48, "max_seqs": 1, "max_length": 320, "block_size": 8}
    spec = kvjax.make_spec(model.layer_specs(), dtype="float32", **sizes)
    requests = make_requests([recall.encode(text)], max_new_tokens=num_tokens)
    (output,), _, _ = kvjax.run_batch(model, kvjax.Cache.create(spec), requests)
    return tokenizer.decode(output.tokens).split()


def wait_for(condition, seconds=60.0):
    """Waits until a condition holds. Returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.1)
    return time.monotonic() - start
