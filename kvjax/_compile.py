# SPDX-License-Identifier: Apache-2.0
"""Options of compiled programs with loops for a GPU, and the folder of compiled programs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from kvjax._files import check_owned, make_folder

VARIABLE = "KVJAX_COMMAND_BUFFERS"
# XLA's default kinds of command, together with loops and branches.
COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,CONDITIONAL"
NOTICE_SECONDS = 2.0
_COMPILING = (
    "compiling %s: the first call with these shapes; kvjax.enable_compilation_cache() keeps the program for other "
    "processes"
)
log = logging.getLogger("kvjax")
KEPT_SECONDS = 0.1  # besides its loops a generation has a dozen programs that compile faster than jax's 1 s


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> str:
    """Keeps compiled programs in a folder, so later processes load them instead of compiling them again.

    This sets jax's persistent compilation cache for all programs compiled from now on. It keeps programs that take at
    least 0.1 s to compile, or less if you have set jax's limit lower. Nothing in the folder is ever deleted. jax runs
    code from the folder, so nobody else may write to it: the folder must belong to the user. A new folder gets mode
    0700.

    Args:
      folder: the folder, which replaces jax's present folder. None keeps jax's folder, from
        JAX_COMPILATION_CACHE_DIR or `jax.config`, or else means `$XDG_CACHE_HOME/kvjax` or `~/.cache/kvjax`.

    Returns:
      The folder.

    Raises:
      ValueError: if `folder` is not a path, belongs to another user, or others may write to it. Nothing has changed
        then.
      OSError: if the folder cannot be made.
    """
    if not isinstance(folder, str | os.PathLike | None) or folder == "":
        raise ValueError(f"folder: got {folder!r:.80}, wanted a path or None")
    present = jax.config.jax_compilation_cache_dir
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    wanted = os.fspath(folder) if folder is not None else present or os.path.join(home, "kvjax")
    if "://" not in wanted:  # a bucket has access rules of its own
        make_folder(pathlib.Path(wanted))
        check_owned("folder", pathlib.Path(wanted))
    if wanted != present:
        jax.config.update("jax_compilation_cache_dir", wanted)
        reset_cache()  # jax would go on with the folder of the first program that it kept
    min_seconds = min(jax.config.jax_persistent_cache_min_compile_time_secs, KEPT_SECONDS)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_seconds)
    return wanted


def compiler_options(platform: str | None = None) -> dict[str, str]:
    """Options for the outermost `jax.jit` of a loop, which let an NVIDIA GPU run it without waiting for the host.

    XLA then records loops and branches in command buffers (CUDA graphs). Otherwise the device waits for the host at
    every turn of a loop of unknown length. Pass the options only to your outermost jit:
    `jax.jit(loop, compiler_options=kvjax.serving.compiler_options())`. jax refuses options of a jit inside another.

    Args:
      platform: the platform to compile for, such as "cuda". None means the platform of jax's default device.

    Returns:
      The options, empty for other platforms. If the environment variable KVJAX_COMMAND_BUFFERS is 0, the options record
      nothing.
    """
    if platform is None:
        device = jax.devices()[0]
        version = device.client.platform_version
        platform = "cuda" if device.platform == "gpu" and "cuda" in version.lower() else device.platform
    if platform != "cuda":
        return {}
    # XLA counts a pool that is updated in place more than once. If the pools fill the memory, XLA concludes that memory
    # is short, and computes products again rather than store them.
    options = {"xla_disable_hlo_passes": "rematerialization"}
    if os.environ.get(VARIABLE) == "0":
        return options
    # A loop is a single command, whatever it contains, and by default XLA records no fewer than five.
    return options | {"xla_gpu_enable_command_buffer": COMMANDS, "xla_gpu_graph_min_graph_size": "1"}


_GUARDS = {
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
}


@contextlib.contextmanager
def own_transfers() -> Iterator[None]:
    """Marks the library's own transfers as explicit, so `jax.transfer_guard("disallow")` lets them pass.

    A `jax.device_put` could not replace this: each eager operation of jax moves the Python numbers in it, as
    `jnp.zeros` moves its 0. Like `jax.device_put`, these transfers are forbidden under "disallow_explicit".
    """
    with contextlib.ExitStack() as stack:
        for name, guard in _GUARDS.items():
            if getattr(jax.config, name) in ("log", "disallow"):
                stack.enter_context(guard("allow"))
        yield


class _Notice(threading.local):
    """Writes to the log that this thread is compiling a program, after `NOTICE_SECONDS`."""

    timer: threading.Timer | None = None

    def begin(self, name: str) -> None:
        """Starts a timer thread, if the log is enabled."""
        if self.timer is None and log.isEnabledFor(logging.INFO):
            self.timer = threading.Timer(NOTICE_SECONDS, log.info, (_COMPILING, name))
            self.timer.daemon = True
            self.timer.start()

    def end(self) -> None:
        """Stops the timer."""
        timer = self.timer
        self.timer = None
        if timer is not None:
            timer.cancel()
            timer.join()


_notice = _Notice()


class OutermostJit:
    """`jax.jit` with `compiler_options()`, for programs never called inside another.

    If a call compiles for longer than two seconds, it logs a line to the logger `kvjax` at level INFO.
    """

    def __init__(self, function: Callable[..., Any], **options: Any):
        self._function = function
        self._options = options

    @functools.cached_property
    def _jitted(self) -> Any:  # at the first call, because the options need jax's backend, which starts then
        named = self._function
        while isinstance(named, functools.partial):
            named = named.func

        @functools.wraps(self._function)
        def traced(*args: Any, **kwargs: Any) -> Any:  # called only for a program that is not compiled yet
            _notice.begin(traced.__name__)
            return self._function(*args, **kwargs)

        traced.__name__ = named.__name__
        return jax.jit(traced, compiler_options=compiler_options(), **self._options)

    @own_transfers()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._jitted(*args, **kwargs)
        finally:
            _notice.end()

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """See `jax.jit`."""
        try:
            return self._jitted.lower(*args, **kwargs)
        finally:
            _notice.end()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """See `jax.jit`."""
        try:
            return self._jitted.eval_shape(*args, **kwargs)
        finally:
            _notice.end()
