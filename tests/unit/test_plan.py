# SPDX-License-Identifier: Apache-2.0
"""A `plan` fits exactly; its errors say why nothing does."""

import itertools

import jax
import numpy as np
import pytest

from kvjax import cache
from kvjax.ledger import blocks_per_seq, make_ledger
from kvjax.policies.scores import fifo
from kvjax.sizing import Plan, plan
from kvjax.spec import LayerSpec, make_spec

LAYERS = [LayerSpec(2, 16)] * 3 + [LayerSpec(1, 32)]
GEMMA = [LayerSpec(2, 16, None if layer % 6 == 5 else 64) for layer in range(12)]  # five with windows to one without
SINKS = [LayerSpec(2, 8, 100), LayerSpec(2, 16, 24, sink_tokens=4), LayerSpec(1, 16, 24)]
SHAPE = {"max_seqs": 8, "max_length": 256}


def real_bytes(spec, policy=None) -> int:
    """The bytes of a state and of its pools, by building the state."""
    leaves = jax.tree.leaves(cache.init(spec, policy))
    size = spec.block_size
    rows = sum((group.num_blocks + 1) * pool.block_bytes(size) for group in spec.groups for pool in group.pools)
    return rows + sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize("budget", [200_000, 1_000_000, 12_345_678])
@pytest.mark.parametrize(
    ("layers", "policy", "options"),
    [
        (LAYERS, None, {}), (LAYERS, None, {"block_size": 8, "dtype": "float32", "extra_ids": True}), ([], None, {}),
        ([], fifo(), {}),
    ],
)  # fmt: skip
def test_plan_takes_all_that_fits_and_not_a_block_more(budget, layers, policy, options):
    """Without layers it is a cache of metadata alone. The policy's own state counts."""
    spec, ledger = plan(layers, budget_bytes=budget, policy=policy, **SHAPE, **options)
    (group,) = spec.groups
    assert ledger.used_bytes == real_bytes(spec, policy) <= budget
    one_more = make_spec(layers, num_blocks=group.num_blocks + 1, **SHAPE, **options)
    assert real_bytes(one_more, policy) > budget
    assert ledger.unused_bytes == budget - ledger.used_bytes >= 0
    assert layers or [entry.name for entry in ledger.entries] == ["metadata"]


def test_plan_counts_what_the_ledger_says():
    spec, ledger = plan(LAYERS, budget_bytes=3_000_000, model_bytes=1_000_000, **SHAPE)
    assert ledger.used_bytes == real_bytes(spec) + 1_000_000
    assert ledger.num_tokens == spec.groups[0].num_blocks * 16
    assert ledger.num_full_seqs == ledger.num_tokens // 256
    text = str(ledger)
    for part in ("budget", "model", "3 layers x 2 heads x 16 bfloat16", "1 layer x 1 head x 32", "scratch row"):
        assert part in text
    for entry in ledger.entries:
        assert f"{entry.num_bytes:,}" in text
    assert str(Plan(spec, ledger)) == text


def test_too_small_a_budget_says_what_the_least_would_be():
    with pytest.raises(ValueError, match=r"^budget_bytes: got 1,000 bytes, wanted at least [\d,]+") as caught:
        plan(LAYERS, budget_bytes=1000, model_bytes=77, **SHAPE)
    least = int(str(caught.value).split("at least ")[1].split(", the")[0].replace(",", ""))
    spec, ledger = plan(LAYERS, budget_bytes=least, model_bytes=77, **SHAPE)
    assert spec.groups[0].num_blocks == 1
    assert ledger.unused_bytes == 0
    with pytest.raises(ValueError, match=f"at least {least:,}"):
        plan(LAYERS, budget_bytes=least - 1, model_bytes=77, **SHAPE)


def test_the_ledger_says_when_long_sequences_do_not_fit():
    roomy = str(plan(LAYERS, budget_bytes=50_000_000, **SHAPE).ledger)
    assert "note" not in roomy
    tight = str(plan(LAYERS, budget_bytes=400_000, max_seqs=8, max_length=2048).ledger)
    assert "0 of 8 sequences can be 2,048 tokens long" in tight
    assert "no sequence can be longer than" in tight


