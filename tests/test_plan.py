# SPDX-License-Identifier: Apache-2.0
"""What `plan` promises fits, exactly, and what it says when nothing does."""

import jax
import pytest

from kvjax import cache
from kvjax.plan import plan
from kvjax.policies import fifo
from kvjax.spec import LayerSpec, make_spec

LAYERS = [LayerSpec(2, 16)] * 3 + [LayerSpec(1, 32)]
SHAPE = {"max_seqs": 8, "max_length": 256}


def real_bytes(spec, policy=None) -> int:
    """Bytes of a state and of its pools, built rather than computed."""
    leaves = jax.tree.leaves(cache.init(spec, policy))
    rows = sum((g.num_blocks + 1) * pool.block_bytes(spec.block_size) for g in spec.groups for pool in g.pools)
    return rows + sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize("budget", [200_000, 1_000_000, 12_345_678])
@pytest.mark.parametrize("options", [{}, {"block_size": 8, "dtype": "float32", "extra_ids": True}])
def test_plan_takes_all_that_fits_and_not_a_block_more(budget, options):
    spec, ledger = plan(LAYERS, budget_bytes=budget, **SHAPE, **options)
    (group,) = spec.groups
    assert ledger.used_bytes == real_bytes(spec) <= budget
    one_more = make_spec(LAYERS, num_blocks=group.num_blocks + 1, **SHAPE, **options)
    assert real_bytes(one_more) > budget
    assert ledger.left_bytes == budget - ledger.used_bytes >= 0


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


def test_the_policys_own_state_counts():
    spec, ledger = plan(LAYERS, budget_bytes=1_000_000, policy=fifo(), **SHAPE)
    assert ledger.used_bytes == real_bytes(spec, fifo())
    assert spec.groups[0].num_blocks > plan(LAYERS, budget_bytes=1_000_000, **SHAPE).spec.groups[0].num_blocks


def test_a_cache_of_metadata_alone():
    spec, ledger = plan([], budget_bytes=100_000, **SHAPE)
    assert [entry.name for entry in ledger.entries] == ["metadata"]
    assert ledger.used_bytes == real_bytes(spec) <= 100_000


def test_too_small_a_budget_says_what_the_least_would_be():
    with pytest.raises(ValueError, match=r"^budget_bytes: got 1,000 bytes, wanted at least [\d,]+") as caught:
        plan(LAYERS, budget_bytes=1000, model_bytes=77, **SHAPE)
    least = int(str(caught.value).split("at least ")[1].split(", the")[0].replace(",", ""))
    spec, ledger = plan(LAYERS, budget_bytes=least, model_bytes=77, **SHAPE)
    assert spec.groups[0].num_blocks == 1
    assert ledger.left_bytes == 0
    with pytest.raises(ValueError, match=f"at least {least:,}"):
        plan(LAYERS, budget_bytes=least - 1, model_bytes=77, **SHAPE)


def test_the_ledger_says_when_long_sequences_do_not_fit():
    roomy = str(plan(LAYERS, budget_bytes=50_000_000, **SHAPE).ledger)
    assert "note" not in roomy
    tight = str(plan(LAYERS, budget_bytes=400_000, max_seqs=8, max_length=2048).ledger)
    assert "0 of 8 sequences can be 2,048 tokens long" in tight
    assert "no sequence can be longer than" in tight


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
        ({"budget_bytes": 10**6, "block_size": 0}, "block_size: got 0"),
    ],
)
def test_bad_arguments_are_named(budget, message):
    with pytest.raises(ValueError, match=message):
        plan(LAYERS, **budget, **SHAPE)


@pytest.mark.gpu
def test_a_fraction_of_this_gpus_memory():
    device = jax.devices("gpu")[0]
    spec, ledger = plan(LAYERS, device_fraction=0.01, device=device, **SHAPE)
    assert ledger.budget_bytes == int(device.memory_stats()["bytes_limit"] * 0.01)
    with jax.default_device(device):
        assert real_bytes(spec) <= ledger.budget_bytes
