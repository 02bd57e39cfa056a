# SPDX-License-Identifier: Apache-2.0
"""A state machine which makes the same random requests to the cache and to the oracle."""

from __future__ import annotations

import functools
import os
from typing import Any

import chex
import hypothesis.strategies as st
import jax
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvjax
from kvjax.blocks.backups import LEFT
from kvjax.policies.ring import Ring
from kvjax.serving.capacity import num_steps
from kvjax.testing.trial import verify_order
from tests import cases, drive
from tests.drive import BOTH, VERBS
from tests.oracle.cache import NO_BLOCK, Block, Oracle, Priority, Result, Retention, Status, lru
from tests.oracle.events import named, plain, without_copied_paths

ROWS, BLOCKS_PER_ROW, SIZE, WIDTH, MOST = 4, 5, 4, 20, 6
# Options of caches: `layers` are (window, sink tokens). Leaving out an option saves a dozen programs.
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "extra ids": {"extra_ids": True},
    "whole blocks": {"policy": "fifo", "partial_reuse": False},
    "by class": {"policy": "lfu", "num_host_blocks": 4},
    "retention": {"policy": "priority", "retention": True},
    "queues": {"policy": "trt_leaf", "retention": True, "partial_reuse": False},
    "windows": {"layers": [(None, 0), (6, 3)]},
    "windows, retention": {"policy": "priority", "retention": True, "layers": [(None, 0), (6, 3)]},
    "host, windows, retention": {
        "policy": "priority", "retention": True, "layers": [(None, 0), (6, 3)], "num_host_blocks": 4,
    },
    "thinning": {"layers": [(None, 0), (6, 3)], "num_host_blocks": 4, "thinning": True},
    "thinning, plain": {"thinning": True},
    "thinning, recurrent": {"layers": [(None, 0), "recurrent"], "thinning": True},
    "sparse": {"layers": [(None, 0), (6, 3)], "num_host_blocks": 4, "thinning": True, "sparse": True},
    "sparse, plain": {"sparse": True},
    "windows alone": {"layers": [(5, 0), (9, 1)], "partial_reuse": False},
    "recurrent": {"layers": [(None, 0), "recurrent"]},
    "recurrent alone": {"layers": ["recurrent"]},
    "recurrent, host": {"layers": [(None, 0), (6, 3), "recurrent"], "num_host_blocks": 3},
    "host": {"num_host_blocks": 5},
    "host, windows": {"layers": [(None, 0), (6, 3)], "num_host_blocks": 3},
    "backups": {"num_host_blocks": 7, "backups": True},
    "backups, windows": {"layers": [(None, 0), (6, 3)], "num_host_blocks": 5, "backups": True},
    "backups, recurrent": {"layers": [(None, 0), "recurrent"], "num_host_blocks": 5, "backups": True},
    "backups, thinning": {"layers": [(None, 0), (6, 3)], "num_host_blocks": 5, "backups": True, "thinning": True},
    "backups, retention": {
        "policy": "priority", "retention": True, "num_host_blocks": 6, "offload_min_priority": 30, "backups": True,
    },
    "host, retention": {
        "policy": "priority", "retention": True, "num_host_blocks": 4, "offload_min_priority": 30,
        "partial_reuse": False,
    },
}  # fmt: skip
# Each costs twenty programs to compile: by default one, KVJAX_MACHINE names another; test_bytes.py has both tiers.
DEFAULT = os.environ.get("KVJAX_MACHINE", "windows, retention")
NAMES = sorted(CONFIGS) if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else [DEFAULT]
POLICIES = {
    "lru": (kvjax.lru(), lru), "fifo": (kvjax.policies.fifo(), lambda block: block.stored),
    "priority": (kvjax.policies.priority(), Oracle.priority),
    "trt_leaf": (kvjax.policies.trt_leaf(), Oracle.queue_position),
    "lfu": (kvjax.policies.lfu(), lambda block: (block.hits, block.queued)),
}  # fmt: skip
# Of `admit` and `lookup`: how much is reserved, and where the reused prefix may end.
SIZES = ({}, {}, {"reserve_tokens": 5}, {"alignment_tokens": 2 * SIZE})
NUM_STEPS = jax.jit(num_steps, static_argnames="k")


def nearly_wrapped(state):
    """An empty cache whose counters wrap soon."""
    groups = []
    for group in state.groups:
        host, soon = group.host, np.iinfo(np.int32).max - 9

        def turned(policy, soon=soon):
            return policy._replace(head=policy.head + soon, tail=policy.tail + soon) if type(policy) is Ring else policy

        if host is not None:
            host = host.replace(num_moves=host.num_moves + soon, policy=turned(host.policy))
        blocks = group.blocks.replace(clock=group.blocks.clock + soon)
        groups.append(group.replace(blocks=blocks, host=host, policy=turned(group.policy)))
    return state.replace(groups=tuple(groups))


