# SPDX-License-Identifier: Apache-2.0
"""Servers as docs/howto/serving.md runs them: a client, a router in front of two, a saved cache, and a mesh."""

import concurrent.futures
import contextlib
import importlib.util
import re
import socket
import time

import httpx
import openai
import pytest
from flax import nnx

from kvjax.interop.vllm import Subscriber
from models import memory, recall, serve, session
from models.recall import CHECKPOINT
from models.serve_http import HEADER_BYTES, MIN_READ, Patience
from models.tenants import salt_of
from tests import wire_kit
from tests.drive import ROOT
from tests.models.serve_kit import (
    DOCUMENT,
    GREEDY,
    KEY,
    ON,
    PATIENCE,
    PEOPLE,
    Running,
    answer_about,
    prompt_of,
    with_template,
)

PAGE = ROOT / "docs/howto/serving.md"
PUBLISH = ("--publish", wire_kit.ANY, "--replay", wire_kit.ANY)


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def codes():
    """The Python of the page that its build does not run, since it needs servers: two parts of a client, and a router.

    `test_serve_tools.py`, `test_serve_schemas.py` and `test_serve_responses.py` run the code between them.
    """
    first, second, *_, router = re.findall(r"^```python3\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [code.replace('"none"', f'"{KEY}"') for code in (first, second, router)]


@pytest.fixture
def started(monkeypatch):
    """Starts servers: (server, the addresses at which it publishes)."""
    notes = list[str]()
    monkeypatch.setattr(serve, "_note", notes.append)
    with contextlib.ExitStack() as stack:

        def start(*options):
            notes.clear()
            server = Running(CHECKPOINT, *options)
            stack.callback(server.close)
            published = [note for note in notes if note.startswith("publishing")]
            return server, *(note.removeprefix("publishing at ").split(" and ") for note in published)

        yield start


TURNS = {
    "What is the capital of France?": "alice is in paris . bob is in oslo . where is bob ?",
    "And of Italy?": "where is alice ?",
    "Which of the two is older?": "where is bob ?",
    "The capital of France is": "where is alice ?",
}  # {a question of the page: one that the bundled model can answer}


@pytest.mark.long
def test_the_client_of_the_page_gets_an_answer(started):
    server, *_ = started("--name", "smollm2")
    first, second, _ = codes()
    code = f"{first}\n{second}".replace("http://127.0.0.1:8000", server.url)
    for of_page, question in TURNS.items():  # the bundled model has few words
        assert of_page in code
        code = code.replace(of_page, question)
    printed = list[tuple]()
    names = {"print": lambda *values: printed.append(values)}
    exec(code, names)
    names["client"].close()
    answers, counts = printed[::2], printed[1::2]
    assert [answer.strip() for (answer,) in answers] == ["oslo", "paris", "oslo"]
    assert counts[0][0] == 0 and all(0 < num_found < total for num_found, _, total, _ in counts[1:]), counts
    assert names["answer"].choices[0].message.content.split()[0] == "paris"  # of the message that was to be continued


@pytest.mark.long
def test_the_router_of_the_page_sends_prompts_where_they_are_cached(started):
    found = [started("--share-prefixes", *PUBLISH) for _ in range(2)]
    *_, code = codes()
    for number, (server, (publish, replay)) in enumerate(found, 1):
        code = code.replace(f"http://127.0.0.1:800{number}", server.url)
        code = code.replace(f"tcp://127.0.0.1:560{number}", publish).replace(f"tcp://127.0.0.1:561{number}", replay)
    names = {}
    exec(code, names)
    with contextlib.closing(names["router"]) as router:
        documents = [prompt_of(PEOPLE[0]), " ".join(prompt_of(PEOPLE[0]).split()[::-1])]
        for salt in (None, "a tenant"):
            for text in documents:
                names["complete"](text, salt, max_tokens=1, temperature=0)
            for text in documents:
                tokens, mirrors = recall.encode(text), router.mirrors.values()
                for mirror in mirrors:
                    mirror.wait(lambda one, text=tokens, salt=salt: one.lookup(text, salt).tokens > 0, timeout=1)
                answer = names["complete"](text, salt, max_tokens=1, temperature=0)
                assert answer.usage.prompt_tokens_details.cached_tokens == len(tokens) - 1


@pytest.mark.long
def test_a_saved_cache_is_found_and_published_by_the_next_server(started, tmp_path):
    options = ("--save", str(tmp_path / "saved"))
    first, *_ = started(*options)
    prompt = prompt_of(PEOPLE[0])
    with client_of(first) as client:
        for salt in ("a", "b"):
            client.completions.create(prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}, **GREEDY)
    first.close()
    second, (publish, replay) = started(*options, *PUBLISH)
    with Subscriber(publish, replay) as mirror, client_of(second) as client:
        tokens = recall.encode(prompt)
        whole, most = len(tokens) // 16 * 16, len(tokens) - 1
        assert mirror.wait(lambda one: one.lookup(tokens, salt_of(KEY, "b")).tokens == whole, timeout=PATIENCE)
        for salt, cached in (("b", most), ("a", most), ("c", 0)):
            found = client.completions.create(prompt=prompt, max_tokens=16, extra_body={"cache_salt": salt}, **GREEDY)
            assert found.usage.prompt_tokens_details.cached_tokens == cached
            assert answer_about(PEOPLE[0]).begins(found.choices[0].text)


