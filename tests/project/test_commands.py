# SPDX-License-Identifier: Apache-2.0
"""The command lines: errors of one line, streamed text and JSON, Ctrl-C, separate times, compiled programs."""

import functools
import io
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import time
import types
import urllib.request

import jax
import jax.numpy as jnp
import pytest
import tokenizers
from flax import nnx

import kvjax
from kvjax.events.log import init_log
from kvjax.interop.vllm import Subscriber
from kvjax.research import log_report
from models import (
    Decoder,
    ModelConfig,
    __main__,
    commands,
    demo,
    generate,
    prefill_decode,
    save,
    serve,
    session,
    stores,
    train,
    verify,
    wires,
)
from models.stopwatch import Stopwatch
from tests.drive import DATA
from tests.wire_kit import Reader


def test_logs_of_prompts_are_their_users_alone(tmp_path):
    before = os.umask(0)
    try:
        commands.save(commands.Parser("demo", None), types.SimpleNamespace(events=tmp_path / "demo"), [{"ts": 0}])
        with wires._File(tmp_path / "wire", print) as file:
            file.write("{}")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600, 0o600]


def test_a_folder_of_programs_to_which_others_may_write_ends_a_command_with_one_line(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(kvjax, "enable_compilation_cache", functools.partial(kvjax.enable_compilation_cache, tmp_path))
    with pytest.raises(SystemExit, match=r"^folder: got .* mode 0777, wanted .*; --no-compile-cache needs no folder$"):
        commands.enable_compilation_cache(True)


FIELDS = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
VOCABULARY = "wanted 0 to 255 (the vocabulary has 256)"
COUNT = "wanted an int of at least 1 and at most 1073741824"
LOCATION = "wanted a folder, a URL or an open tensorstore.KvStore"
STORE = "wanted a folder of a store, an empty one or none"
ONE = "--checkpoint ids --prompt 1"
LONGER = "in longer sequences the rope has other frequencies (sequence_length of rope_parameters)"
NO_FILE = "No such file or directory"
MAINS = {"generate": generate.main}
NEW = 20
QUESTION = ["--prompt", "caf\u00e9", "--prompt", "hello"]


def bytes_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer with a token for each byte, so that an é is two."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model of random weights, with and without a tokenizer."""
    home, model = tmp_path_factory.mktemp("models"), Decoder(ModelConfig.from_hf(FIELDS), rngs=nnx.Rngs(0))
    save(model, home / "text", bytes_tokenizer())
    save(model, home / "ids")
    (home / "longrope").symlink_to(DATA / "goldens" / "llama_longrope")
    return home


@pytest.fixture(autouse=True)
def away(folders, monkeypatch):
    """Runs tests in the folder of the models, and keeps jax's settings unchanged."""
    monkeypatch.chdir(folders)
    monkeypatch.setattr(commands.jax.config, "update", lambda *_: None)


def refused(capsys, *arguments, main=generate.main, command="generate"):
    """The one line that a command prints before it exits with 2."""
    with pytest.raises(SystemExit) as caught:
        main([*arguments])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1), err
    return err.removeprefix(f"python -m models.{command}: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--checkpoint bad/ --prompt 1", "--checkpoint: bad/: no such folder"),
        ("--checkpoint . --prompt 1", "--checkpoint: config.json: no such file or directory"),
        ("--checkpoint ids --prompts none.txt", "--prompts: none.txt: no such file or directory"),
        ("--checkpoint ids", "--prompt: got none, wanted at least one (or --prompts FILE)"),
        ("--prompt 1", "--checkpoint: got none, wanted the folder of a model"),
        ("--checkpoint ids --prompt x", "--prompt: got 'x', wanted token ids (the checkpoint has no tokenizer.json)"),
        ("--checkpoint ids --prompt 1 --prompt 2,256", f"--prompt: got token id 256 in prompt 2, {VOCABULARY}"),
        ("--checkpoint ids --prompt", "--prompt: expected one argument"),
        ("--checkpoint ids --prompt=-1", f"--prompt: got token id -1 in prompt 1, {VOCABULARY}"),
        ("--checkpoint ids --prompt=", "--prompt: got no token in prompt 1, wanted at least one"),
        ("--rows 0", f"--rows: got '0', {COUNT}"),
        ("--max-new-tokens many", f"--max-new-tokens: got 'many', {COUNT}"),
        ("--max-new-tokens 3000000000", f"--max-new-tokens: got '3000000000', {COUNT}"),
        (
            "--checkpoint ids --prompt 1,2 --max-new-tokens 1000000000",
            "--max-new-tokens: got 1000000000, wanted at most 8190 after 2 of a prompt "
            "(512 blocks of 16 tokens: --blocks)",
        ),
        (
            "--checkpoint ids --prompt 1 --prompt 1,2,3,4 --blocks 1 --block-size 4",
            "--prompt: got 4 tokens in prompt 2, wanted at most 3 (1 blocks of 4 tokens: --blocks)",
        ),
        (
            "--checkpoint ids --prompt 1,2 --max-new-tokens 8 --max-length 9",
            "--max-length: got 9, wanted at least 10: a prompt with its answer",
        ),
        (
            "--checkpoint longrope --prompt 1,2 --max-new-tokens 63",
            f"--max-length: got 65, wanted at most 64: {LONGER}",
        ),
        ("--checkpoint longrope --prompt 1 --max-length 80", f"--max-length: got 80, wanted at most 64: {LONGER}"),
        ("--chat", "--checkpoint: got none, wanted the folder of a model"),
        ("--checkpoint ids --chat", "--chat: ids: wanted a checkpoint with a tokenizer.json"),
        ("--checkpoint ids --chat --prompt 1", "--chat: got a prompt too, wanted turns from standard input alone"),
        (
            "--checkpoint text --chat --blocks 2 --max-length 33",
            "--max-length: got 33, wanted at most 32: the model has...",
        ),
        ("--temperature nan", "--temperature: got 'nan', wanted a number of at least 0.0"),
        ("--top-p 2", "--top-p: got '2', wanted a number of at least 0.0 and at most 1.0"),
        ("--checkpoint ids --prompt 1 --top-p 0", "top_p: got 0.0, wanted None or a number in (0, 1]"),
        ("--events none/events.jsonl", "--events: none: no such folder"),
        ("--checkpoint ids --prompt 1 --trace none/trace.json", "--trace: none: no such folder"),
        ("--trace trace.json", "--checkpoint: got none, wanted the folder of a model"),
        ("--checkpoint ids --prompt 1 --trace .", "--trace: .: is a directory"),
        ("--publish tcp://127.0.0.1:*", "--checkpoint: got none, wanted the folder of a model"),
        ("--checkpoint ids --prompt 1 --replay tcp://127.0.0.1:*", "--replay: got one without --publish"),
        ("--checkpoint ids --prompt 1 --publish 5557", "--publish: got '5557', wanted tcp://HOST:PORT or ipc://PATH"),
        (
            "--checkpoint ids --prompt 1 --publish tcp://127.0.0.1:* --replay x",
            "--replay: got 'x', wanted tcp://HOST:PORT or ipc://PATH",
        ),
        ("--checkpoint ids --prompt 1 --publish tcp://*:99999", "--publish: got port 99999, wanted at most 65535"),
        ("--checkpoint ids --prompt 1 --stay", "--stay: got none of --publish, --agent and --metrics"),
        ("--agent 0", "--checkpoint: got none, wanted the folder of a model"),
        ("--metrics 0", "--checkpoint: got none, wanted the folder of a model"),
        ("--agent 65536", "--agent: got '65536', wanted an int of at least 0 and at most 65535"),
        ("--store-bytes 5", "--store-bytes: got one without --store"),
        ("--store-bytes 5XB", "--store-bytes: got '5XB', wanted a size such as 500MB or 10GiB"),
        (
            "--checkpoint ids --prompt 1 --store new --store-bytes 1k",
            "--store-bytes: got 1000, wanted an int of at least 1152",
        ),
        ("--nonsense", "unrecognized arguments: --nonsense"),
        (f"{ONE} --store=", f"--store: got '', {LOCATION}"),
        (f"{ONE} --store text", f"--store: got '{{home}}/text' without store.lock, {STORE}"),
        (f"{ONE} --store {{home}}/ids/config.json", f"--store: got '{{home}}/ids/config.json', {STORE}..."),
        ("--store-readonly", "--store-readonly: got one without --store"),
        (f"{ONE} --store new --store-readonly --store-bytes 5", "--store-bytes: not allowed with argument..."),
        (f"{ONE} --store text --store-readonly", "--store: got '{home}/text' without store.lock, wanted a store"),
        (f"{ONE} --curve", "--curve: got one without --publish"),
        (f"{ONE} --curve --publish tcp://127.0.0.1:*", "--publish: got no secret key in $KVJAX_CURVE_KEY, wanted..."),
        (f"{ONE} --publish ipc://{{home}}/none/x", f"--publish: ipc://{{home}}/none/x: {NO_FILE}..."),
        (
            f"{ONE} --publish tcp://127.0.0.1:* --replay ipc://{{home}}/none/x",
            f"--replay: ipc://{{home}}/none/x: {NO_FILE}...",
        ),
        (f"{ONE} --agent {{taken}}", "--agent: got 127.0.0.1:{taken}, wanted a free port of this machine"),
        (f"{ONE} --metrics {{taken}}", "--metrics: 127.0.0.1:{taken}: Address already in use"),
    ],
)  # fmt: skip
def test_errors_are_one_line(capsys, folders, line, message):
    """Of `generate`, if the line names no other command. Three dots are any rest."""
    command, *words = line.split() if line.split()[0] in MAINS else ["generate", *line.split()]
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"home": folders, "taken": server.getsockname()[1]}
        found = refused(capsys, *(word.format(**names) for word in words), main=MAINS[command], command=command)
    wanted = message.format(**names)
    assert found == wanted or (wanted.endswith("...") and found.startswith(wanted[:-3]))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", '{"model_type": "gpt2"}', "config.json: model_type: got 'gpt2', wanted 'llama' or"),
        ("config.json", json.dumps({**FIELDS, "hidden_size": "wide"}), "config.json: hidden_size: got 'wide'"),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
        ("model.safetensors", "", "model.safetensors: not a safetensors file"),
    ],
)
def test_broken_files_are_named_in_one_line(tmp_path, capsys, folders, file, text, message):
    for path in (folders / "text").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(text)
    line = refused(capsys, "--checkpoint", str(tmp_path), "--prompt", "hi")
    assert line.startswith(f"--checkpoint: {tmp_path}/{message}")


