# SPDX-License-Identifier: Apache-2.0
"""The options of `models.serve` for replicas on a Ray cluster."""

from __future__ import annotations

import argparse

from . import commands
from .commands import number

MAX_REPLICAS = 1024
_PARTS = ("max_replicas", "address", "gpus")  # options which need --replicas
# {an option: why replicas cannot have it}
_REFUSED = {
    "publish": "each replica publishes to the front, encrypted",
    "replay": "each replica answers the front, encrypted",
    "curve": "the events of replicas are always encrypted, with keys of their own",
    "weights": "each replica has the weights of --checkpoint, or of its user_config",
    "operator_key": "no path of the front changes a single engine",
    "max_connections": "clients connect to Ray's proxies",
}


def add_options(parser: commands.Parser) -> None:
    """Adds the options for `check` and `models.cluster`."""
    count = number(int, 1, MAX_REPLICAS)
    parser.add_argument(
        "--replicas", metavar="N", type=count, help="serve with this number of engines, each in a process of Ray's"
    )
    parser.add_argument(
        "--max-replicas", metavar="M", type=count, help="start up to this number while requests wait (default: N)"
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="Ray cluster to join (default: Ray starts on this machine)"
    )
    parser.add_argument(
        "--gpus", metavar="G", type=number(float, 0), default=0, help="GPUs of a replica (default: %(default)s)"
    )


def check(parser: commands.Parser, args: argparse.Namespace) -> None:
    """Refuses options without those that they depend on, and options which replicas cannot have."""
    if args.replicas is None:
        for option in _PARTS:
            if getattr(args, option) != parser.get_default(option):
                parser.error(f"--{option.replace('_', '-')}: got one without --replicas")
        return
    commands.check_extra(parser, "cluster", "--replicas")
    if args.max_replicas is not None and args.max_replicas < args.replicas:
        parser.error(f"--max-replicas: got {args.max_replicas}, wanted at least the {args.replicas} of --replicas")
    for option, reason in _REFUSED.items():
        if getattr(args, option) != parser.get_default(option):
            parser.error(f"--{option.replace('_', '-')}: got one with --replicas, but {reason}")
    if args.port == 0:
        parser.error("--port: got 0 with --replicas, wanted the port of each machine's proxy")
    if args.store is not None and "://" in args.store and not args.store_readonly:
        parser.error(f"--store: got {args.store} with --replicas, wanted a folder, in which each replica has its own")
    if args.agent:
        parser.error(f"--agent: got port {args.agent} with --replicas, wanted 0, a free port for each replica")
