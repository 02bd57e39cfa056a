# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF file as a folder in Hugging Face format, with dequantised weights."""

from __future__ import annotations

import os
import pathlib
import tempfile

from . import commands
from .loading import TOKENIZER_CONFIG, load, open_checkpoint, save


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = commands.Parser("convert", __doc__)
    parser.add_argument("file", metavar="IN.gguf", type=pathlib.Path, help="of a Llama, Qwen2, Qwen3 or Gemma 3")
    parser.add_argument("folder", metavar="OUT", type=pathlib.Path, help="a folder that is empty or not there yet")
    dtype = "of the weights (default: the file's; float32 if quantised)"
    parser.add_argument("--dtype", choices=commands.DTYPES, help=dtype)
    args = parser.parse_args(arguments)
    if args.file.suffix != ".gguf":
        parser.error(f"IN.gguf: got {args.file}, wanted a file with this ending")
    if args.folder.exists() and not (args.folder.is_dir() and not any(args.folder.iterdir())):
        parser.error(f"OUT: {args.folder}: got something that is there, wanted an empty folder or none")
    try:
        convert(args.file, args.folder, args.dtype)
    except (ImportError, OSError, ValueError) as error:
        parser.error(commands.reason(error, args.folder))


def convert(file: pathlib.Path, folder: pathlib.Path, dtype: str | None = None) -> None:
    """Writes the folder of a GGUF file. If it fails, it removes the folder.

    Args:
      file: the GGUF file.
      folder: an empty folder, or a path in an existing folder.
      dtype: dtype for the weights; None keeps the file's.
    """
    model, tokenizer = load(file, dtype)
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as unfinished:
        written = pathlib.Path(unfinished, "checkpoint")
        save(model, written, tokenizer, open_checkpoint(file).fields(TOKENIZER_CONFIG))
        os.replace(written, folder)


if __name__ == "__main__":
    main()