@pytest.mark.parametrize("option", ["--blocks", "--host-blocks", "--block-size", "--rows"])
def test_what_takes_more_than_the_memory_is_refused_before_it_is_taken(capsys, option):
    line = refused(capsys, "--checkpoint", "ids", "--prompt", "1", option, "1000000000")
    assert re.fullmatch(
        rf"{option}: got 1000000000, which takes .* with the model, wanted at most the .* of cpu:0", line
    )


def test_bytes_that_are_not_utf8_are_named(capsys, tmp_path, monkeypatch):
    text = "got bytes that are not UTF-8 in"
    assert refused(capsys, "--checkpoint", "ids", "--prompt", "1", "--prompt", "\udce9") == f"--prompt: {text} prompt 2"
    (tmp_path / "prompts").write_bytes(b"hi\n\xe9")
    line = refused(capsys, "--checkpoint", "ids", "--prompts", str(tmp_path / "prompts"))
    assert line == f"--prompts: {tmp_path}/prompts: not UTF-8 at byte 3"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xe9\n"), encoding="utf-8"))
    assert refused(capsys, "--checkpoint", "text", "--chat") == f"--chat: {text} a turn"


def test_a_chat_does_not_begin_with_a_broken_template(capsys, tmp_path):
    folder = shutil.copytree("text", tmp_path / "text")
    (folder / "chat_template.jinja").write_text("{% if %}")
    line = refused(capsys, "--checkpoint", str(folder), "--chat")
    assert line.startswith("--chat: chat template: Expected an expression")


