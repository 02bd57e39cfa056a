# SPDX-License-Identifier: Apache-2.0
"""The bytes of a server: what weights and steps take of a budget, and a cache of the rest."""

from __future__ import annotations

import argparse
from typing import Any

import jax
from flax import nnx

import kvjax
import kvjax.tiers
from kvjax.ledger import human
from kvjax.spec import Kind

from . import commands
from .decoder import Decoder

_VALUES = 12  # arrays of the widest layer's size that a step has at a time, by measurement on a CPU
_OF_TOKEN = 16  # bytes that the scheduler keeps of each token of a request, and 8 more for each of the likeliest tokens
_SLOTS = 4  # requests that the scheduler knows, for each row


def own_bytes(tree: Any) -> int:
    """The bytes of a tree's arrays on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def step_bytes(args: argparse.Namespace, model: Decoder, max_length: int) -> int:
    """About as many bytes as a step takes while it runs, and the scheduler for its requests.

    A step computes a chunk of prompts and a token of each row, and has logits of each row.
    """
    vocabulary = model.config.vocab_size
    sizes = (size for leaf in jax.tree.leaves(nnx.state(model)) for size in leaf.shape[-2:])
    widest = max(size for size in sizes if size != vocabulary)
    step = 4 * _VALUES * ((args.chunk + args.rows) * widest + args.rows * vocabulary)
    return step + _SLOTS * args.rows * (max_length + 1) * (_OF_TOKEN + 8 * args.top_logprobs)


def fitting(
    parser: commands.Parser, args: argparse.Namespace, model: Decoder, max_length: int, where: dict[str, Any]
) -> kvjax.CacheSpec:
    """The spec of the largest cache that `--budget` holds with weights and steps; sets the number of blocks.

    A row has `max_length` tokens. `where` has the mesh, if any, and its axes.
    """
    weights, steps = own_bytes(nnx.state(model)), step_bytes(args, model, max_length)
    try:
        spec, _ = kvjax.plan(
            model.layer_specs(),
            budget_bytes=args.budget,
            model_bytes=weights + steps,
            max_seqs=args.rows,
            max_length=max_length,
            block_size=args.block_size,
            dtype=args.dtype,
            num_host_blocks=args.host_blocks,
            **where,
        )
    except ValueError as error:
        message, taken = str(error).splitlines()[0], f"{human(weights)} are for weights, {human(steps)} for steps"
        if message.startswith("budget_bytes: "):
            message = f"{message.replace('budget_bytes', '--budget').rstrip(':')}: {taken}"
        parser.error(message)
    full = [group.num_blocks for group in spec.groups if group.kind is Kind.FULL and group.pools]
    args.blocks = min(full or [group.num_blocks for group in spec.groups])
    return spec


def described(args: argparse.Namespace, model: Decoder, cache: Any) -> str:
    """A line with the bytes of the weights, of the K/V on both tiers, and of the rest; those of one device."""
    spec = cache.state.spec
    blocks = " and ".join(dict.fromkeys(f"{group.num_blocks:,}" for group in spec.groups if group.pools))
    found = [
        f"{human(own_bytes(nnx.state(model)))} of weights",
        f"{human(own_bytes(cache.pools))} of K/V in {blocks} blocks of {spec.block_size} tokens",
        f"{human(own_bytes(cache.state))} of metadata",
        f"about {human(step_bytes(args, model, spec.max_length))} of steps and requests",
    ]
    if cache.host is not None:
        found.append(f"{human(own_bytes(cache.host))} of K/V on the host")
    return f"memory: {', '.join(found)}"
