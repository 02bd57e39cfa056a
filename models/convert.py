# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF file as a folder in Hugging Face format, dequantised."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile

from . import commands
from .loading import gguf_file, is_gguf, load, save


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; see --help."""
    parser = commands.Parser("convert", __doc__)
    parser.add_argument("file", metavar="IN.gguf", type=pathlib.Path, help="of a Llama, Qwen2, Qwen3 or Gemma 3")
    parser.add_argument("folder", metavar="OUT", type=pathlib.Path, help="a folder that is empty or not there yet")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="of the weights (default: the file's; float32 if quantised)")
    args = parser.parse_args(arguments)
    if not is_gguf(args.file):
        parser.error(f"IN.gguf: got {args.file}, wanted a file with this ending")
    commands.check_extra(parser, "gguf")
    if args.folder.exists() and not (args.folder.is_dir() and not any(args.folder.iterdir())):
        parser.error(f"OUT: {args.folder}: got something that is there, wanted an empty folder or none")
    try:
        convert(args.file, args.folder, args.dtype)
    except (OSError, ValueError) as error:
        parser.error(commands.reason(error, args.folder))


def convert(file: pathlib.Path, folder: pathlib.Path, dtype: str | None = None) -> None:
    """Writes the folder of a GGUF file, whole or not at all.

    Args:
      file: the GGUF file.
      folder: is empty, or not there yet.
      dtype: of the weights; None for that of the file.
    """
    model, tokenizer = load(file, dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
    try:
        save(model, unfinished, tokenizer)
        config = json.dumps(gguf_file(file).tokenizer_config, indent=2, ensure_ascii=False)
        pathlib.Path(unfinished, "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
        os.chmod(unfinished, 0o777 & ~_mask())
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _mask() -> int:
    """The permissions that new folders do not get; `mkdtemp` gives its owner alone any."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    main()
