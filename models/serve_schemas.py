# SPDX-License-Identifier: Apache-2.0
"""The grammars of a server. A separate process compiles them, and requests share slots of the engine's constraints."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import dataclasses
import pathlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import grammar
from kvjax.grammar import TokenTable, Vocabulary
from kvjax.serving import Constraints, Engine, chain, penalize
from kvjax.serving.constraints import MAX_STOP_TOKENS, NONE

from .limited_process import LimitedProcess, Stopped
from .openai_api import ApiError, Grammar, busy

MAX_STATES = 4096
MAX_CLASSES = 1024
SECONDS = 10.0  # CPU time to compile a grammar
MAX_BYTES = 2 << 30  # memory of the compiler
MAX_COMPILING = 32  # grammars in the compiler's queue
MAX_KEPT = 64  # tables and errors
MAX_KEPT_BYTES = 256 << 20  # in all tables
_LIMITS = {"max_states": MAX_STATES, "max_classes": MAX_CLASSES}
_PROGRAM = pathlib.Path(__file__).with_name("grammar_process.py")


class Compiler:
    """Compiles grammars in a separate process, one after another, and keeps the latest tables and errors."""

    def __init__(self, vocabulary: Vocabulary):
        first = {
            "tokens": [None if token is None else token.decode("latin-1") for token in vocabulary.tokens],
            "limits": _LIMITS,
        }
        folder = str(pathlib.Path(grammar.__file__).parents[1])
        self._process = LimitedProcess(_PROGRAM, folder, seconds=SECONDS, max_bytes=MAX_BYTES, first=first)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "kvjax-grammar")
        self._thread.submit(self._process.start)  # while the engine compiles
        self._kept = OrderedDict[tuple[str, str], TokenTable | str]()  # a text is an error
        self._compiling = dict[tuple[str, str], asyncio.Future[TokenTable | str]]()

    async def table(self, wanted: Grammar) -> TokenTable:
        """Compiles a grammar, unless its table is kept.

        Raises:
          ApiError: if a part of the grammar is not served, or the grammar is too large.
        """
        key = wanted.kind, wanted.text
        if key not in self._kept:
            if key not in self._compiling:
                if len(self._compiling) >= MAX_COMPILING:
                    raise busy(f"{wanted.param}: {MAX_COMPILING} schemas are being compiled, and more may not wait")
                self._compiling[key] = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, *key)
                self._compiling[key].add_done_callback(lambda done: self._keep(key, done))
            # If this request is cancelled, other requests may still need the table.
            result = await asyncio.shield(self._compiling[key])
        else:
            result = self._kept[key]
            self._kept.move_to_end(key)
        if isinstance(result, TokenTable):
            return result
        raise ApiError(400, _reason(result, wanted), wanted.field)

    def _compile(self, kind: str, text: str) -> TokenTable | str:
        """Returns the table, or the text of an error."""
        try:
            answer = self._process.ask({"kind": kind, "text": text})
        except Stopped as error:
            return f"{kind}: {error}"
        if "error" in answer:
            return answer["error"]
        may_end = np.frombuffer(base64.b64decode(answer["may_end"]), np.bool_)
        next_state, token_class = (
            np.frombuffer(base64.b64decode(answer[name]), "<i2") for name in ("next_state", "token_class")
        )
        return TokenTable(next_state.reshape(len(may_end), -1), token_class, may_end)

    def _keep(self, key: tuple[str, str], done: asyncio.Future[TokenTable | str]) -> None:
        del self._compiling[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[key] = done.result()
        while len(self._kept) > MAX_KEPT or sum(map(_num_bytes, self._kept.values())) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    def close(self) -> None:
        """Ends the process."""
        self._thread.shutdown(cancel_futures=True)
        self._process.close()


def _reason(error: str, wanted: Grammar) -> str:
    """An error of `kvjax.grammar` that begins with the place in the request instead of the kind."""
    rest = error.removeprefix(wanted.kind)
    within = rest.removeprefix(": ")
    has_place = wanted.kind == "structure" and within.startswith(("tools[", wanted.param))
    return within if has_place else wanted.param + rest


def _num_bytes(table: TokenTable | str) -> int:
    return len(table) if isinstance(table, str) else sum(array.nbytes for array in table)


@dataclasses.dataclass(eq=False)
class Slot:
    """A place for a grammar.

    Attributes:
      index: The slot's index among the constraints.
      key: The kind and the text of its grammar. None means the slot is empty.
      users: The number of requests which use the slot.
    """

    index: int
    key: tuple[str, str] | None = None
    users: int = 0


class Schemas:
    """Lends slots of the engine's constraints to the grammars of requests.

    Requests with the same grammar share a slot. Requests get slots in the order in which their grammars are compiled.
    If all slots are in use, a request waits, and later requests wait after it.

    Attributes:
      constraints: The last function in `logits_fn`, the engine's chain.
      engine: Uses the constraints. None means it has not started.
    """

    def __init__(self, compiler: Compiler, constraints: Constraints, stop_tokens: Sequence[int], timeout: float):
        """Makes a slot for each grammar in `constraints`. Requests wait at most `timeout` seconds for a slot."""
        self._compiler = compiler
        self._timeout = timeout
        self._stop_tokens = list(stop_tokens)
        self._on_device = constraints
        # The engine reads these when a request arrives. They are on the host, so it need not wait for the device.
        self._slot_stop_tokens = np.full((constraints.grammars, constraints.stop_tokens.shape[1]), -1, np.int32)
        self._slot_stop_tokens[:, : len(stop_tokens)] = stop_tokens
        self.constraints = constraints.replace(stop_tokens=self._slot_stop_tokens)
        self._slots = [Slot(index) for index in range(constraints.grammars)]  # the slot released last is at the end
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._num_waiting = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "kvjax-schemas")
        self.engine: Engine[Any] | None = None

    @property
    def logits_fn(self) -> Any:
        """The `logits_fn` of an engine."""
        return chain(penalize, self.constraints)

    async def take(self, wanted: Grammar, most_waiting: int) -> Slot:
        """Lends a slot with a grammar. `release` gives it back.

        Raises:
          ApiError: if the grammar is not served, too many requests wait, or the request waits for too long.
        """
        if self._num_waiting >= most_waiting:
            raise busy(f"{wanted.param}: {self._num_waiting} requests wait for their schemas already")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout):
                table = await self._compiler.table(wanted)
                async with self._turn:
                    return await self._lend((wanted.kind, wanted.text), table)
        except TimeoutError:
            message = f"{wanted.param}: others have had all {len(self._slots)} places of --schemas for the whole time"
            raise busy(message) from None
        finally:
            self._num_waiting -= 1

    async def _lend(self, key: tuple[str, str], table: TokenTable) -> Slot:
        while True:
            slot = next((slot for slot in self._slots if slot.key == key), None)
            if slot is not None:
                break
            slot = next((slot for slot in self._slots if not slot.users), None)
            if slot is not None:
                slot.key = None  # if the next line is cancelled, the slot's content is unknown
                await asyncio.get_running_loop().run_in_executor(self._thread, self.put, slot.index, table)
                slot.key = key
                break
            self._freed.clear()
            await self._freed.wait()
        slot.users += 1
        return slot

    def release(self, slot: Slot) -> None:
        """Gives a slot back. Its grammar stays there until another grammar needs the slot."""
        slot.users -= 1
        if not slot.users:
            self._slots.remove(slot)
            self._slots.append(slot)
            self._freed.set()

    def state(self, slot: Slot | None) -> np.int32:
        """The constraints' part of a request's `logits_state`."""
        return np.int32(NONE) if slot is None else self.constraints.state(slot.index)

    def put(self, slot_index: int, table: TokenTable) -> None:
        """Puts a table into a slot, which takes time."""
        constraints = self._on_device.put(slot_index, Constraints.of(table, self._stop_tokens, **_LIMITS))
        self._on_device = jax.block_until_ready(constraints)
        self.constraints = constraints.replace(stop_tokens=self._slot_stop_tokens)
        if self.engine is not None:
            self.engine.replace_logits_fn(self.logits_fn)

    def close(self) -> None:
        """Ends the threads and the process."""
        self._thread.shutdown(cancel_futures=True)
        self._compiler.close()


def open_schemas(
    num_slots: int, tokenizer: Any, vocab_size: int, marks: Iterable[str], stop_tokens: Sequence[int], timeout: float
) -> Schemas | str:
    """Makes slots for grammars over the tokens of a model. If this is not possible, returns the reason.

    Args:
      num_slots: The number of slots.
      tokenizer: The model's tokenizer. None means the model has none.
      vocab_size: V, the number of the model's logits.
      marks: Special tokens around calls of tools. Grammars see their text, unlike the text of other special tokens.
      stop_tokens: Tokens with which an answer ends.
      timeout: The longest wait for a slot, in seconds.
    """
    if not num_slots:
        return "--schemas is 0"
    if tokenizer is None:
        return "the model has no tokenizer"
    if not 0 < len(stop_tokens) <= MAX_STOP_TOKENS:
        return f"the model has {len(stop_tokens)} stop tokens, and grammars need 1 to {MAX_STOP_TOKENS}"
    try:
        tokens = [*Vocabulary.of(tokenizer, vocab_size).tokens]
    except ValueError as error:
        return str(error)
    for mark in marks:
        token = tokenizer.token_to_id(mark)
        if token is not None:
            tokens[token] = mark.encode()
    schemas = Schemas(
        Compiler(Vocabulary(tokens)), Constraints.create(num_slots, vocab_size, **_LIMITS), stop_tokens, timeout
    )
    # Compiles the programs of `put`.
    schemas.put(
        0, TokenTable(np.full((1, 1), -1, np.int32), np.zeros((vocab_size,), np.int32), np.ones((1,), np.bool_))
    )
    return schemas