class Scripted:
    """A stand-in for a model's stream. Every answer is " fine", and the prompts are recorded."""

    def __init__(self):
        self.prompts, self.caches, self.stores = [], [], []
        self.tokens = bytes_tokenizer().encode(" fine").ids

    def __call__(self, model, cache, requests, options):
        prompts = [request.prompt.tolist() for request in requests]
        self.prompts += prompts
        self.caches.append(cache)
        self.stores.append(options.store)
        outputs = [kvjax.serving.Output(len(prompt), cached_tokens=len(prompt) - 1) for prompt in prompts]
        for count in (2, len(self.tokens)):
            for output in outputs:
                output.tokens = self.tokens[:count]
                output.logprobs = [0.0] * count
                output.finish = "stop" if count == len(self.tokens) else None
            if options.listener is not None:
                options.listener(init_log(8, 16, False))
            new = {number: output.tokens for number, output in enumerate(outputs)}
            yield types.SimpleNamespace(outputs=outputs, cache=cache, new=new)


@pytest.fixture
def scripted(monkeypatch):
    stream = Scripted()
    monkeypatch.setattr(kvjax, "stream", stream)
    return stream


def test_an_answer_has_a_line_of_its_own_with_and_without_a_host_tier(capsys, scripted):
    out, _ = run("--checkpoint", "text", *QUESTION, capsys=capsys)
    assert out == "> caf\u00e9\nfine\n\n> hello\nfine\n"
    run("--checkpoint", "text", *QUESTION, "--host-blocks", "8", capsys=capsys)
    assert [type(cache) for cache in scripted.caches] == [kvjax.Cache, kvjax.tiers.TieredCache]
    assert scripted.caches[1].state.spec.groups[0].num_host_blocks == 8


