# SPDX-License-Identifier: Apache-2.0
"""Pages that follow the code: tables have a row for each thing in it, and no other row."""

import inspect
import re
import types

import numpy as np
import pytest

import kvjax
import kvjax.stores
from kvjax.events import EventKind
from kvjax.interop import log, trtllm
from kvjax.interop.readers import trtllm as trtllm_reader
from kvjax.interop.readers import vllm
from kvjax.serving.requests import Finish
from models import prefix_router
from tests.drive import ROOT


def rows(page, heading):
    """The cells of each row of the tables below a heading, up to the next one; without the tables' own heads."""
    text = (ROOT / "docs/reference" / f"{page}.md").read_text()
    (part,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.M | re.S)
    part = re.sub(r"^\|.*\n(?=\|---)", "", part, flags=re.M)
    return [line.strip("| ").split(" | ") for line in part.splitlines() if re.match(r"\| [^-]", line)]


def code(cell):
    """The words in backticks of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def test_each_status_and_each_end_has_a_row():
    cells = [row[0] for row in rows("errors", "Status")[: len(kvjax.Status)]]
    assert cells == [f"`{status.name}` ({status.value})" for status in kvjax.Status]
    ends = [name.strip('"') for row in rows("errors", "The end of a generated output") for name in code(row[0])]
    assert sorted(ends) == sorted(end.name.lower() for end in Finish if end)


def test_each_exception_has_a_row_with_its_base():
    texts = (path.read_text() for path in (ROOT / "kvjax").rglob("*.py"))
    found = dict(
        pair for text in texts for pair in re.findall(r"^class ([A-Z]\w*)\((\w+(?:Error|Exception))\)", text, re.M)
    )
    named = (row[0] for row in rows("errors", "Exceptions of kvjax"))
    listed = (re.fullmatch(r"\{py:obj\}`~[\w.]+\.(\w+)` \(an? (\w+)\)", name).groups() for name in named)
    assert dict(listed) == found


def test_each_verb_has_a_row_of_the_cheat_sheet():
    """A verb is a public function of a module of `kvjax.verbs`."""
    homes = (kvjax, kvjax.tiers, kvjax.stores)
    exported = {f"{home.__name__}.{name}": getattr(home, name) for home in homes for name in home.__all__}
    verbs = {name for name, verb in exported.items() if getattr(verb, "__module__", "").startswith("kvjax.verbs.")}
    text = (ROOT / "docs/reference/verbs.md").read_text()
    assert verbs == set(re.findall(r"^\| \{py:obj\}`~([\w.]+)`\(", text, re.M))


@pytest.mark.parametrize("name", ["BlockStored", "BlockRemoved"])
def test_fields_of_vllms_events_are_in_order(name):
    struct = {"BlockStored": vllm._Stored, "BlockRemoved": vllm._Removed}[name]
    assert [code(row[0])[0] for row in rows("wires", name)] == list(struct.__struct_fields__)


def test_fields_of_trtllms_events():
    cells = [row[0] for row in rows("wires", "TensorRT-LLM's event JSON")]
    names = {field.encode_name for field in trtllm_reader.msgspec.structs.fields(trtllm.Event)}
    assert {code(cell)[0] for cell in cells[:5]} == names
    kinds = trtllm.Created, trtllm.Stored, trtllm.Removed, trtllm.Updated
    wanted = [
        f"{kind.__struct_config__.tag}, `{field.encode_name}`"
        for kind in kinds
        for field in trtllm_reader.msgspec.structs.fields(kind)
    ]
    assert cells[5 : 5 + len(wanted)] == wanted
    fields = [field.encode_name for field in trtllm_reader.msgspec.structs.fields(trtllm.Block)]
    assert [code(cell)[0] for cell in cells[5 + len(wanted) :]] == fields


def test_fields_of_the_agents_messages():
    text = (ROOT / "kvjax/interop/agent/agent.proto").read_text()
    wanted = [
        f"{message}, `{name}` ({number})"
        for message, body in re.findall(r"^message (\w+) \{\n(.*?)^\}", text, re.M | re.S)
        for name, number in re.findall(r"(\w+) = (\d+);", body)
    ]
    assert sorted(row[0] for row in rows("wires", "MAX's KV cache agent")) == sorted(wanted)


def test_fields_of_a_log():
    spec = kvjax.make_spec(num_blocks=2, max_seqs=1, max_length=4, block_size=4)
    kinds = [EventKind[name] for name in ("CREATED", "REMOVED", "UPDATED", "STORED", "STORED", "COPIED")]
    records, none = np.zeros((len(kinds), 9), np.int32), np.zeros(0, np.int32)
    records[:, 0], records[3, 4], records[:, 6] = kinds, -1, 4  # one of the stored blocks is at a root
    text = kvjax.state.Text(*np.ones((2, len(kinds), spec.block_size), np.int32))
    entry = log.entry(kvjax.Events(records, text, none, none, none, np.int32(0)), now=0.0)
    listed = [(row[0], code(row[1])) for row in rows("wires", "Lines of a log")]
    assert [cell.strip("`") for cell, _ in listed[: len(entry)]] == [*entry]
    for event in entry["events"]:
        names = [of for kinds, of in listed[len(entry) :] if event["kind"] in kinds.split(", ") or kinds == "all"]
        assert event.keys() <= {name for of in names for name in of}


def test_each_metric_has_a_row_with_its_type_and_labels():
    prometheus_client = pytest.importorskip("prometheus_client")
    metrics = pytest.importorskip("kvjax.interop.metrics")
    spec = kvjax.make_spec(num_blocks=2, max_seqs=1, max_length=4, block_size=4)
    wires = {"wire": types.SimpleNamespace(queued_bytes=0, counts={"overflows": 0, "ignored": 0})}
    with metrics.Metrics(prometheus_client.CollectorRegistry(), spec, wires=wires) as exported:
        exported.set(kvjax.init(spec))
        families = list(exported.collect())
    wanted = []
    for family in families:
        labels = [name for name in family.samples[0].labels if name != "le"]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        wanted.append((f"`{name}`", f"{family.type}{'; ' * bool(labels)}{', '.join(labels)}"))
    assert [(name, kind) for name, kind, _ in rows("wires", "Metrics")] == wanted


def test_the_router_of_the_page_fits_a_screen():
    """The page has the method with the rule."""
    text = (ROOT / "docs/howto/routers.md").read_text()
    assert "../../models/prefix_router.py\n:language: python\n:pyobject: Router.rank\n" in text
    lines = inspect.getsource(prefix_router.Router.rank).splitlines()
    assert 10 <= sum(bool(line.strip()) for line in lines) <= 30


def test_messages_of_the_questions_are_those_of_the_code():
    text = (ROOT / "docs/reference/faq.md").read_text()
    messages = re.findall(r'^### "([^"]+)"', text, re.M)
    paths = [path for package in ("kvjax", "pallas_kernels") for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text() for path in paths)
    assert len(messages) >= 7 and not [message for message in messages if message not in code]
