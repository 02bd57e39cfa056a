# SPDX-License-Identifier: Apache-2.0
"""Runs scenario files: small histories of a cache with expectations (format: tests/data/scenarios/README.md).

    python -m tests.scenarios PATH [PATH ...]             # files or folders, against the library
    python -m tests.scenarios --oracle PATH [PATH ...]    # against the cache in plain Python

Prints a line per file and a count. The exit status is 1 if a file failed.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import drive
from tests.oracle.backends import BACKENDS, Outcome, Prompt, Size, done
from tests.oracle.cache import NO_BLOCK

DATA = drive.DATA / "scenarios"
OPS = (
    "admit", "compute", "append", "release", "fork", "truncate", "pin", "unpin", "lookup", "expect", "tick", "reset",
)  # fmt: skip
EACH_GROUP = {"blocks", "num_blocks", "num_used", "num_free"}
CHECKS = {"ok", "cached_tokens", "events", "priorities", "groups", *EACH_GROUP}


class Mismatch(AssertionError):
    """A result of a step which differs from its file's expectation."""


def size_of(scenario: dict[str, Any]) -> Size:
    """The smallest cache in which a scenario can run, if every step ends as the file expects."""
    lengths: dict[str, int] = {}
    rows = longest = 1
    for step in scenario["steps"]:
        op, seq = step["op"], step.get("seq")
        ok = step.get("expect", {}).get("ok", True)
        length = lengths.get(seq, 0) + len(step["tokens"]) if op in ("admit", "append") else 0
        longest = max(longest, length, len(step.get("tokens", ())))
        rows = max(rows, len(lengths) + (op in ("admit", "fork")))
        if op in ("admit", "append") and ok:
            lengths[seq] = length
        elif op == "fork" and ok:
            lengths[step["new"]] = lengths[seq]
        elif op == "truncate":
            lengths[seq] = step["length"]
        elif op == "release":
            lengths.pop(seq, None)
    config = scenario["config"]
    extra_ids = any("extra_ids" in step for step in scenario["steps"])
    partial_reuse, eviction = config.get("partial_reuse", True), config.get("eviction", "lru")
    _require(eviction in ("lru", "priority"), f"unknown eviction {eviction}")
    return Size(
        config["block_size"], config["num_blocks"], rows, longest, partial_reuse, extra_ids, eviction == "priority",
        tuple(config.get("windows", (None,))), config.get("num_host_blocks", 0), config.get("offload_min_priority", 0),
    )  # fmt: skip