def test_a_store_is_an_option_and_is_closed_at_the_end(capsys, scripted, tmp_path):
    words = "--checkpoint", "text", *QUESTION, "--store", str(tmp_path / "store")
    out, _ = run(*words, "--json", "--store-bytes", "1.5MB", capsys=capsys)
    assert json.loads(out.splitlines()[0])["stored_tokens"] == 0
    run(*words, capsys=capsys)
    first, second = scripted.stores
    assert (first.max_bytes, second.max_bytes, first.readonly) == (1_500_000, 10 << 30, False)
    for store in (first, second):
        with pytest.raises(ValueError, match="store: got one that is closed"):
            store.flush()


@pytest.mark.parametrize("where", ["show", "before"])
def test_ctrl_c_closes_the_store(capsys, scripted, tmp_path, monkeypatch, where):
    def press(self, outputs, **options):
        if where == "show" and not options.get("last"):
            raise KeyboardInterrupt

    def interrupted(model, cache, requests, options):
        scripted.stores.append(options.store)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate._Screen, "show", press)
    if where == "before":
        monkeypatch.setattr(kvjax, "stream", interrupted)
    with pytest.raises(SystemExit) as caught:
        run("--checkpoint", "text", *QUESTION, "--store", str(tmp_path / "store"), capsys=capsys)
    assert caught.value.code == 130
    with pytest.raises(ValueError, match="store: got one that is closed"):
        scripted.stores[0].flush()


def test_a_checkpoints_name_changes_with_its_weights_alone(tmp_path, folders):
    def copy(name, file="", change=lambda text: text):
        for path in (folders / "ids").iterdir():
            (tmp_path / name).mkdir(exist_ok=True)
            text = path.read_bytes()
            (tmp_path / name / path.name).write_bytes(change(text) if path.name == file else text)
            os.utime(tmp_path / name / path.name, (0, 0))
        return stores.checkpoint_name(tmp_path / name)

    name = stores.checkpoint_name(folders / "ids")
    others = [
        copy("weights", "model.safetensors", lambda text: text[:-1] + bytes([text[-1] ^ 1])),
        copy("config", "config.json", lambda text: text.replace(b"16", b"32")),
    ]
    assert copy("same") == name and len({name, *others}) == 3


@pytest.mark.parametrize("option", ["--events", "--trace"])
def test_a_full_disk_costs_no_answer(capsys, scripted, option):
    with pytest.raises(SystemExit) as caught:
        run("--checkpoint", "text", *QUESTION, option, "/dev/full", capsys=capsys)
    out, err = capsys.readouterr()
    assert (caught.value.code, out.count("fine\n")) == (1, 2)
    assert err.count(f"{option}: /dev/full: no space left on device; the rest is not written\n") == 1


