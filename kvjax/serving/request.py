# SPDX-License-Identifier: Apache-2.0
"""`Request` is a prompt with the options for its answers. `RunOptions` has the options for all requests of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer

from kvjax._compile import own_transfers
from kvjax.blocks.keys import Namespaces
from kvjax.checks import check_bool, check_functions, check_on_host, host_integers, is_integer, static_int, static_int32
from kvjax.events.listeners import Listener, Listeners
from kvjax.layers import set_ints
from kvjax.policies.retention import Retention
from kvjax.serving.constraints import initial_state
from kvjax.serving.decode import LogitsFn
from kvjax.serving.options import Scheduler
from kvjax.serving.sampling import Sampling, check_logprobs, output_seeds, seed_key
from kvjax.serving.speculation import Drafter
from kvjax.spec import CacheSpec
from kvjax.stores.disk import DiskStore
from kvjax.verbs._request import check_retention

INSIDE = "inside one use kvjax.serving.serve or kvjax.serving.decode"  # a program


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt, and the options for its answers. It is checked when you make it, so no bad request reaches a cache.

    Attributes:
      prompt: token ids; becomes i32[n].
      max_new_tokens: maximum tokens of each answer; 0, together with `prompt_logprobs_from`, asks for no answer.
      sampling: options of choosing tokens. None means greedy. An answer does not depend on other requests.
      seed: seed of the random stream. With an int, sample n has the stream `seed + n`, modulo 2**32. With a jax key,
        the samples have the streams that `generate` gives its outputs. None means the number of the request's first
        output in the call, and 0 in an engine.
      stop_tokens: tokens ending an answer; becomes i32[K].
      namespace: a number from `Namespaces`. Requests of different namespaces share no prefix.
      priority: higher first.
      samples: number of answers. They run at the same time and share the computation of the prompt. If the cache cannot
        hold all of them, they end with "no_blocks".
      retention: retention of the prompt's blocks, if the spec has retention. None disables it.
      logits_state: a tree of numpy arrays, the state that `logits_fn` gets with the first logits. None means the
        engine's state, or the `initial_state` of `logits_fn`, such as a constraint's. In `run_batch` without either,
        all requests must have a state, or none.
      prompt_logprobs_from: position of the first prompt token whose log-probability you want; you get the
        log-probabilities of all tokens from there on; 0 to the prompt's length. These tokens are computed even if they
        are cached, between the loops of other requests, and before the request itself runs. None disables them.

    Raises:
      ValueError: naming the attribute.

    Example:
      >>> request = kvjax.serving.Request([3, 1, 4], max_new_tokens=8, seed=7, samples=2)
      >>> request.prompt.dtype, request.streams()
      (dtype('int32'), [7, 8])
      >>> try:
      ...     kvjax.serving.Request("text")
      ... except ValueError as error:
      ...     print(error)
      prompt: got 'text', wanted a list of token ids
    """

    prompt: Any
    max_new_tokens: int = 32
    sampling: Sampling | None = None
    seed: int | jax.Array | None = None
    stop_tokens: Any = ()
    namespace: int = 0
    priority: int = 0
    samples: int = 1
    retention: Retention | None = None
    logits_state: Any = None
    prompt_logprobs_from: int | None = None

    def __post_init__(self):
        checked = {
            "prompt": _checked_prompt(self.prompt),
            "stop_tokens": host_integers("stop_tokens", self.stop_tokens, np.int32, "a list of token ids"),
            "namespace": static_int32("namespace", self.namespace, 0),
            "priority": static_int32("priority", self.priority, -(2**31)),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        set_ints(self, 1, "samples")
        set_ints(self, 1 if self.prompt_logprobs_from is None else 0, "max_new_tokens")
        if (first := self.prompt_logprobs_from) is not None:
            object.__setattr__(self, "prompt_logprobs_from", static_int("prompt_logprobs_from", first, 0))
            if (length := len(checked["prompt"])) < first:
                raise ValueError(f"prompt_logprobs_from: got {first}, wanted at most the prompt's length, {length}")
        sampling = self.sampling
        retention = self.retention
        if not isinstance(sampling, Sampling | None) or any(map(np.ndim, jax.tree.leaves(sampling))):
            raise ValueError(f"sampling: got {reprlib.repr(sampling)}, wanted a kvjax.Sampling of numbers or None")
        if not isinstance(retention, Retention | None):
            raise ValueError(f"retention: got {reprlib.repr(retention)}, wanted a kvjax.Retention or None")
        if self.seed is not None and not is_integer(self.seed):
            with own_transfers():
                seed_key(self.seed)

    @property
    def num_ranges(self) -> int | None:
        """The number of ranges of its retention, or None without a retention."""
        return None if self.retention is None else len(self.retention.ranges)

    @property
    def is_greedy(self) -> bool:
        """Whether it always chooses the likeliest token, and a stop token may come at once."""
        sampling = self.sampling
        return sampling is None or not (sampling.temperature > 0 or sampling.min_tokens > 0)

    @property
    def has_min_p(self) -> bool:
        """Whether its sampling has a `min_p`."""
        return self.sampling is not None and self.sampling.min_p is not None

    def streams(self, default: int = 0) -> list[int]:
        """The random stream of each sample. Without a seed, `default` is the stream of the first sample."""
        seed = default if self.seed is None else self.seed
        if is_integer(seed):
            return [(operator.index(seed) + sample) % 2**32 for sample in range(self.samples)]
        return jax.device_get(output_seeds(seed, self.samples)).tolist()


def _checked_prompt(prompt: Any) -> np.ndarray:
    """i32[n]; the token ids of a prompt."""
    _check_untraced(prompt)
    wanted = "a list of token ids"
    if getattr(prompt, "ndim", 1) != 1 or isinstance(prompt, str):
        raise ValueError(f"prompt: got {reprlib.repr(prompt)}, wanted {wanted}")
    return host_integers("prompt", prompt, np.int32, wanted)


def _check_untraced(*prompts: Any) -> None:
    if any(isinstance(prompt, Tracer) for prompt in prompts):
        check_on_host("generation", prompts, INSIDE)


def make_requests(prompts: Any, **values: Any) -> list[Request]:
    """Makes a request for each prompt.

    Args:
      prompts: token ids of each prompt. Rows of an array must have no padding.
      values: other attributes, each for all requests, or a list with an entry for each. A list of stop tokens is for
        all requests.

    Raises:
      ValueError: naming the attribute, and the number of the prompt.

    Example:
      >>> first, second = kvjax.serving.make_requests([[1, 2], [3]], max_new_tokens=8, priority=[0, 1], stop_tokens=[5])
      >>> second.max_new_tokens, second.priority, second.stop_tokens.tolist()
      (8, 1, [5])
    """
    _check_untraced(prompts)
    if getattr(prompts, "ndim", 1) > 1:  # its padding would be read as tokens
        raise ValueError(
            f"prompts: got an array {list(np.shape(prompts))}, wanted a list for each prompt, without padding: "
            "[row[:length] for row, length in zip(array, lengths)]"
        )
    listed = list(prompts)
    _check_untraced(*listed)
    columns = {name: value for name, value in values.items() if name != "stop_tokens" and _is_list(value)}
    for name, column in columns.items():
        if len(column) != len(listed):
            raise ValueError(f"{name}: got {len(column)}, wanted a value for each of {len(listed)} prompts")
    requests = []
    for index, prompt in enumerate(listed):
        request_values = {name: column[index] for name, column in columns.items()}
        with errors_of(index):
            requests.append(Request(prompt, **values | request_values))
    return requests


@contextlib.contextmanager
def errors_of(prompt_number: int) -> Iterator[None]:
    """Puts the number of a prompt before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompt {prompt_number}: {error}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim == 1)


@dataclasses.dataclass(frozen=True, eq=False)
class RunOptions:
    """Options for all requests of a run.

    Attributes:
      scheduler: options of the scheduler, which are static.
      steps: maximum steps of the model in a jitted loop. Between loops the clock is read, and Ctrl-C acts. None means
        1024 in `run_batch`, 32 in `generate` and 8 in `stream`; an engine chooses.
      fixed_steps: whether every block runs k steps of the model, even if fewer are needed. Use it on a GPU without
        command buffers, where a loop of unknown length waits for the host at each turn; see `compiler_options`.
      loop: whether the scheduler's steps run as a loop on the device. With False, Python calls each step and reads its
        result, for a GPU that does not run the loop; see `compiler_options`.
      logits_fn: (logits f32[S, V], last tokens i32[S], positions i32[S]) -> logits. With a `logits_state` it gets the
        state as a fourth argument, and returns (logits, state). If it is a pytree, such as the result of `constrain`,
        its arrays may change without a new program. Any other function is static.
      top_logprobs: static; number of likeliest tokens whose log-probabilities are recorded at each step.
      logprobs: static; "raw" for log-probabilities of the logits as the model returned them; "sampling" for the
        distribution that a token was drawn from, after temperature, top-k, top-p, min-p and `min_tokens`, with 0 for
        greedy choices.
      clock: () -> ms since any origin, as an int, such as `lambda: time.monotonic_ns() // 1_000_000`. It is read at the
        start and before each jitted loop. None means the time is always 0, and no time to live ends.
      names: the `Namespaces` that issued the requests' namespaces. Other numbers are refused. None accepts any
        number.
      store: a `kvjax.stores.DiskStore`, for whole blocks of prompts that the cache lacks. Blocks that arrive in time
        are adopted, and the rest is computed. Computed blocks are written to the store. A run waits for the store only
        once, at most for `read_timeout_ms`. None disables the store.
      log_events: whether to decode the events; an engine decodes none.
      listener: called with every `Events` and `EventLog` of the run, each once and in order, whatever `log_events` is.
        An example is `Publisher.publish` of `kvjax.interop.vllm`. It is called on the thread of the run, and gets the
        events of a loop while the next loop runs. It must copy events that it wants to keep, because they may be
        donated next. Ctrl-C waits for it. If it raises an `Exception`, the run logs this and continues. Later, or at
        the end of the run, the listener gets a snapshot in place of all missed events, see `kvjax.events.Listeners`.
        Any other exception ends the run like Ctrl-C. The listener must not read the cache, which the running loop has
        taken. To see the metadata together with the events, use `progress.state` of a `stream`. None means no listener.
      drafter: guesses the next tokens of rows, such as `kvjax.serving.ngram` makes. Tokens stay the same, and a pass of
        the model may bring several. `steps` then count tokens of the fastest row. None disables it.
      reuse: "same weights" refuses a model whose arrays are other objects than the arrays that computed what a
        namespace of this cache holds, as far as the host knows: caches come from an earlier run, and nothing has
        changed them since. "any" reuses K/V whatever computed them.

    Raises:
      ValueError: naming the attribute.
    """

    scheduler: Scheduler = dataclasses.field(default_factory=Scheduler)
    steps: int | None = None
    fixed_steps: bool = False
    loop: bool = True
    logits_fn: LogitsFn | None = None
    top_logprobs: int = 0
    logprobs: Literal["raw", "sampling"] = "raw"
    clock: Callable[[], int] | None = None
    names: Namespaces | None = None
    store: DiskStore | None = None
    log_events: bool = True
    listener: Listener | None = None
    drafter: Drafter | None = None
    reuse: Literal["same weights", "any"] = "same weights"

    def __post_init__(self):
        if not isinstance(self.scheduler, Scheduler):
            raise ValueError(f"scheduler: got {self.scheduler!r:.80}, wanted a kvjax.serving.Scheduler")
        if self.steps is not None:
            static_int("steps", self.steps, 1)
        static_int("top_logprobs", self.top_logprobs, 0)
        for name in ("fixed_steps", "loop", "log_events"):
            check_bool(name, getattr(self, name))
        if self.reuse not in ("same weights", "any"):
            raise ValueError(f"reuse: got {self.reuse!r}, wanted 'same weights' or 'any'")
        check_logprobs(self.logprobs)
        check_functions(logits_fn=self.logits_fn, clock=self.clock, listener=self.listener)
        if not isinstance(self.store, DiskStore | None):
            raise ValueError(f"store: got {self.store!r:.80}, wanted a kvjax.stores.DiskStore or None")
        if not isinstance(self.drafter, Drafter | None):
            raise ValueError(f"drafter: got {reprlib.repr(self.drafter)}, wanted a kvjax.serving.Drafter or None")
        if not isinstance(self.names, Namespaces | None):
            raise ValueError(f"names: got {reprlib.repr(self.names)}, wanted a kvjax.Namespaces or None")

    @functools.cached_property
    def listeners(self) -> Listeners:
        """The listener, if there is one, with the state of its failures."""
        return Listeners() if self.listener is None else Listeners.of(self.listener)

    def check(self, spec: CacheSpec) -> None:
        """Raises a ValueError if an option does not fit the spec, or the clock is broken."""
        self.scheduler.check(spec)
        if self.clock is not None:
            read_clock(self.clock)
        if self.store is not None:
            self.store.check(spec, [], self.names)

    def state_of(self, request: Request) -> Any:
        """The initial `logits_state` of a request of a batch."""
        return initial_state(self.logits_fn) if request.logits_state is None else request.logits_state

    def check_request(self, request: Request, spec: CacheSpec) -> None:
        """Raises a ValueError for a request whose namespace, retention or state the run does not know."""
        if self.names is not None and request.namespace not in self.names:
            raise ValueError(
                f"namespace: got {request.namespace}, wanted a number of the {len(self.names):,} that names gave out; "
                "load a saved cache with the names saved with it (Namespaces.from_dict)"
            )
        check_retention(spec, retention=request.retention)
        if request.logits_state is not None and self.logits_fn is None:
            raise ValueError("logits_state: got one, wanted None without a logits_fn")
        if request.prompt_logprobs_from is not None and self.scheduler.canonical:
            got = request.prompt_logprobs_from  # cached blocks would come from another program
            raise ValueError(f"prompt_logprobs_from: got {got} with canonical=True, wanted None")
        if self.store is not None:
            self.store.root(request.namespace)


def check_state(state: Any, expected: Any, wanted: str) -> None:
    """Raises a ValueError unless a state of `logits_fn` has arrays of the same shapes as another."""
    (arrays, tree), (expected_arrays, expected_tree) = map(jax.tree.flatten, (state, expected))
    if tree != expected_tree or list(map(np.shape, arrays)) != list(map(np.shape, expected_arrays)):
        raise ValueError(f"logits_state: got {reprlib.repr(state)}, wanted {wanted}")


def read_clock(clock: Callable[[], int]) -> int:
    """A clock's reading as i32. Only differences of readings matter, so readings may have any size."""
    reading = clock()
    if not is_integer(reading):
        raise ValueError(f"clock: got {reading!r:.80}, wanted an int of milliseconds")
    return int(np.uint32(int(reading) & 0xFFFFFFFF).view(np.int32))
