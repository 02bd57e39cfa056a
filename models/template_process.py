# SPDX-License-Identifier: Apache-2.0
"""A program that renders a chat template. It answers each line of JSON with a line.

A template is code by the author of a checkpoint. Jinja's sandbox protects files and Python's internals from it, but
does not prevent endless loops and huge values, which even the compilation of a template may compute. So it runs in a
separate process, with the system's limits. Too much memory is an error, and a timer of CPU time ends the process.
`chat.py` starts the process, and this program imports nothing from this package.
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

MAX_CHARACTERS = 16 << 20  # of a rendered text
MAX_REASON = 500  # characters of an error, which the template may have written


class Generation(Extension):
    """The tag around texts of the assistant, for training. Rendering does not change these texts."""

    tags = {"generation"}  # noqa: RUF012, jinja's interface

    def parse(self, parser: Any) -> nodes.Node:
        """The body, as a block with its own scope of variables."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def compiled(text: str) -> jinja2.Template:
    """Compiles a template with the options of `apply_chat_template` in transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(text)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """The filter of transformers, with its order of arguments. Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def answers(seconds: float) -> None:
    """Answers the lines of standard input: first {"template": text}, then {"values": names with values} each.

    An answer is {"text": text} or {"error": reason}. If a line takes more CPU time than `seconds`, the process ends.
    """
    template = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            request = json.loads(line)
            if template is None:
                template = compiled(request["template"])
                text = ""
            else:
                text = template.render(request["values"])
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"it makes {len(text):,} characters, and the most are {MAX_CHARACTERS:,}")
            text.encode()  # an error for halves of surrogate pairs, which no tokenizer takes
            answer = json.dumps({"text": text})
        except MemoryError:
            answer = json.dumps({"error": "it needs more memory than it may have"})
        except Exception as error:  # a template is code
            answer = json.dumps({"error": (str(error) or type(error).__name__)[:MAX_REASON]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that started the process
    max_bytes = int(sys.argv[2])
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    answers(float(sys.argv[1]))