def test_a_full_disk_costs_no_answer_of_the_demo_and_no_plot(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda *_: ([{"events": []}], None))
    message = "no space left on device"
    assert refused(capsys, "--events", "/dev/full", main=demo.main, command="demo") == f"--events: /dev/full: {message}"

    def plot_blocks(state, path):
        with path.open("wb", buffering=0) as file:
            file.write(b"x")

    (tmp_path / "full.png").symlink_to("/dev/full")
    cache = types.SimpleNamespace(state=None)
    monkeypatch.setattr(demo, "run", lambda *_: ([], cache))
    monkeypatch.setattr(kvjax.debug, "plot_blocks", plot_blocks)
    line = refused(capsys, "--plot", str(tmp_path / "full.png"), main=demo.main, command="demo")
    assert line == f"--plot: {tmp_path}/full.png: {message}"


def test_what_is_served_stays_until_ctrl_c(capsys, scripted, monkeypatch):
    port, pages = free_port(), []

    class Pressed:
        def wait(self):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                pages.append(page.read().decode())
            raise KeyboardInterrupt

    monkeypatch.setattr(session, "threading", types.SimpleNamespace(Event=Pressed))
    out, err = run("--checkpoint", "text", *QUESTION, "--metrics", str(port), "--stay", capsys=capsys)
    assert "kvjax_blocks" in pages[0] and out.endswith("fine\n")
    assert err.endswith("all is answered, and the cache is served on: Ctrl-C ends it\n")


def chat(capsys, monkeypatch, turns, *arguments):
    """The output of a chat for some turns."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
    return run("--checkpoint", "text", "--chat", *arguments, capsys=capsys)


def test_each_turn_of_a_chat_begins_with_the_turns_before(capsys, scripted, monkeypatch):
    out, err = chat(capsys, monkeypatch, "one\n\ntwo\n")
    assert out == "fine\nfine\n" and ">" not in err
    first, second = scripted.prompts
    assert second[: len(first) + 5] == first + scripted.tokens
    assert bytes_tokenizer().decode(second) == "one\n fine\ntwo\n"
    assert f"{len(second) - 1} of {len(second)} prompt tokens reused\n" in err
    out, _ = chat(capsys, monkeypatch, "one\n", "--json")
    assert json.loads(out)["prompt"] == "one"


def test_a_chat_ends_where_the_cache_does(capsys, scripted, monkeypatch):
    _, err = chat(capsys, monkeypatch, "one\ntwo\nthree\n", "--blocks", "1", "--block-size", "16")
    assert "the chat ends: it has 26 tokens, and the most are 16\n" in err
    assert len(scripted.prompts) == 2


def test_ctrl_c_ends_an_answer_and_the_chat_goes_on(capsys, scripted, monkeypatch):
    show, shown = generate._Screen.show, []

    def press(self, outputs, **options):
        shown.append(outputs)
        show(self, outputs, **options)
        if len(shown) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(generate._Screen, "show", press)
    out, err = chat(capsys, monkeypatch, "one\ntwo\n")
    assert out == "f\nfine\n" and err.count("prompt 1 ended early: interrupted\n") == 1
    assert bytes_tokenizer().decode(scripted.prompts[1]) == "one\n f\ntwo\n"


@pytest.mark.slow
def test_a_chat_reuses_its_turns_and_gets_them_back_from_the_host(capsys, monkeypatch, tmp_path):
    """The device has seven blocks. The second chat evicts the first one's to the host."""
    sizes = ["--blocks", "8", "--block-size", "8", "--host-blocks", "16", "--events", str(tmp_path / "events")]
    _, err = chat(capsys, monkeypatch, "a first turn\nand\n", *sizes)
    counts = re.findall(r"(\d+) of (\d+) prompt tokens reused", err)
    assert counts[0][0] == "0" and int(counts[1][0]) >= 24, err
    words = ["--prompt", "a" * 30, "--prompt", "b" * 30, "--prompt", "a" * 30 + "c", "--rows", "1"]
    out, _ = run("--checkpoint", "text", *words, "--json", *sizes, capsys=capsys)
    assert [json.loads(line)["cached_tokens"] for line in out.splitlines()] == [0, 0, 30]
    levels = {event.get("level") for event in logged(tmp_path / "events") if event["kind"] == "updated"}
    assert levels == {0, 1}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("prompt", "line", "length"),
    [(40, "", 256), (60, "", 256), (225, "", 512), (40, "--max-length 72", 72), (1, "--blocks 3", 48)],
)
def test_the_length_of_a_row_is_rounded_up(monkeypatch, prompt, line, length):
    """Prompts of other lengths then share the programs."""
    args = generate._parser().parse_args(line.split())
    monkeypatch.setattr(session, "most_tokens", lambda args, model: args.blocks * args.block_size)
    monkeypatch.setattr(session, "rope_limit", lambda config: None)
    session.check_length(commands.Parser("generate", ""), args, types.SimpleNamespace(config=None), [[1] * prompt, [1]])
    assert args.max_length == length


