# SPDX-License-Identifier: Apache-2.0
"""Measures attention kernels without a GPU: `python -m tests.kernels.gpu_kernels [CASE ...]`.

Prints a line for each kernel of the cases of `gpu_compile`, or with --json its measurements: registers and spills, the
programs which fit on a multiprocessor at once, and the first of its loops with matrix products, which has no masks.
`instructions_32kb` counts the instructions of all warps for 32 KB of K/V, and `in_flight` the groups of asynchronous
copies which go on while the loop waits for a group. tests/data/gpu_budgets.json bounds them. Needs the packages of
scripts/gpu_toolchain.sh on PYTHONPATH.
"""

import argparse
import json

from tests.kernels.gpu_compile import CASES, TARGETS, measure, prepare

SHOWN = (
    "registers", "stack", "spills", "resident", "instructions_32kb", "loop_instructions", "loop_global_loads",
    "loop_byte_loads", "loop_slow_conversions", "loop_barriers",
    "loop_in_flight",
)  # fmt: skip


def main() -> None:
    names = [case for case in CASES if "decode" in case or "prefill" in case]
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.gpu_kernels", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--target", choices=TARGETS, default="h200")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each kernel")
    args = parser.parse_args()
    if not args.json:
        print(f"{args.target:54}", *(name.removeprefix("loop_") for name in SHOWN))
    for case in args.cases or names:
        if args.target != "h200" and case.startswith("mosaic"):
            continue
        for kernel, counts in measure(args.target, case)["kernels"].items():
            if "loop_instructions" not in counts:
                continue
            if args.json:
                print(json.dumps({"case": case, "kernel": kernel, **counts}), flush=True)
            else:
                cells = (f"{counts.get(name, '-'):>{len(name.removeprefix('loop_'))}}" for name in SHOWN)
                print(f"{case:28} {kernel:25}", *cells, flush=True)


if __name__ == "__main__":
    prepare()
    main()
