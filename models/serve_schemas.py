# SPDX-License-Identifier: Apache-2.0
"""Grammars of a server's answers: they are compiled in a process, and lent places among the engine's constraints."""

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
from kvjax.serving.constraints import MOST_STOP_TOKENS, NONE

from .limited_process import LimitedProcess, Stopped
from .openai_api import ApiError, Grammar, busy

MOST_STATES, MOST_CLASSES = 4096, 1024
SECONDS = 10.0  # of CPU time for a grammar to compile
MOST_BYTES = 2 << 30  # of the compiler's memory
MOST_COMPILING = 32  # grammars in the compiler's queue
MOST_KEPT, MOST_KEPT_BYTES = 64, 256 << 20  # kept tables and errors, and the tables' bytes
_LIMITS = {"max_states": MOST_STATES, "max_classes": MOST_CLASSES}
_PROGRAM = pathlib.Path(__file__).with_name("grammar_process.py")


class Compiler:
    """Compiles grammars in a process of its own, one at a time, and keeps the last tables and errors."""

    def __init__(self, vocabulary: Vocabulary):
        first = {
            "tokens": [None if token is None else token.decode("latin-1") for token in vocabulary.tokens],
            "limits": _LIMITS,
        }
        folder = str(pathlib.Path(grammar.__file__).parents[1])
        self._process = LimitedProcess(_PROGRAM, folder, seconds=SECONDS, most_bytes=MOST_BYTES, first=first)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "kvjax-grammar")
        self._thread.submit(self._process.start)  # while the engine compiles
        self._kept = OrderedDict[tuple[str, str], TokenTable | str]()  # a text is an error's
        self._compiling = dict[tuple[str, str], asyncio.Future[TokenTable | str]]()

    async def table(self, wanted: Grammar) -> TokenTable:
        """The table of a grammar.

        Raises:
          ApiError: naming the place in the grammar and what is not served, or a limit.
        """
        key = wanted.kind, wanted.text
        if key not in self._kept:
            if key not in self._compiling:
                if len(self._compiling) >= MOST_COMPILING:
                    raise busy(f"{wanted.param}: {MOST_COMPILING} schemas are being compiled, and more may not wait")
                self._compiling[key] = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, *key)
                self._compiling[key].add_done_callback(lambda done: self._keep(key, done))
            # If this request is cancelled, others may still want the table.
            found = await asyncio.shield(self._compiling[key])
        else:
            found = self._kept[key]
            self._kept.move_to_end(key)
        if isinstance(found, TokenTable):
            return found
        raise ApiError(400, _reason(found, wanted), wanted.field)

    def _compile(self, kind: str, text: str) -> TokenTable | str:
        """The table, or the text of an error."""
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
        while len(self._kept) > MOST_KEPT or sum(map(_num_bytes, self._kept.values())) > MOST_KEPT_BYTES:
            self._kept.popitem(last=False)

    def close(self) -> None:
        """Ends the process."""
        self._thread.shutdown(cancel_futures=True)
        self._process.close()