def logged(path):
    """The events in a file of `--events`."""
    return [event for line in path.read_text().splitlines() for event in json.loads(line)["events"]]


def run(*arguments, capsys):
    """The standard output and standard error of a generation. Few shapes mean few programs to compile."""
    generate.main([*arguments, "--max-new-tokens", str(NEW), "--rows", "2", "--no-compile-cache"])
    return capsys.readouterr()


@pytest.mark.long
def test_text_json_and_events_say_what_generate_does(capsys, tmp_path, monkeypatch):
    """One test, so that one pair of programs is compiled. Subscribers get the same events."""
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("live", "replay")]
    agent, metrics, show, pages = free_port(), free_port(), generate._Lines.show, []

    def scrape(self, outputs, **options):
        if not options.get("last"):  # then no block is active any more
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics") as page:
                pages.append(page.read().decode())
        time.sleep(0.6)  # every second the agent sends how full the cache is
        show(self, outputs, **options)

    monkeypatch.setattr(generate._Lines, "show", scrape)
    with Subscriber(*endpoints) as sub, Reader(f"127.0.0.1:{agent}") as reader:
        out, err = run(
            "--checkpoint", "text", *QUESTION, "--json", "--events", str(tmp_path / "events"),
            "--trace", str(tmp_path / "trace"), "--publish", endpoints[0], "--replay", endpoints[1],
            "--agent", str(agent), "--metrics", str(metrics), capsys=capsys,
        )  # fmt: skip
        assert f"publishing at {endpoints[0]} and {endpoints[1]}\nan agent listens at 127.0.0.1:{agent}\n" in err
        assert f"metrics are at http://127.0.0.1:{metrics}/metrics\n" in err
        assert reader.wait(lambda one: one.error is not None) and reader.fill[0].used_blocks
        assert re.search(r"^kvjax_queried_tokens_total 10.0$", pages[-1], re.MULTILINE)
        assert re.search(r'^kvjax_blocks{condition="active",group="0",tier="device"} [1-9]', pages[-1], re.MULTILINE)
        assert 'kvjax_wire_overflows_total{wire="agent"} 0.0' in pages[-1]
        events = logged(tmp_path / "events")
        whole = {path for _, _, path in kvjax.fold(events).index if len(path) % 16 == 0}
        assert whole and sub.wait(lambda one: {prefix.tokens for prefix in one.index} == whole, 20), sub.counts
        assert len(reader.found) == len(whole)
    monkeypatch.setattr(generate._Lines, "show", show)
    first, second = map(json.loads, out.splitlines())
    assert list(first) == ["prompt", "text", "tokens", "logprobs", "prompt_tokens", "cached_tokens", "finish"]
    assert (first["prompt"], first["prompt_tokens"], first["cached_tokens"]) == ("caf\u00e9", 5, 0)
    assert (len(second["tokens"]), len(second["logprobs"]), second["finish"]) == (NEW, NEW, "length")
    assert first["text"] == bytes_tokenizer().decode(first["tokens"])
    assert "compiling the loop ...\ncompile " in err
    assert "; prefill 10 tokens " in err
    assert {event["kind"] for event in events} == {"stored"}
    totals = log_report((tmp_path / "events").read_text().splitlines())
    assert sum(totals.queried) == 10 and totals.kinds["stored"] == len(events) and not totals.refused
    trace = json.loads((tmp_path / "trace").read_text())
    tracks = {one["args"]["name"] for one in trace if one["name"] == "thread_name"}
    assert {"loops", "prompt 0", "prompt 1"} <= tracks and any(one["name"] == "blocks, device" for one in trace)

    out, err = run("--checkpoint", "text", *QUESTION, capsys=capsys)
    assert out == f"> caf\u00e9\n{first['text'].lstrip()}\n\n> hello\n{second['text'].lstrip()}\n"
    assert "compiling" not in err

    ids = " ".join(map(str, bytes_tokenizer().encode("hello").ids))
    out, _ = run("--checkpoint", "ids", "--prompt", "1 2 3 4 5", "--prompt", ids, capsys=capsys)
    assert out.splitlines()[-1] == " ".join(map(str, second["tokens"]))


