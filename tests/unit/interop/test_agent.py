# SPDX-License-Identifier: Apache-2.0
"""The agent over real sockets: MAX's clients, the bytes, how full the tiers are, and bad peers."""

import contextlib
import inspect
import pathlib
import shutil
import subprocess
import threading
import time

import grpc
import grpc_tools
import hypothesis
import hypothesis.strategies as st
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc_tools import protoc

import kvjax
from kvjax.blocks.hashes import first_64_bits
from kvjax.interop import hashing
from kvjax.interop.agent import Agent, messages, service, services
from kvjax.interop.agent.service import MAX_HASHES
from tests.drive import TIMEOUT
from tests.unit.debug import stories
from tests.unit.interop.forest import named, spec_of
from tests.wire_kit import (
    CHAIN,
    GPU,
    LONG,
    METHOD,
    PACKAGE,
    PLAIN,
    Reader,
    agent,
    eventually,
    removed,
    stored,
    updated,
)

# The description that MAX's clients are made from, after max/serve/kvcache_agent/kvcache_agent_service_v1.proto in the
# history of Modular's public repository, of 2025. Its versions agree in all of this. The wheel of MAX 26.7 has no
# agent. The port is that of `KVCacheAgentServerConfig` in kvcache_agent.py of the same folder.
MAX = """
syntax = "proto3";
package max.serve.kvcache_agent.v1;
message SubscriptionRequest {}
enum UpdateType { UPDATE_TYPE_UNSPECIFIED = 0; UPDATE_TYPE_ADDED = 1; UPDATE_TYPE_REMOVED = 2; }
enum MemoryTier {
  MEMORY_TIER_UNSPECIFIED = 0; MEMORY_TIER_GPU = 1; MEMORY_TIER_CPU = 2; MEMORY_TIER_DISK = 3;
  MEMORY_TIER_OBJECT_STORE = 4;
}
message KVCacheStateUpdate { UpdateType update_type = 1; MemoryTier memory_tier = 2; repeated string cache_ids = 3; }
service KVCacheAgentService { rpc SubscribeToUpdates(SubscriptionRequest) returns (stream KVCacheStateUpdate); }
"""


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """MAX's own description."""
    folder = tmp_path_factory.mktemp("max")
    (folder / "max.proto").write_text(MAX)
    include = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    made = folder / "made"
    assert protoc.main(["", f"-I{folder}", f"-I{include}", f"--descriptor_set_out={made}", "max.proto"]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file:
        pool.Add(file)
    return pool


def test_all_that_max_describes_has_the_same_numbers_in_ours(described):
    """Ours has its service, method, fields and values, and more."""
    theirs, ours = (
        descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
        for file in (described.FindFileByName("max.proto"), messages.DESCRIPTOR)
    )
    assert (theirs.package, theirs.syntax) == (ours.package, ours.syntax) == (PACKAGE, "proto3")
    assert list(theirs.service) == list(ours.service) and list(theirs.enum_type) == list(ours.enum_type)
    wanted, got = (
        {message.name: [(f.name, f.number, f.type, f.label, f.type_name) for f in message.field]
         for message in file.message_type} for file in (theirs, ours)
    )  # fmt: skip
    assert [len(fields) for fields in wanted.values()] == [0, 3]
    assert all(set(fields) <= set(got[name]) for name, fields in wanted.items())


def mirror_of(*events):
    return kvjax.fold([event for some in events for event in some])


# The bytes.


def test_updates_by_hand():
    first = hashing.block_hash(hashing.root_hash("m"), [1, 2, 3, 4])
    a, b = (str(first_64_bits(digest)).encode() for digest in (first, hashing.block_hash(first, [5, 6, 7, 8])))

    def text(tag, value):
        return bytes([tag << 3 | 2, len(value)]) + value

    with agent(heartbeat=None, model="m") as source, grpc.insecure_channel(source.address) as channel:
        source.publish([*CHAIN, stored(2, 1, (1, 1), [9])])
        assert source.flush(LONG)
        stream = channel.unary_stream(METHOD)(b"")
        gpu, cpu = b"\x08\x01\x10\x01", b"\x10\x02"
        both = gpu + text(3, a) + text(3, b) + text(5, b"") + text(5, a)
        assert next(stream) == both + b"\x30\x01"  # in_snapshot; number 0 is not written
        fill = text(9, b"\x10\x01\x18\x03\x20\x0a") + text(9, cpu + b"\x20\x06")
        assert next(stream) == gpu + b"\x38\x01" + fill + b"\x20\x01"  # snapshot_end, number 1
        source.publish([updated(1, 1, 1)])
        assert next(stream) == b"\x08\x02\x10\x01" + text(3, b) + b"\x20\x02"
        assert next(stream) == b"\x08\x01" + cpu + text(3, b) + text(5, a) + b"\x20\x03"
        stream.cancel()


# Readers.


def test_maxs_clients_have_what_is_cached(described):
    theirs = message_factory.GetMessageClass(described.FindMessageTypeByName(f"{PACKAGE}.KVCacheStateUpdate"))
    with agent() as source, Reader(source.address, update=theirs) as reader:
        mirror = kvjax.events.Mirror()
        for events in (CHAIN, [updated(1, 1, 1)], [removed(1, 1)]):
            source.publish(events)
            mirror = kvjax.fold(events, mirror)
            assert reader.agrees(named(mirror, PLAIN, kvjax.Namespaces()))


class Hesitant:
    """A lock that delays subscribers' threads, so that events come between their work with and without it."""

    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        if threading.current_thread().name.startswith("kvjax-agent-stream"):
            time.sleep(0.02)
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_who_subscribes_while_events_come_misses_none_and_gets_none_twice():
    with agent(heartbeat=0.01, max_subscribers=64) as source, contextlib.ExitStack() as stack:
        source._lock, readers = Hesitant(source._lock), []
        for number in range(150):
            source.publish([stored(5, number, 0, [number] * 4)])
            time.sleep(0.003)
            source.publish([removed(5, number)])
            if number % 10 == 0:
                readers.append(stack.enter_context(Reader(source.address)))
        source.publish(CHAIN)
        assert all(reader.agrees(named(mirror_of(CHAIN), PLAIN, kvjax.Namespaces())) for reader in readers)


def test_a_large_state_comes_in_pieces():
    spec = kvjax.make_spec(num_blocks=MAX_HASHES + 10, max_seqs=1, max_length=4, block_size=1)
    sizes = []
    with agent(spec) as source, grpc.insecure_channel(source.address) as channel:
        source.publish([stored(block, 1, 0, [block]) for block in range(MAX_HASHES + 10)])
        assert source.flush(LONG)
        for message in channel.unary_stream(METHOD)(b""):
            update = messages.KVCacheStateUpdate.FromString(message)
            sizes.append((len(update.cache_ids), len(message) < 1 << 20))
            if update.snapshot_end:
                break
    assert sizes == [(MAX_HASHES, True), (10, True), (0, True)]
    assert MAX_HASHES * 2 * (2 + len(str(2**64))) < 1 << 20


# Fill levels.


def test_how_full_the_tiers_are_is_sent_again_and_again():
    story = stories.plain()
    state = story.state
    with agent(state.spec, heartbeat=0.05) as source, Reader(source.address) as reader:
        assert reader.wait(lambda one: one.updates > 3)
        [fill] = reader.fill
        assert (fill.memory_tier, fill.cached_blocks, fill.total_blocks) == (GPU, 0, state.spec.groups[0].num_blocks)
        assert not fill.HasField("used_blocks")
        source.attach(state)
        source.set(state)
        wanted, cached = kvjax.debug.stats(state), len(kvjax.events.index_of(state))
        assert reader.wait(lambda one: one.fill[0].cached_blocks == cached > 0 and one.fill[0].HasField("used_blocks"))
        [fill] = reader.fill
        assert (
            fill.used_blocks == wanted.active_blocks + wanted.cached_blocks and fill.total_blocks == wanted.num_blocks
        )
        assert reader.wait(lambda one: one.fill[0].used_age_seconds > fill.used_age_seconds)


def test_without_a_heartbeat_it_is_sent_once():
    with agent(heartbeat=None) as source, Reader(source.address) as reader:
        assert reader.wait(lambda one: one.complete)
        assert not reader.wait(lambda one: one.updates > 1, 0.3) and reader.fill


# Ends.


def test_readers_get_what_was_published_before_it_was_closed():
    source = agent(heartbeat=None)
    with Reader(source.address) as reader:
        assert reader.wait(lambda one: one.complete)
        for event in CHAIN:
            source.publish([event])
        source.close()
        assert reader.wait(lambda one: one.error is not None)
        assert len(reader.found) == 2 and reader.error.code() is grpc.StatusCode.UNAVAILABLE
        assert reader.error.details() == "the agent is closed"


# Peers.


@contextlib.contextmanager
def unread(source, groups=()):
    """A subscription with a small window that is never read."""
    options = [("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(source.address, options) as channel:
        stream = channel.unary_stream(METHOD)(messages.SubscriptionRequest(groups=groups).SerializeToString())
        assert eventually(lambda: source.counts["subscribers"] == 1)
        yield stream
        stream.cancel()


def flood(source, seconds=LONG):
    """Publishes until a subscriber is late."""
    tokens, until, number = [7] * 4, time.monotonic() + seconds, 0
    while not any(stream.ended for stream in list(source._streams)) and time.monotonic() < until:
        number += 1
        source.publish([stored(0, number, 0, tokens), removed(0, number)])
    assert any(stream.ended is service.End.LATE for stream in list(source._streams))


def test_a_subscriber_that_is_late_ends_and_may_come_again():
    with agent(max_behind=50, heartbeat=None) as source:
        with unread(source) as stream:
            flood(source)
            with pytest.raises(grpc.RpcError) as caught:
                list(stream)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.details() == "the subscriber reads too slowly: subscribe again"
        assert eventually(lambda: source.counts["subscribers"] == 0) and source.counts["subscribers_late"] == 1
        assert source.flush(LONG)  # or a new subscription is late at once
        source.publish(CHAIN[:1])
        with Reader(source.address) as reader:
            assert reader.agrees(named(mirror_of(CHAIN[:1]), PLAIN, kvjax.Namespaces()))


def test_one_that_never_reads_does_not_stay(monkeypatch):
    monkeypatch.setattr(service, "_GRACE", 0.1)
    with agent(max_behind=50, heartbeat=0.05, max_subscribers=1) as source, unread(source):
        flood(source)
        assert eventually(lambda: source.counts["subscribers"] == 0) and source.counts["subscribers_late"] == 1
        with Reader(source.address) as reader:
            assert reader.wait(lambda one: one.complete)


def test_subscribers_are_as_many_as_it_says():
    with agent(max_subscribers=2) as source, Reader(source.address) as one, Reader(source.address) as two:
        assert one.wait(lambda it: it.complete) and two.wait(lambda it: it.complete)
        with Reader(source.address) as three:
            assert three.wait(lambda it: it.error is not None)
            assert three.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert three.error.details() == "subscribers: got another one, wanted at most 2"
        assert source.counts["subscribers_refused"] == 1 and source.counts["subscribers"] == 2
        one.__exit__()
        assert eventually(lambda: source.counts["subscribers"] == 1)
        with Reader(source.address) as three:
            assert three.wait(lambda it: it.complete)


def test_groups_without_keys_and_values_are_refused():
    for shape, groups, valid in (("bare", [0], [1, 2]), ("plain", [0, 5], [0])):
        with agent(spec_of(shape)) as source, Reader(source.address, groups) as reader:
            assert reader.wait(lambda one: one.error is not None)
            assert reader.error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reader.error.details() == f"groups: got {groups}, wanted some of {valid}"
            assert source.counts["requests_refused"] == 1


@pytest.fixture(scope="module")
def beset():
    """An agent, a reader of it, and a channel for others."""
    with agent() as source, Reader(source.address) as reader, grpc.insecure_channel(source.address) as channel:
        source.publish(CHAIN)
        yield source, reader, channel


def requests():
    """Requests that are random, oversized, or for any groups."""
    groups = st.lists(st.integers(0, 2**32 - 1) | st.just(0), max_size=4)
    sent = groups.map(lambda some: messages.SubscriptionRequest(groups=some).SerializeToString())
    return st.one_of(st.binary(max_size=60), st.binary(min_size=4090, max_size=6000), sent)


def answer(channel, request_):
    """The status of a request, OK if it is answered with the state."""
    stream = channel.unary_stream(METHOD, response_deserializer=messages.KVCacheStateUpdate.FromString)
    found = stream(request_, timeout=LONG)
    try:
        return grpc.StatusCode.OK if next(found).in_snapshot else None
    except grpc.RpcError as error:
        return error.code()
    finally:
        found.cancel()


def expected(request_):
    if len(request_) > 4096:
        return grpc.StatusCode.INVALID_ARGUMENT
    try:
        groups = messages.SubscriptionRequest.FromString(request_).groups
    except DecodeError:
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.INVALID_ARGUMENT if set(groups) - {0} else grpc.StatusCode.OK


@hypothesis.settings(max_examples=40)
@hypothesis.given(requests())
def test_requests_of_others_are_answered_or_refused(beset, request_):
    source, reader, channel = beset
    assert eventually(lambda: source.counts["subscribers"] < 10)
    before, wanted = source.counts["requests_refused"], expected(request_)
    assert answer(channel, request_) is wanted
    assert source.counts["requests_refused"] == before + (wanted is grpc.StatusCode.INVALID_ARGUMENT)
    assert reader.agrees(named(mirror_of(CHAIN), PLAIN, kvjax.Namespaces())) and source.counts["ignored"] == 0


def test_what_grpc_refuses_does_no_harm(beset):
    _, reader, channel = beset
    assert answer(channel, bytes((1 << 20) + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reader.agrees(named(mirror_of(CHAIN), PLAIN, kvjax.Namespaces()))


def test_other_methods_are_refused(beset):
    _, _, channel = beset
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(METHOD + "s")(b"", timeout=LONG))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(private key, certificate) of 127.0.0.1, signed by itself, in PEM."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl, which makes certificates")
    folder = tmp_path_factory.mktemp("tls")
    key, signed = folder / "key.pem", folder / "signed.pem"
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=here"]
    options += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", signed]
    subprocess.run([openssl, "req", "-x509", *options], check=True, capture_output=True, timeout=TIMEOUT)
    return key.read_bytes(), signed.read_bytes()


def test_updates_are_encrypted_for_those_who_know_the_certificate(certificate):
    """Clients without it, and those without encryption, get no updates."""
    trusting, others = (grpc.ssl_channel_credentials(root) for root in (certificate[1], None))
    with agent(credentials=grpc.ssl_server_credentials([certificate])) as source:
        source.publish(CHAIN)
        with Reader(source.address, credentials=trusting) as reader:
            assert reader.agrees(named(mirror_of(CHAIN), PLAIN, kvjax.Namespaces()))
        for channel in (grpc.secure_channel(source.address, others), grpc.insecure_channel(source.address)):
            with channel, pytest.raises(grpc.RpcError) as caught:
                next(channel.unary_stream(METHOD)(b"", timeout=LONG))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert source.counts["subscriptions"] == 1


def test_the_description_makes_a_client():
    """The client is README's."""
    with agent() as source, grpc.insecure_channel(source.address) as channel:
        source.publish(CHAIN)
        assert source.flush(LONG)
        stub = services.KVCacheAgentServiceStub(channel)
        assert len(next(stub.SubscribeToUpdates(messages.SubscriptionRequest())).cache_ids) == 2
    assert inspect.signature(Agent).parameters["port"].default == 50051  # as MAX's
