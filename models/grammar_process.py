# SPDX-License-Identifier: Apache-2.0
"""The program of a process for the tables of grammars: lines of JSON come in, and a line goes out for each.

A grammar is a client's, and its tables take Python's time, which the server's threads need. So they are made in a
process with the system's limits: see `limited_process.py`. It imports nothing of this package, and of `kvjax` only the
grammars, which need numpy alone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
import resource
import signal
import sys
import types
from typing import Any

MOST_REASON = 1000  # characters of an error, which may have a part of the grammar


def answers(grammar: Any, seconds: float) -> None:
    """Answers the lines of standard input.

    First comes {"tokens": latin-1 of each token's bytes, or null; "limits": arguments of the compilers}, then
    {"kind": name, "text": JSON of what `compile_NAME` takes} each. An answer has an error, or the arrays of a table,
    i16 but for `may_end`. More CPU time than `seconds` for a line ends the process.
    """
    vocabulary, limits = None, {}
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            request = json.loads(line)
            if vocabulary is None:
                tokens = [None if token is None else token.encode("latin-1") for token in request["tokens"]]
                vocabulary, limits, answer = grammar.Vocabulary(tokens), request["limits"], {}
            else:
                compiler = getattr(grammar, f"compile_{request['kind']}")
                table = compiler(json.loads(request["text"]), vocabulary, **limits)
                arrays = table._replace(
                    next_state=table.next_state.astype("<i2"), token_class=table.token_class.astype("<i2")
                )
                answer = {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays._asdict().items()}
        except grammar.GrammarError as error:
            answer = {"error": str(error)[:MOST_REASON]}
        except MemoryError:
            answer = {"error": f"{request['kind']}: it needs more memory than it may have"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program around it
    most_bytes = int(sys.argv[2])
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    package = types.ModuleType("kvjax")  # without its own imports: jax takes seconds and memory
    package.__path__ = [str(pathlib.Path(sys.argv[3]))]
    sys.modules["kvjax"] = package
    from kvjax import grammar

    answers(grammar, float(sys.argv[1]))