# Hypothesis draws the first of a list, 0 and True most often: these are the values that do something.
rows = st.integers(-1, ROWS)
mostly = st.sampled_from((True, True, True, False))
num_blocks = st.integers(0, 11).map(lambda fewer: 12 - fewer)
lists = functools.partial(st.lists, min_size=1)
two = functools.partial(st.lists, min_size=2, max_size=2)
masks = st.integers(0, 2**BLOCKS_PER_ROW - 1)  # of columns
prompts = lists(st.sampled_from((0, 0, 0, 1, 2)), max_size=WIDTH)
pairs = st.tuples(st.sampled_from((0, 0, 1)), prompts)
priorities = st.tuples(st.sampled_from((0, 20, 35, 60)), st.sampled_from((None, None, 0, 5)))
# The bounds of the first and the second range, their priorities, and that of generated blocks.
retentions = st.tuples(
    st.sampled_from(((0, 4, 8), (4, 12, 13), (2, 6, None), (0, 1, 2))), priorities, priorities, priorities
)
# Blocks of steps: k, an idle row, the tokens that rows want, those after which they stop, and the log's free records.
per_row = functools.partial(lists, min_size=ROWS, max_size=ROWS)
lines_of_steps = st.one_of(
    per_row(lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE)), st.just([[0] * SIZE] * ROWS)
)
present = lists(
    lists(st.sampled_from((True, True, True, False)), min_size=BLOCKS_PER_ROW, max_size=BLOCKS_PER_ROW),
    min_size=3, max_size=3,
)  # fmt: skip
blocks_of_steps = lists(st.fixed_dictionaries({
    "k": st.sampled_from((1, 3, SIZE, SIZE)), "idle": st.integers(0, 2 * ROWS), "left": per_row(st.integers(1, 9)),
    "stops": per_row(st.sampled_from((9, 9, 1, 2, 3))), "tokens": lines_of_steps,
    "log": st.sampled_from((99, 99, 99, 0, 6, 12, 18, 24)),
}), max_size=3)  # fmt: skip


def padded(tokens):
    return drive.padded(tokens, WIDTH, 9)


def joined(results):
    """The report of a call which equals several calls in turn."""
    return results[0]._replace(
        status=[s for r in results for s in r.status], events=[e for r in results for e in r.events],
        queried=[q for r in results for q in r.queried], cached=[c for r in results for c in r.cached],
        moves=[m for r in results for m in r.moves],
    )  # fmt: skip


