# SPDX-License-Identifier: Apache-2.0
"""The reader of XLA's thunks, on small programs compiled for an H200 whose kernels and loops are known.

`python -m tests.kernels.test_gpu_thunks` compiles them and prints what the reader finds, as a line of JSON.
"""

import functools
import json
import pathlib
import tempfile
from collections import Counter

import jax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from benchmarks import gpu
from tests.kernels import gpu_thunks
from tests.kernels.gpu_thunks import Thunk, count
from tests.kernels.toolchain import needs_toolchain, results_of

pytestmark = pytest.mark.long
MARGIN = ("one", "two", "three", "four", "five")  # a command buffer has five commands at least


def run(x, *names):
    """Kernels of these names, one after the other."""

    def kernel(x, out):
        out[0] = x[0] + 1

    for name in names:
        x = pl.pallas_call(
            kernel,
            out_shape=x,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            input_output_aliases={0: 0},
            compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
            name=name,
        )(x)
    return x


def while_small(body, x):
    return lax.while_loop(lambda x: x[0] < 100, body, x)


def nested(x):
    """Five kernels, a loop of unknown length with a loop of seven turns and a conditional in it, and a kernel."""

    def outer(x):
        x = lax.fori_loop(0, 7, lambda _, x: run(x, "turn", "also"), run(x, "before"))
        return run(lax.switch(x[1], [lambda x, name=name: run(x, name) for name in ("a", "b", "c")], x), "between")

    return run(while_small(outer, run(x, *MARGIN)), "after")


def carried(x):
    """A loop whose predicate is carried: its condition has no thunks."""

    def body(carry):
        _, x = carry
        x = run(x, "turn")
        return x[0] < 100, x

    return run(lax.while_loop(lambda carry: carry[0], body, (x[0] < 9, x))[1], "after")


def usual_and_rare(x):
    """A loop in a scope of its own, with a loop and a conditional in it, within another."""

    def body(x):
        with jax.named_scope("make_room"):
            x = while_small(lambda x: while_small(lambda x: run(x, "deep"), run(x, "inside")), run(x, "beside"))
        return run(x, "common")

    return while_small(body, x)


PROGRAMS = {
    "nested": (nested, "host"),
    "nested_buffered": (nested, "device"),
    "carried": (carried, "host"),
    "usual_and_rare": (usual_and_rare, "host"),
}


def paths(thunk, path=()):
    """The loops, branches and command buffers around each kernel of `run`, by the kernel's name."""
    found = {thunk.kernel: path} if "/pallas_call" in thunk.op_name else {}
    for label, part in thunk.parts.items():
        step = () if thunk.kind == "program" else (" ".join(filter(None, (thunk.kind, label, str(thunk.trips or "")))),)
        for inside in part:
            found |= paths(inside, path + step)
    return found


def compile_for_gpu():
    """The reader's results for each program: the paths of its kernels, and the counts without and with a rare loop."""
    from tests.kernels.gpu_compile import compile_for, i32, on_gpus, prepare

    prepare()
    for function, who in PROGRAMS.values():
        args, mesh = on_gpus("h200", {"x": 1}, (i32(8),))
        with tempfile.TemporaryDirectory() as dump:
            _, compiled = compile_for(mesh, function, args, (), dump, **gpu.DECIDES[who])
            root = gpu_thunks.read(pathlib.Path(dump), compiled.as_text())
        stops = [thunk.op_name.rsplit("/", 1)[-1] for thunk in root if thunk.stops]
        counts = {"all": count(root), "rare": count(root, ["make_room"]), "stops": stops}
        print(json.dumps({"paths": paths(root), **counts}), flush=True)


@functools.cache
def results():
    return dict(zip(PROGRAMS, results_of("tests.kernels.test_gpu_thunks"), strict=True))


LOOP = ["kWhile body"]
NESTED = {
    **{name: [] for name in MARGIN}, "before": LOOP, "turn": [*LOOP, "kWhile body 7"], "also": [*LOOP, "kWhile body 7"],
    **{name: [*LOOP, f"kConditional branch_{i}"] for i, name in enumerate("abc")}, "between": LOOP, "after": [],
}  # fmt: skip


@needs_toolchain
def test_kernels_are_found_where_they_run():
    assert results()["nested"]["paths"] == NESTED
    buffered = results()["nested_buffered"]["paths"]
    assert buffered == {name: ["kCommandBuffer", *path] for name, path in NESTED.items()}
    assert results()["carried"]["paths"] == {"turn": LOOP, "after": []}
    assert results()["usual_and_rare"]["paths"] == {
        "common": LOOP, "beside": LOOP, "inside": LOOP * 2, "deep": LOOP * 3,
    }  # fmt: skip