def pool_bytes(spec, number="num_blocks") -> dict[int | None, int]:
    """The K/V bytes of each window's blocks."""
    found = {group.window: 0 for group in spec.groups[spec.bare :]}
    for group in spec.groups[spec.bare :]:
        found[group.window] += getattr(group, number) * sum(pool.block_bytes(spec.block_size) for pool in group.pools)
    return found


def block_bytes(spec) -> dict[int | None, int]:
    """The K/V bytes of one block of each window."""
    found = pool_bytes(spec)
    return {group.window: found[group.window] // group.num_blocks for group in spec.groups[spec.bare :]}


@pytest.mark.long
@pytest.mark.parametrize("layers", [GEMMA, SINKS], ids=["gemma", "bare"])
@pytest.mark.parametrize("shares", ["equal", "bytes", "weights"])
def test_windows_share_both_budgets(layers, shares):
    windows = list(dict.fromkeys(layer.window for layer in layers))
    shares = {window: 0.3 + n for n, window in enumerate(windows)} if shares == "weights" else shares
    spec, ledger = plan(layers, budget_bytes=4_000_003, host_budget_bytes=3_000_017, shares=shares, **SHAPE)
    spent, each, host = pool_bytes(spec), block_bytes(spec), pool_bytes(spec, "num_host_blocks")
    if shares == "bytes":
        tokens = {None: 256, 64: 64, 100: 100}
        wanted = {window: each[window] * tokens.get(window, 0) for window in windows}
        if 24 in wanted:  # two groups, one of them with sinks
            wanted[24] = 16 * (2 * 2 * 16 * 2 * 28 + 2 * 1 * 16 * 2 * 24)
    else:
        wanted = dict.fromkeys(windows, 1) if shares == "equal" else shares
    for one, two in itertools.permutations(windows, 2):  # no window is a block ahead of another
        assert spent[one] / wanted[one] < (spent[two] + 1.001 * each[two]) / wanted[two]
        assert host[one] / wanted[one] < (host[two] + 1.001 * each[two]) / wanted[two]
    most = max(each.values())
    assert 4_000_003 - 1.1 * most < ledger.used_bytes == real_bytes(spec) <= 4_000_003  # a block takes metadata too
    assert 3_000_017 - most < ledger.host_used_bytes == sum(host.values()) <= 3_000_017


@pytest.mark.parametrize(
    ("layers", "budget"),
    [
        (GEMMA, 400_000), (GEMMA, 400_700), (GEMMA, 443_210),
        pytest.param(SINKS, 200_000, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_plan_is_the_last_of_all_steps_that_fit(layers, budget):
    """It equals a walk from the smallest cache up, in which each block goes to the window furthest behind its share."""
    shares = {None: 1, 64: 4} if layers is GEMMA else {24: 2, 100: 3}
    one = make_spec(layers, num_blocks=16, **SHAPE)
    price = block_bytes(one)

    def fits(counts):
        return make_ledger(make_spec(layers, num_blocks=counts, **SHAPE), budget, None, 0, None).unused_bytes >= 0

    def due(window):
        return -(-(counts[window] + 1) * price[window] * sum(shares.values()) // shares[window])

    counts = {window: max(one.least_blocks(group) for group in one.groups if group.key == window) for window in shares}
    last = False
    while not last:
        first = min(map(due, counts))
        tied = sorted((w for w in counts if due(w) == first), key=lambda w: -price[w])
        last = not fits({w: counts[w] + (w in tied) for w in counts})
        for window in tied:
            more = counts | {window: counts[window] + 1}
            counts = more if fits(more) else counts
    spec = plan(layers, budget_bytes=budget, shares=shares, **SHAPE).spec
    assert spec == make_spec(layers, num_blocks=counts, **SHAPE)
    assert min(counts.values()) > 1


def test_a_ledger_with_windows_says_what_fits():
    spec, ledger = plan(GEMMA, budget_bytes=600_000, host_budget_bytes=500_000, shares="bytes", **SHAPE)
    full, window = spec.groups
    text = str(ledger)
    for part in (
        f"K/V, 10 layers x 2 heads x 16 bfloat16, window 64 {window.num_blocks * 20_480:>8,}",
        f"{full.num_blocks} x 4,096", "host budget", f"{window.num_host_blocks} x 20,480", "scratch rows",
        "of 1,536 K/V bytes each, 256 once they have left every window", "of 8 sequences can be 256 tokens long",
    ):  # fmt: skip
        assert part in text, text
    # A sequence of 256 tokens has 16 blocks, and up to 6 in its window of 64 while it grows by a block at a time.
    assert ledger.num_full_seqs == min(full.num_blocks // 16, window.num_blocks // 6) == 2
    assert full.num_blocks - 32 >= 16 and ledger.num_tokens == 16 * (32 + window.num_blocks - 12)
    given = str(plan(GEMMA, budget_bytes=600_000, num_host_blocks=3, **SHAPE).ledger)
    assert "host budget" not in given and "3 x 20,480" in given
    sinks = str(plan(SINKS, budget_bytes=10_000_000, **SHAPE).ledger)
    assert "window 24 and 4 sinks" in sinks and "0 once they have left" in sinks and "note" not in sinks


# A hybrid: Qwen3-Next's recurrent layers, DeepSeek V3's latents.
STATE = LayerSpec.recurrent({"state": (32, 128, 128), "convolution": (3, 8192)}, axes={"state": 0})
HYBRID = [STATE] * 3 + [LayerSpec.latent(576, 512)] * 2


@pytest.mark.parametrize("shares", ["equal", "bytes", {None: 1, "recurrent": 3}])
def test_latents_and_snapshots_share_a_budget(shares):
    shape = {"max_seqs": 4, "max_length": 1024, "block_size": 64}
    spec, ledger = plan(HYBRID, budget_bytes=200_000_000, host_budget_bytes=100_000_000, shares=shares, **shape)
    latents, states = spec.groups
    assert ledger.used_bytes == real_bytes(spec) <= 200_000_000 and ledger.host_used_bytes <= 100_000_000
    a_block, a_snapshot = 2 * 64 * 576 * 2, 3 * (4 * (32 * 128 * 128 + 3 * 8192) + 4)
    weights = {"equal": (1, 1), "bytes": (1024 / 64 * a_block, 2 * a_snapshot)}.get(str(shares), (1, 3))
    for number in ("num_blocks", "num_host_blocks"):
        spent = getattr(latents, number) * a_block / weights[0], getattr(states, number) * a_snapshot / weights[1]
        assert abs(spent[0] - spent[1]) < 1.01 * max(a_block / weights[0], a_snapshot / weights[1])
    text = str(ledger)
    for part in (
        "latents, 2 layers x 576 bfloat16 ", "snapshots, 3 layers x 2.2 MB ", f"{states.num_blocks} x {a_snapshot:,}",
        "each sequence holds up to 2 snapshots of 6.6 MB", f"of {2 * 576 * 2:,} K/V bytes each",
    ):  # fmt: skip
        assert part in text, text
    assert "window" not in text and blocks_per_seq(spec, states) == 2
    assert ledger.num_full_seqs == min(latents.num_blocks // 16, states.num_blocks // 2)


def test_a_mesh_divides_states_and_heads_and_copies_latents():
    shape = {"max_seqs": 4, "max_length": 1024, "budget_bytes": 100_000_000, "block_size": 64}
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "heads"))
    planned = plan([*HYBRID, LayerSpec(8, 16)], mesh=mesh, heads="heads", **shape)
    part = LayerSpec.recurrent({"state": (8, 128, 128), "convolution": (3, 8192)}, axes={"state": 0})
    own = plan([part] * 3 + [*HYBRID[3:], LayerSpec(2, 16)], **shape)
    assert planned.ledger == own.ledger
    blocks = {group.key: group.num_blocks for group in own.spec.groups}
    assert blocks == {group.key: group.num_blocks for group in planned.spec.groups}
    assert planned.spec.groups[1].pools[0].arrays == STATE.arrays


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 0), (5, 0), (9, 6), (64, 0)])
def test_a_sequence_needs_the_blocks_that_the_ledger_says(window, sinks):
    """The sequence grows by a token, or by at most a block of four tokens at a time, from any start."""
    spec = make_spec([LayerSpec(1, 4), LayerSpec(1, 4, window, sinks)], num_blocks=16, max_seqs=1, max_length=40,
                     block_size=4)  # fmt: skip
    most = {1: 0, 4: 0}
    for step, start in itertools.product(most, range(1, 5)):
        for committed in [0, *range(start, 40, step)]:
            grown = committed + step if committed else min(start, step)
            columns = np.arange(-(-min(grown, 40) // 4))
            most[step] = max(most[step], int(np.sum(spec.groups[1].keeps(columns, np.int32(committed), 4))))
    assert most == {1: spec.least_blocks(spec.groups[1]), 4: blocks_per_seq(spec, spec.groups[1])}


@pytest.mark.parametrize(
    ("window", "sinks", "least"), [(1, 0, 1), (4, 0, 2), (5, 0, 2), (6, 0, 3), (9, 6, 5), (64, 0, 10)]
)
def test_a_group_with_fewer_blocks_than_its_window_is_refused(window, sinks, least):
    layers, shape = (
        [LayerSpec(1, 4), LayerSpec(1, 4, window, sinks)],
        {"max_seqs": 1, "max_length": 40, "block_size": 4},
    )
    assert make_spec(layers, num_blocks={None: 1, window: least}, **shape).groups[1].num_blocks == least
    message = rf"^num_blocks: got {least - 1} for window {window}, wanted at least {least}: the blocks that one row"
    if least > 1:
        with pytest.raises(ValueError, match=message):
            make_spec(layers, num_blocks={None: 1, window: least - 1}, **shape)
        with pytest.raises(ValueError, match=rf"^num_blocks: got {least - 1}, wanted {least}\.\.{least}"):
            cache.init(make_spec(layers, num_blocks=least, **shape), num_blocks=least - 1)
    smallest = real_bytes(make_spec(layers, num_blocks={None: 1, window: least}, **shape))
    assert plan(layers, budget_bytes=smallest, **shape).spec.groups[1].num_blocks == least
    with pytest.raises(
        ValueError, match="the least for one block of 4 tokens in each group and for the windows of one"
    ):
        plan(layers, budget_bytes=smallest - 1, **shape)


def test_the_ledger_says_what_a_chunk_of_a_prompt_adds():
    spec, ledger = plan(GEMMA, budget_bytes=600_000, **SHAPE)
    more = (
        "each sequence holds up to 6 blocks, window 64; a chunk of its prompt takes one more for each 16 tokens beyond"
    )
    assert more in str(ledger)
    for chunk in (16, 17, 32, 100):
        held = spec.groups[1].max_blocks(spec.max_blocks_per_seq, 16, step=chunk)
        assert held <= 6 + -(-max(chunk - 16, 0) // 16) <= held + 1


def test_a_cache_takes_blocks_by_window_as_its_spec_does():
    spec = make_spec([LayerSpec(1, 4), LayerSpec(1, 4, 8)], num_blocks=9, max_seqs=1, max_length=40, block_size=4)
    for numbers in ({None: 5, 8: 4}, {None: np.int64(5), 8: np.int32(4)}):
        state = cache.Cache.create(spec, num_blocks=numbers).state
        assert [int(group.num_blocks) for group in state.groups] == [5, 4]
    several = jax.vmap(lambda full, window: cache.init(spec, num_blocks={None: full, 8: window}))
    assert several(np.array([5, 9]), np.array([4, 2])).groups[1].num_blocks.tolist() == [4, 0]  # out of range
    for numbers, message in (
        ({None: 5}, "num_blocks: got .*, wanted a number for window 8"),
        ({None: 5, 8: 4, 16: 4}, "num_blocks: got a number for window 16, which no layer has, wanted none"),
        ({None: 5, 8: 10}, r"num_blocks: got 10, wanted 3\.\.9"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.init(spec, num_blocks=numbers)
    with pytest.raises(ValueError, match="num_host_blocks: got a number for window 16, which no layer has"):
        make_spec([LayerSpec(1, 4)], num_blocks=4, num_host_blocks={None: 1, 16: 3}, max_seqs=1, max_length=8)


def test_a_plan_takes_numpys_integers():
    ints = {
        "budget_bytes": 600_000,
        "model_bytes": 1000,
        "max_seqs": 8,
        "max_length": 256,
        "host_budget_bytes": 300_000,
    }
    assert plan(GEMMA, **{name: np.int64(value) for name, value in ints.items()}) == plan(GEMMA, **ints)


class Device:
    """A device that reports `limit` bytes, or nothing."""

    def __init__(self, limit):
        self.limit = limit

    def memory_stats(self):
        return self.limit and {"bytes_limit": self.limit}

    def __repr__(self):
        return "toy:0"


def test_a_fraction_of_a_devices_memory():
    half = plan(LAYERS, device_fraction=0.5, device=Device(2_000_000), **SHAPE)
    assert half == plan(LAYERS, budget_bytes=1_000_000, **SHAPE)
    with pytest.raises(ValueError, match=r"device_fraction: got 500 bytes"):
        plan(LAYERS, device_fraction=0.5, device=Device(1000), **SHAPE)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({}, "exactly one"),
        ({"budget_bytes": 1, "device_fraction": 0.5}, "exactly one"),
        ({"budget_bytes": 1e9}, "budget_bytes: got 1000000000.0, wanted an int"),
        ({"budget_bytes": True}, "budget_bytes: got True"),
        ({"device_fraction": 0.0}, "device_fraction: got 0.0, wanted more than 0"),
        ({"device_fraction": float("nan")}, "device_fraction: got nan"),
        ({"device_fraction": 1.5}, "device_fraction: got 1.5"),
        ({"device_fraction": 0.5, "device": Device(None)}, "toy:0 does not report .*; pass budget_bytes"),
        ({"budget_bytes": 10**6, "model_bytes": -1}, "model_bytes: got -1"),
        ({"budget_bytes": 10**6, "model_bytes": 0.5}, "model_bytes: got 0.5"),
        ({"budget_bytes": -1}, "budget_bytes: got -1"),
        *(({"budget_bytes": 10**6, name: 0}, f"{name}: got 0") for name in ("block_size", "max_seqs", "max_length")),
        ({"budget_bytes": 10**6, "shares": "half"}, r"shares: got 'half', wanted .* windows \[None\]"),
        ({"budget_bytes": 10**6, "shares": {None: 1, 8: 2}}, r"shares: got \{None: 1, 8: 2\}, wanted"),
        ({"budget_bytes": 10**6, "shares": {None: 0}}, r"shares\[None\]: got 0, wanted a number above 0"),
        ({"budget_bytes": 10**6, "shares": {None: float("inf")}}, r"shares\[None\]: got inf"),
        ({"budget_bytes": 10**6, "host_budget_bytes": 1e9}, "host_budget_bytes: got 1000000000.0, wanted an int"),
        (
            {"budget_bytes": 10**6, "host_budget_bytes": 8191},
            "host_budget_bytes: got 8,191 bytes, wanted at least 8,192",
        ),
        (
            {"budget_bytes": 10**6, "host_budget_bytes": 10**6, "num_host_blocks": 3},
            "num_host_blocks, host_budget_bytes: wanted at most one",
        ),
        (
            {"budget_bytes": 10**4, "host_budget_bytes": 10**6},
            r"budget_bytes: got 10,000 bytes, wanted at least [\d,]+",
        ),
    ],
)
def test_bad_arguments_are_named(budget, message):
    with pytest.raises(ValueError, match=message):
        plan(LAYERS, **(SHAPE | budget))


def test_a_host_budget_wants_layers():
    with pytest.raises(ValueError, match="host_budget_bytes: got 1,000,000 without layers"):
        plan([], budget_bytes=10**6, host_budget_bytes=10**6, **SHAPE)


@pytest.mark.gpu
def test_a_fraction_of_this_gpus_memory():
    device = jax.devices("gpu")[0]
    spec, ledger = plan(LAYERS, device_fraction=0.01, device=device, **SHAPE)
    assert ledger.budget_bytes == int(device.memory_stats()["bytes_limit"] * 0.01)
    with jax.default_device(device):
        assert real_bytes(spec) <= ledger.budget_bytes
