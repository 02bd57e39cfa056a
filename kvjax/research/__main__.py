# SPDX-License-Identifier: Apache-2.0
"""Answers from a trace: what it is, how much LRU finds at each size, what other policies find, and what none can pass.

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
from kvjax.research.bound import belady
from kvjax.research.curves import lru_curve
from kvjax.research.densities import Learned
from kvjax.research.figures import summary, unbounded
from kvjax.research.generator import draw_trace
from kvjax.research.learn import learn_policy
from kvjax.research.plots import plot_gains, plot_rates, plot_reuse
from kvjax.research.readers import read_trace
from kvjax.research.replays import replay
from kvjax.research.rules import RULES, Hits, Rule
from kvjax.research.simulations import not_told, simulate
from kvjax.research.splits import compare_learned
from kvjax.research.traces import Trace
from kvjax.state import EvictionPolicy

_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "cost_aware": policies.cost_aware, "fifo": policies.fifo, "lfu": policies.lfu, "lru": policies.lru,
    "random": policies.random,
}  # fmt: skip
_DRAWN = 500  # sizes of a curve in a picture: more than the eye tells apart


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.research", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (about, run) in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("trace", metavar="TRACE", help=_TRACE)
        command.add_argument("--rule", choices=get_args(Rule), default="full", help="what counts (%(default)s)")
        command.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the figures there")
        command.set_defaults(run=run)
        command.add_argument("--sizes", metavar="BLOCKS", type=int, nargs="+", help="blocks of each cache")
        command.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw it there")
        if name == "learn":
            command.add_argument("--seeds", metavar="S", type=int, default=3, help="policies of a split (%(default)s)")
            command.add_argument("--on", metavar="TRACE", help="a second one, to count hits in")
            command.add_argument(
                "--save", metavar="FILE.npz", type=pathlib.Path, help="write one learned from all there"
            )
            command.add_argument("--policies", metavar="NAME", nargs="*", default=["lfu", "fifo"], help=_NAMES)
        if name == "sweep":
            command.add_argument("--policies", metavar="NAME", nargs="+", default=["lru", "lfu"], help=_NAMES)
            command.add_argument("--overlap", nargs=2, type=float, metavar=("TOKENS/S", "MS"), help=_OVERLAP)
    asked = parser.parse_args(arguments)
    try:
        asked.run(_trace(asked.trace), asked)
    except (OSError, ValueError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _trace(name: str) -> Trace:
    """The trace of a file, or `drawn:SEED`."""
    kind, _, seed = name.partition(":")
    if kind != "drawn":
        return read_trace(name)
    if not seed.isdecimal():
        raise ValueError(f"TRACE: got {name!r}, wanted drawn:SEED with a number from 0")
    return draw_trace(int(seed))


def _summary(trace: Trace, asked: argparse.Namespace) -> None:
    found = summary(trace, asked.rule)
    print(found)
    _save(asked.json, dataclasses.asdict(found))
    if asked.plot is not None:
        curves = {"unbounded": unbounded(trace, asked.rule)}
        if asked.sizes:
            curves["lru"] = lru_curve(trace, asked.sizes, asked.rule)
        plot_reuse(curves, asked.plot)


def _curve(trace: Trace, asked: argparse.Namespace) -> None:
    sizes = _sizes(trace, asked)
    _tell(asked, {"lru": lru_curve(trace, sizes, asked.rule)}, belady(trace, sizes))
    if asked.plot is not None:
        every = _between(sizes)
        plot_rates({"lru": lru_curve(trace, every, asked.rule)}, asked.plot, bound=belady(trace, every))


def _bound(trace: Trace, asked: argparse.Namespace) -> None:
    sizes = _sizes(trace, asked)
    find = lambda sizes: {"Belady": belady(trace, sizes), "with bypass": belady(trace, sizes, bypass=True)}  # noqa: E731
    _tell(argparse.Namespace(**vars(asked) | {"rule": "papers"}), find(sizes), None)
    if asked.plot is not None:
        plot_rates(find(_between(sizes)), asked.plot)


def _sweep(trace: Trace, asked: argparse.Namespace) -> None:
    sizes = _sizes(trace, asked)
    chosen = {name: _policy(name) for name in asked.policies}
    found = {name: _hits(name, trace, policy, sizes, asked) for name, policy in chosen.items()}
    fits = min(sizes) >= trace.lengths.max()
    _tell(asked, found, belady(trace, sizes) if fits else None)
    if not fits:
        print(f"No bound: the longest request has {trace.lengths.max():,} blocks.")
    if asked.plot is not None:
        every = _between(sizes)
        if fits and asked.overlap is None and "lru" in found:
            found["lru"] = lru_curve(trace, every, asked.rule)
        plot_rates(found, asked.plot, bound=belady(trace, every) if fits else None)


def _hits(name: str, trace: Trace, policy: EvictionPolicy, sizes: list[int], asked: argparse.Namespace) -> Hits:
    """By `simulate`; by `replay` for requests that overlap, and a policy that reads what a trace does not tell."""
    missing, began = not_told(policy, max(sizes)), time.perf_counter()
    if missing or asked.overlap is not None:
        how = "through the verbs" + (f", since it reads {', '.join(missing)}" if missing else "")
        found = replay(trace, policy, sizes, rule=asked.rule, overlap=asked.overlap)
    else:
        how, found = "without the verbs", simulate(trace, policy, sizes, rule=asked.rule)
    print(f"{name}: {how}, in {time.perf_counter() - began:.1f} s")
    return found


def _learn(trace: Trace, asked: argparse.Namespace) -> None:
    on = None if asked.on is None else _trace(asked.on)
    chosen = {name: _policy(name) for name in asked.policies}
    sizes = _sizes(trace if on is None else on, asked)
    found = compare_learned(trace, sizes, rule=asked.rule, seeds=asked.seeds, policies=chosen, on=on)
    print(found)
    _save(asked.json, found.as_json())
    if asked.plot is not None:
        plot_gains(found, asked.plot)
    if asked.save is not None:
        learn_policy(trace, rule=asked.rule).save(asked.save)


def _sizes(trace: Trace, asked: argparse.Namespace) -> list[int]:
    """Those that were asked for; else eight from the longest request to a size that holds the whole trace."""
    longest = int(trace.lengths.max())
    return asked.sizes or sorted(set(np.geomspace(longest, trace.num_ids + longest, 8).astype(int).tolist()))


def _between(sizes: Sequence[int]) -> list[int]:
    """The sizes, and those between them that a picture shows."""
    return sorted({*sizes, *np.geomspace(min(sizes), max(sizes), _DRAWN).astype(int).tolist()})


def _policy(name: str) -> EvictionPolicy:
    """One of kvjax's by its name, one that `learn --save` wrote, or a user's: MODULE:NAME, or what that returns."""
    if name.endswith(".npz"):
        return Learned.load(name).policy
    module, _, attribute = name.rpartition(":")
    if not module and name not in _POLICIES:
        raise ValueError(f"--policies: got {name!r}, wanted {_NAMES}")
    found = getattr(importlib.import_module(module), attribute, None) if module else _POLICIES[name]
    policy = found() if callable(found) else found
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(f"--policies: {name} is {policy!r}, wanted an EvictionPolicy or a function that returns one")
    return policy


def _tell(asked: argparse.Namespace, found: Mapping[str, Hits], bound: Hits | None) -> None:
    """A line for each size, and what counts as a hit."""
    columns = {**found, **({} if bound is None else {"bound": bound})}
    some = next(iter(found.values()))
    print(" ".join(["    blocks", *(f"{name:>12}" for name in columns), "     refused"]))
    for at, size in enumerate(some.sizes.tolist()):
        rates = [f"{hits.rate[at]:>12.4f}" for hits in columns.values()]
        print(" ".join([f"{size:>10,}", *rates, f"{some.refused[at]:>12,}"]))
    print(f'Blocks found of blocks asked for. Rule "{asked.rule}": {RULES[asked.rule]}.')
    if bound is not None and asked.rule != "papers":
        print(
            'The bound is Belady\'s under the rule "papers"; under this one it cannot be passed, perhaps not reached.'
        )
    if some.unserved is None:
        print("Requests follow one another, and answers are not stored: `summary` says what that hides.")
    else:
        print("Requests run at the same time and hold blocks for their answers, which are not cached afterwards.")
    _save(asked.json, {
        "rule": asked.rule, "sizes": some.sizes.tolist(), "refused": some.refused.tolist(),
        "rates": {name: hits.rate.tolist() for name, hits in columns.items()},
        "token_rates": {name: hits.token_rate.tolist() for name, hits in columns.items()},
        "mean_rates": {name: hits.mean_rate.tolist() for name, hits in columns.items()},
    })  # fmt: skip


def _save(path: pathlib.Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


_TRACE = "a file that read_trace knows, or drawn:SEED for one drawn at random"
_OVERLAP = "requests run at the same time: prompt tokens/s, and ms a token of an answer"
_NAMES = f"{', '.join(_POLICIES)}, FILE.npz that learn has saved, or MODULE:NAME of one's own"
_COMMANDS: dict[str, tuple[str, Callable[[Trace, argparse.Namespace], None]]] = {
    "summary": ("what a trace is, in figures", _summary),
    "curve": ("what LRU finds at each size, exactly, and the bound", _curve),
    "sweep": ("what policies find, and the bound", _sweep),
    "learn": ("a policy learned from a part of the trace, beside LRU on a later part", _learn),
    "bound": ("Belady's bound, without and with bypass", _bound),
}


if __name__ == "__main__":
    main()
