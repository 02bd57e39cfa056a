# SPDX-License-Identifier: Apache-2.0
"""Divides the memory of a server: weights and steps take a part of the budget, and the cache takes the rest."""

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

_VALUES = 12  # arrays of the widest layer's size that a step has at a time, measured on a CPU
_TOKEN_BYTES = 16  # the scheduler's bytes for each token of a request
_LIKELY_BYTES = 8  # further bytes for each of the likeliest tokens in its place
_SLOTS = 4  # the scheduler's requests for each row


def own_bytes(tree: Any) -> int:
    """The bytes of a tree's arrays on a device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def step_bytes(args: argparse.Namespace, model: Decoder, max_length: int) -> int:
    """Estimates the bytes of a step while it runs, and of the scheduler's requests.

    A step computes a chunk of prompts and a token of each row, and has logits of each row.
    """
    vocabulary = model.config.vocab_size
    sizes = (size for leaf in jax.tree.leaves(nnx.state(model)) for size in leaf.shape[-2:])
    widest = max(size for size in sizes if size != vocabulary)
    step = 4 * _VALUES * ((args.chunk + args.rows) * widest + args.rows * vocabulary)
    return step + _SLOTS * args.rows * (max_length + 1) * (_TOKEN_BYTES + _LIKELY_BYTES * args.top_logprobs)


def fitting(
    parser: commands.Parser, args: argparse.Namespace, model: Decoder, max_length: int, where: dict[str, Any]
) -> kvjax.CacheSpec:
    """The spec of the largest cache in `--budget` after weights and steps. Sets `args.blocks`.

    A row has `max_length` tokens. `where` has the mesh, if any, and its axes.
    """
    weights = own_bytes(nnx.state(model))
    steps = step_bytes(args, model, max_length)
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
        message = str(error).splitlines()[0]
        taken = f"{human(weights)} are for weights, {human(steps)} for steps"
        if message.startswith("budget_bytes: "):
            message = f"{message.replace('budget_bytes', '--budget').rstrip(':')}: {taken}"
        parser.error(message)
    full = [group.num_blocks for group in spec.groups if group.kind is Kind.FULL and group.pools]
    args.blocks = min(full or [group.num_blocks for group in spec.groups])
    return spec


def described(args: argparse.Namespace, model: Decoder, cache: Any) -> str:
    """A line with the bytes of the weights, of the K/V on both tiers, and of the rest, on each device."""
    spec = cache.state.spec
    blocks = " and ".join(dict.fromkeys(f"{group.num_blocks:,}" for group in spec.groups if group.pools))
    parts = [
        f"{human(own_bytes(nnx.state(model)))} of weights",
        f"{human(own_bytes(cache.pools))} of K/V in {blocks} blocks of {spec.block_size} tokens",
        f"{human(own_bytes(cache.state))} of metadata",
        f"about {human(step_bytes(args, model, spec.max_length))} of steps and requests",
    ]
    if cache.host is not None:
        parts.append(f"{human(own_bytes(cache.host))} of K/V on the host")
    return f"memory: {', '.join(parts)}"