class Run:
    """A scenario on a back end, with maps from the file's names to rows and blocks of the cache."""

    def __init__(self, scenario: dict[str, Any], backend: str, k: int | None = None):
        self.scenario = scenario
        self.size = size = size_of(scenario)
        self.cache = BACKENDS[backend](size, k)
        self.num_blocks = size.num_blocks
        self.free_rows = list(range(size.rows))
        self.rows: dict[str, int] = {}
        self.prompts: dict[str, Prompt] = {}
        self.written: dict[str, int] = {}
        self.pins: dict[str, list[int]] = {}
        self.names: list[dict[str, int]] = [{} for _ in size.windows]  # of blocks, per group
        self.now = 0

    def run(self) -> None:
        """Performs and checks all steps. Raises `Mismatch` at the first difference."""
        for number, step in enumerate(self.scenario["steps"]):
            try:
                _require(step["op"] in OPS, "unknown op")
                before = self.cache.state()
                self.now = step.get("now", self.now)
                outcome = getattr(self, f"_{step['op']}")(step)
                self._check(step, outcome, before)
            except Exception as error:
                message = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
                label = " ".join([step["op"], *[str(step[key]) for key in ("seq", "pin") if key in step]])
                raise Mismatch(f"step {number} ({label}): {message}") from error

    # One method per op.

    def _admit(self, step: dict[str, Any]) -> Outcome:
        seq, prompt = step["seq"], _prompt(step)
        _require(seq not in self.rows, f"sequence {seq} is in use")
        row = min(self.free_rows)
        retention = step.get("retention", {})
        _require(not retention or self.size.retention, "retention without eviction by priority")
        outcome = self.cache.admit(row, prompt, self.now, retention)
        if outcome.ok:
            self._bind(seq, row, prompt, outcome.cached or 0)
        return outcome

    def _compute(self, step: dict[str, Any]) -> Outcome:
        seq = step["seq"]
        prompt, start = self.prompts[seq], self.written[seq]
        end = step.get("upto", len(prompt.tokens))
        if end <= start:
            return done()
        self.written[seq] = end
        part = prompt._replace(tokens=prompt.tokens[start:end], extra_ids=prompt.extra_ids[start:end])
        return self.cache.compute(self.rows[seq], part, self.now)

    def _append(self, step: dict[str, Any]) -> Outcome:
        seq, new = step["seq"], _prompt(step)
        old = self.prompts[seq]
        _require(self.written[seq] == len(old.tokens), "append to a prompt that is not computed yet")
        outcome = self.cache.append(self.rows[seq], new, self.now)
        if outcome.ok:
            self.prompts[seq] = old._replace(tokens=old.tokens + new.tokens, extra_ids=old.extra_ids + new.extra_ids)
            self.written[seq] += len(new.tokens)
        return outcome

    def _release(self, step: dict[str, Any]) -> Outcome:
        row = self.rows.pop(step["seq"])
        self.free_rows.append(row)
        return self.cache.release(row, self.now)

    def _fork(self, step: dict[str, Any]) -> Outcome:
        seq, new = step["seq"], step["new"]
        _require(new not in self.rows, f"sequence {new} is in use")
        row = min(self.free_rows)
        outcome = self.cache.fork(self.rows[seq], row)
        if outcome.ok:
            self._bind(new, row, self.prompts[seq], self.written[seq])
        return outcome

    def _truncate(self, step: dict[str, Any]) -> Outcome:
        seq, length = step["seq"], step["length"]
        outcome = self.cache.truncate(self.rows[seq], length)
        if outcome.ok:
            old = self.prompts[seq]
            self.prompts[seq] = old._replace(tokens=old.tokens[:length], extra_ids=old.extra_ids[:length])
            self.written[seq] = min(self.written[seq], length)
        return outcome

    def _pin(self, step: dict[str, Any]) -> Outcome:
        self.pins[step["pin"]] = self.cache.findable(self.rows[step["seq"]])
        return self.cache.pin(self.pins[step["pin"]])

    def _unpin(self, step: dict[str, Any]) -> Outcome:
        return self.cache.unpin(self.pins.pop(step["pin"]), self.now)

    def _lookup(self, step: dict[str, Any]) -> Outcome:
        return self.cache.lookup(_prompt(step))

    def _reset(self, step: dict[str, Any]) -> Outcome:
        return self.cache.reset()

    def _expect(self, step: dict[str, Any]) -> Outcome:
        return done()

    def _tick(self, step: dict[str, Any]) -> Outcome:
        return done()

    def _bind(self, seq: str, row: int, prompt: Prompt, written: int) -> None:
        self.free_rows.remove(row)
        self.rows[seq], self.prompts[seq], self.written[seq] = row, prompt, written

    # The expectations of the file.

    def _check(self, step: dict[str, Any], outcome: Outcome, before: Any) -> None:
        expect = step.get("expect", {})
        _require(expect.keys() <= CHECKS, f"unknown expectations {sorted(expect.keys() - CHECKS)}")
        _equal("ok", outcome.ok, expect.get("ok", True))
        if not outcome.ok:
            _require(self.cache.is_state(before), "the operation was refused, but the state changed")
            _equal("events of a refused operation", dict(outcome.events), {})
        if "cached_tokens" in expect:
            _equal("cached_tokens", outcome.cached, expect["cached_tokens"])
        for kind, count in expect.get("events", {}).items():
            _equal(f"events {kind}", outcome.events[kind], count)
        groups = expect.get("groups", [expect])
        several = len(self.size.windows) > 1
        _require("groups" in expect or not several or not expect.keys() & EACH_GROUP, "expectations of which group?")
        _require(len(groups) == len(self.size.windows) or "groups" not in expect, "as many groups as windows")
        for number, wanted in enumerate(groups if not several or "groups" in expect else [{}] * len(self.names)):
            self._check_group(number, step, wanted)
        if "priorities" in expect:
            _equal("priorities", self.cache.priorities(self.rows[step["seq"]]), expect["priorities"])

    def _check_group(self, number: int, step: dict[str, Any], expect: dict[str, Any]) -> None:
        used, free = self.cache.used_and_free(number)
        _equal("num_used + num_free", used + free, self.num_blocks)
        _equal("num_used", used, expect.get("num_used", used))
        _equal("num_free", free, expect.get("num_free", free))
        for seq, row in self.rows.items():
            table = _held(self.cache.table(row, number))
            _require(len(set(table)) == len(table), f"the table of {seq} repeats a block: {table}")
        seq = step.get("new", step.get("seq"))
        table = self.cache.table(self.rows[seq], number) if seq in self.rows else []
        _equal("num_blocks", len(_held(table)), expect.get("num_blocks", len(_held(table))))
        if "blocks" in expect:
            self._check_table(table, expect["blocks"], self.names[number])

    def _check_table(self, table: list[int], wanted: list[str | None], names: dict[str, int]) -> None:
        """Checks a block table, whose null entries were released by a window."""
        _equal("number of blocks", len(table), len(wanted))
        for block, name in zip(table, wanted, strict=True):
            where = f"blocks: got {table}, wanted {wanted}"
            _require((name is None) == (block == NO_BLOCK), f"{where}: null stands for a block that a window released")
            if name not in (None, "*"):
                named = names.setdefault(name, block)
                _require(named == block, f"{where}, where {name} is {named}")
        taken = collections.Counter(names.values())
        _require(max(taken.values(), default=0) <= 1, f"blocks: two names for one block in {names}")


