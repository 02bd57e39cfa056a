# SPDX-License-Identifier: Apache-2.0
"""The bytes of the host tier: moves against plain arrays of rows, in place, asynchronous, and safe when they fail.

`python -m tests.unit.pools.test_host_pool` compiles the moves for a GPU on a machine without one, like
tests/kernels/gpu_compile.py.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax.events.transfer import Transfer
from kvjax.pools import host as host_pool
from kvjax.pools.device import init_pools
from kvjax.spec import CacheSpec, GroupSpec, PoolSpec
from pallas_kernels import lowering_for
from tests.kernels.toolchain import needs_toolchain, results_of
from tests.mesh import collectives, mesh_of

N, H = (7, 5), (6, 8)  # device and host blocks of the two groups
FLOAT = PoolSpec((0, 1), 2, 4, "float32"), PoolSpec((2,), 1, 8, "bfloat16"), PoolSpec((3, 4), 3, 2, "float32")
INT8 = tuple(dataclasses.replace(pool, dtype="int8") for pool in FLOAT)
MIXED = INT8[0], FLOAT[1], FLOAT[2]


def make_spec(pools, num_blocks=N, num_host_blocks=H, block_size=4):
    """A spec with two pools in a group of full attention, and the others, if any, in a group with a window."""
    by_group, windows = (pools[:2], pools[2:]), (None, 8)
    parts = zip(num_blocks, by_group, windows, num_host_blocks, strict=False)
    return CacheSpec(tuple(GroupSpec(n, p, w, h) for n, p, w, h in parts), block_size, 2, 4)


def make_pools(spec, rng, **placement):
    """Device and host pools with random bits in every row, including all kinds of NaN."""

    def fill(x):
        bits = rng.integers(0, 256, (x.size + 1) * x.dtype.itemsize, np.uint8).view(x.dtype)
        return jax.device_put(bits[1:].reshape(x.shape), x.sharding)  # not aligned, or numpy's memory would be used

    return jax.tree.map(fill, host_pool.init_host_pools(init_pools(spec, **placement)))


def order(*moves):
    """The moves (group, source, target), with padding between and after them."""
    records = np.full((2 * len(moves) + 1, 5), -1, np.int32)
    for i, (group, source, target) in enumerate(moves):
        records[2 * i] = group, 0, 1, source, target
    return Transfer(jnp.asarray(records))


def rows(pools, host):
    """{(group, leaf): u8[N + H + 1, bytes]}: the blocks of the device, those of the host, and the scratch row."""
    found = {}
    for number in range(len(pools.spec.groups)):
        leaves = [jax.device_get(jax.tree.leaves(host_pool.arrays_of(x, number))) for x in (pools, host)]
        for i, (device, tier) in enumerate(zip(*leaves, strict=True)):
            joined = np.concatenate([device[:-1], tier, device[-1:]])
            found[number, i] = joined.reshape(len(joined), -1).view(np.uint8)
    return found


def moved(model, moves):
    """The rows after moves, whose sources are all read before any write."""
    result = {key: x.copy() for key, x in model.items()}
    for (number, i), x in result.items():
        for group, source, target in moves:
            if group == number:
                x[target] = model[number, i][source]
    return result


def random_moves(rng, num_blocks, num_host_blocks):
    """Moves to distinct targets. Sources may come twice, and may be targets of others: then blocks swap."""
    found = []
    for number, (n, h) in enumerate(zip(num_blocks, num_host_blocks, strict=True)):
        out, back = rng.integers(0, min(n, h) + 1, 2)
        found += zip([number] * out, rng.integers(0, n, out), n + rng.permutation(h)[:out], strict=True)
        found += zip([number] * back, n + rng.integers(0, h, back), rng.permutation(n)[:back], strict=True)
    return [found[i] for i in rng.permutation(len(found))]


def step(pools, blocks, zero):
    """Other work on the pools: writes zeros to some blocks of each group."""
    for number, ids in enumerate(blocks):
        arrays = jax.tree.map(
            lambda x, ids=ids: x.at[ids].set(zero.astype(x.dtype)), host_pool.arrays_of(pools, number)
        )
        pools = host_pool._with(pools, number, arrays)
    return pools


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for key in got:
        np.testing.assert_array_equal(got[key], wanted[key], err_msg=str(key))


def hostile_rounds(pools, host, rng, rounds):
    """Moves, each followed at once by a step that overwrites sources; returns how many steps began during copies."""
    sizes = [(group.num_blocks, group.num_host_blocks) for group in pools.spec.groups]
    donated, model, running, swaps = jax.jit(step, donate_argnums=0), rows(pools, host), 0, 0
    for _ in range(rounds):
        moves = random_moves(rng, *zip(*sizes, strict=True))
        swaps += any((number, target) in {(number, s) for number, s, _ in moves} for number, _, target in moves)
        blocks = [rng.permutation(n)[: n // 2].astype(np.int32) for n, _ in sizes]
        pools, host = host_pool.move(pools, host, order(*moves))
        running += not all(x.is_ready() for x in jax.tree.leaves((pools, host)))
        pools = donated(pools, blocks, np.float32(0))
        model = moved(model, moves)
        for (number, _), x in model.items():
            x[blocks[number]] = 0
    assert swaps > rounds // 3
    assert_same(rows(pools, host), model)
    return running


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [FLOAT, INT8, MIXED], ids=["float", "int8", "mixed"])
def test_random_moves_and_hostile_steps(kinds):
    rng = np.random.default_rng(1)
    pools, host = make_pools(make_spec(kinds), rng)
    for _ in range(10):
        hostile_rounds(pools, host, rng, 6)
        pools, host = make_pools(pools.spec, rng)


def test_moves_go_on_while_the_caller_does():
    """Blocks are large enough for the copies to take longer than the next call."""
    spec = make_spec((PoolSpec((0, 1, 2, 3), 4, 128, "float32"),), (40,), (36,), 32)
    rng = np.random.default_rng(2)
    pools, host = make_pools(spec, rng)
    assert hostile_rounds(pools, host, rng, 8) >= 1


def test_blocks_come_back_as_they_went():
    """A transfer has any number of blocks, out and back to other rows, with a program for each size and direction."""
    n = 130
    spec = make_spec(INT8[:1], (n,), (n,))
    rng = np.random.default_rng(3)
    pools, host = make_pools(spec, rng)
    before, programs = rows(pools, host)[0, 0], host_pool._copy._cache_size()
    for count in (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, n):
        sources, slots, targets = (rng.permutation(n)[:count] for _ in range(3))
        model = rows(pools, host)
        out = [(0, s, n + h) for s, h in zip(sources, slots, strict=True)]
        back = [(0, n + h, t) for h, t in zip(slots, targets, strict=True)]
        pools, host = host_pool.move(pools, host, order(*out))
        pools, host = host_pool.move(pools, host, order(*back))
        assert_same(rows(pools, host), moved(moved(model, out), back))
    assert host_pool._copy._cache_size() - programs == 2 * len(host_pool.BATCHES)
    assert (rows(pools, host)[0, 0][-1] == before[-1]).all()  # the scratch row


def test_padding_alone_does_nothing():
    pools, host = make_pools(make_spec(FLOAT), np.random.default_rng(5))
    same_pools, same_host = host_pool.move(pools, host, order())
    assert same_pools is pools and same_host is host


def test_a_group_without_pools_has_nothing_to_move():
    spec = CacheSpec((GroupSpec(4, (), None, 4), GroupSpec(4, FLOAT[:1], 8, 4)), 4, 2, 4)
    pools, host = make_pools(spec, np.random.default_rng(6))
    model, moves = rows(pools, host), [(0, 1, 5), (1, 2, 6)]
    assert_same(rows(*host_pool.move(pools, host, order(*moves))), moved(model, moves))


@pytest.mark.parametrize("move", [(0, 1, 2), (0, N[0], N[0] + 1), (0, 0, N[0] + H[0]), (1, -1, N[1]), (2, 0, N[0])])
def test_what_is_no_move_between_tiers_is_refused_before_any_is_made(move):
    pools, host = make_pools(make_spec(FLOAT), np.random.default_rng(7))
    model = rows(pools, host)
    with pytest.raises(ValueError, match=r"transfer: got a move .*group \d"):
        host_pool.move(pools, host, order((0, 0, N[0]), move))
    assert_same(rows(pools, host), model)


MOVES = [(0, 0, N[0]), (0, N[0] + 1, 4), (0, 2, N[0] + 3), (0, N[0] + 3, 2), (1, 2, N[1] + 1), (1, N[1] + 2, 3)]


@pytest.mark.parametrize(("function", "call"), [("_read", 0), *(("_copy", call) for call in range(6))])
def test_a_failure_leaves_everything_but_the_targets(monkeypatch, function, call):
    pools, host = make_pools(make_spec(MIXED), np.random.default_rng(8))
    model, real, calls = rows(pools, host), getattr(host_pool, function), []

    def fail(*args):
        calls.append(args)
        if len(calls) == call + 1:
            raise RuntimeError("out of memory")
        return real(*args)

    monkeypatch.setattr(host_pool, function, fail)
    with pytest.raises(
        host_pool.TransferError, match=r"group \d: \d blocks to the host and \d .*: out of memory"
    ) as info:
        host_pool.move(pools, host, order(*MOVES))
    error = info.value
    assert isinstance(error.__cause__, RuntimeError)
    assert error.overwritten.tolist() == [i in (4, 6) for i in range(13)]  # the two that swap
    after = rows(error.pools, error.host)
    for (number, i), x in after.items():
        rest = [row for row in range(len(x)) if (number, row) not in {(number, target) for number, _, target in MOVES}]
        np.testing.assert_array_equal(x[rest], model[number, i][rest])
    monkeypatch.undo()
    assert_same(rows(*host_pool.move(error.pools, error.host, order(*MOVES))), moved(after, MOVES))  # they can go on


def test_before_the_first_copy_a_failure_costs_nothing(monkeypatch):
    pools, host = make_pools(make_spec(FLOAT), np.random.default_rng(9))
    model = rows(pools, host)
    monkeypatch.setattr(host_pool, "_read", lambda *_: 1 / 0)
    with pytest.raises(host_pool.TransferError):
        host_pool.move(pools, host, order((0, 2, N[0] + 3), (0, N[0] + 3, 2)))
    assert_same(rows(pools, host), model)


STATES = [kvjax.LayerSpec.recurrent({"state": (2, 3)}), kvjax.LayerSpec.latent(8, 4)]
SIZES = {"max_seqs": 2, "max_length": 16, "block_size": 4, "num_blocks": 7, "num_host_blocks": 6, "dtype": "int8"}
DIVIDED = PoolSpec((0, 1), 4, 8, "int8"), PoolSpec((2,), 8, 8, "float32"), PoolSpec((3,), 4, 2, "int8")
SPECS = {
    "mixed": make_spec(MIXED), "one token": make_spec(FLOAT[1:2], N[:1], H[:1], 1), "divided": make_spec(DIVIDED),
    "states": kvjax.make_spec(STATES, **SIZES),
}  # fmt: skip
AXES = {"heads": "heads", "context": "context"}


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("mixed", (1, 1), {}), ("states", (1, 1), {}),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (
            ("one token", (1, 1), {}), ("divided", (2, 2), AXES), ("divided", (4, 1), {"heads": "heads"}),
            ("states", (1, 2), AXES),
        )),
    ],
)  # fmt: skip
def test_blocks_go_to_the_host_and_come_back(name, shape, axes):
    """Each device moves its part of a block, and sends nothing. Pools stay where they are, in their kinds of memory."""
    with mesh_of(*shape, names=("heads", "context")) as mesh:
        rng, spec = np.random.default_rng(11), SPECS[name]
        pools, host = make_pools(spec, rng, **axes, **({"mesh": mesh} if axes else {}))

        def pointers():
            shards = [shard for x in jax.tree.leaves((pools, host)) for shard in x.addressable_shards]
            return [shard.data.unsafe_buffer_pointer() for shard in shards]

        sizes = [(group.num_blocks, group.num_host_blocks) for group in spec.groups]
        before, (first, *rest) = pointers(), [random_moves(rng, *zip(*sizes, strict=True)) for _ in range(4)]
        pools, host = host_pool.move(pools, host, order(*first))
        assert pointers() == before  # before numpy looks at them, which the oldest jax then copies
        model = rows(pools, host)
        for moves in rest:
            pools, host = host_pool.move(pools, host, order(*moves))
            model = moved(model, moves)
        assert_same(rows(pools, host), model)
        kinds = [{x.sharding.memory_kind for x in jax.tree.leaves(tree)} for tree in (pools, host)]
        assert kinds == [{"device"}, {"pinned_host"}]
        of_device, of_host = (host_pool.arrays_of(tier, 0) for tier in (pools, host))
        for target, source in (of_host, of_device), (of_device, of_host):
            assert not collectives(host_pool._copy.lower(target, source, np.zeros((2, 1), np.int32)).compile())


def test_a_step_is_not_compiled_again_when_blocks_come_back():
    pools, host = make_pools(make_spec(FLOAT), np.random.default_rng(13))
    pools, host = host_pool.init_host_pools(init_pools(pools.spec))
    donated: Any = jax.jit(lambda *args: step(*args), donate_argnums=0)
    for moves in ([], [(0, 0, N[0])], [(0, N[0], 1)], [(0, 2, N[0]), (0, N[0], 2)]):
        pools, host = host_pool.move(pools, host, order(*moves))
        pools = donated(pools, [np.zeros(1, np.int32)] * 2, np.float32(0))
    assert donated._cache_size() == 1


@pytest.mark.long
@needs_toolchain
def test_on_a_gpu_both_pools_are_updated_in_place():
    results = results_of("tests.unit.pools.test_host_pool")
    for result in results:
        assert result["aliased"] == result["target"], result
        assert result["temporaries"] < 3 * result["block"], result
        assert (result["host_code"], result["loops"]) == (0, 1), result  # and the loop's length is known
    assert len(results) == 4


def compile_for_gpu():
    """Prints XLA's results for each program for a GPU, as lines of JSON."""
    from tests.kernels.gpu_compile import mark_memories, on_gpus

    _, mesh = on_gpus("h200", {"x": 1}, ())
    Space = jax.memory.Space

    def tree(count):
        shapes = ((count, 4, 2, 8, 16, 128), jnp.bfloat16), ((count, 3, 2, 4, 16, 64), jnp.int8)
        made = [jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, PartitionSpec())) for x in shapes]
        scale = jax.ShapeDtypeStruct((count, 3, 2, 4, 16), jnp.float32, sharding=made[0].sharding)
        return tuple(made), (None, scale)

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    def measure(function, donated, *args):
        """Compiles a program, whose arguments are pairs of a tree and its memory kind."""
        trees, memories = zip(*args, strict=True)

        def marked(*trees):
            put = [
                jax.device_put(x, memory) if memory == Space.Host else x
                for x, memory in zip(trees, memories, strict=True)
            ]
            return function(*put)

        with lowering_for("cuda"), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(marked, donate_argnums=0 if donated else ()).lower(*trees)
        given = [memory == Space.Host for tree, memory in args for _ in jax.tree.leaves(tree)]
        returned = donated and memories[0] == Space.Host
        mark_memories(lowered, given, [returned] * len(jax.tree.leaves(lowered.out_info)))
        compiled: Any = lowered.compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        result = {
            "target": size(trees[0]) if donated else 0,
            "aliased": memory.alias_size_in_bytes + memory.host_alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes + memory.host_temp_size_in_bytes,
            "block": size(tree(1)),
            "host_code": text.count("_xla_compute_type"),
            "loops": text.count("known_trip_count") if text.count(" while(") == 1 else -1,
        }
        print(json.dumps(result), flush=True)

    device, host, staged = (tree(1025), Space.Device), (tree(2048), Space.Host), (tree(16), Space.Device)
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    one = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=ids.sharding)
    measure(host_pool._copy_blocks, True, host, device, (ids, Space.Device))
    measure(host_pool._copy_blocks, True, device, host, (ids, Space.Device))
    measure(host_pool._copy_blocks, True, device, staged, (ids, Space.Device))
    measure(host_pool._read_blocks, False, host, (one, Space.Device))


if __name__ == "__main__":
    compile_for_gpu()