@pytest.mark.slow
def test_a_second_run_finds_what_the_first_one_stored(capsys, tmp_path, monkeypatch):
    words = "--checkpoint", "text", "--block-size", "8", "--store", str(tmp_path / "store")
    prompt = "a prompt of some forty bytes, for five blocks"
    out, _ = run(*words, "--prompt", prompt, "--json", capsys=capsys)
    first = json.loads(out)
    assert first["cached_tokens"] == first["stored_tokens"] == 0
    out, err = run(*words, "--prompt", prompt, "--json", capsys=capsys)
    second = json.loads(out)
    assert (second["cached_tokens"], second["stored_tokens"], second["tokens"]) == (40, 40, first["tokens"])
    assert f"prefill {len(prompt) - 40} tokens (40 more reused, 40 of them from the store)" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt + "\nand\n"))
    _, err = run(*words, "--chat", capsys=capsys)
    counts = re.findall(r"(\d+) of (\d+) prompt tokens reused, (\d+) of them from the store", err)
    assert [int(stored) for _, _, stored in counts] == [40, 0] and int(counts[1][0]) >= 40


@pytest.mark.long
@pytest.mark.parametrize("where", ["shown", "computed"])
def test_ctrl_c_prints_what_is_generated(capsys, tmp_path, monkeypatch, where):
    """While a Progress is shown the command handles it. While one is computed the stream turns it into an error."""
    show, stream, shown = generate._Lines.show, kvjax.stream, []

    def press_while_shown(self, outputs, **options):
        shown.append(outputs)
        if len(shown) == 2:
            raise KeyboardInterrupt
        show(self, outputs, **options)

    def press_while_computed(*args, **options):
        inner = stream(*args, **options)
        next(inner)
        inner.throw(KeyboardInterrupt())
        yield

    if where == "shown":
        monkeypatch.setattr(generate._Lines, "show", press_while_shown)
    else:
        monkeypatch.setattr(kvjax, "stream", press_while_computed)
    with pytest.raises(SystemExit) as caught:
        run("--checkpoint", "text", *QUESTION, "--json", "--events", str(tmp_path / "events"), capsys=capsys)
    assert caught.value.code == 130
    out, err = capsys.readouterr()
    parts = [json.loads(line) for line in out.splitlines()]
    assert [part["finish"] for part in parts] == [None, None]
    assert all(0 < len(part["tokens"]) < NEW for part in parts)
    assert "prompt 1 ended early: interrupted\nprompt 2 ended early: interrupted\ncompile " in err
    assert kvjax.fold(logged(tmp_path / "events")).index


def test_ctrl_c_before_anything_was_generated(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "load", interrupted)
    with pytest.raises(SystemExit) as caught:
        generate.main(["--checkpoint", "ids", "--prompt", "1"])
    assert (caught.value.code, capsys.readouterr().out) == (130, "")


def test_scan_is_an_option_of_the_model(monkeypatch, capsys):
    """Both commands that load a model have it. tests/models tests its effect."""

    def load(folder, **options):
        raise ValueError(f"scan={options['scan']}")

    monkeypatch.setattr(session, "load", load)
    monkeypatch.setattr(verify, "load", load)
    for flags in ([], ["--scan"]):
        message = f"scan={bool(flags)}"
        assert refused(capsys, "--checkpoint", "ids", "--prompt", "1", *flags) == f"--checkpoint: {message}"
        assert verify.main(["ids", *flags]) == 1
        assert capsys.readouterr().err == f"ids: {message}\n"


