# SPDX-License-Identifier: Apache-2.0
"""Compares the hashes of the verbs' programs with another commit: `python scripts/fingerprint.py COMMIT`.

A pure refactoring leaves each program as it is, so you have to explain every difference. For each changed program, the
script prints the difference in operations of each kind.
"""

import argparse
import collections
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS, WIDTH = 4, 24
SPECS = {
    "plain": {},
    "extra ids": {"extra_ids": True},
    "retention": {"retention": True},
    "windows": {"windows": True},
    "host": {"num_host_blocks": 8},
    "thinning": {"thinning": True, "windows": True},
    "all of it": {"extra_ids": True, "retention": True, "windows": True, "num_host_blocks": 8},
}


def main() -> int:
    """Compares this tree with a commit, or prints the result of `lowered`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", help="compare with this; without it print this tree's programs as JSON")
    commit = parser.parse_args().commit
    if commit is None:
        json.dump(lowered(), sys.stdout)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
        try:
            processes = [_start(pathlib.Path(folder)), _start(ROOT)]
            outputs = [process.communicate()[0] for process in processes]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)
    if any(process.returncode for process in processes):
        return 1
    return report(*map(json.loads, outputs))


def _start(tree: pathlib.Path) -> subprocess.Popen[str]:
    """Lowers a tree's programs with this file, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([sys.executable, __file__], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)


def report(before: dict, after: dict) -> int:
    """Prints the changed programs and their differences. Returns 1 if any program has changed."""
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    for name in changed:
        if name not in before or name not in after:
            print(f"{name}: {'new' if name in after else 'gone'}")
            continue
        old, new = (collections.Counter(programs[name]["operations"]) for programs in (before, after))
        kinds = {kind: new[kind] - old[kind] for kind in sorted({*old, *new}) if new[kind] != old[kind]}
        changes = ", ".join(f"{kind} {by:+d}" for kind, by in kinds.items()) or "the same operations in another order"
        print(f"{name}: {old.total()} operations, {new.total() - old.total():+d}: {changes}")
    print(f"{len({*before, *after}) - len(changed)} programs are equal, {len(changed)} differ")
    return min(len(changed), 1)


def lowered() -> dict[str, dict]:
    """Each program's hash and its number of operations of each kind, for the importable kvjax."""
    import jax

    import kvjax

    programs = {}
    known = {*inspect.signature(kvjax.make_spec).parameters, "windows"}
    for spec_name, options in SPECS.items():
        if not options.keys() <= known:  # an older tree
            continue
        for verb, fn, args in programs_of(**options):
            text = re.sub(r'jax\.result_info = "[^"]*"', "", jax.jit(fn).lower(*args).as_text())  # names of fields
            kinds = collections.Counter(re.findall(r"= \"?([a-z_]+\.[a-z_]+|call)\b", text))
            programs[f"{spec_name}: {verb}"] = {
                "hash": hashlib.sha256(text.encode()).hexdigest(), "operations": kinds
            }  # fmt: skip
    return programs


def programs_of(windows: bool = False, num_host_blocks: int = 0, **options):
    """(name, function, shapes of its arguments) of every verb in the tree for a spec."""
    import jax
    import jax.numpy as jnp

    import kvjax

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    layers = [kvjax.LayerSpec(1, 8), *([kvjax.LayerSpec(1, 8, 6, 3)] if windows else [])]
    spec = kvjax.make_spec(
        layers, num_blocks=16, num_host_blocks=num_host_blocks, max_seqs=ROWS, max_length=WIDTH, block_size=4, **options
    )
    state = jax.eval_shape(lambda: kvjax.init(spec))
    rows, texts, flags = i32(ROWS), i32(ROWS, WIDTH), jax.ShapeDtypeStruct((ROWS,), jnp.bool_)
    one = {"extra_ids": i32(WIDTH)} if spec.extra_ids else {}
    several = {"extra_ids": texts} if spec.extra_ids else {}
    retention = {"retention": jax.eval_shape(lambda: kvjax.Retention.of([(0, 4, 80, 9)]))} if spec.retention else {}
    requests = {
        "init": ((), {}),
        "admit": ((i32(), i32(WIDTH), i32()), one | retention),
        "admit several": ((rows, texts, rows), several),
        "adopt": ((i32(WIDTH), i32(), jax.ShapeDtypeStruct((WIDTH // 4,), jnp.bool_)), one),
        "lookup": ((i32(WIDTH), i32()), one),
        "extend": ((flags,), {}),
        "extend by 6": ((flags, rows), {"max_tokens": 6}),
        "extend some": ((flags, rows), {"max_tokens": 6, "seqs": rows}),
        "commit": ((texts, rows), several),
        "fork": ((i32(), i32()), {}),
        "truncate": ((i32(), i32()), {}),
        "trim": ((flags,), {"max_tokens": 4}),
        "release": ((i32(),), {}),
        "release several": ((rows,), {}),
        "beam_step": ((rows, rows), {}),
        **{verb: ((rows,), {}) for verb in ("pin", "unpin", "evict", "forget_namespaces")},
        "reset": ((), {}),
    }
    if num_host_blocks:
        both = {"tiers": ("device", "host")}
        requests |= {
            "admit over tiers": ((i32(), i32(WIDTH), i32()), one | both),
            "extend over tiers": ((flags,), both),
            "adopt over tiers": ((i32(WIDTH), i32(), jax.ShapeDtypeStruct((WIDTH // 4,), jnp.bool_)), one | both),
            **{verb: ((rows,), {}) for verb in ("offload", "onboard")},
            "watermark": ((i32(),), {"max_blocks": 5}),
            **{verb: ((i32(),), {}) for verb in ("swap_out", "swap_in")},
        }
    if options.get("thinning"):
        requests["thin"] = ((i32(), jax.ShapeDtypeStruct((WIDTH // 4,), jnp.bool_)), {})
    for name, (args, kwargs) in requests.items():
        verb = _find(name.split()[0])
        if verb is None or not kwargs.keys() <= inspect.signature(verb).parameters.keys():
            continue
        if name == "init":
            yield name, lambda verb=verb: verb(spec), ()
            continue
        arrays = {key: kwargs.pop(key) for key in ("extra_ids", "retention", "seqs") if key in kwargs}
        yield name, lambda arrays, *args, verb=verb, kw=kwargs: verb(*args, **arrays, **kw), (arrays, state, *args)
        if name == "adopt":
            _, events = jax.eval_shape(verb, state, *args, **arrays)
            finish = _find("finish_adoption")
            if finish is not None:
                yield "finish_adoption", finish, (state, events.adopted, args[2])
        if name == "admit over tiers":
            _, events = jax.eval_shape(lambda arrays, *args, v=verb, kw=kwargs: v(*args, **arrays, **kw),
                                       arrays, state, *args)  # fmt: skip
            yield "complete", _find("complete"), (state, events.transfer, jax.ShapeDtypeStruct((), jnp.bool_))


def _find(name: str):
    """The verb of this name anywhere in the tree, or None."""
    for path in ("kvjax", "kvjax.tiers", "kvjax.stores"):
        if importlib.util.find_spec(path) and hasattr(importlib.import_module(path), name):
            return getattr(importlib.import_module(path), name)
    return None


if __name__ == "__main__":
    sys.exit(main())
