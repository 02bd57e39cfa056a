# SPDX-License-Identifier: Apache-2.0
"""Schemas of a server without a server: tables from another process, and places that requests share and wait for."""

import asyncio
import json
import time

import numpy as np
import pytest

from kvjax.grammar import TokenTable, Vocabulary, compile_regex, compile_schema
from kvjax.serving import Constraints
from models import serve_schemas
from models.openai_api import ApiError, Grammar
from models.serve_schemas import Compiler, Schemas, open_schemas
from tests.grammar_kit import VOCABULARY
from tests.models.schema_kit import make_tokenizer

END = 0


def regex(pattern):
    return Grammar("regex", json.dumps(pattern), "guided_regex")


@pytest.fixture(scope="module")
def compiler():
    found = Compiler(VOCABULARY)
    yield found
    found.close()


def assert_equal(table, other):
    for array, wanted in zip(table, other, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_tables_are_those_of_this_process_and_are_kept(compiler):
    async def run():
        schema = {"type": "object", "properties": {"b": {"type": "boolean"}, "a": {"type": "integer"}}}
        found = await compiler.table(Grammar("schema", json.dumps(schema), "response_format"))
        assert_equal(found, compile_schema(schema, VOCABULARY))
        first, same = await asyncio.gather(compiler.table(regex("a+")), compiler.table(regex("a+")))
        assert_equal(first, compile_regex("a+", VOCABULARY))
        assert first is same is await compiler.table(regex("a+"))

    asyncio.run(run())


ERRORS = {
    "guided_regex: got a lookahead at position 0": regex("(?=a)"),
    "a.b.properties.x.not: this keyword is not supported": Grammar(
        "schema", '{"type": "object", "properties": {"x": {"not": {}}}}', "a.b"
    ),
    "tools[0].parameters.not: this keyword is not supported": Grammar(
        "structure", '{"type": "json_schema", "json_schema": {"not": {}}, "name": "tools[0].parameters"}', "tools"
    ),
    "tools.elements: got": Grammar("structure", '{"type": "sequence", "elements": [3]}', "tools"),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_have_the_place_in_the_request_and_are_kept(compiler, message):
    async def run():
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await compiler.table(ERRORS[message])
            error = caught.value.body["error"]
            assert error["message"].startswith(message.split(":")[0]) and caught.value.status == 400
            assert error["param"] == ERRORS[message].field

    asyncio.run(run())


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_served(monkeypatch):
    monkeypatch.setattr(serve_schemas, "SECONDS", 0.5)
    compiler = Compiler(VOCABULARY)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 300} for i in range(300)}}

    async def run():
        began = time.monotonic()
        with pytest.raises(ApiError, match=r"^guided_json: it takes more than 0\.5 s"):
            await compiler.table(Grammar("schema", json.dumps(wide), "guided_json"))
        assert time.monotonic() - began < 20
        assert isinstance(await compiler.table(regex("b+")), TokenTable)

    try:
        asyncio.run(run())
    finally:
        compiler.close()


def test_grammars_that_wait_and_those_that_are_kept_are_limited(monkeypatch):
    monkeypatch.setattr(serve_schemas, "MAX_COMPILING", 3)
    monkeypatch.setattr(serve_schemas, "MAX_KEPT", 2)
    compiler = Compiler(VOCABULARY)

    async def run():
        tasks = [asyncio.create_task(compiler.table(regex("a" * (number + 1)))) for number in range(4)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, TokenTable) for one in found] == [True] * 3 + [False]
        assert found[3].status == 429 and "3 schemas are being compiled" in str(found[3])
        assert [key[1] for key in compiler._kept] == ['"aa"', '"aaa"'] and not compiler._compiling
        await compiler.table(regex("aa"))
        await compiler.table(regex("b"))
        assert [key[1] for key in compiler._kept] == ['"aa"', '"b"']  # the latest
        monkeypatch.setattr(serve_schemas, "MAX_KEPT_BYTES", 100)
        await compiler.table(regex("c"))
        assert not compiler._kept

    try:
        asyncio.run(run())
    finally:
        compiler.close()


class Replaced:
    """An engine that counts."""

    def __init__(self):
        self.functions = []

    def replace_logits_fn(self, function):
        self.functions.append(function)


@pytest.fixture
def make(compiler):
    """Makes schemas with some slots."""
    made = []

    def with_slots(number, timeout=60.0):
        constraints = Constraints.create(number, len(VOCABULARY), **serve_schemas._LIMITS)
        made.append(Schemas(compiler, constraints, [END], timeout))
        made[-1].engine = Replaced()
        return made[-1]

    yield with_slots
    for one in made:
        one._thread.shutdown()


