# SPDX-License-Identifier: Apache-2.0
"""The program of a process that renders one chat template: lines of JSON come in, and a line goes out for each.

A template is code of whoever made the checkpoint. Jinja's sandbox keeps it from files and from Python's insides, but
not from endless loops and huge values, which the compiler computes too. So it has a process of its own, with the
system's limits: memory that it cannot get is an error, and a timer of CPU time ends the process. `chat.py` starts it,
and it imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import signal
import sys
from typing import Any

import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension

MOST_CHARACTERS = 16 << 20  # of a rendered text
MOST_REASON = 500  # characters of an error, which may be the template's own


class Generation(Extension):
    """The tag around texts of the assistant. Training needs to know where they are, and rendering leaves them alone."""

    tags = {"generation"}  # noqa: RUF012, jinja's interface

    def parse(self, parser: Any) -> nodes.Node:
        """The body, as a block with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def compiled(text: str) -> jinja2.Template:
    """The template, as `apply_chat_template` of transformers compiles it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(text)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter escapes HTML; the arguments have the order of transformers' filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def answers(seconds: float) -> None:
    """Answers the lines of standard input: first {"template": text}, then {"values": names with values} each.

    An answer is {"text": text} or {"error": reason}. A line that takes more CPU time than `seconds` ends the process.
    """
    template = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            request = json.loads(line)
            if template is None:
                template, text = compiled(request["template"]), ""
            else:
                text = template.render(request["values"])
            if len(text) > MOST_CHARACTERS:
                raise ValueError(f"it makes {len(text):,} characters, and the most are {MOST_CHARACTERS:,}")
            text.encode()  # an error for halves of surrogate pairs, which no tokenizer takes
            answer = json.dumps({"text": text})
        except MemoryError:
            answer = json.dumps({"error": "it needs more memory than it may have"})
        except Exception as error:  # a template is code
            answer = json.dumps({"error": (str(error) or type(error).__name__)[:MOST_REASON]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that has started this one
    most_bytes = int(sys.argv[2])
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    answers(float(sys.argv[1]))
