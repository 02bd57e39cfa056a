# SPDX-License-Identifier: Apache-2.0
"""Strict jax, a cache of programs, few garbage collections, and profiles of Hypothesis. Warnings are errors."""

import gc
import importlib.metadata
import os
import pathlib
import tempfile

# Before jax is imported. `make gpu` asks for the GPU by setting the variable itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Test processes share what they compile, and so do successive runs. A night's run compiles all anew.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    PROGRAMS = f"{pathlib.Path(__file__).parents[1]}/.pytest_cache/jax-{importlib.metadata.version('jaxlib')}"
    if os.environ.get("HYPOTHESIS_PROFILE") == "nightly":
        TEMPORARY = tempfile.TemporaryDirectory(prefix="kvjax-tests-")
        PROGRAMS = TEMPORARY.name
    os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from tests.compiles import Compiles, ProgramLimit, forget_old_programs

# Virtual devices, for tests of meshes (tests/mesh.py); all others use the first one.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
# Programs run for microseconds here and take seconds to compile. Only a night's tests let the optimiser work, and those
# of a GPU, whose kernels would be others without it.
OPTIMISED = os.environ.get("HYPOTHESIS_PROFILE") == "nightly" or "cuda" in os.environ["JAX_PLATFORMS"]
jax.config.update("jax_disable_most_optimizations", not OPTIMISED)


# A trace makes many objects at a time and little garbage. Collecting after every 700 takes a fifth of its time.
gc.set_threshold(100_000, 50, 100)

# The files that take longest come first, so that no process ends alone with one of them: those of the default tests,
# then those of the long ones.
FIRST = (
    "test_scenarios.py", "test_machine.py", "test_errors.py", "test_bytes.py", "test_pool.py", "test_attention.py",
    "test_live_engine.py", "test_recurrent.py", "test_rollout.py", "test_stored.py", "test_canonical.py",
    "test_file.py", "test_adopt.py", "test_score.py", "test_serve.py",
    "test_machine_serving.py", "test_contract.py", "test_readme.py", "test_kernels.py", "test_goldens.py",
    "test_check.py", "test_copies.py", "test_gpu_compile.py", "test_gpu_programs.py", "test_engine.py", "test_mesh.py",
    "test_serve_load.py", "test_serve_ends.py", "test_serve_bodies.py", "test_serve_disconnects.py",
    "test_benchmarks.py", "test_tiers.py", "test_policies.py", "test_interrupts.py", "test_commands.py",
    "test_listener.py", "test_run_batch.py", "test_kinds.py", "test_scheduler.py",
    "test_vocabulary.py", "test_listening.py", "test_machine_vmap.py", "test_windows.py", "test_tracing.py",
    "test_workload.py", "test_vmap.py", "test_broken.py", "test_sampler.py", "test_steps.py",
)  # fmt: skip


def pytest_configure(config):
    # A run that is killed while it writes a program leaves half of it. The next runs compile it again.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")
    if "PROGRAMS" in globals():  # not in the processes of pytest-xdist, for which the first one has set the variable
        forget_old_programs(pathlib.Path(PROGRAMS))
    config.pluginmanager.register(ProgramLimit())
    if config.getoption("durations") is not None or os.environ.get("CI"):
        config.pluginmanager.register(Compiles())


@pytest.fixture(autouse=True)
def programs_stay_cached():
    """A test may run a command with --no-compile-cache. The tests after it in this process cache their programs."""
    yield
    if not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", True)
        reset_cache()  # jax asks once whether programs are cached


def pytest_collection_modifyitems(config, items):
    # CI runs the long tests of the rooms that a change reaches (`scripts/reached.py`), everybody else all.
    if (reached := os.environ.get("KVJAX_REACHED")) is not None:
        homes = [config.rootpath / path for path in reached.split()]
        config.hook.pytest_deselected(items=[item for item in items if not _is_reached(item, homes)])
        items[:] = [item for item in items if _is_reached(item, homes)]
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


def _is_reached(item, homes):
    return not item.get_closest_marker("long") or any(item.path.is_relative_to(home) for home in homes)


# "default": the same examples every time, so that a red run stays red.
# "nightly": 10,000 steps of a state machine, new ones every night; a failure prints how to repeat it.
# "planted": to know that a planted mistake is noticed, nobody needs the smallest example (tests/project/mutations.py).
# Of few examples Hypothesis gives most to the smallest ones and to variations of each other, in which a state machine
# does the same again. It does so for its own backend alone: by another name this one draws every example anew.
hypothesis.internal.conjecture.providers.AVAILABLE_PROVIDERS["anew"] = (
    "hypothesis.internal.conjecture.providers.HypothesisProvider"
)
_ALWAYS = {
    "deadline": None,  # the first example of a shape compiles
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
hypothesis.settings.register_profile("default", derandomize=True, max_examples=20, stateful_step_count=30, **_ALWAYS)
hypothesis.settings.register_profile(
    "planted", hypothesis.settings.get_profile("default"), phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
hypothesis.settings.register_profile("nightly", max_examples=200, stateful_step_count=50, **_ALWAYS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