@needs_toolchain
def test_the_device_stops_where_the_host_decides():
    assert sorted(results()["nested"]["stops"]) == ["cond", "while"]
    assert results()["nested_buffered"]["stops"] == []
    assert results()["carried"]["stops"] == ["while"]
    for name, stops, whiles, conditionals, buffers in [
        ("nested", 2, 2, 1, 0), ("nested_buffered", 0, 2, 1, 1), ("carried", 1, 1, 0, 0),
        ("usual_and_rare", 3, 3, 0, 0),
    ]:  # fmt: skip
        counts = results()[name]["all"]
        found = [counts.get(what, 0) for what in ("stops", "whiles", "conditionals", "command_buffers")]
        assert found == [stops, whiles, conditionals, buffers], (name, counts)


@needs_toolchain
def test_counted_loops_launch_as_often_as_they_turn():
    counts = results()["nested"]["all"]
    # 13 kernels of this file, two of them seven times, and XLA's own. Those for the loop's counter turn too.
    assert counts["kernels"] >= 13 and counts["launches"] >= 13 + 2 * 6
    own = counts["kernels"] + counts["copies"] - 13
    assert counts["launches"] - 13 - 2 * 6 - own in range(6 * own + 1)


@needs_toolchain
def test_what_is_in_rare_loops_is_counted_apart():
    """The loop itself is counted: it asks the host, and evaluates its condition once."""
    usual, rare = results()["usual_and_rare"]["all"], results()["usual_and_rare"]["rare"]
    assert (usual["stops"], rare["stops"], rare["whiles"]) == (3, 2, 2)
    assert usual.get("rare", 0) == 0 and rare["rare"] >= 2
    assert usual["kernels"] == rare["kernels"] + rare["rare"]


def tree(*kinds):
    """The labels and kinds in a part of a tree."""
    return [(thunk.kind, {label: tree(*part) for label, part in thunk.parts.items()}) for thunk in kinds]


TEXT = """\
001: kWhile         [source | next=005 (1)] \n\
condition:
    No thunks.  body:
    003: kConditional [source | sink ]     \n\
      false_branch:
        No thunks.      true_branch:
        004: kCopy [source | sink] kCopy
000: kCommandBuffer [prev=001 (1) | sink ] \n\
    006: kWhile [source | sink]     \n\
condition:
        007: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
      body:
        008: kGemm [source | sink] kGemm
009: kCopy [source | sink] kCopy
"""


def test_indentation_and_labels_make_a_tree():
    root = gpu_thunks.parse(TEXT)
    conditional = ("kConditional", {"false_branch": [], "true_branch": [("kCopy", {})]})
    loop = ("kWhile", {"condition": [("kCustomKernel", {})], "body": [("kGemm", {})]})
    assert tree(*root.parts[""]) == [
        ("kWhile", {"condition": [], "body": [conditional]}),
        ("kCommandBuffer", {"": [loop]}),
        ("kCopy", {}),
    ]
    assert [thunk.kernel for thunk in root if thunk.kernel] == ["compare"]
    assert [thunk.number for thunk in root if thunk.buffered] == [6, 7, 8]
    counted = {
        "stops": 2,
        "kernels": 2,
        "copies": 2,
        "whiles": 2,
        "conditionals": 1,
        "command_buffers": 1,
        "launches": 4,
    }
    assert {what: number for what, number in count(root).items() if number} == counted


def test_unknown_kinds_count_as_kernels():
    root = Thunk("program", parts={"": [Thunk(kind) for kind in ("kNccl", "kSequential", "kMemzero")]})
    assert count(root) == Counter(kernels=1, copies=1, launches=2)


def test_what_is_not_understood_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="not understood: 'kWhile in new words'"):
        gpu_thunks.parse("001: kCopy [source] kCopy\nkWhile in new words\n")
    (tmp_path / "m.thunk_sequence.txt").write_text("001: kCopy [source | sink] kCopy\n002: kWhile [sink] \n")
    metadata = 'thunk_info {\n    profile_annotation: "%s"\n    thunk_id: %d\n  }\n'
    (tmp_path / "m.thunk_metadata.txt").write_text(metadata % ("copy.1", 1) + metadata % ("while.2", 3))
    with pytest.raises(ValueError, match=r"thunks \[2, 3\]: not in both"):
        gpu_thunks.read(tmp_path, "")
    (tmp_path / "m.thunk_metadata.txt").write_text(metadata % ("copy.1", 1) + metadata % ("while.2", 2))
    with pytest.raises(ValueError, match="thunk 2: a loop, but the HLO says"):
        gpu_thunks.read(tmp_path, "  %while.2 = s32[] copy(%x)\n")
    hlo = '  %while.2 = s32[] while(%x), metadata={op_name="f/while"}, backend_config={"known_trip_count":{"n":"3"}}\n'
    assert [(thunk.op_name, thunk.trips) for thunk in gpu_thunks.read(tmp_path, hlo)] == [("", None)] * 2 + [
        ("f/while", 3)
    ]


if __name__ == "__main__":
    compile_for_gpu()