def test_requests_of_a_grammar_share_a_slot_that_stays_until_another_needs_it(make):
    schemas = make(2)

    async def run():
        first, same = [await schemas.take(regex("a"), 9) for _ in range(2)]
        other = await schemas.take(regex("b"), 9)
        assert first is same is not other and first.users == 2
        assert schemas.state(first) != schemas.state(other) and schemas.state(None) == -1
        for slot in (first, other, same):
            schemas.release(slot)
        assert len(schemas.engine.functions) == 2
        assert await schemas.take(regex("b"), 9) is other and len(schemas.engine.functions) == 2
        assert await schemas.take(regex("c"), 9) is first and len(schemas.engine.functions) == 3
        table = schemas.constraints
        wanted = Constraints.of(compile_regex("c", VOCABULARY), [END], **serve_schemas._LIMITS)
        np.testing.assert_array_equal(table.next_state[first.index], wanted.next_state[0])
        np.testing.assert_array_equal(table.stop_tokens[first.index], wanted.stop_tokens[0])

    asyncio.run(run())


def test_the_slot_that_was_used_longest_ago_gets_the_next_grammar(make):
    schemas = make(3)

    async def run():
        slots = {name: await schemas.take(regex(name), 9) for name in "abc"}
        for name in "bac":
            schemas.release(slots[name])
        assert await schemas.take(regex("d"), 9) is slots["b"]
        assert await schemas.take(regex("e"), 9) is slots["a"]

    asyncio.run(run())


def test_requests_get_slots_in_the_order_in_which_they_came(make):
    schemas = make(1)

    async def run():
        slot, got = await schemas.take(regex("a"), 9), []

        async def take(name):
            found = await schemas.take(regex(name), 9)
            got.append(name)
            await asyncio.sleep(0.01)
            schemas.release(found)

        waiting = []
        for name in "bac":  # also who wants the grammar that is there comes after who waits for it to leave
            waiting.append(asyncio.create_task(take(name)))
            await asyncio.sleep(0.3)  # its grammar is compiled
        assert not got and schemas._num_waiting == 3
        schemas.release(slot)
        await asyncio.gather(*waiting)
        assert got == ["b", "a", "c"] and schemas._num_waiting == 0

    asyncio.run(run())


def test_who_goes_away_leaves_the_queue_and_no_slot_in_use(make):
    schemas = make(1)

    async def run():
        for delay in (0.0, 0.001, 0.01, 0.05, 0.2):  # while it is compiled, put there, or lent
            task = asyncio.create_task(schemas.take(regex(f"x{delay}"), 9))
            await asyncio.sleep(delay)
            if not task.cancel():
                schemas.release(task.result())
            else:
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert schemas._num_waiting == 0 and not any(slot.users for slot in schemas._slots)
        slot = await schemas.take(regex("a"), 9)
        task = asyncio.create_task(schemas.take(regex("b"), 9))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        schemas.release(slot)
        assert (await schemas.take(regex("c"), 9)).key == ("regex", '"c"')

    asyncio.run(run())


def test_too_many_and_too_late_requests_get_429(make):
    schemas = make(1, timeout=0.3)

    async def run():
        await schemas.take(regex("a"), 9)
        late = asyncio.create_task(schemas.take(regex("b"), 1))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="guided_regex: 1 requests wait for their schemas already") as caught:
            await schemas.take(regex("c"), 1)
        assert caught.value.status == 429 and caught.value.headers == {"retry-after": "1"}
        with pytest.raises(ApiError, match="all 1 places of --schemas") as caught:
            await late
        assert caught.value.status == 429

    asyncio.run(run())


def test_a_server_has_no_schemas_without_what_they_need():
    words = type(
        "Words",
        (),
        {
            "to_str": lambda _: json.dumps({"decoder": None, "added_tokens": [], "model": {"type": "WordLevel"}}),
            "get_vocab": lambda _, **__: {"a": 0},
        },
    )()
    assert open_schemas(0, make_tokenizer(), 300, (), [1], 9.0) == "--schemas is 0"
    assert open_schemas(2, None, 300, (), [1], 9.0) == "the model has no tokenizer"
    assert "stop tokens" in open_schemas(2, make_tokenizer(), 300, (), [], 9.0)
    assert "17 stop tokens" in open_schemas(2, make_tokenizer(), 300, (), [*range(17)], 9.0)
    assert "byte-level BPE" in open_schemas(2, words, 300, (), [1], 9.0)
    assert "wanted at least" in open_schemas(2, make_tokenizer(), 10, (), [1], 9.0)


def test_marks_of_calls_have_a_text_and_other_special_tokens_none(monkeypatch):
    seen = []
    monkeypatch.setattr(serve_schemas, "Compiler", lambda vocabulary: seen.append(vocabulary))
    tokenizer = make_tokenizer()
    schemas = open_schemas(1, tokenizer, 300, ("<|message|>", "<unknown>"), [tokenizer.token_to_id("<|call|>")], 9.0)
    (vocabulary,) = seen
    assert isinstance(vocabulary, Vocabulary) and len(vocabulary) == 300
    assert vocabulary.tokens[tokenizer.token_to_id("<|message|>")] == b"<|message|>"
    assert vocabulary.tokens[tokenizer.token_to_id("<|end|>")] is None and schemas.constraints.grammars == 1
    schemas._thread.shutdown()
