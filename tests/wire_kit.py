# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of the wires: events by hand, publishers with subscribers, and agents with readers."""

import random
import threading
import time

import grpc
import pytest

from kvjax.interop.agent import Agent, messages
from kvjax.interop.vllm import Publisher, Subscriber
from kvjax.interop.vllm import publisher as publishers
from tests.unit.interop.forest import spec_of

PLAIN = spec_of("plain")
ANY = "tcp://127.0.0.1:*"
LONG = 20.0  # seconds, on a busy machine
PACKAGE = "max.serve.kvcache_agent.v1"
METHOD = f"/{PACKAGE}.KVCacheAgentService/SubscribeToUpdates"
ADDED, REMOVED, GPU, CPU = 1, 2, 1, 2


def stored(block, generation, parent, tokens, group=0, **more):
    above = {"parent": None, "namespace": parent} if isinstance(parent, int) else {"parent": parent}
    fields = {"kind": "stored", "group": group, "block": block, "generation": generation, "level": 0, "priority": 35}
    return {**fields, **above, "tokens": tokens, **more}


def removed(block, generation, group=0):
    return {"kind": "removed", "group": group, "block": block, "generation": generation}


def updated(block, generation, level, priority=35):
    return {**removed(block, generation), "kind": "updated", "level": level, "priority": priority}


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Peers need not wait for a second between replays."""
    monkeypatch.setattr(publishers, "INTERVAL", 0.01)


def publisher(spec=PLAIN, **options):
    return Publisher(spec, **{"bind": ANY, "replay": ANY, "heartbeat": 0.1, **options})


def subscriber(source, **options):
    return Subscriber(source.endpoint, source.replay_endpoint, **options)


def agrees(sub, wanted, timeout=LONG):
    """Whether a subscriber comes to have an index, and to say that it is complete."""
    if sub.wait(lambda one: one.complete and one.index == wanted, timeout):
        return True
    raise AssertionError((sub.counts, sub.complete, set(sub.index.items()) ^ set(wanted.items())))


def eventually(condition):
    """Whether a condition comes to hold in time."""
    until = time.monotonic() + LONG
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


CHAIN = [stored(0, 1, 0, [1, 2, 3, 4]), stored(1, 1, (0, 1), [5, 6, 7, 8])]


class Lossy:
    """Drops some of the messages to a subscriber."""

    def __init__(self, sub, seed, rate=0.3):
        self.rng, self.rate, self.lost, take = random.Random(seed), rate, 0, sub._follower.receive

        def receive(frames):
            if self.rng.random() < self.rate:
                self.lost += 1
            else:
                take(frames)

        sub._follower.receive = receive


def whole(forest):
    """Events that store all that is cached."""
    nodes = sorted(forest.mirror.nodes.items(), key=lambda item: (len(item[1][1]), item[0]))
    size, extra = forest.spec.block_size, forest.spec.extra_ids
    of_path = {(ns, path): node for node, (ns, path, *_) in nodes if node[0] == 0}
    events = []
    for node, (ns, path, level, priority) in nodes:
        start = (len(path) - 1) // size * size
        items = [*path[start:]]
        text = {"tokens": [i[0] for i in items], "extra_ids": [i[1] for i in items]} if extra else {"tokens": items}
        above = {"parent": of_path[ns, path[:start]][1:]} if start else {"parent": None, "namespace": ns}
        event = {"kind": "stored", "group": node[0], "block": node[1], "generation": node[2]}
        events.append({**event, **above, **text, "level": level, "priority": priority})
    return events


def agent(spec=PLAIN, **options):
    return Agent(spec, **{"port": 0, "heartbeat": 0.1, **options})


class Reader:
    """Mirrors an agent from its own start on, with the message class of a description.

    An id that is added or removed twice is an error.

    Attributes:
      found: {(group, cache id): level}.
      updates: the number of updates that it got.
      fill: the last fill levels.
      parents: {cache id: cache id of the prefix before}.
      complete: whether the snapshot has ended.
      error: the error that ended its stream.
    """

    def __init__(self, address, groups=(), update=messages.KVCacheStateUpdate, credentials=None):
        self.found, self.parents, self.fill, self.updates = {}, {}, (), 0
        self.complete, self.error, self.wrong = False, None, []
        self.ours = update is messages.KVCacheStateUpdate
        self._changed = threading.Condition()
        soon = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
        self._channel = (
            grpc.insecure_channel(address, soon)
            if credentials is None
            else grpc.secure_channel(address, credentials, soon)
        )
        call = self._channel.unary_stream(METHOD, response_deserializer=update.FromString)
        self._updates = call(messages.SubscriptionRequest(groups=groups).SerializeToString(), wait_for_ready=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            for update in self._updates:
                with self._changed:
                    self._take(update)
                    self.updates += 1
                    self._changed.notify_all()
        except grpc.RpcError as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _take(self, update):
        group = update.group if self.ours else None
        keys = [(group, name) for name in update.cache_ids]
        if update.update_type == ADDED:
            self.wrong += [key for key in keys if key in self.found]
            self.found.update(dict.fromkeys(keys, update.memory_tier - GPU))
        else:
            self.wrong += [key for key in keys if self.found.get(key) != update.memory_tier - GPU]
            for key in keys:
                self.found.pop(key, None)
        if self.ours:
            self._check(update, keys)

    def _check(self, update, keys):
        late = update.in_snapshot and (self.complete or update.update_type != ADDED)
        if late or update.sequence != self.updates:
            self.wrong.append(update)
        if update.update_type == ADDED:
            self.parents.update(zip(update.cache_ids, update.parent_ids, strict=True))
        self.complete |= update.snapshot_end
        self.fill = tuple(update.fill) or self.fill

    def wait(self, condition, timeout=LONG):
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), timeout)

    def agrees(self, wanted):
        """Whether it comes to have these ids, each sent once."""
        if not self.ours:
            wanted = {(None, name): level for (_, name), level in wanted.items()}
        assert self.wait(lambda one: one.found == wanted), set(self.found.items()) ^ set(wanted.items())
        return not self.wrong

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._updates.cancel()
        self._thread.join()
        self._channel.close()
