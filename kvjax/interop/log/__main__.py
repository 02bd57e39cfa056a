# SPDX-License-Identifier: Apache-2.0
"""Prints a report of a file of events: counts, reuse, lifetimes, and what was stored again after it had been evicted.

python -m kvjax.interop.log events.jsonl --plot events.png
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from kvjax.interop.log.plot import plot
from kvjax.interop.log.report import report


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.interop.log", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=pathlib.Path, help="what Log or models.generate --events wrote")
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path, help="draw it there")
    args = parser.parse_args(arguments)
    try:
        with args.file.open(errors="replace") as lines:
            found = report(lines)
        print(found)
        if args.plot is not None:
            plot(found, args.plot)
    except (OSError, ValueError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
