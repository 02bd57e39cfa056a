# SPDX-License-Identifier: Apache-2.0
"""A program which compiles grammars to tables. It reads lines of JSON, and answers each with a line.

Clients send grammars, and compiling them would block the server's threads. So a separate process with limits compiles
them, as `limited_process.py` describes. It imports nothing from this package, and from `kvjax` only `kvjax.grammar`,
which needs only numpy.
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

MAX_REASON = 1000  # characters of an error, which may quote the grammar


def answers(grammar: Any, seconds: float) -> None:
    """Answers the lines of standard input.

    The first line is {"tokens": [...], "limits": {...}}. Each token is its bytes as latin-1, or null. The limits are
    arguments of the compilers. Each later line is {"kind": name, "text": JSON}, with the argument of `compile_NAME` as
    JSON. An answer has an error or the arrays of a table: `may_end` is bool, and the other arrays are i16. The process
    ends if a line takes more CPU time than `seconds`.
    """
    vocabulary = None
    limits = {}
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            request = json.loads(line)
            if vocabulary is None:
                tokens = [None if token is None else token.encode("latin-1") for token in request["tokens"]]
                vocabulary = grammar.Vocabulary(tokens)
                limits = request["limits"]
                answer = {}
            else:
                compiler = getattr(grammar, f"compile_{request['kind']}")
                table = compiler(json.loads(request["text"]), vocabulary, **limits)
                arrays = table._replace(
                    next_state=table.next_state.astype("<i2"), token_class=table.token_class.astype("<i2")
                )
                answer = {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays._asdict().items()}
        except grammar.GrammarError as error:
            answer = {"error": str(error)[:MAX_REASON]}
        except MemoryError:
            answer = {"error": f"{request['kind']}: it needs more memory than it may have"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    max_bytes = int(sys.argv[2])
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    package = types.ModuleType("kvjax")  # without the imports in its __init__: jax takes seconds and memory
    package.__path__ = [str(pathlib.Path(sys.argv[3]))]
    sys.modules["kvjax"] = package
    from kvjax import grammar

    answers(grammar, float(sys.argv[1]))
