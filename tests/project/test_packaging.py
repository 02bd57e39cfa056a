# SPDX-License-Identifier: Apache-2.0
"""The project's promises about itself: its dependencies, its imports, and the set-up of its environment."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import kvjax
from tests.drive import ROOT, TIMEOUT, output_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def test_the_core_needs_jax_and_numpy_alone():
    assert names(PROJECT["dependencies"]) == {"jax", "numpy"}
    assert "jax>=0.11.1,<0.13" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == ">=3.12"
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_cuda_extras_are_jaxs_own():
    extras = PROJECT["optional-dependencies"]
    wanted = {
        "models", "plot", "wires", "agent", "metrics", "stores", "serve", "tunix", "cluster", "eval", "test",
        "dev", "docs",
    }  # fmt: skip
    assert {"cuda12", "cuda13", *wanted} <= set(extras)
    for cuda in ("cuda12", "cuda13"):
        assert extras[cuda] == [f"jax[{cuda}]>=0.11.1,<0.13"]


def test_the_extra_of_tests_has_those_of_the_wires():
    extras = PROJECT["optional-dependencies"]
    assert names(extras["agent"]) == {"grpcio", "grpcio-tools", "protobuf"}
    assert names(extras["metrics"]) == {"prometheus-client"}
    assert names(extras["serve"]) == {"starlette", "uvicorn", "httptools", "uvloop", "prometheus-client"}
    [included] = (one for one in extras["test"] if one.startswith("kvjax["))
    assert {"wires", "agent", "metrics", "stores", "serve"} <= set(
        included.removeprefix("kvjax[").removesuffix("]").split(",")
    )


def test_commits_are_checked_by_the_ruff_of_the_extra():
    """The versions are written twice, as pre-commit reads no pyproject.toml."""
    (pinned,) = (package for package in PROJECT["optional-dependencies"]["dev"] if package.startswith("ruff=="))
    assert re.findall(r"^ +rev: v(\S+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M) == [pinned[6:]]


def test_the_version_has_one_home():
    """The build reads it from the source, and it needs no installation."""
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    home = ROOT / tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["path"]
    assert re.findall(r'^__version__ = "([\d.]+)"$', home.read_text(), re.MULTILINE) == [kvjax.__version__]


# Without one, an error names the extra.
WIRES = {"msgspec", "zmq", "grpc", "grpc_tools", "google", "prometheus_client"}


def test_importing_the_library_imports_no_extra():
    code = "import sys, kvjax.stores, pallas_kernels; print(*sys.modules)"
    loaded = output_of(sys.executable, "-c", code).split()
    packages = {module.split(".")[0] for module in loaded}
    tools = {"chex", "hypothesis", "matplotlib", "flax", "optax", "safetensors", "tensorstore", "tokenizers", "rich"}
    assert not packages & (tools | WIRES | {"models", "tests"})
    assert not {"jax.experimental.pallas.triton", "pallas_kernels.mosaic", "pallas_kernels.triton"} & set(loaded)


WIRES_NEED = 'kvjax.interop: needs msgspec and pyzmq for vllm, and to read trtllm (pip install "kvjax[wires]")'
METRICS_NEED = 'kvjax.interop.metrics: needs prometheus-client (pip install "kvjax[metrics]")'
TUNIX_NEEDS = 'models.tunix needs google-tunix: pip install "kvjax[tunix]"'
AGENT_NEEDS = 'kvjax.interop.agent: needs grpcio, grpcio-tools and protobuf (pip install "kvjax[agent]")'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "absent", "needs"),
    [
        ("kvjax.interop.vllm", "msgspec", WIRES_NEED),
        ("kvjax.interop.vllm", "zmq", WIRES_NEED),
        ("kvjax.interop.readers.trtllm", "msgspec", WIRES_NEED),
        ("kvjax.interop.agent", "grpc", AGENT_NEEDS),
        ("kvjax.interop.agent", "grpc_tools", AGENT_NEEDS),
        ("kvjax.interop.agent", "google.protobuf", AGENT_NEEDS),
        ("kvjax.interop.metrics", "prometheus_client", METRICS_NEED),
        ("models.tunix", "tunix", TUNIX_NEEDS),
    ],
)
def test_modules_without_their_packages_name_the_extra(module, absent, needs):
    code = f"""