def _held(table: list[int]) -> list[int]:
    return [block for block in table if block != NO_BLOCK]


def _prompt(step: dict[str, Any]) -> Prompt:
    tokens = step["tokens"]
    salt = str(step["salt"]) if "salt" in step else None  # TensorRT-LLM's are numbers
    return Prompt(tokens, step.get("extra_ids", [0] * len(tokens)), salt, step.get("lora"))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Mismatch(message)


def _equal(what: str, got: Any, wanted: Any) -> None:
    _require(got == wanted, f"{what}: got {got}, wanted {wanted}")


def scenario_files(paths: Sequence[Path]) -> list[Path]:
    """The given files, and the *.json of the given folders, sorted."""
    return [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


def run_file(path: Path, backend: str, k: int | None = None) -> tuple[str, str]:
    """Runs a file. Returns pass or fail, and a reason. With a number k, tokens are appended in blocks of k steps."""
    try:
        scenario = json.loads(path.read_text(encoding="utf-8"))
        Run(scenario, backend, k).run()
    except Mismatch as error:
        return "fail", str(error)
    except (OSError, LookupError, TypeError, ValueError) as error:  # not a scenario file
        return "fail", f"{type(error).__name__}: {error}"
    return "pass", ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a scenario file or a folder of them")
    parser.add_argument("--oracle", action="store_true", help="run the cache in plain Python instead of the library")
    args = parser.parse_args(argv)
    files = scenario_files(args.paths)
    if not files:
        parser.error(f"no *.json in {', '.join(map(str, args.paths))}")
    results: collections.Counter[str] = collections.Counter()
    for file in files:
        result, why = run_file(file, "oracle" if args.oracle else "library")
        results[result] += 1
        print(f"{result:4}  {file.stem}{': ' + why if why else ''}", flush=True)
    print(f"{results['pass']} passed, {results['fail']} failed")
    return 1 if results["fail"] else 0
