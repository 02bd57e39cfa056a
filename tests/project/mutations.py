# SPDX-License-Identifier: Apache-2.0
"""Small mistakes, planted in turn in a copy of the tree. Tests have to notice each of them.

    python -m tests.project.mutations                # all of them; `make test-mutations`
    python -m tests.project.mutations extend release # mistakes with these words in their file or text

A mistake changes source text which occurs once. It survives if its tests pass, and then a test is missing. If the
library changes and moves the text, plant the mistake anew: `test_mutations.py` names the lost mistakes.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
COPIED = "kvjax", "models", "pallas_kernels", "benchmarks", "scripts", "tests", "docs", "pyproject.toml", "README.md"
TIMEOUT = 900  # seconds; a mistake may make a loop endless, which is noticed too
MACHINE = "tests/oracle/test_machine.py"
BYTES = "tests/oracle/test_bytes.py"
SCENARIOS = "tests/oracle/test_scenarios.py"
CONTRACT = "tests/unit/serving/test_contract.py"


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
      what: the fault, in words.
      file: a file of kvjax, or of the tree.
      old: source text, which the file has once.
      new: the text in its place.
      tests: the arguments of pytest which notice it.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str


MISTAKES = [
    # Verbs.
    Mistake(
        "a row never gets its last block",
        "kvjax/verbs/extend.py",
        "full = active & (-(-grown // block_size) > spec.max_blocks_per_seq)",
        "full = active & (-(-grown // block_size) >= spec.max_blocks_per_seq)",
        MACHINE,
    ),
    Mistake(
        "a block too many for rows that end with one",
        "kvjax/verbs/extend.py",
        "beyond = (columns * block_size < grown[:, None])",
        "beyond = (columns * block_size <= grown[:, None])",
        MACHINE,
    ),
    Mistake(
        "a shared block is copied without the tokens in it",
        "kvjax/verbs/extend.py",
        "lambda group: copy_text(group, ids[:, 0], old_block, copies), groups[0]",
        "lambda group: group, groups[0]",
        MACHINE,
    ),
    Mistake(
        "parents leave before their children",
        "kvjax/verbs/release.py",
        "table[::-1], (ok & (table >= 0))[::-1], now)",
        "table, (ok & (table >= 0)), now)",
        "tests/unit/verbs/test_order_of_release.py",
    ),
    Mistake(
        "a tail is published while others write it",
        "kvjax/verbs/release.py",
        "(pick(blocks.refcount, tail) == 1) & (pick(blocks.fill, tail) == 0)",
        "(pick(blocks.fill, tail) == 0)",
        MACHINE,
    ),
    Mistake(
        "a row that is swapped out may be written",
        "kvjax/verbs/commit.py",
        "    bad = bad | ((num_tokens > 0) & pick(state.seqs.swapped_out, rows))\n",
        "",
        "tests/unit/test_tiers.py -k move",
    ),
    Mistake(
        "negative tokens are stored",
        "kvjax/verbs/commit.py",
        "    bad = bad | some((num_tokens[:, None] > steps) & (tokens < 0))\n",
        "",
        "tests/unit/verbs/test_errors.py tests/unit/verbs/test_protocol.py " + MACHINE,
    ),
    Mistake(
        "a cut keeps a block too many",
        "kvjax/verbs/truncate.py",
        "num_columns = -(-length // block_size)",
        "num_columns = length // block_size + 1",
        MACHINE,
    ),
    Mistake(
        "a cut takes a block out of the index that others hold",
        "kvjax/verbs/truncate.py",
        "ok & (length % block_size > 0) & alone)",
        "ok & (length % block_size > 0))",
        MACHINE,
    ),
    Mistake(
        "a fork counts no holder",
        "kvjax/verbs/fork.py",
        "refcount = add(group.blocks.refcount, table, 1, ok & (table >= 0))",
        "refcount = group.blocks.refcount",
        MACHINE,
    ),
    Mistake(
        "a beam gives a row back that two go on with",
        "kvjax/verbs/fork.py",
        "jnp.broadcast_to(1 - num_heirs, table.T.shape)",
        "jnp.broadcast_to(num_heirs * 0, table.T.shape)",
        MACHINE,
    ),
    Mistake(
        "a row comes back while its blocks are on the move",
        "kvjax/verbs/swap.py",
        "return _finish(state, after, seq, False, taken, removed, (bad, Status.BAD_REQUEST), (moving, Status.HELD))",
        "return _finish(state, after, seq, False, taken, removed, (bad, Status.BAD_REQUEST))",
        "tests/unit/test_tiers.py -k move",
    ),
    Mistake(
        "blocks whose move failed stay findable",
        "kvjax/verbs/offload.py",
        "lost = is_among(group.ids.size, ids, current & ~ok) | overwritten",
        "lost = overwritten",
        SCENARIOS + " " + BYTES,
    ),
    # Blocks.
    Mistake(
        "an empty block is taken twice",
        "kvjax/blocks/take.py",
        "from_stack_ids = pick(group.empty, group.num_empty - 1 - index)",
        "from_stack_ids = pick(group.empty, group.num_empty - 1 - index // 2)",
        MACHINE,
    ),
    Mistake(
        "evicted blocks are counted as cached",
        "kvjax/blocks/take.py",
        "num_cached=group.num_cached - num_victims,",
        "num_cached=group.num_cached,",
        MACHINE,
    ),
    Mistake(
        "a prompt is found whole, so that no logits come",
        "kvjax/blocks/match.py",
        "& (np.arange(num_blocks, dtype=np.int32) < (length - 1) // block_size)",
        "& (np.arange(num_blocks, dtype=np.int32) < length // block_size)",
        "tests/unit/blocks/test_copy_on_write.py",
    ),
    Mistake(
        "blocks that have not arrived are found",
        "kvjax/blocks/match.py",
        "        & group.reachable(ids, tiers)\n",
        "",
        SCENARIOS + " " + BYTES,
    ),
    Mistake(
        "two namespaces share keys",
        "kvjax/blocks/keys.py",
        "return mix(namespace.astype(jnp.uint32)[..., None] + _last_axes(LANES, namespace.ndim + 1))",
        "return mix((namespace * 0).astype(jnp.uint32)[..., None] + _last_axes(LANES, namespace.ndim + 1))",
        MACHINE,
    ),
    Mistake(
        "a collision of keys gives another text's blocks",
        "kvjax/blocks/match.py",
        "        same_content(blocks, ids, text)\n        & jnp.all(",
        "        (ids >= 0)\n        & jnp.all(",
        "tests/unit/blocks/test_collisions.py",
    ),
    Mistake(
        "extra ids are left out of keys",
        "kvjax/blocks/keys.py",
        "return words if text.extra_ids is None else words + mix(text.extra_ids.astype(jnp.uint32))",
        "return words",
        "tests/unit/blocks " + MACHINE,
    ),
    Mistake(
        "equal blocks are published twice",
        "kvjax/blocks/dedup.py",
        "publish = ok & (cached < 0) & is_first\n    merge = ok & (target != block)",
        "publish = ok & (cached < 0)\n    merge = ok & (target != block) & ~is_first",
        MACHINE,
    ),
    Mistake(
        "a block that two rows give back is emptied while a third holds it",
        "kvjax/blocks/holders.py",
        "refcount, last = last_of_each(refcount, ids, freed)",
        "refcount, last = last_of_each(refcount, ids, where)",
        MACHINE,
    ),
    Mistake(
        "the oldest of equal children is copied",
        "kvjax/blocks/index.py",
        "better = length > shared",
        "better = (length > 0) & (length >= shared)",
        MACHINE + " tests/unit/blocks/test_index.py",
    ),
    Mistake(
        "a window keeps a block too few",
        "kvjax/blocks/windows.py",
        "leave = (ids >= 0) & ~spec.keeps(columns, end[:, None], block_size)",
        "leave = (ids >= 0) & ~spec.keeps(columns, end[:, None] + 1, block_size)",
        MACHINE,
    ),
    Mistake(
        "a window group's block is linked twice",
        "kvjax/blocks/windows.py",
        "missing = accepted & dedup.first & (group.in_this_group(dedup.target) < 0)",
        "missing = accepted & (group.in_this_group(dedup.target) < 0)",
        MACHINE,
    ),
    # Pools.
    Mistake(
        "a block comes back after an offload has overwritten it",
        "kvjax/pools/host.py",
        "early = np.isin(to_device[:, 0], to_host[:, 1])",
        "early = np.zeros(len(to_device), bool)",
        "tests/unit/pools/test_host_pool.py " + BYTES,
    ),
    Mistake(
        "padding is written into a block",
        "kvjax/pools/views.py",
        "slots.append(jnp.where(is_token, pool_row, group.num_blocks) * size + positions % size)",
        "slots.append(pool_row * size + positions % size)",
        "tests/unit/pools " + BYTES,
    ),
    Mistake(
        "a row sees a token too few",
        "kvjax/pools/views.py",
        "lengths = jnp.where(count > 0, start + count, 0)",
        "lengths = jnp.where(count > 0, start + count - 1, 0)",
        "tests/unit/pools",
    ),
    # Events.
    Mistake(
        "a log that is full overwrites what it has",
        "kvjax/events/log.py",
        "where = is_event & (index < log.records.shape[0])",
        "index, where = index % log.records.shape[0], is_event",
        "tests/unit/events",
    ),
    Mistake(
        "a listener that failed gets later events",
        "kvjax/events/listeners.py",
        "if standing.is_behind and not _begins_anew(events):",
        "if False:",
        CONTRACT + " tests/unit/interop/test_failing.py",
    ),
    Mistake(
        "moves to the host are counted as moves back",
        "kvjax/events/totals.py",
        "(moves.block >= 0) & (moves.target > moves.source))",
        "(moves.block >= 0) & (moves.target < moves.source))",
        "tests/unit/debug/test_show_tiers.py",
    ),
    # Stores.
    Mistake(
        "a value with a flipped bit is read",
        "kvjax/stores/values.py",
        'if zlib.crc32(view[:-_CRC]) != struct.unpack("<I", view[-_CRC:])[0]:',
        "if False:",
        "tests/unit/stores/test_values.py tests/unit/stores/test_disk.py",
    ),
    Mistake(
        "the name of a value has no layout",
        "kvjax/stores/values.py",
        'self._folders = [f"{self.layout.hex()}-{group_index}-{size}"',
        "self._folders = [f\"{'0' * 16}-{group_index}-{size}\"",
        "tests/unit/stores",
    ),
    Mistake(
        "a manifest with another checksum is read",
        "kvjax/stores/manifest.py",
        'if manifest.get("crc32") != checksum:',
        "if False:",
        "tests/unit/stores/test_broken.py tests/unit/stores/test_file.py",
    ),
    Mistake(
        "a store grows without end",
        "kvjax/stores/disk.py",
        "if arrays is None or not self._evict_for(size):",
        "if arrays is None:",
        "tests/unit/stores/test_disk.py",
    ),
    # Serving.
    Mistake(
        "a cancelled request goes on",
        "kvjax/serving/driver.py",
        "self._slots.ends(cancelled)",
        "self._slots.ends(())",
        "tests/unit/serving/test_live_engine.py",
    ),
    Mistake(
        "the next request of a slot cannot be cancelled",
        "kvjax/serving/driver.py",
        "self._release(job, result.generation[slot] + 1)",
        "self._release(job, result.generation[slot])",
        "tests/unit/serving/test_live_engine.py",
    ),
    Mistake(
        "samples of a prompt are equal",
        "kvjax/serving/request.py",
        "return [(operator.index(seed) + sample) % 2**32 for sample in range(self.samples)]",
        "return [operator.index(seed) % 2**32 for _ in range(self.samples)]",
        CONTRACT,
    ),
    Mistake(
        "the events of a loop are lost where the next one runs",
        "kvjax/serving/interrupt.py",
        "while len(self.unpublished) > keep:",
        "while self.unpublished:",
        CONTRACT + " tests/unit/serving/test_listener.py",
    ),
    Mistake(
        "an interrupt leaves rows in use",
        "kvjax/serving/interrupt.py",
        "                self.release_rows()\n",
        "",
        CONTRACT,
    ),
    Mistake(
        "salts are given back while requests have them",
        "kvjax/serving/engine_thread.py",
        "self.inbox.give_back(cached | {job.namespace for job in jobs})",
        "self.inbox.give_back(cached)",
        "tests/unit/serving/test_live_engine.py",
    ),
    Mistake(
        "rows that go on over old K/V publish their blocks",
        "kvjax/serving/park.py",
        "doomed = descendants(group.blocks, is_in_row & (group.blocks.fill > 0))",
        "doomed = descendants(group.blocks, is_in_row & (group.blocks.fill < 0))",
        "tests/unit/serving/test_park.py",
    ),
    Mistake(
        "a parked canonical request keeps tokens whose K/V another program computes",
        "kvjax/serving/park.py",
        "if kept is None and scheduler.canonical:",
        "if kept is None and scheduler is None:",
        "tests/unit/serving/test_park.py",
    ),
    Mistake(
        "new weights find K/V of old weights",
        "kvjax/serving/changes.py",
        "namespace[slot] = thread.space_of(job, change.weights)",
        "namespace[slot] = thread.space_of(job, thread.inbox.weights)",
        "tests/unit/serving/test_park.py",
    ),
    Mistake(
        "top-k leaves a token too many",
        "kvjax/serving/sampling.py",
        "(sampling.top_k < size), sampling.top_k, size) - 1",
        "(sampling.top_k < size), sampling.top_k + 1, size) - 1",
        "tests/unit/serving/test_sampling.py",
    ),
    # Grammars.
    Mistake(
        "ways that the tokens cannot complete are allowed",
        "kvjax/grammar/tokens.py",
        "if not single_bytes <= {0, *used.tolist()}:",
        "if not used.tolist():",
        "tests/unit/grammar/test_regex.py",
    ),
    Mistake(
        "a number may be equal to a strict bound",
        "kvjax/grammar/numerals.py",
        "after = seq(_POINT, not_zero) if bound.strict else optional(_FRACTION)",
        "after = optional(_FRACTION)",
        "tests/unit/grammar/test_schema.py",
    ),
    Mistake(
        "the first property may not be absent",
        "kvjax/grammar/automaton.py",
        "self.jumps[first].append(next_first)",
        "pass",
        "tests/unit/grammar/test_schema.py",
    ),
    Mistake(
        "an additional property has the name of another one",
        "kvjax/grammar/json_schema.py",
        "name = minus(both(NAME, *allowed), declared)",
        "name = both(NAME, *allowed)",
        "tests/unit/grammar/test_schema.py",
    ),
    Mistake(
        "an array may end before its least number of items",
        "kvjax/grammar/json_schema.py",
        "tail = tail if index < minimum else optional(tail)",
        "tail = optional(tail)",
        "tests/unit/grammar/test_schema.py",
    ),
    Mistake(
        "half of a character may be followed by any byte",
        "kvjax/grammar/expressions.py",
        "yield seq(*(_byte_range(low, high) for low, high in zip(begin, end, strict=True)))",
        "yield seq(*(_byte_range(min(low, 128), high) for low, high in zip(begin, end, strict=True)))",
        "tests/unit/grammar/test_regex.py",
    ),
    Mistake(
        "a penalty comes a token late",
        "kvjax/serving/penalties.py",
        "jnp.maximum(end - 1, 0)",
        "end",
        "tests/unit/serving/test_penalties.py",
    ),
    Mistake(
        "a repetition penalty counts the answer alone",
        "kvjax/serving/penalties.py",
        "token_index < num_prompt[:, None]) > 0",
        "token_index < 0) > 0",
        "tests/unit/serving/test_penalties.py",
    ),
    Mistake(
        "a min-p is a share of all probability",
        "kvjax/serving/sampling.py",
        "jnp.max(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)",
        "jax.nn.logsumexp(logits, axis=-1, keepdims=True) + jnp.log(sampling.min_p)",
        "tests/unit/serving/test_sampling.py",
    ),
    Mistake(
        "the last token of a prompt is one of the answer's",
        "kvjax/serving/constraints.py",
        "current = jnp.where(is_first, current, jnp.maximum(after, _END))",
        "current = jnp.maximum(after, _END)",
        "tests/unit/serving/test_constraints.py",
    ),
    Mistake(
        "a stop token may come before a text is complete",
        "kvjax/serving/constraints.py",
        "inner[table.may_end, _STOP_CLASS] = _END",
        "inner[:, _STOP_CLASS] = _END",
        "tests/unit/serving/test_constraints.py",
    ),
    # Wires and models.
    Mistake(
        "a snapshot's messages are not counted",
        "kvjax/interop/vllm/publisher.py",
        "self._history.restart(nodes, self._next + len(payloads))",
        "self._history.restart(nodes, self._next)",
        "tests/unit/interop/test_contract.py tests/unit/interop/test_wire.py",
    ),
    Mistake(
        "the queue of a wire has no end",
        "kvjax/interop/hub.py",
        "elif self._queued + size <= self._queue_bytes:",
        "elif True:",
        "tests/unit/interop/test_contract.py",
    ),
    Mistake(
        "angles begin at 1",
        "models/rope.py",
        "sin = jnp.sin(angle)",
        "sin = jnp.sin(angle + 1e-3)",
        "tests/models/test_goldens.py",
    ),
    Mistake(
        "impossible tokens have no number in JSON",
        "models/echo.py",
        "return logprob if math.isfinite(logprob) else IMPOSSIBLE",
        "return logprob",
        "tests/models/test_serve_requests.py",
    ),
    Mistake(
        "the first scored token of a prompt may be found in the cache",
        "kvjax/serving/prompt_scores.py",
        "row[None], prompt[None, :width], first[None], namespace",
        "row[None], prompt[None, :width], end[None], namespace",
        "tests/unit/serving/test_prompt_scores.py",
    ),
]


def source(mistake: Mistake, root: pathlib.Path = ROOT) -> str:
    """The text of the file with the mistake in it. Raises a ValueError unless it has the old text once."""
    text = (root / mistake.file).read_text()
    if text.count(mistake.old) != 1:
        raise ValueError(f"{mistake.file}: has {mistake.old!r} {text.count(mistake.old)} times, wanted once")
    return text.replace(mistake.old, mistake.new)


def plant(mistake: Mistake) -> tuple[bool, str, float]:
    """Runs a mistake's tests in a copy of the tree. Returns whether they noticed it, the last line, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        copy, began = pathlib.Path(folder), time.monotonic()
        for name in COPIED:
            path = ROOT / name
            copying = shutil.copytree if path.is_dir() else shutil.copy2
            copying(path, copy / name)
        (copy / mistake.file).write_text(source(mistake))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
        command += ["-n", "0", "-m", "not slow and not gpu"]
        environment = {**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_PROFILE": "planted"}
        try:
            done = subprocess.run(
                [*command, *mistake.tests.split()], cwd=copy, env=environment, capture_output=True, text=True,
                timeout=TIMEOUT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return True, "no end", time.monotonic() - began
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.returncode not in (0, 1) and not failed:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return done.returncode == 1, (failed or ["all passed"])[0][:110], time.monotonic() - began


def main(words: list[str]) -> int:
    """Plants the mistakes chosen by these words, and prints a line for each. Returns the number of survivors."""
    survived = 0
    for mistake in MISTAKES:
        if words and not any(word in mistake.file or word in mistake.what for word in words):
            continue
        is_noticed, line, seconds = plant(mistake)
        survived += not is_noticed
        print(f"{'noticed ' if is_noticed else 'SURVIVED'} {seconds:4.0f} s  {mistake.file}: {mistake.what}  [{line}]")
        sys.stdout.flush()
    print(f"{survived} survived")
    return survived


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