class CacheMachine(RuleBasedStateMachine):
    """Each rule runs a verb on both caches and compares the reports. The invariant compares the contents."""

    @initialize(config=st.sampled_from(NAMES), blocks=num_blocks)
    def start(self, config, blocks):
        options = dict(CONFIGS[config])
        chosen, score = POLICIES[options.pop("policy", "lru")]
        layers = [
            kvjax.LayerSpec.recurrent({"state": (1,)}) if layer == "recurrent" else kvjax.LayerSpec(1, 1, *layer)
            for layer in options.pop("layers", [])
        ]
        spec = kvjax.make_spec(layers, num_blocks=12, max_seqs=ROWS, max_length=WIDTH, block_size=SIZE, **options)
        self.timed, self.extra, self.host = spec.retention, spec.extra_ids, spec.has_host
        self.thinning, self.sparse = spec.thinning, spec.sparse
        sizes = {group.key: max(blocks, spec.least_blocks(group)) for group in spec.groups}
        self.state = kvjax.init(spec, chosen, num_blocks=sizes)
        sliding = [group for group in spec.window_groups if not group.recurrent]
        windows = [(group.window, group.sink_tokens, sizes[group.key]) for group in sliding]
        first = spec.groups[0].num_blocks if spec.bare else blocks
        self.oracle = Oracle(
            first, SIZE, ROWS, BLOCKS_PER_ROW, spec.partial_reuse, score, windows,
            options.get("num_host_blocks", 0), spec.offload_min_priority, spec.bare, blocks * spec.has_recurrent,
            spec.sparse,
            spec.backups,
        )  # fmt: skip
        if self.timed:  # the score depends on the time
            self.oracle.score = functools.partial(score, self.oracle)
        self.oracle.now = 2**31 - 20  # the library's time wraps soon
        self.state = nearly_wrapped(self.state)
        self.mirror, self.pins, self.moves, self.adoptions = kvjax.events.Mirror(), [], [], []

    @property
    def used(self):
        return [seq for seq, row in enumerate(self.oracle.rows) if row.length]

    @property
    def free(self):
        return [seq for seq, row in enumerate(self.oracle.rows) if not row.length]

    @property
    def ready(self):
        """The rows which a decode loop could continue."""
        rows = enumerate(self.oracle.rows)
        return [seq for seq, row in rows if 0 < row.length == len(row.tokens) and not row.swapped]

    @staticmethod
    def one_of(rows, seq):
        """A row among these rows, if there are any, for a row drawn from all."""
        return rows[seq % len(rows)] if rows else seq

    def both(self, verb, wanted, *args, **kwargs):
        """Runs the library's verb and compares its report with the oracle's Result."""
        before = self.state
        self.state, events = VERBS[verb](before, *args, **self.timely(verb, kwargs))
        self.compare(verb, wanted, before, events)
        return events

    def timely(self, verb, kwargs):
        """The options of a call, with the time if the verb takes it."""
        return kwargs | ({"now": np.int32((self.oracle.now + 2**31) % 2**32 - 2**31)} if verb in cases.TIMED else {})

    def compare(self, verb, wanted, before, events):
        """Compares the events of a verb, called on the state `before`, with the oracle's Result."""
        mirror = self.mirror
        assert events.status.tolist() == [int(s) for s in wanted.status]
        if verb == "admit":
            ok = events.status == 0
            assert events.queried[ok].tolist() == list(wanted.queried)
            assert events.cached[ok].tolist() == list(wanted.cached)
        if not bool(events.ok) and len(wanted.status) == 1:
            assert int(events.shortfall) == wanted.shortfall
        if verb != "complete" and (not any(s == 0 for s in wanted.status) or (verb == "extend" and not wanted.ok)):
            chex.assert_trees_all_equal(before, self.state)
        if wanted.moves or (events.transfer is not None and np.any(np.asarray(events.transfer.block) >= 0)):
            assert np.sum(np.asarray(events.transfer.block) >= 0) == len(wanted.moves)
            self.moves.append((events.transfer, wanted.moves))
        records = kvjax.to_list(events)
        self.mirror = kvjax.fold(records, mirror)
        assert named(records, mirror, self.paired) == without_copied_paths(wanted.events, SIZE)
        verify_order(verb, events)

    def paired(self, path):
        return tuple(path) if self.extra else plain(path)

    def ids(self, tokens):
        """Extra ids of tokens, for the oracle, and padded for the library."""
        if not self.extra:
            return None, None
        ids = [1 if i % 3 == 2 and t else 0 for i, t in enumerate(tokens)]
        return ids, padded(ids)

    def retained(self, choice):
        """A request's priorities, for the oracle and for the library. None without `timed`."""
        if not self.timed:
            return Retention(), None
        (first, second, end), *priorities = choice
        choices = [Priority(*each) for each in priorities]
        ranges = [(first, second, choices[0]), (second, end, choices[1])]
        library = kvjax.Retention.of(
            [(a, b, *w) for a, b, w in ranges], decode_priority=choices[2].priority, decode_ttl=choices[2].ttl
        )
        return Retention(ranges, choices[2]), library

    @rule(ms=st.sampled_from((1, 4, 5, 2**30)))
    def wait(self, ms):
        """Waits, even for days, but less than 24 of them after the latest time of the library."""
        time = self.state.groups[0].blocks.time
        if time is None or self.oracle.now + ms - (int(time[0]) * 2**32 + int(time[1])) < 2**31:
            self.oracle.now += ms

    def tiers(self, wide):
        """The tiers, as arguments for the oracle and for the library."""
        return {"tiers": wide and self.host}, {"tiers": BOTH} if wide and self.host else {}

    @rule(seq=rows, is_free=mostly, prompt=pairs, sizes=st.sampled_from(SIZES), retention=retentions, wide=mostly)
    def admit(self, seq, is_free, prompt, sizes, retention, wide):
        namespace, tokens = prompt
        seq = self.one_of(self.free, seq) if is_free else seq
        own, tiers = self.tiers(wide)
        (ids, library), (theirs, ours) = self.ids(tokens), self.retained(retention)
        wanted = self.oracle.admit(seq, tokens, namespace=namespace, extra_ids=ids, retention=theirs, **sizes, **own)
        self.both(
            "admit", wanted, seq, padded(tokens), len(tokens), namespace=namespace, extra_ids=library,
            retention=ours, **sizes, **tiers,
        )  # fmt: skip

    @rule(
        prompts=lists(pairs, max_size=3), retention=retentions, wide=mostly,
        end=st.sampled_from(("release", "release", "stay", "swap_out", "stay", "decode", "decode")),
        hurry=st.booleans(), blocks=blocks_of_steps,
    )  # fmt: skip
    def serve(self, prompts, retention, wide, end, hurry, blocks):
        """Serves whole sequences, to fill the cache."""
        for prompt in prompts:
            if not self.free:
                break
            seq, (_, tokens) = self.free[0], prompt
            self.admit(seq, False, prompt, {}, retention, wide)
            start = len(self.oracle.rows[seq].tokens)
            if not self.oracle.rows[seq].length:
                continue
            lines = [tokens[start:] if row == seq else [] for row in range(ROWS)]
            ids, library = (
                [self.ids(tokens)[0][start:] if row == seq else [] for row in range(ROWS)] if self.extra else None,
                None,
            )
            if self.extra:
                library = np.stack([padded(line) for line in ids])
            counts = [len(line) for line in lines]
            exact, options = self.exact(range(ROWS))
            wanted = self.oracle.commit(lines, counts, extra_ids=ids, exact=exact)
            batch = np.stack([padded(line) for line in lines])
            self.both("commit", wanted, batch, np.asarray(counts, np.int32), extra_ids=library, **options)
            if end == "release":
                self.release(seq)
            elif end == "swap_out" and self.host:
                self.swap_out(seq)
            if hurry:
                self.complete(True, True)
        if end == "decode" and self.used:
            self.decode(blocks, hurry)

    @rule(prompts=lists(pairs, min_size=ROWS, max_size=ROWS), same=st.booleans(), retention=retentions)
    def admit_batch(self, prompts, same, retention):
        prompts = prompts[:1] * ROWS if same else prompts
        own, tiers = self.tiers(True)
        ids, (theirs, ours) = [self.ids(tokens) for _, tokens in prompts], self.retained(retention)
        requests = [
            {"seq": seq, "tokens": tokens, "namespace": namespace, "extra_ids": own_ids, "retention": theirs}
            for seq, ((namespace, tokens), (own_ids, _)) in enumerate(zip(prompts, ids, strict=True))
        ]
        wanted = self.oracle.admit_batch(requests, **own)
        self.both(
            "admit", joined(wanted), np.arange(ROWS, dtype=np.int32),
            np.stack([padded(tokens) for _, tokens in prompts]),
            np.asarray([len(tokens) for _, tokens in prompts], np.int32),
            namespace=np.asarray([namespace for namespace, _ in prompts], np.int32),
            extra_ids=np.stack([library for _, library in ids]) if self.extra else None,
            retention=jax.tree.map(lambda x: np.stack([x] * ROWS), ours), **tiers,
        )  # fmt: skip

    @rule(
        active=lists(st.booleans(), min_size=ROWS, max_size=ROWS), count=st.integers(0, MOST), one=st.booleans(),
        wide=st.booleans(), seqs=st.one_of(st.none(), st.permutations(range(ROWS)), lists(rows, min_size=3)),
    )  # fmt: skip
    def extend(self, active, count, one, wide, seqs):
        own, tiers = self.tiers(wide)
        named = range(ROWS) if seqs is None else seqs[:3]
        used = [seq for seq, row in enumerate(self.oracle.rows) if row.length]
        active = [on and (seq in used or count == 5) for on, seq in zip(active, named, strict=False)]
        counts = [1 if one else (count + i) % (MOST + 1) for i in range(len(named))]
        wanted = self.oracle.extend(active, counts, seqs=named, **own)
        mask, numbers = np.asarray(active), np.asarray(counts, np.int32)
        if seqs is not None:
            rows = np.asarray(named, np.int32)
            self.both("extend", wanted, mask, numbers, seqs=rows, max_tokens=MOST, **tiers)
        elif one:
            self.both("extend", wanted, mask, **tiers)
        else:
            self.both("extend", wanted, mask, numbers, max_tokens=MOST, **tiers)

    @rule(
        tokens=lists(lists(st.integers(0, 2), min_size=WIDTH, max_size=WIDTH), min_size=ROWS, max_size=ROWS),
        amount=st.sampled_from((99, 99, 3, 1, 0, 100, -1)), same=st.booleans(), negative=st.booleans(),
        exact=lists(mostly, min_size=ROWS, max_size=ROWS),
    )  # fmt: skip
    def commit(self, tokens, amount, same, negative, exact):
        reserved = [row.length - len(row.tokens) for row in self.oracle.rows]
        counts = [min(amount, r) if amount < 100 else r + 1 for r in reserved]
        if same:
            tokens = [[0] * WIDTH] * ROWS
        if negative:
            tokens = [[-1, *tokens[0][1:]], *tokens[1:]]
        self.write(tokens, counts, [seq for seq in range(ROWS) if exact[seq]])

    def exact(self, rows):
        """These rows as those whose K/V are exact, if the cache may be told so, and the option that tells it."""
        return (rows, {"exact": np.isin(np.arange(ROWS), [*rows])}) if self.sparse else ((), {})

    def write(self, tokens, counts, rows=range(ROWS)):
        """Commits lines of `WIDTH` tokens. The K/V of `rows` are exact."""
        ids = [self.ids(line)[0] for line in tokens] if self.extra else None
        exact, options = self.exact(rows)
        wanted = self.oracle.commit(tokens, counts, extra_ids=ids, exact=exact)
        library = np.asarray(ids, np.int32) if self.extra else None
        texts = np.asarray(tokens, np.int32), np.asarray(counts, np.int32)
        self.both("commit", wanted, *texts, extra_ids=library, **options)

    def write_reserved(self):
        """Commits all tokens reserved by rows, so they are ready."""
        reserved = [0 if row.swapped else row.length - len(row.tokens) for row in self.oracle.rows]
        self.write([[0] * WIDTH] * ROWS, reserved)

    @precondition(lambda self: self.used)
    @rule(src=two(rows), dst=two(rows), is_sound=mostly)
    def fork(self, src, dst, is_sound):
        if is_sound:
            self.write_reserved()
            src, dst = [self.one_of(self.ready, seq) for seq in src], [self.one_of(self.free, seq) for seq in dst]
        wanted = [self.oracle.fork(*pair) for pair in zip(src, dst, strict=True)]
        self.both("fork", joined(wanted), np.asarray(src, np.int32), np.asarray(dst, np.int32))

    @precondition(lambda self: self.used)
    @rule(
        seqs=st.lists(st.integers(0, ROWS - 1), min_size=3, max_size=3, unique=True),
        parents=lists(st.sampled_from((0, 0, 1, 2, 2, 3)), min_size=3, max_size=3), in_use=st.booleans(),
    )  # fmt: skip
    def beam_step(self, seqs, parents, in_use):
        if in_use:
            parents = [parent % 3 for parent in parents]
        wanted = self.oracle.beam_step(seqs, parents)
        self.both("beam_step", wanted, np.asarray(seqs, np.int32), np.asarray(parents, np.int32))

    @precondition(lambda self: self.used)
    @rule(seqs=two(rows), lengths=two(st.integers(0, WIDTH)), is_sound=mostly)
    def truncate(self, seqs, lengths, is_sound):
        if is_sound:
            seqs = [self.one_of(self.used, seq + index) for index, seq in enumerate(seqs)]
            lengths = [min(self.oracle.rows[seq].length, length) for seq, length in zip(seqs, lengths, strict=True)]
        wanted = [self.oracle.truncate(*pair) for pair in zip(seqs, lengths, strict=True)]
        self.both("truncate", joined(wanted), np.asarray(seqs, np.int32), np.asarray(lengths, np.int32))

    @precondition(lambda self: self.used and self.thinning)
    @rule(seqs=two(rows), which=two(masks), is_sound=mostly, most=st.sampled_from((None, None, 1)))
    def thin(self, seqs, which, is_sound, most):
        columns = [[column for column in range(BLOCKS_PER_ROW) if mask >> column & 1] for mask in which]
        if is_sound:
            seqs = [self.one_of(self.used, seq + index) for index, seq in enumerate(seqs)]
            seqs[1] = NO_BLOCK if seqs[1] == seqs[0] else seqs[1]
            whole = [len(self.oracle.rows[seq].tokens) // SIZE if seq in self.used else 0 for seq in seqs]
            columns = [[c for c in chosen if c < end] for chosen, end in zip(columns, whole, strict=True)]
        named_columns = np.array([[c in chosen for c in range(BLOCKS_PER_ROW)] for chosen in columns])
        wanted = self.oracle.thin(seqs, columns, most)
        self.both("thin", wanted, np.asarray(seqs, np.int32), named_columns, max_removed=most)

    @precondition(lambda self: self.used)
    @rule(active=lists(st.booleans(), min_size=ROWS, max_size=ROWS), most=st.sampled_from((None, SIZE)))
    def trim(self, active, most):
        self.both("trim", self.oracle.trim(active, most), np.asarray(active), max_tokens=most)

    @precondition(lambda self: self.used)
    @rule(blocks=blocks_of_steps, forked=mostly)
    def decode(self, blocks, forked):
        """Runs blocks of steps for the rows in use, once their prompts are written. Two rows may share theirs."""
        self.write_reserved()
        ready, free = self.ready, self.free
        if forked and ready and free:
            self.fork([ready[0], ready[-1]], [free[0], free[-1]], False)
        for block in blocks:
            self.decode_block(**block)

    def decode_block(self, k, idle, left, stops, tokens, log):
        """Runs a block of steps like `decode` of `serving/decode.py`. Each row stops after so many tokens."""
        active = [seq in self.ready and seq != idle for seq in range(ROWS)]
        lengths = [row.length for row in self.oracle.rows]
        want = [max(min(a, WIDTH - b, k), 1) * on for a, b, on in zip(left, lengths, active, strict=True)]
        n = self.oracle.num_steps(want, k, log)
        assert int(NUM_STEPS(self.state, np.asarray(want, np.int32), k, np.int32(log))) == n
        for steps in sorted({n, 1}, reverse=True):  # as many as blocks suffice for by counting, or one
            counts = [min(tokens, steps) for tokens in want]
            wanted = self.oracle.extend(active, counts)
            self.both("extend", wanted, np.asarray(active), np.asarray(counts, np.int32), max_tokens=MOST)
            if wanted.ok:
                break
        written = [min(a, b) if wanted.ok else 0 for a, b in zip(counts, stops, strict=True)]
        self.write([padded(line).tolist() for line in tokens], written)
        begun = [on and wanted.ok for on in active]
        self.both("trim", self.oracle.trim(begun, SIZE), np.asarray(begun), max_tokens=SIZE)
        assert all(row.length == len(row.tokens) for row, on in zip(self.oracle.rows, begun, strict=True) if on)

    @precondition(lambda self: self.used)
    @rule(seq=rows, is_used=mostly)
    def release(self, seq, is_used=False):
        seq = self.one_of(self.used, seq) if is_used else seq
        self.both("release", self.oracle.release(seq), seq)

    @precondition(lambda self: self.used)
    @rule(seqs=lists(rows, min_size=ROWS, max_size=ROWS))
    def release_batch(self, seqs):
        self.both("release", self.oracle.release(seqs), np.asarray(seqs, np.int32))

    @rule(prompt=pairs, wide=st.booleans(), aligned=st.sampled_from((None, None, 2 * SIZE)))
    def lookup(self, prompt, wide, aligned):
        namespace, tokens = prompt
        ids, library = self.ids(tokens)
        match = VERBS["lookup"](
            self.state, padded(tokens), len(tokens), namespace=namespace, extra_ids=library,
            alignment_tokens=aligned, tiers=BOTH if wide else BOTH[:1],
        )  # fmt: skip
        options = {"namespace": namespace, "extra_ids": ids, "alignment_tokens": aligned, "tiers": wide}
        assert int(match.cached_tokens) == self.oracle.lookup(tokens, **options)
        if match.unusable_tokens is not None:
            assert int(match.unusable_tokens) == self.oracle.unusable(tokens, **options)

    @precondition(lambda self: self.used)
    @rule(
        seq=st.integers(0, ROWS - 1), which=st.sampled_from((0b11111, 0b11111, 0b00011, 0b00110, 0b11010)),
        sound=st.booleans(), of=st.sampled_from((0, 0, 1, 2)),
    )  # fmt: skip
    def pin(self, seq, which, sound, of):
        of = of % len(self.state.groups)
        chosen, group = (which >> np.arange(BLOCKS_PER_ROW)) & 1 == 1, self.state.groups[of]
        if sound:
            chosen = chosen & np.asarray((group.table[seq] >= 0) & (group.blocks.fill[group.table[seq]] > 0))
        theirs = [b for b, on in zip(self.oracle.tables(of)[seq], chosen, strict=False) if on]
        ours = np.where(chosen, group.table[seq], kvjax.state.NO_BLOCK)
        wanted = self.oracle.pin(theirs, of)
        self.both("pin", wanted, ours, group=of)
        if np.any(ours >= 0) and wanted.ok:
            self.pins.append((ours, theirs, of))

    @precondition(lambda self: self.used)
    @rule(seq=st.integers(0, ROWS - 1))
    def unpin_what_a_row_holds(self, seq):
        theirs = self.oracle.tables()[seq]
        if theirs and not self.pins and not self.adoptions:
            self.both("unpin", self.oracle.unpin(theirs), np.asarray(self.state.groups[0].table[seq]))

    @precondition(lambda self: self.oracle.index)
    @rule(data=st.data(), of=st.integers(0, 2))
    def pin_cached(self, data, of):
        of = of % len(self.state.groups)
        pairs = sorted(self.pairing(of).items())
        if pairs:
            ours, theirs = data.draw(st.sampled_from(pairs))
            ours = np.asarray([ours] + [kvjax.state.NO_BLOCK] * (BLOCKS_PER_ROW - 1), np.int32)
            wanted = self.oracle.pin([theirs], of)
            self.both("pin", wanted, ours, group=of)
            if wanted.ok:
                self.pins.append((ours, [theirs], of))

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), backwards=st.booleans())
    def unpin(self, data, backwards):
        if self.pins:
            ours, theirs, of = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            ours, theirs = (ours[::-1], theirs[::-1]) if backwards else (ours, theirs)
            wanted = self.oracle.unpin(theirs, of)
            self.both("unpin", wanted, ours, group=of)
            if not wanted.ok:  # the prefix or group0_block of a block that stays held; it can be unpinned later
                self.pins.append((ours, theirs, of))

    @precondition(lambda self: self.oracle.index)
    @rule(data=st.data())
    def evict(self, data):
        pairs = sorted(self.pairing().items())
        if pairs:
            ours, theirs = data.draw(st.sampled_from(pairs))
            self.both("evict", self.oracle.evict([theirs]), np.asarray([ours], np.int32))

    @precondition(lambda self: self.oracle.index)
    @rule(keep=st.lists(st.integers(0, 2), min_size=2, max_size=2))
    def forget_namespaces(self, keep):
        self.both("forget_namespaces", self.oracle.forget_namespaces(keep), np.asarray(keep, np.int32))

    @rule(chance=st.integers(0, 15))
    def reset(self, chance):
        if chance == 13:
            self.both("reset", self.oracle.reset())

    @precondition(lambda self: self.host and self.oracle.index)
    @rule(data=st.data(), which=st.integers(0, 15), verb=st.sampled_from(("offload", "onboard")), of=st.integers(0, 1))
    def shift(self, data, which, verb, of):
        """Offloads or onboards blocks by name, mostly such as can move."""
        of, on_host = of % len(self.state.groups), verb == "onboard"
        group = self.state.groups[of]
        pairs = [
            pair for pair in sorted(self.pairing(of).items())
            if not group.blocks.refcount[pair[0]] and (group.host.pool_row[pair[0]] >= len(group.empty)) == on_host
        ]  # fmt: skip
        chosen = [pair for i, pair in enumerate(pairs[:4]) if which >> i & 1] if which else pairs[:4]
        ours = np.asarray([a for a, _ in chosen] + [kvjax.state.NO_BLOCK] * (4 - len(chosen)), np.int32)
        wanted = getattr(self.oracle, verb)([b for _, b in chosen], of)
        self.both(verb, wanted, ours, group=of)

    @precondition(lambda self: self.host and self.oracle.index)
    @rule(empty=st.integers(0, 8), of=st.integers(0, 1))
    def watermark(self, empty, of):
        of = of % len(self.state.groups)
        self.both("watermark", self.oracle.watermark(empty, 6, of), empty, max_blocks=6, group=of)

    @precondition(lambda self: self.state.spec.backups and self.oracle.index)
    @rule(of=st.integers(0, 1), hurry=mostly)
    def backup(self, of, hurry):
        of = of % len(self.state.groups)
        self.both("backup", self.oracle.backup(6, of), max_blocks=6, group=of)
        if hurry:
            self.complete(True, True)

    @precondition(lambda self: self.host and self.used)
    @rule(seq=rows)
    def swap_out(self, seq):
        self.both("swap_out", self.oracle.swap_out(seq), seq)

    @precondition(lambda self: any(row.swapped for row in self.oracle.rows))
    @rule(seq=rows)
    def swap_in(self, seq):
        self.both("swap_in", self.oracle.swap_in(seq), seq)

    @precondition(lambda self: self.moves)
    @rule(ok=st.sampled_from((True, True, True, False)), every=st.booleans())
    def complete(self, ok, every):
        while self.moves:
            ours, theirs = self.moves.pop(0)
            wanted = self.oracle.complete(theirs, ok)
            self.both("complete", wanted, ours, ok)
            if not every:
                break

    def pairing(self, number=0):
        """{our block id: the oracle's} of a group, by the tables and indexes of both. A contradiction is a failure."""
        pairs, index = {kvjax.state.NO_BLOCK: NO_BLOCK}, self.oracle.groups[number].index
        for ours, theirs in zip(np.asarray(self.state.groups[number].table), self.oracle.tables(number), strict=True):
            for a, b in zip(ours.tolist(), [*theirs, *[NO_BLOCK] * (len(ours) - len(theirs))], strict=True):
                assert pairs.setdefault(a, b) == b
        del pairs[kvjax.state.NO_BLOCK]
        ours = {
            (ns, self.paired(path)): node[1] for node, (ns, path, *_) in self.mirror.nodes.items() if node[0] == number
        }
        assert ours.keys() == index.keys()
        for node, block in ours.items():
            assert pairs.setdefault(block, index[node]) == index[node]
        assert len(set(pairs.values())) == len(pairs)
        return pairs

    @invariant()
    def agree(self):
        if not hasattr(self, "state"):
            return
        kvjax.check(self.state)
        assert kvjax.events.index_of(self.state) == self.mirror.index
        seqs = self.state.seqs
        assert seqs.length.tolist() == [row.length for row in self.oracle.rows]
        assert seqs.committed.tolist() == [len(row.tokens) for row in self.oracle.rows]
        if seqs.holes is not None:
            wanted = [[column in row.holes for column in range(BLOCKS_PER_ROW)] for row in self.oracle.rows]
            assert seqs.holes.tolist() == wanted
        if seqs.approximate is not None:
            assert seqs.approximate.tolist() == [row.approximate for row in self.oracle.rows]
        if seqs.swapped is not None:
            assert seqs.swapped.tolist() == [row.swapped for row in self.oracle.rows]
        self.agree_on_text()
        for number, group in enumerate(self.state.groups):
            counts = self.oracle.counts(number)
            assert (int(group.num_empty), int(group.num_cached)) == (counts["empty"], counts["cached"])
            for ours, theirs in self.pairing(number).items():
                block: Block = self.oracle.groups[number].blocks[theirs]
                assert (int(group.blocks.refcount[ours]), int(group.blocks.hits[ours]) if block.node else 0) == (
                    block.refcount,
                    block.hits if block.node else 0,
                )
                if group.host is not None:
                    assert bool(group.host.pool_row[ours] >= len(group.empty)) == block.host
                    assert bool(group.host.pending_transfer[ours] != 0) == (block.move > 0)
                if group.host is not None and group.host.backup is not None:
                    copy = int(group.host.backup[ours])
                    assert (copy >= 0) == block.backed and (copy == LEFT) == block.left
                    assert copy < 0 or bool(group.host.pending_transfer[copy] != 0) == (block.copying > 0)
                if group.blocks.retention is not None:
                    requested = block.requested_priority
                    expected = [requested.priority, -1 if requested.ttl is None else requested.ttl]
                    assert group.blocks.retention[ours].tolist() == expected

    def agree_on_text(self):
        """Compares the tokens and extra ids of each row's blocks, including blocks outside of the index."""
        table, text = np.asarray(self.state.groups[0].table), jax.device_get(self.state.groups[0].blocks.text)
        for blocks, row in zip(table, self.oracle.rows, strict=True):
            position = np.arange(len(row.tokens))
            block, slot = blocks[position // SIZE], position % SIZE
            has_block = block >= 0
            extra = np.zeros_like(text.tokens) if text.extra_ids is None else text.extra_ids
            ours = np.stack([text.tokens[block, slot], extra[block, slot]], axis=-1)
            wanted = np.reshape([*row.tokens], (-1, 2))
            assert ours[has_block].tolist() == wanted[has_block].tolist()


class AdoptingMachine(CacheMachine):
    """The same with K/V from outside: prefixes are adopted, and land later or never."""

    @rule(
        prompt=pairs, have=present, wide=st.sampled_from((True, True, False)),
        hits=lists(st.integers(0, 3), min_size=BLOCKS_PER_ROW, max_size=BLOCKS_PER_ROW),
        requested_priority=lists(st.none() | priorities, min_size=BLOCKS_PER_ROW, max_size=BLOCKS_PER_ROW),
    )  # fmt: skip
    def adopt(self, prompt, have, wide, hits, requested_priority):
        namespace, tokens = prompt
        own, tiers = self.tiers(wide)
        ids, library = self.ids(tokens)
        have, theirs, ours = have[: len(self.state.groups)], None, -1
        if self.timed:
            theirs = [pair and Priority(*pair) for pair in requested_priority]
            pairs = [pair or (-1, None) for pair in requested_priority]
            ours = np.array([(priority, -1 if ttl is None else ttl) for priority, ttl in pairs])
        wanted, adopted = self.oracle.adopt(
            tokens, have, namespace=namespace, extra_ids=ids, requested_priority=theirs, hits=hits, **own
        )
        events = self.both(
            "adopt", wanted, padded(tokens), len(tokens), np.array(have), namespace=namespace, extra_ids=library,
            requested_priority=ours, hits=np.array(hits), **tiers,
        )  # fmt: skip
        self.adoptions.append((events.adopted, adopted))

    @precondition(lambda self: self.adoptions)
    @rule(data=st.data(), arrived=present, again=st.sampled_from((False, False, True)))
    def finish_adoption(self, data, arrived, again):
        ours, theirs = self.adoptions.pop(data.draw(st.integers(0, len(self.adoptions) - 1)))
        arrived = arrived[: len(self.state.groups)]
        self.both("finish_adoption", self.oracle.finish_adoption(theirs, arrived), ours, np.array(arrived))
        if again and theirs.nodes:
            self.both("finish_adoption", Result([Status.BAD_REQUEST]), ours, np.array(arrived))