import sys
sys.modules[{absent!r}] = None
import kvjax, kvjax.interop
try:
    import {module}
except ImportError as error:
    print(error)
"""
    assert output_of(sys.executable, "-c", code) == f"{needs}\n"


@pytest.mark.long
def test_trtllms_lines_are_written_without_the_extra_that_reads_them():
    code = """
import sys
sys.modules["msgspec"] = None
from kvjax.interop import trtllm
print(trtllm.Writer.__name__)
try:
    trtllm.parse
except ImportError as error:
    print(error)
"""
    assert output_of(sys.executable, "-c", code) == f"Writer\n{WIRES_NEED}\n"


IMPORTS_KERNELS = """
import sys
import jax, jax.numpy as jnp, pallas_kernels
q, pool, one = jnp.ones((1, 1, 16)), jnp.ones((2, 1, 2, 1, 8, 16)), jnp.ones((1,), jnp.int32)
arguments = q, pool, 0, jnp.zeros((1, 1), jnp.int32), one, 0 * one, one
double = jax.jit(lambda x: 2 * x)
double(one)
def prefill(*arguments):
    return pallas_kernels.call("prefill_attention", *arguments, max_count=1, scale=1.0)
with jax.checking_leaks(), pallas_kernels.lowering_for("cuda"):
    assert jax.eval_shape(prefill, *arguments).shape == q.shape
    assert {"pallas_kernels.mosaic", "pallas_kernels.triton"} <= set(sys.modules)
    assert jnp.all(prefill(*arguments) == 1)
double(one)
assert double._cache_size() == 1, "what was compiled before was compiled again"
"""


@pytest.mark.long
def test_kernels_are_imported_while_a_call_is_traced():
    output_of(sys.executable, "-c", IMPORTS_KERNELS)


def test_serving_is_loaded_when_it_is_first_used():
    code = """
