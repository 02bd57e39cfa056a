# SPDX-License-Identifier: Apache-2.0
"""Reports on a trace: its figures, the hits of LRU and of other policies at each size, and an upper bound of hits.

`log` reports on a log of events.

python -m kvjax.research curve conversation_trace.jsonl --sizes 3000 10000 30000 --plot curve.png
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from kvjax import policies
from kvjax.research.comparison import NOTES, SHARES, compare
from kvjax.research.figures import summary, unbounded
from kvjax.research.log_report import log_report
from kvjax.research.plots import plot_closed, plot_log, plot_rates, plot_reuse
from kvjax.research.simulators.belady import belady
from kvjax.research.simulators.hits import RULES, Hits, Rule, check_longest, check_sizes
from kvjax.research.simulators.lru_curve import lru_curve
from kvjax.research.simulators.replay import replay
from kvjax.research.simulators.simulate import missing_fields, simulate
from kvjax.research.traces.generator import draw_trace
from kvjax.research.traces.readers import read_trace
from kvjax.research.traces.sessions import split_sessions
from kvjax.research.traces.trace import Trace
from kvjax.state import EvictionPolicy

_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "adaptive": policies.adaptive,
    "cost_aware": policies.cost_aware,
    "fifo": policies.fifo,
    "lfu": policies.lfu,
    "lfu_da": policies.lfu_da,
    "lru": policies.lru,
    "random": policies.random,
    "t_lru": policies.t_lru,
}
_PLOTTED = 500  # sizes of a plotted curve, more than the eye can distinguish


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. See --help."""
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.research", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (about, run) in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("trace", metavar="TRACE", nargs="+" if name == "compare" else None, help=_TRACE)
        command.add_argument("--rule", choices=get_args(Rule), default="full", help="rule of hits (%(default)s)")
        command.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the figures to this file")
        command.set_defaults(run=run)
        command.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="save a plot in this file")
        if name == "compare":
            command.add_argument("--shares", metavar="SHARE", type=float, nargs="+", default=SHARES, help=_SHARES)
            command.add_argument("--policies", metavar="NAME", nargs="+", default=["adaptive"], help=_NAMES)
            command.add_argument("--final", action="store_true", help="the second half of each trace, once at the end")
        else:
            command.add_argument("--sizes", metavar="BLOCKS", type=int, nargs="+", help="blocks of each cache")
        if name == "sweep":
            command.add_argument("--policies", metavar="NAME", nargs="+", default=["lru", "lfu"], help=_NAMES)
            command.add_argument("--overlap", nargs=2, type=float, metavar=("TOKENS/S", "MS"), help=_OVERLAP)
    log = commands.add_parser("log", help=_LOG, description=_LOG)
    log.add_argument("file", metavar="FILE", type=pathlib.Path, help="a file of Log or models.generate --events")
    log.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="save a plot in this file")
    args = parser.parse_args(arguments)
    try:
        if args.command == "log":
            _log(args)
        elif args.command == "compare":
            _compare(args)
        else:
            args.run(_trace(args.trace), args)
    except (OSError, ValueError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _trace(name: str) -> Trace:
    """The trace of a file, or of `drawn:SEED`."""
    kind, _, seed = name.partition(":")
    if kind != "drawn":
        return read_trace(name)
    if not seed.isdecimal():
        raise ValueError(f"TRACE: got {name!r}, wanted drawn:SEED with a number from 0")
    return draw_trace(int(seed))


def _log(args: argparse.Namespace) -> None:
    with args.file.open(errors="replace") as lines:
        report = log_report(lines)
    print(report)
    if args.plot is not None:
        plot_log(report, args.plot)


def _summary(trace: Trace, args: argparse.Namespace) -> None:
    figures = summary(trace, args.rule)
    print(figures)
    _save(args.json, dataclasses.asdict(figures))
    if args.plot is not None:
        curves = {"unbounded": unbounded(trace, args.rule)}
        if args.sizes:
            curves["lru"] = lru_curve(trace, _sizes(trace, args, hold_all=True), args.rule)
        plot_reuse(curves, args.plot)


def _curve(trace: Trace, args: argparse.Namespace) -> None:
    sizes = _sizes(trace, args, hold_all=True)
    _report(args, {"lru": lru_curve(trace, sizes, args.rule)}, belady(trace, sizes))
    if args.plot is not None:
        plotted = _between(sizes)
        plot_rates({"lru": lru_curve(trace, plotted, args.rule)}, args.plot, bound=belady(trace, plotted))


def _bound(trace: Trace, args: argparse.Namespace) -> None:
    sizes = _sizes(trace, args, hold_all=True)
    curves = lambda sizes: {"Belady": belady(trace, sizes), "with bypass": belady(trace, sizes, bypass=True)}  # noqa: E731
    _report(argparse.Namespace(**vars(args) | {"rule": "papers"}), curves(sizes), None)
    if args.plot is not None:
        plot_rates(curves(_between(sizes)), args.plot)


def _sweep(trace: Trace, args: argparse.Namespace) -> None:
    sizes = _sizes(trace, args)
    chosen = {name: _policy(name) for name in args.policies}
    curves = {name: _hits(name, trace, policy, sizes, args) for name, policy in chosen.items()}
    fits = min(sizes) >= trace.lengths.max()
    _report(args, curves, belady(trace, sizes) if fits else None)
    if not fits:
        print(f"No bound: the longest request has {trace.lengths.max():,} blocks.")
    if args.plot is not None:
        plotted = _between(sizes)
        if fits and args.overlap is None and "lru" in curves:
            curves["lru"] = lru_curve(trace, plotted, args.rule)
        plot_rates(curves, args.plot, bound=belady(trace, plotted) if fits else None)


def _hits(name: str, trace: Trace, policy: EvictionPolicy, sizes: list[int], args: argparse.Namespace) -> Hits:
    """Hits by `simulate`, or by `replay` if requests overlap or the policy reads fields that a trace lacks."""
    missing = missing_fields(policy, max(sizes))
    began = time.perf_counter()
    if missing or args.overlap is not None:
        method = "through the verbs" + (f", since it reads {', '.join(missing)}" if missing else "")
        hits = replay(trace, policy, sizes, rule=args.rule, overlap=args.overlap)
    else:
        method = "without the verbs"
        hits = simulate(trace, policy, sizes, rule=args.rule)
    print(f"{name}: {method}, in {time.perf_counter() - began:.1f} s")
    return hits


def _compare(args: argparse.Namespace) -> None:
    """Prints a table for a half of each trace. All traces are read before the first table."""
    chosen = {name: _policy(name) for name in args.policies if name != "lru"}
    traces = {name: split_sessions(_trace(name))[args.final] for name in args.trace}
    half = "second half" if args.final else "first half"
    comparisons = []
    for name, trace in traces.items():
        stem = pathlib.Path(name).stem
        comparisons.append(compare(trace, chosen, shares=args.shares, rule=args.rule, name=f"{stem}, {half}"))
        print(f"{comparisons[-1]}\n", flush=True)
    print("\n".join(NOTES))
    print(_SEEN if args.final else _FIRST)
    _save(args.json, [comparison.as_json() for comparison in comparisons])
    if args.plot is not None:
        plot_closed(comparisons, args.plot)


def _sizes(trace: Trace, args: argparse.Namespace, *, hold_all: bool = False) -> list[int]:
    """The sizes of --sizes, else eight sizes from the longest request to the whole trace.

    With `hold_all` each size must hold the longest request.
    """
    if args.sizes is not None:
        return (
            check_longest(trace, args.sizes, "--sizes") if hold_all else check_sizes(args.sizes, "--sizes")
        ).tolist()
    longest = int(trace.lengths.max())
    return sorted(set(np.geomspace(longest, trace.num_ids + longest, 8).astype(int).tolist()))


def _between(sizes: Sequence[int]) -> list[int]:
    """The sizes, with further sizes in between for a picture."""
    return sorted({*sizes, *np.geomspace(min(sizes), max(sizes), _PLOTTED).astype(int).tolist()})


def _policy(name: str) -> EvictionPolicy:
    """A policy of kvjax by name, or of your own: MODULE:NAME, or its return value."""
    module, _, attribute = name.rpartition(":")
    if not module and name not in _POLICIES:
        raise ValueError(f"--policies: got {name!r}, wanted {_NAMES}")
    value = getattr(importlib.import_module(module), attribute, None) if module else _POLICIES[name]
    policy = value() if callable(value) else value
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(f"--policies: {name} is {policy!r}, wanted an EvictionPolicy or a function that returns one")
    return policy


def _report(args: argparse.Namespace, curves: Mapping[str, Hits], bound: Hits | None) -> None:
    """Prints a line for each size, and the rule of hits. Writes --json."""
    columns = {**curves, **({} if bound is None else {"bound": bound})}
    example = next(iter(curves.values()))
    print(" ".join(["    blocks", *(f"{name:>12}" for name in columns), "     refused"]))
    for index, size in enumerate(example.sizes.tolist()):
        rates = [f"{hits.rate[index]:>12.4f}" for hits in columns.values()]
        print(" ".join([f"{size:>10,}", *rates, f"{example.refused[index]:>12,}"]))
    print(f'Blocks found of blocks requested. Rule "{args.rule}": {RULES[args.rule]}.')
    if bound is not None and args.rule != "papers":
        print(
            'The bound is Belady\'s under the rule "papers"; under this one it cannot be passed, perhaps not reached.'
        )
    if example.unserved is None:
        print("Requests follow one another, and answers are not stored: `summary` says what that hides.")
    else:
        print("Requests run at the same time and hold blocks for their answers, which are not cached afterwards.")
    _save(
        args.json,
        {
            "rule": args.rule,
            "sizes": example.sizes.tolist(),
            "refused": example.refused.tolist(),
            "rates": {name: hits.rate.tolist() for name, hits in columns.items()},
            "token_rates": {name: hits.token_rate.tolist() for name, hits in columns.items()},
            "mean_rates": {name: hits.mean_rate.tolist() for name, hits in columns.items()},
        },
    )


def _save(path: pathlib.Path | None, figures: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


_LOG = "counts, reuse and lifetimes in a log of events, and blocks stored again after their eviction"
_TRACE = "a file for read_trace, or drawn:SEED for a random trace"
_OVERLAP = "run requests at the same time, at this speed: prompt tokens/s, and ms per token of an answer"
_NAMES = f"{', '.join(_POLICIES)}, or MODULE:NAME of your own"
_SHARES = "sizes of caches as shares of the distinct blocks (0.02 0.1 0.3)"
_FIRST = "This is the half to choose by. Once you have chosen, --final prints the other sessions."
_SEEN = "You have seen the second half now: for a policy changed after this, it is no clean test."
_COMMANDS: dict[str, tuple[str, Callable[..., None]]] = {
    "summary": ("figures of a trace", _summary),
    "curve": ("LRU's hits at each size, exactly, and the bound", _curve),
    "sweep": ("hits of policies, and the bound", _sweep),
    "compare": ("policies next to LRU and the bound, on one half of the sessions of each trace", _compare),
    "bound": ("Belady's bound, without and with bypass", _bound),
}


if __name__ == "__main__":
    main()
