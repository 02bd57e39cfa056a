# SPDX-License-Identifier: Apache-2.0
"""Sleeps and updates at random turns change no bit of canonical answers, for all kinds of models and caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.serving import Request, Sampling, Scheduler
from tests.unit.serving.canonical_kit import CHUNK, KINDS, ROWS, each_kind, make_cache, make_prompts, model_of
from tests.unit.serving.turned import Turned

pytestmark = pytest.mark.long
NEW = 14


def other_of(kind):
    """The model with other weights."""
    return jax.tree.map(
        lambda x: x * np.asarray(1.05, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, model_of(kind)
    )


def disturbed(turned, requests, models, random, has_host):
    """The outputs of requests, and the model of each version, with changes at random turns."""
    by_version = [models[0]]
    handles = [turned.engine.submit(request) for request in requests]
    num_sleeps = 0
    while not all(handle.done for handle in handles):
        turned.turn(int(random.integers(1, 4)))
        if random.random() < 0.12:
            keep = "host" if has_host and random.random() < 0.5 else "none"
            turned.change("sleep", keep=keep).result(0)
            turned.turn()
            if random.random() < 0.3:
                by_version.append(models[len(by_version) % 2])
                turned.update(by_version[-1], "recompute", weights=f"asleep {len(by_version)}").result(0)
            turned.change("wake").result(0)
            num_sleeps += 1
        elif random.random() < 0.1:
            by_version.append(models[len(by_version) % 2])
            forget = bool(random.random() < 0.5)
            turned.update(by_version[-1], "recompute", weights=f"awake {len(by_version)}", forget=forget).result(0)
    assert num_sleeps and len(by_version) > 1
    return [handle.result(0) for handle in handles], by_version


@each_kind
def test_answers_are_those_of_fresh_requests_of_each_version(kind, monkeypatch):
    """The tokens of a version are, bit for bit, those of a fresh request with all earlier tokens as its prompt."""
    random = np.random.default_rng(3)
    models = [model_of(kind), other_of(kind)]
    scheduler = Scheduler(chunk=CHUNK, canonical=True)
    options = {"scheduler": scheduler, "steps": 4, "top_logprobs": 2, "reuse": "any"}
    turned = Turned(monkeypatch, models[0], make_cache(kind), **options)
    prompts = make_prompts(kind, random)[: ROWS + 2]
    sampling = Sampling(temperature=1.0)
    requests = [
        Request(prompt, max_new_tokens=NEW, seed=seed, sampling=sampling) for seed, prompt in enumerate(prompts)
    ]
    outputs, by_version = disturbed(turned, requests, models, random, "num_host_blocks" in KINDS[kind][1])
    for version, model in enumerate(by_version):
        turned.update(model, "recompute", weights=f"fresh {version}").result(0)
        parts, handles = [], []
        for seed, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            if version not in output.versions:
                continue
            first = output.versions.index(version)
            end = first + output.versions.count(version)
            assert output.versions[first:end] == [version] * (end - first)
            text = [*prompt, *output.tokens[:first]]
            fresh = Request(text, max_new_tokens=NEW - first, seed=seed, sampling=sampling)
            handles.append(turned.engine.submit(fresh))
            parts.append((output, first, end))
        for (output, first, end), fresh in zip(parts, turned.finish(handles), strict=True):
            assert output.tokens[first:end] == fresh.tokens[: end - first]
            assert output.logprobs[first:end] == fresh.logprobs[: end - first]
            assert output.top_logprobs[first:end] == fresh.top_logprobs[: end - first]
