# SPDX-License-Identifier: Apache-2.0
"""Checks a wheel installed with its extra `models`: the command line answers from the cache."""

import json
import pathlib
import subprocess
import sys

import kvjax_models

HOME = pathlib.Path(kvjax_models.__file__).parent
COMMAND = [sys.executable, "-m", "kvjax_models.generate"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `kvjax_models.generate`."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


assert "site-packages" in HOME.parts, HOME
assert (HOME / "py.typed").exists()
helped = run("--help").stdout
assert helped.startswith("usage: python -m kvjax_models.generate"), helped
refused = run("--checkpoint", "bad/", "--prompt", "hi").stderr
assert refused == "python -m kvjax_models.generate: --checkpoint: bad/: no such folder\n", refused

question = "alice is in paris . bob is in oslo . where is bob ?"
answered = run("--checkpoint", str(HOME / "checkpoints" / "recall"), "--prompt", question, "--json")
assert answered.returncode == 0, answered.stderr
assert json.loads(answered.stdout)["text"] == " oslo .", answered.stdout
print("wheel: kvjax_models answers from", HOME)
print(answered.stderr, end="")