def _reason(error: str, wanted: Grammar) -> str:
    """An error of `kvjax.grammar` with the place in the request in the stead of the kind with which it begins."""
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
      number: among the constraints.
      key: its grammar, a kind and a text; None: none.
      users: requests in it.
    """

    number: int
    key: tuple[str, str] | None = None
    users: int = 0


class Schemas:
    """The grammars of requests, each in a slot of the engine's constraints, which requests of one grammar share.

    The slots are given to requests in the order in which their grammars are compiled: where all are in use, a request
    waits, and so do those after it.

    Attributes:
      constraints: the last function of the engine's chain; see `logits_fn`.
    """

    def __init__(self, compiler: Compiler, constraints: Constraints, stop_tokens: Sequence[int], timeout: float):
        """Has a slot for each grammar of `constraints`; requests wait at most `timeout` seconds for one."""
        self._compiler, self._timeout = compiler, timeout
        self._stop_tokens, self._on_device = list(stop_tokens), constraints
        # On the host: the engine reads them when a request comes, which must not wait for a step of the device.
        self._of_slots = np.full((constraints.grammars, constraints.stop_tokens.shape[1]), -1, np.int32)
        self._of_slots[:, : len(stop_tokens)] = stop_tokens
        self.constraints = constraints.replace(stop_tokens=self._of_slots)
        self._slots = [Slot(number) for number in range(constraints.grammars)]  # the last ones are used last
        self._turn, self._freed, self._num_waiting = asyncio.Lock(), asyncio.Event(), 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "kvjax-schemas")
        self.engine: Engine[Any] | None = None

    @property
    def logits_fn(self) -> Any:
        """The function of an engine."""
        return chain(penalize, self.constraints)

    async def take(self, wanted: Grammar, most_waiting: int) -> Slot:
        """Lends the slot of a grammar; `release` gives it back.

        Raises:
          ApiError: if the grammar is not served, or too many requests wait, or one waits too long.
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
            found = next((slot for slot in self._slots if slot.key == key), None)
            if found is not None:
                break
            found = next((slot for slot in self._slots if not slot.users), None)
            if found is not None:
                found.key = None  # if the next line is cancelled, another grammar is put there after it
                await asyncio.get_running_loop().run_in_executor(self._thread, self.put, found.number, table)
                found.key = key
                break
            self._freed.clear()
            await self._freed.wait()
        found.users += 1
        return found

    def release(self, slot: Slot) -> None:
        """Gives a slot back. Its grammar stays there until another one needs the slot."""
        slot.users -= 1
        if not slot.users:
            self._slots.remove(slot)
            self._slots.append(slot)
            self._freed.set()

    def state(self, slot: Slot | None) -> np.int32:
        """The constraints' part of a request's `logits_state`."""
        return np.int32(NONE) if slot is None else self.constraints.state(slot.number)

    def put(self, number: int, table: TokenTable) -> None:
        """Puts a table into a slot, which takes time."""
        new = self._on_device.put(number, Constraints.of(table, self._stop_tokens, **_LIMITS))
        self._on_device = jax.block_until_ready(new)
        self.constraints = new.replace(stop_tokens=self._of_slots)
        if self.engine is not None:
            self.engine.replace_logits_fn(self.logits_fn)

    def close(self) -> None:
        """Ends the threads and the process."""
        self._thread.shutdown(cancel_futures=True)
        self._compiler.close()


def open_schemas(
    number: int, tokenizer: Any, size: int, marks: Iterable[str], stop_tokens: Sequence[int], timeout: float
) -> Schemas | str:
    """Slots for grammars over the tokens of a model; the reason, if there are none.

    Args:
      number: of slots.
      tokenizer: of the model, or None.
      size: V, the tokens of its logits.
      marks: special tokens with a text nevertheless, around calls of tools.
      stop_tokens: end an answer.
      timeout: seconds, the longest wait for a slot.
    """
    if not number:
        return "--schemas is 0"
    if tokenizer is None:
        return "the model has no tokenizer"
    if not 0 < len(stop_tokens) <= MOST_STOP_TOKENS:
        return f"the model has {len(stop_tokens)} stop tokens, and grammars need 1 to {MOST_STOP_TOKENS}"
    try:
        tokens = [*Vocabulary.of(tokenizer, size).tokens]
    except ValueError as error:
        return str(error)
    for mark in marks:
        token = tokenizer.token_to_id(mark)
        if token is not None:
            tokens[token] = mark.encode()
    schemas = Schemas(Compiler(Vocabulary(tokens)), Constraints.create(number, size, **_LIMITS), stop_tokens, timeout)
    # Compiles the programs of `put`.
    schemas.put(0, TokenTable(np.full((1, 1), -1, np.int32), np.zeros((size,), np.int32), np.ones((1,), np.bool_)))
    return schemas