def test_half_a_character_waits_for_the_rest(capsys):
    tokenizer, output, pieces = bytes_tokenizer(), kvjax.serving.Output(2), []
    screen = generate._Screen(generate._parser().parse_args(["--chat"]), [""], [tokenizer.encode("so").ids], tokenizer)
    tokens = tokenizer.encode(" na\u00efve \U0001f600").ids
    for output.tokens in (tokens[:count] for count in range(len(tokens))):
        screen.show([output])
        pieces.append(capsys.readouterr().out)
    assert pieces == ["", "", "n", "a", "", "\u00ef", "v", "e", " ", "", "", ""]
    screen.show([output], last=True)
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"


def test_compiling_prefill_and_decoding_are_timed_apart():
    """A loop of fixed duration stands in for a model's. A turn that does both is divided by the pace of the others."""

    @jax.jit
    def _turn(x):
        return jnp.sin(x) + 1

    def turns():
        outputs, x = [kvjax.serving.Output(7, cached_tokens=3)], jnp.ones(3)
        for new, seconds in ((3, 0.3), (4, 0.2), (4, 0.2)):
            _turn(x)
            time.sleep(seconds)
            outputs[0].tokens += [0] * new
            yield types.SimpleNamespace(outputs=outputs, new={0: [0] * new})

    notes = []
    with Stopwatch(notes.append) as watch:
        assert watch.report() == "compile 0.00 s"
        assert len(list(watch.timed(turns()))) == 3
    assert notes == ["compiling the loop ..."]
    assert watch.compiled > 0
    *_, prefill, decode = watch.report().split("; ")
    assert prefill.startswith("prefill 4 tokens (3 more reused) 0.")
    assert 0.1 < float(prefill.split()[-2]) < 0.9
    assert 5 <= int(decode.split()[1]) <= 20


def test_commands_cache_compiled_programs_by_default(monkeypatch):
    settings, calls = {}, []
    monkeypatch.setattr(commands.jax.config, "update", settings.__setitem__)
    monkeypatch.setattr(commands.kvjax, "enable_compilation_cache", lambda: calls.append(True))
    parser = commands.Parser("demo", "")
    commands.add_outputs(parser)
    commands.prepare(parser, parser.parse_args([]))
    assert calls == [True] and not settings
    commands.prepare(parser, parser.parse_args(["--no-compile-cache"]))
    assert calls == [True] and settings == {"jax_enable_compilation_cache": False}


@pytest.mark.parametrize("command", [demo, generate, prefill_decode, serve, train, verify])
def test_help_has_the_name_that_the_command_was_started_by(capsys, command):
    with pytest.raises(SystemExit) as caught:
        command.main(["--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {command.__name__} ")


def test_the_package_lists_its_commands(capsys):
    __main__.main()
    listed = re.findall(r"^python -m models\.(\w+) ", capsys.readouterr().out, re.MULTILINE)
    files = pathlib.Path(__main__.__file__).parent.glob("[a-z]*.py")
    assert set(listed) == {file.stem for file in files if "def main(arguments" in file.read_text()}


def test_what_needs_an_extra_says_so(capsys, monkeypatch):
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None)
    needed = 'needs tensorstore: pip install "kvjax[stores]"'
    assert refused(capsys, "--store", "new") == f"--store: {needed}"
    assert refused(capsys, main=prefill_decode.main, command="prefill_decode") == needed
    needed = 'needs msgspec and pyzmq: pip install "kvjax[wires]"'
    wanting = ["--checkpoint", "ids", "--prompt", "1", "--publish", "tcp://127.0.0.1:*"]
    assert refused(capsys, *wanting) == f"--publish: {needed}"
    wanting[-2:] = ["--agent", "0"]
    needed = 'needs grpcio, grpcio-tools and protobuf: pip install "kvjax[agent]"'
    assert refused(capsys, *wanting) == f"--agent: {needed}"
    wanting[-2:] = ["--metrics", "0"]
    assert refused(capsys, *wanting) == '--metrics: needs prometheus-client: pip install "kvjax[metrics]"'
