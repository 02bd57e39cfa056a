# SPDX-License-Identifier: Apache-2.0
"""`serve` under `shard_map` over replicas: `python -m tests.unit.serving.served_replicas PORT NUMBER`.

PORT is the coordinator's. NUMBER is this process's, which has a device with one of two replicas. Prints a line of
JSON: the result of `serve_replicas`. `test_several_devices.py` compares it with each replica alone.
"""

import argparse
import functools
import json

import jax
import numpy as np

NEW = 6
# Of each replica, in two rounds; in the second one a prompt of the first comes again. The replicas do not step alike.
PROMPTS = [
    [[[1, 2, 0, 2, 1, 0, 0, 1, 2]], [[1, 2, 0, 2, 1, 0, 0, 1, 2, 2]]],
    [
        [[2, 0, 1, 1, 2, 0, 0, 1, 2, 2, 1], [1, 1, 1, 2, 0], [0, 2, 1, 0, 2, 1, 1], [2, 2, 2]],
        [[2, 0, 1, 1, 2, 0, 0, 1, 2, 2, 1, 1], [0, 1]],
    ],
]


@functools.cache
def programs():
    """`submit`, and all steps, of a replica."""
    from kvjax.serving import Scheduler, serve, submit

    scheduler = Scheduler(chunk=8)
    return jax.jit(functools.partial(submit, scheduler=scheduler)), functools.partial(
        serve, scheduler=scheduler, steps=np.int32(200)
    )


def submitted(serving, prompts):
    """Serving with further prompts, padded to the same width."""
    lengths, tokens = np.zeros(4, np.int32), np.zeros(32, np.int32)
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    tokens[: lengths.sum()] = np.concatenate(prompts)
    serving, status, *_ = programs()[0](serving, tokens, lengths, np.full(4, NEW, np.int32))
    assert not np.any(status[: len(prompts)])
    return serving


def begin(device):
    """The empty requests of a replica, and its log."""
    from kvjax.events import init_log
    from kvjax.serving import init_serving
    from tests.serving_kit import SIZE, make_cache

    with jax.default_device(device):
        return init_serving(make_cache(), [24] * 8, greedy=True), init_log(1000, SIZE)


def outcome(serving, logs):
    """The tokens and steps of a replica, after its cache and its events are verified."""
    import kvjax
    from kvjax.serving import results

    state = serving.cache.state
    kvjax.check(state)
    events = [event for log in logs for event in kvjax.to_list(log)]
    assert kvjax.fold(events).index == kvjax.events.index_of(state)
    outputs = [output for _, output in sorted(results(serving).items()) if output.prompt_tokens]
    return {
        "tokens": [output.tokens for output in outputs], "cached": [output.cached_tokens for output in outputs],
        "steps": int(serving.steps),
    }  # fmt: skip


def serve_alone(replica_index):
    """The outcome of a replica by itself."""
    from tests.serving_kit import MODEL

    (serving, log), run, logs = begin(jax.devices()[0]), jax.jit(programs()[1]), []
    for prompts in PROMPTS[replica_index]:
        serving, filled = run(MODEL, submitted(serving, prompts), log)
        logs.append(filled)
    return outcome(serving, logs)


def serve_replicas(devices):
    """Two replicas under `shard_map`. This process submits to the replicas on its own devices, and reads their shards.

    Returns:
      (the outcomes of these replicas, by their numbers as text, and the collectives in the program).
    """
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tests.mesh import AUTO, collectives
    from tests.serving_kit import MODEL

    mesh = Mesh(np.array(devices), ("replicas",), axis_types=(AUTO,))
    sharding, replicated = NamedSharding(mesh, PartitionSpec("replicas")), NamedSharding(mesh, PartitionSpec())
    local = [n for n, device in enumerate(devices) if device.process_index == jax.process_index()]

    def stacked(*replicas):
        """The trees of this process's replicas as their part of a tree, whose leaves have an axis of replicas."""

        def put(*leaves):
            parts = [jax.device_put(np.asarray(leaf)[None], devices[n]) for n, leaf in zip(local, leaves, strict=True)]
            return jax.make_array_from_single_device_arrays((len(devices), *leaves[0].shape), sharding, parts)

        return jax.tree.map(put, *replicas)

    def own(tree, replica_index):
        """The tree of a replica of this process."""

        def shard(leaf):
            (shard,) = (part.data for part in leaf.addressable_shards if part.index[0].start == replica_index)
            return jax.device_put(np.asarray(shard)[0], devices[replica_index])

        return jax.tree.map(shard, tree)

    def replica(model, *parts):
        serving, log = jax.tree.map(lambda x: x[0], parts)
        return jax.tree.map(lambda x: x[None], programs()[1](model, serving, log))

    data = PartitionSpec("replicas")
    specs = {"in_specs": (PartitionSpec(), data, data), "out_specs": (data, data)}
    program, compiled = jax.jit(jax.shard_map(replica, mesh=mesh, **specs)), None
    model = jax.device_put(jax.tree.map(np.asarray, MODEL), replicated)
    begun = [begin(devices[n]) for n in local]
    servings, empty, logs = (
        [serving for serving, _ in begun],
        stacked(*(log for _, log in begun)),
        {n: [] for n in local},
    )
    for turn in range(2):
        servings = [submitted(serving, PROMPTS[n][turn]) for n, serving in zip(local, servings, strict=True)]
        arguments = model, stacked(*servings), empty
        compiled = compiled or program.lower(*arguments).compile()
        serving, log = compiled(*arguments)
        servings = [own(serving, n) for n in local]
        for n in local:
            logs[n].append(own(log, n))
    outcomes = {str(n): outcome(serving, logs[n]) for n, serving in zip(local, servings, strict=True)}
    return outcomes, dict(collectives(compiled))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("number", type=int)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"localhost:{args.port}", 2, args.number)
    print(json.dumps(serve_replicas(sorted(jax.devices(), key=lambda device: device.process_index))))


if __name__ == "__main__":
    main()