@pytest.mark.long
def test_one_server_computes_prompts_and_another_finds_them_in_the_store(started, tmp_path):
    options = ("--store", str(tmp_path / "store"))
    prefill, *_ = started(*options, "--store-sync")
    decode, *_ = started(*options, "--store-readonly")
    for number, person in enumerate(PEOPLE[:6]):  # under salts: what one server has is in the store alone
        body = {"prompt": prompt_of(person), "max_tokens": 1, "cache_salt": str(number), **GREEDY}
        assert prefill.post({**body, "stream": number % 2 == 0}).status_code == 200
        answer = decode.post(body).json()
        assert answer["choices"][0]["text"] == f" {DOCUMENT.facts[person]}"
        most = answer["usage"]["prompt_tokens"] - 1
        assert most % 16 == 15 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == most


@pytest.mark.long
@pytest.mark.parametrize(
    "template", ["{% if %}", "{% for _ in range(9999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}"]
)
def test_a_template_that_fails_costs_chats_and_nothing_else(started, tmp_path, template):
    """Neither the start, nor completions, nor the time of others while it is rendered."""
    folder = with_template(tmp_path / "recall")
    (folder / "chat_template.jinja").write_text(template)
    server, *_ = started("--checkpoint", str(folder))
    messages = [{"role": "user", "content": "alice"}]
    with client_of(server) as client, httpx.Client(base_url=server.url) as other:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            chat = pool.submit(client.chat.completions.create, messages=messages, **GREEDY)
            while not chat.done():
                begin = time.monotonic()
                assert other.get("/health").status_code == 200 and time.monotonic() - begin < 1
        with pytest.raises(openai.BadRequestError, match=r"chat template: (Expected an expression|it takes more than)"):
            chat.result()
        found = client.completions.create(prompt=prompt_of(PEOPLE[0]), max_tokens=8, **GREEDY)
        assert answer_about(PEOPLE[0]).begins(found.choices[0].text)


