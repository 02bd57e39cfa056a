# SPDX-License-Identifier: Apache-2.0
"""Generates on a mesh of four devices of two processes or of one: `python -m tests.models.two_processes PORT NUMBER`.

PORT is the coordinator's, or 0 for a single process. NUMBER is this process's. Prints a line of JSON: the outputs, the
decoded events, and a digest of the state. The clocks of the processes differ. With `--fail` process number 1 cannot
start a move. With `--context` the processes divide the tokens of blocks in place of the heads.
"""

import argparse
import hashlib
import itertools
import json
import warnings

import jax
import numpy as np

PROMPTS, LENGTH = 3, 40


def generate_all(fail: bool, start: int, context: bool):
    """Three documents twice, through a cache which holds one document on the device and all on the host."""
    import kvjax
    from kvjax.pools import host
    from models import load
    from tests.models.families import GOLDENS

    # The heads of a layer are in different processes, or the tokens of a block.
    devices = np.array(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    axes = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Auto
    names = ("heads", "context") if context else ("data", "heads")
    mesh = jax.sharding.Mesh(devices.reshape(2, 2).T, names, axis_types=axes)
    where = {"mesh": mesh, "heads": "heads"} | ({"context": "context"} if context else {})
    model, _ = load(GOLDENS / "llama_heads", **where)
    spec = kvjax.make_spec(
        model.layer_specs(), num_blocks=10, num_host_blocks=14, max_seqs=2, max_length=64, block_size=8,
        dtype="float32", retention=True,
    )  # fmt: skip
    cache = kvjax.tiers.TieredCache.create(spec, **where)
    numbers = np.random.default_rng(0).integers(0, 64, (PROMPTS, LENGTH)).tolist()
    if fail:
        copy, calls = host._copy, itertools.count()
        host._copy = lambda *args: copy(*args) if next(calls) != 2 else 1 / 0
    results = []
    for document in numbers * 2:
        clock = itertools.count(start, 7)
        outputs, cache, events = kvjax.generate(
            model, cache, [document, [*document[:20], 1]], max_new_tokens=6, clock=lambda clock=clock: next(clock),
            retention=kvjax.Retention.of(decode_priority=50, decode_ttl=100),
        )  # fmt: skip
        results.append([[output.tokens, output.cached_tokens, output.finish] for output in outputs])
        results.append(events)
    state = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache.state)))
    return {"results": results, "state": state.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("number", type=int)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--context", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2 if args.port else 4)
    jax.config.update("jax_disable_most_optimizations", True)
    if args.port:
        jax.distributed.initialize(f"localhost:{args.port}", 2, args.number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = generate_all(args.fail and args.number == 1, 1_000_000 * args.number, args.context)
    lost = [str(warning.message) for warning in caught if "computed again" in str(warning.message)]
    print(json.dumps(result | {"lost": lost}))


if __name__ == "__main__":
    main()