import sys, kvjax
assert "kvjax.serving" not in sys.modules
assert {"serving", "stores", "grammar", "generate", "Cache"} <= set(dir(kvjax)) and not hasattr(kvjax, "nothing")
assert kvjax.stores.gather and kvjax.grammar.compile_schema and kvjax.generate is kvjax.serving.generate
print("done")
"""
    assert output_of(sys.executable, "-c", code) == "done\n"


@pytest.mark.long
def test_importing_the_library_takes_little_more_than_importing_jax():
    """CPU time, best of some: at most 1.25 times that of importing jax and numpy.

    Both come from byte code, as for a user: jax's was compiled at its installation, the library's by the first import
    of this test.
    """
    code = "import time, jax, numpy; t = time.process_time(); import kvjax; print(t, time.process_time())"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def times() -> list[float]:
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, check=True, timeout=TIMEOUT
        )
        return [float(number) for number in ran.stdout.split()]

    times()
    runs = list[list[float]]()
    for _ in range(30):  # a busy machine takes longer, never less
        runs.append(times())
        without, with_ = (min(column) for column in zip(*runs, strict=True))
        if len(runs) >= 5 and with_ <= 1.25 * without:
            return
    raise AssertionError(f"{with_:.3f} s with kvjax, {without:.3f} s without")


def sandbox(tmp_path: pathlib.Path, **commands: str) -> tuple[pathlib.Path, dict[str, str]]:
    """A checkout with nothing but the set-up script, and a PATH with a few tools and these commands."""
    tree, bin_ = tmp_path / "a checkout", tmp_path / "bin"
    (tree / "scripts").mkdir(parents=True)
    bin_.mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", tree / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tree)
    for tool in ("bash", "cat", "cksum", "dirname", "rm", "mkdir", "chmod", "cp"):
        (bin_ / tool).symlink_to(shutil.which(tool) or "")
    for name, script in commands.items():
        (bin_ / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (bin_ / name).chmod(0o755)
    return tree, {"PATH": str(bin_), "HOME": str(tmp_path)}


def setup(tree: pathlib.Path, env: dict[str, str], *args: str) -> subprocess.CompletedProcess:
    command = [shutil.which("bash") or "bash", "scripts/setup.sh", *args]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT)


# A stand-in for a Python: `-m venv DIR` makes DIR with itself inside; all other calls succeed and are recorded.
NEW_PYTHON = """
echo "$0 $*" >>"$HOME/calls"
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo >"$3/pyvenv.cfg"; fi
"""
OLD_PYTHON = "exit 1"


@pytest.mark.long
def test_set_up_installs_once_and_again_when_what_is_needed_changes(tmp_path):
    tree, env = sandbox(tmp_path, python3=NEW_PYTHON)
    first = setup(tree, env)
    assert first.returncode == 0, first.stderr
    assert "making .venv" in first.stdout
    calls = tmp_path / "calls"
    assert "pip install --quiet --disable-pip-version-check --editable .[test]" in calls.read_text()

    calls.write_text("")
    second = setup(tree, env)
    assert (second.returncode, second.stdout) == (0, "")
    assert "install" not in calls.read_text()

    with (tree / "pyproject.toml").open("a") as project:
        project.write("\n")
    third = setup(tree, env)
    assert "making" not in third.stdout
    assert "pip install" in calls.read_text()

    calls.write_text("")
    oldest = setup(tree, env, ".venv-old", "test", "jax==0.11.2")
    assert "making .venv-old" in oldest.stdout
    assert "--editable .[test] jax==0.11.2" in calls.read_text()


@pytest.mark.long
def test_set_up_prefers_uv(tmp_path):
    uv = 'echo "uv $*" >>"$HOME/calls"; if [ "$1" = venv ]; then python3 -m venv .venv; fi'
    tree, env = sandbox(tmp_path, python3=NEW_PYTHON, uv=uv)
    assert setup(tree, env).returncode == 0
    calls = (tmp_path / "calls").read_text()
    assert "uv pip install --python .venv/bin/python --editable .[test]" in calls
    assert "pip install --quiet" not in calls


@pytest.mark.long
def test_set_up_with_an_old_python_asks_a_private_uv(tmp_path):
    """python3 is too old to run the project; it can still install uv, which finds a newer one."""
    found = tmp_path / "python-of-uv"
    found.write_text(f"#!{shutil.which('bash')}\n{NEW_PYTHON}")
    found.chmod(0o755)
    uv = 'if [ "$1" = venv ]; then "$HOME/python-of-uv" -m venv .venv; else echo "uv $*" >>"$HOME/calls"; fi'
    old = f"""
case "$*" in
  "-m venv .venv-uv") mkdir -p .venv-uv/bin; cp "$0" .venv-uv/bin/python ;;
  *"install --quiet uv") printf '#!{shutil.which("bash")}\n%s\n' '{uv}' >.venv-uv/bin/uv; chmod +x .venv-uv/bin/uv ;;
  *) exit 1 ;;
esac"""
    tree, env = sandbox(tmp_path, python3=old)
    ran = setup(tree, env)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "asking uv" in ran.stdout
    assert "uv pip install --python .venv/bin/python --editable .[test]" in (tmp_path / "calls").read_text()


@pytest.mark.long
def test_set_up_without_any_python_says_what_to_install(tmp_path):
    tree, env = sandbox(tmp_path, python3=OLD_PYTHON)
    ran = setup(tree, env)
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1].startswith("setup: please install Python 3.12 or newer")