@pytest.mark.long
def test_drafts_change_no_answer_and_are_counted(started):
    """A model that repeats its document has drafts, and the usage and the metrics say how many."""
    plain, drafting = started()[0], started("--speculate", "4")[0]
    body = {"prompt": f"{DOCUMENT.text} {DOCUMENT.text} {PEOPLE[0]} is", "max_tokens": 48, **GREEDY, **ON}
    wanted, found = (server.post(body).json() for server in (plain, drafting))
    assert found["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert "completion_tokens_details" not in wanted["usage"]
    details = found["usage"]["completion_tokens_details"]
    accepted, rejected = (details[f"{name}_prediction_tokens"] for name in ("accepted", "rejected"))
    assert accepted > 0
    lines = httpx.get(f"{drafting.url}/metrics").text.splitlines()
    numbers = dict(line.rsplit(" ", 1) for line in lines if line.startswith("kvjax_spec_decode"))
    assert float(numbers["kvjax_spec_decode_num_accepted_tokens_total"]) == accepted
    assert float(numbers["kvjax_spec_decode_num_draft_tokens_total"]) == accepted + rejected


@pytest.mark.slow
@pytest.mark.parametrize(("options", "devices"), [(("--mesh", "2"), 2), (("--mesh", "2", "--context", "2"), 4)])
def test_a_mesh_gives_the_same_answers(started, options, devices):
    server, *_ = started(*options)
    with client_of(server) as client:
        for person in PEOPLE[:3]:
            found = client.completions.create(prompt=prompt_of(person), max_tokens=8, **GREEDY)
            assert answer_about(person).begins(found.choices[0].text)
    (leaf, *_) = server.engine.close().pools.arrays[0]
    assert len(leaf.sharding.device_set) == devices


@pytest.mark.long
def test_keys_share_no_prefixes_unless_they_are_to(started, tmp_path):
    tokens = recall.encode(prompt_of(PEOPLE[0]))
    whole, most = len(tokens) // 16 * 16, len(tokens) - 1
    file = tmp_path / "keys"
    file.write_text("other\n")

    def ask(server, key, salt=None):
        body = {"prompt": tokens, "max_tokens": 1, "cache_salt": salt, **GREEDY}
        return server.post(body, authorization=f"Bearer {key}")

    def cached(*use):
        return ask(*use).json()["usage"].get("prompt_tokens_details", {}).get("cached_tokens")

    def prompts_shown(server, key):
        page = httpx.get(f"{server.url}/cache", auth=("", key)).text
        return page.count("<tr><td")

    uses = [(KEY, None), (KEY, "a"), ("other", None), ("other", "a"), ("other", "b")]
    server, (publish, replay) = started("--api-keys", str(file), *PUBLISH)
    assert [cached(server, *use) for use in uses] == [0] * 5
    assert [cached(server, *use) for use in uses] == [most] * 5
    assert (prompts_shown(server, KEY), prompts_shown(server, "other")) == (2, 3)
    for salt in (salt_of(KEY), salt_of(KEY, "a")):
        found = ask(server, "other", salt)
        assert found.status_code == 400 and found.json()["error"]["param"] == "cache_salt"
    with Subscriber(publish, replay) as mirror:  # a router knows the salts of keys
        for salt in [salt_of(*use) for use in uses]:
            assert mirror.wait(lambda one, salt=salt: one.lookup(tokens, salt).tokens == whole, timeout=PATIENCE)
        assert mirror.lookup(tokens).tokens == 0 == mirror.lookup(tokens, "a").tokens
    shared, *_ = started("--api-key", "other", "--share-prefixes")
    assert [cached(shared, *use) for use in uses] == [0, 0, most, most, 0]
    assert (prompts_shown(shared, KEY), prompts_shown(shared, "other")) == (3, 3)
    hidden, *_ = started("--hide-cached-tokens")
    assert cached(hidden, KEY) is None is cached(hidden, KEY)


def test_the_page_has_every_limit_with_its_default():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (?:`(--[^|]+)`|) ?\| ([^|]+) \|$", PAGE.read_text(), re.M)
    parser = serve.make_parser()
    found = {option: default for _, default, option, _ in rows if option not in ("", "--max-length")}
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "s": 1, "": 1}
    for option, text in found.items():
        number, unit = re.fullmatch(r"(\d+) ?(KiB|MiB|s|)(?: .*)?", text).groups()
        assert parser.get_default(option[2:].replace("-", "_")) == int(number) * units[unit], option
    limits = {option for action in parser._actions for option in action.option_strings if option.startswith("--max-")}
    assert found.keys() == limits - {"--max-length", "--max-replicas"} | {"--timeout", "--grace", "--schemas"}
    (headers, header_time, body_time, read_time), patience = [default for _, default, *_ in rows[:4]], Patience()
    assert headers == f"{HEADER_BYTES >> 10} KiB" and f"read {MIN_READ >> 10} KiB" in rows[3][0]
    assert [header_time, body_time] == [f"{patience.header_seconds} s", f"{patience.body_seconds} s"]
    assert read_time == f"{patience.read_seconds} s"


