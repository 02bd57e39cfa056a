# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of the wires: events by hand, each wire with its reader, and all of them with readers of a cache."""

import contextlib
import io
import random
import threading
import time

import grpc
import pytest

import kvjax
from kvjax.interop import trtllm
from kvjax.interop.agent import Agent, messages
from kvjax.interop.vllm import Publisher, Subscriber
from kvjax.interop.vllm import publisher as publishers
from tests.unit.interop.forest import Lines, named, projected, spec_of, written

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
    """Whether a subscriber comes to have an index, and to be complete."""
    if sub.wait(lambda subscriber: subscriber.complete and subscriber.index == wanted, timeout):
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
    """Events which store all cached blocks."""
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

    It is an error to add or remove an id twice.

    Attributes:
      found: {(group, cache id): level}.
      updates: the number of updates.
      fill: the last fill levels.
      parents: {cache id: cache id of the prefix before}.
      complete: whether the snapshot has ended.
      error: the error which ended its stream.
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
        assert self.wait(lambda reader: reader.found == wanted), set(self.found.items()) ^ set(wanted.items())
        return not self.wrong

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._updates.cancel()
        self._thread.join()
        self._channel.close()


# Each wire with its reader.


class Zmq:
    """vLLM's wire."""

    make, read, threads = staticmethod(publisher), staticmethod(subscriber), {"kvjax-publisher", "kvjax-replay"}

    @staticmethod
    def agrees(reader, mirror, spec=PLAIN):
        """Whether a reader comes to have the contents of a cache, and to be complete."""
        return agrees(reader, projected(mirror, spec, kvjax.Namespaces()))

    @staticmethod
    def taken(source):
        """The option with another wire's address, and the complaint."""
        return {"bind": source.endpoint}, f"bind: {source.endpoint}: Address already in use"


class Grpc:
    """The wire of MAX's agent."""

    make, threads = staticmethod(agent), {"kvjax-agent"}

    @staticmethod
    def read(source):
        return Reader(source.address)

    @staticmethod
    def agrees(reader, mirror, spec=PLAIN):
        return reader.wait(lambda follower: follower.complete) and reader.agrees(
            named(mirror, spec, kvjax.Namespaces())
        )

    @staticmethod
    def taken(source):
        return {"port": source.port}, f"port: got {source.address}, wanted a free port of this machine"


class File:
    """TensorRT-LLM's lines in a file, with the methods of a publisher. Impossible events are its caller's error."""

    def __init__(self, spec=PLAIN, **options):
        self.file = io.StringIO()
        self.writer = trtllm.Writer(spec, self.file, **options)
        self.publish, self.attach = self.writer.write, self.writer.attach

    make = classmethod(lambda cls, *args, **options: contextlib.nullcontext(cls(*args, **options)))
    read = staticmethod(contextlib.nullcontext)

    @staticmethod
    def agrees(reader, mirror, spec=PLAIN):
        reread = trtllm.Mirror()
        reread.follow(reader.file.getvalue().splitlines())
        assert reread.counts["events"] == sum(reread.counts.values())
        return reread.complete and reread.index == written(mirror, spec, kvjax.Namespaces())


class Wires:
    """All wires of a cache with readers: early readers, of which one loses messages, and readers added by `join`.

    Attributes:
      listeners: the listeners of the wires.
    """

    def __init__(self, stack, spec, names, *, key=b"", queue_bytes=64 << 20, extra_name=None, **options):
        self.stack, self.spec, self.names, self.key = stack, spec, names, key
        self.extra = {} if extra_name is None else {"extra_name": extra_name}
        given = {"names": names, "key": key, "queue_bytes": queue_bytes}
        self.source = stack.enter_context(publisher(spec, **given, **self.extra, **options))
        self.agent = stack.enter_context(agent(spec, **given))
        self.lines = Lines(spec, names, key=key)
        self.listeners = [self.source.publish, self.agent.publish, self.lines.follow]
        self.subs, self.readers = [], []
        self.join()
        self.join(asks=False)
        self.lossy = Lossy(self.subs[1], 1)

    def join(self, *, asks=True):
        """Adds a subscriber, and a reader which asks for all groups, or for none and so gets the first."""
        self.subs.append(self.stack.enter_context(subscriber(self.source, replay_timeout=1.0)))
        groups = range(int(self.spec.bare), len(self.spec.groups)) if asks else None
        self.readers.append((self.stack.enter_context(Reader(self.agent.address, groups or ())), groups))

    def publish(self, events):
        for listen in self.listeners:
            listen(events)

    def attach(self, state):
        self.source.attach(state)
        self.agent.attach(state)
        self.lines.mirror.follow(self.lines.writer.attach(state))

    def agree(self, mirror):
        """Asserts that every reader comes to have the contents of a cache, as far as its wire carries them."""
        wanted = projected(mirror, self.spec, self.names, key=self.key, **self.extra)
        assert all(agrees(sub, wanted) for sub in self.subs) and self.lines.agrees(mirror)
        for reader, groups in self.readers:
            assert reader.agrees(named(mirror, self.spec, self.names, groups=groups, key=self.key))


@contextlib.contextmanager
def all_wires(spec, names, **options):
    with contextlib.ExitStack() as stack:
        yield Wires(stack, spec, names, **options)