@pytest.mark.parametrize(
    "options", [(), ("--host-blocks", "9"), ("--mesh", "2"), ("--rows", "3", "--dtype", "bfloat16")], ids="_".join
)
def test_a_budget_is_weights_steps_and_as_many_blocks_as_fit(options):
    parser = serve.make_parser()
    for budget in (9_000_000, 30_000_000):
        args = parser.parse_args(["--checkpoint", str(CHECKPOINT), "--budget", str(budget), *options])
        where = session.make_mesh(parser, args)
        model, _ = session.load_model(parser, args, **where)
        spec = serve._spec(parser, args, model, where)
        cache = session.make_cache(parser, args, spec, **where)
        block = memory.own_bytes(cache.pools) // (args.blocks + 1)
        taken = sum(map(memory.own_bytes, (nnx.state(model), cache.pools, cache.state)))
        taken += memory.step_bytes(args, model, spec.max_length)
        assert 0 <= budget - taken < 2 * block and (spec.groups[0].num_blocks, spec.max_length) == (args.blocks, 1024)
        line = memory.described(args, model, cache)
        assert line.startswith("memory: ") and f" of K/V in {args.blocks:,} blocks of 16 tokens, " in line
        assert ("K/V on the host" in line) == ("--host-blocks" in options)


def test_a_small_budget_shortens_the_rows():
    parser = serve.make_parser()
    args = parser.parse_args(["--checkpoint", str(CHECKPOINT), *SMALL])
    spec = serve._spec(parser, args, session.load_model(parser, args)[0], {})
    assert spec.max_length <= spec.groups[0].num_blocks * 16 < 1024


SMALL = ("--rows", "1", "--chunk", "16", "--budget", "1.5MB")
TOO_SMALL = r"--budget: got 1,000,000 bytes, wanted at least [\d,]+, the least for one block of"
DEVICES = "wanted at most 8, the number of devices"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([*SMALL, "--budget", "1MB"], TOO_SMALL),
        ([*SMALL, "--max-length", "1000"], "--max-length: got 1000, wanted at most"),
        ([*SMALL, "--blocks", "9"], "--blocks: not allowed with argument --budget"),
        (["--budget", "much"], "--budget: got 'much', wanted a size such as 500MB or 10GiB"),
        (["--max-length", "2000"], "--max-length: got 2000, wanted at most 1024"),
        (["--mesh", "64"], f"--mesh: got 64, {DEVICES}"),
        (["--mesh", "4", "--context", "4"], f"--mesh times --context: got 16, {DEVICES}"),
        (["--context", "3"], "--context: got axis 'context' of 3 devices, wanted one that divides blocks of"),
        (["--mesh", "3"], "--mesh: got 3 devices along 'heads', wanted a divisor of"),
        (["--save", "{other}"], "--save: got '{other}' without manifest.json"),
        (["--checkpoint", "{other}/x"], "--checkpoint: {other}/x: no such folder$"),
        (["--chat-template", "{other}/broken"], "--chat-template: chat template: Expected an expression"),
        (["--port", "65536"], "--port: got '65536', wanted"),
        (["--port", "{taken}"], "--port: 127.0.0.1:{taken}: address already in use$"),
        (["--api-keys", "{other}/none"], "--api-keys: {other}/none has no key$"),
        (["--api-keys", "{other}/x"], "--api-keys: {other}/x: no such file or directory$"),
        (["--api-key", ""], "--api-key: got a key that no header can have, wanted ASCII letters, digits and signs$"),
        (["--api-key", "a", "--api-key", "\xe4"], "--api-key: got a key that no header can have"),
    ],
)
def test_options_that_cannot_be_are_errors_of_one_line(options, wanted, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(serve.commands.jax.config, "update", lambda *_: None)  # of this process
    (tmp_path / "broken").write_text("{% if %}")
    (tmp_path / "none").write_text("# none\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"other": str(tmp_path), "taken": taken.getsockname()[1]}
        given = [option.format(**names) for option in options]
        with pytest.raises(SystemExit) as caught:
            serve.main(["--checkpoint", str(CHECKPOINT), "--port", "0", "--no-compile-cache", *given])
    line = capsys.readouterr().err.removeprefix("python -m models.serve: ")
    assert caught.value.code == 2 and line.count("\n") == 1 and re.match(wanted.format(**names), line)


def test_packages_that_are_not_installed_are_named(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "starlette" else find(name))
    with pytest.raises(SystemExit):
        serve.main(["--checkpoint", str(CHECKPOINT)])
    assert 'needs starlette, uvicorn and prometheus-client: pip install "kvjax[serve]"' in capsys.readouterr().err
