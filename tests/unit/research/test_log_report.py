# SPDX-License-Identifier: Apache-2.0
"""The report and the picture of a log of events, by hand."""

import json
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from kvjax.research import log_report
from kvjax.research.__main__ import main
from kvjax.research.plots import plot_log
from tests.drive import output_of
from tests.wire_kit import removed, stored, updated

HITS = "Events have no hits on single blocks: what was looked up and reused is given for each admission as a whole"


def line(now, *events, queried=0, cached=0):
    return json.dumps({"ts": now, "events": events, "queried": queried, "cached": cached})


A, B = stored(1, 1, 0, [1, 2, 3, 4]), stored(2, 1, (1, 1), [5, 6])
LINES = [
    line(100.0, queried=10),
    line(101.0, A, B),
    line(102.0, updated(1, 1, 1), queried=10, cached=5),
    line(104.0, removed(2, 1), removed(1, 1)),
    line(104.5, stored(7, 3, 0, [1, 2, 3, 4]), stored(8, 1, (7, 3), [5, 7])),
    line(109.0, {"kind": "copied", "group": 0, "block": 1, "source": 2, "num_tokens": 3}),
    line(110.0, {"kind": "cleared", "group": 0}),
]


def test_a_report_by_hand():
    found = log_report(LINES)
    assert (found.transitions, found.refused, found.unknown) == (7, 0, 0)
    assert found.kinds == {"stored": 4, "removed": 2, "updated": 1, "copied": 1, "cleared": 1}
    assert found.times == [0, 1, 2, 4, 4.5, 9, 10]
    assert found.queried == [10, 0, 10, 0, 0, 0, 0] and found.cached == [0, 0, 5, 0, 0, 0, 0] and found.share == 0.25
    assert found.blocks == [(0, 0), (2, 0), (1, 1), (0, 0), (2, 0), (2, 0), (0, 0)]
    assert found.lifetimes == [3, 3, 5.5, 5.5]
    assert found.again == [0.5] and found.again_tokens == 4  # the second block has another end
    assert str(found) == "\n".join([
        "events        9 of 7 transitions in 10.0 s",
        "              4 stored, 2 removed, 1 updated, 1 copied, 1 cleared",
        "reuse         5 of 20 tokens looked up (25.0%)",
        "cached        0 blocks on the device, 0 on the host; 2 at most",
        "lifetimes     4 blocks removed; median 4.2 s, 8 of 10 between 3.0 s and 5.5 s",
        "stored again  1 blocks with 4 tokens; median 500.0 ms, 8 of 10 between 500.0 ms and 500.0 ms",
        "",
        HITS + ", in tokens.",
    ])  # fmt: skip


def test_contents_differ_by_namespace_prefix_and_extra_ids():
    gone = [removed(1, 1)]
    for other in (stored(2, 1, 1, [1, 2, 3, 4]), stored(2, 1, 0, [1, 2, 3, 4], extra_ids=[0, 0, 0, 7]),
                  stored(2, 1, 0, [1, 2, 3]), stored(2, 1, (9, 9), [1, 2, 3, 4])):  # fmt: skip
        assert log_report([line(0, A), line(1, *gone), line(2, other)]).again == []
    twice = [stored(1, 1, 0, [1, 2, 3, 4], extra_ids=[0, 0, 0, 7]), removed(1, 1)]
    assert log_report([line(0, *twice), line(1, *twice)]).again == [1]


def test_a_stored_event_without_a_parent_is_at_a_root():
    bare = {name: value for name, value in A.items() if name != "parent"}
    assert log_report([line(0, bare, removed(1, 1)), line(1, A)]).again == [1]


def test_a_file_that_begins_in_the_middle_says_so():
    found = log_report([line(0, removed(1, 1), updated(2, 1, 1), stored(3, 1, (2, 1), [7])), line(1, removed(3, 1))])
    assert found.unknown == 3 and found.lifetimes == [1]
    assert "not known     3 events of blocks that this file did not store\n" in str(found)


def test_a_cache_that_is_attached_replaces_the_one_before():
    """There are no removals of its blocks, nor of those of the first cache."""
    found = log_report([line(0, A, B), line(1, {"kind": "created", "group": 0}, A)])
    assert found.lifetimes == found.again == [] and found.blocks == [(2, 0), (1, 0)]


def test_clocks_may_be_set_back():
    assert log_report([line(5, A), line(3, removed(1, 1)), line(6)]).times == [0, 0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        LINES[1][:-1], "7", "null", "[]", '"kind"', "{}", "[" * 100_000, line(0, 7), line(0, {}), line("x"),
        line(float("nan")), line(0, queried=-1), line(0, cached=None), line(0, {**A, "kind": "moved"}),
        line(0, {**A, "kind": []}), line(0, {**A, "level": 2}), line(0, {**A, "tokens": [1, "2"]}),
        line(0, {**A, "tokens": [2**40]}), line(0, {**A, "tokens": []}), line(0, {**A, "parent": [1]}),
        line(0, {**A, "extra_ids": [1]}), line(0, {"kind": "removed", "group": 0}), '{"kind": "stored"}',
    ],
)  # fmt: skip
def test_what_is_no_entry_is_counted(wrong):
    found = log_report([LINES[1], "", wrong, LINES[3].replace("104", "200")])
    assert found.refused == 1 and found.transitions == 2 and found.kinds == {"stored": 2, "removed": 2}
    assert "refused       1 lines; line 3: " in str(found)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"ts": 1e400, "events": [], "queried": 0, "cached": 0}', "ts: got inf, wanted a finite number"),
        ('{"ts": NaN, "events": [], "queried": 0, "cached": 0}', "ts: got nan, wanted"),
        (line(10**400), "ts: got 1000"),
        (line(True), "ts: got True, wanted"),
        (line("x"), "ts: got 'x', wanted"),
        (line(2**53), "ts: got 9007199254740992.0, wanted a number of seconds below"),
        (line(0, cached=10**400), "cached: got 1000"),
        (line(0, queried=True), "queried: got True, wanted an integer from 0"),
        (line(0, queried=1.0), "queried: got 1.0, wanted an integer"),
        ('{"ts": 0, "events": {}, "queried": 0, "cached": 0}', "events: got {}, wanted an array"),
        (line(0, {**A, "extra_ids": []}), "tokens: got 4 with 0 extra ids"),
        (line(0, {**A, "extra_ids": ""}), "extra_ids: got '', wanted a list"),
        (line(0, {**A, "level": True}), "level: got True, wanted"),
        (line(0, {**A, "tokens": [1, True]}), "tokens: got [1, True], wanted"),
        (line(0, {**A, "parent": "11"}), "parent: got '11', wanted a list"),
        ("[" * 5000 + "]" * 5000, "got "),
        ("[7", "got [7, wanted JSON"),
    ],
)
def test_the_first_refused_line_is_named_with_its_field(text, complaint):
    found = log_report([LINES[1], "", text, "null"])
    assert found.refused == 2 and found.transitions == 1 and found.kinds == {"stored": 2}
    assert found.first_refused.startswith(f"line 3: {complaint}") and len(found.first_refused) < 200
    assert f"refused       2 lines; {found.first_refused}\n" in str(found)


def test_numbers_as_large_as_lines_may_have_are_added_up_and_plotted(recwarn):
    most = 2**31 - 1
    found = log_report([line(1 - 2**53, queried=most, cached=most), *[line(2**53 - 1, queried=most)] * 3000])
    assert found.refused == 0 and found.share == 1 / 3001 and str(found)
    figure = plot_log(found)
    figure.draw_without_rendering()
    assert figure.axes[-1].get_lines()[0].get_ydata()[-1] == pytest.approx(1 / 3001) and not recwarn.list


@hypothesis.given(st.data())
def test_any_text_is_read_or_refused(data):
    """Parts of valid lines with some characters changed, and arbitrary text."""
    given = list(data.draw(st.one_of(st.sampled_from(LINES), st.text(max_size=60))))
    for _ in range(data.draw(st.integers(0, 4))):
        if given:
            given[data.draw(st.integers(0, len(given) - 1))] = data.draw(st.characters())
    text = "".join(given[: data.draw(st.integers(0, len(given)))])
    found = log_report([LINES[1], text, LINES[3]])
    assert found.refused <= 1 and str(found)


# The command, and the picture.


def test_the_command_prints_the_report(tmp_path, capsys):
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(LINES))
    output = output_of(sys.executable, "-W", "error", "-m", "kvjax.research", "log", str(file))
    assert output == f"{log_report(LINES)}\n"
    with pytest.raises(SystemExit) as caught:
        main(["log", str(tmp_path / "none.jsonl")])
    assert caught.value.code == 2 and "No such file" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("lines", [LINES, LINES[1:2], []], ids=["all", "stored", "empty"])
def test_the_picture_has_what_the_lines_have(tmp_path, lines):
    found = log_report(lines)
    figure = plot_log(found, tmp_path / "events.png")
    assert (tmp_path / "events.png").read_bytes()[:4] == b"\x89PNG"
    reuse, blocks, lives, again, *shares = figure.axes
    if lines:
        assert reuse.get_title(loc="left") == ("Prompt tokens: 25.0% reused" if found.share else "Prompt tokens")
    assert blocks.get_title(loc="left") == "Findable blocks"
    heights = {ax: sum(bar.get_height() for bar in ax.patches) for ax in (reuse, lives, again)}
    assert heights == {reuse: sum(found.queried), lives: len(found.lifetimes), again: len(found.again)}
    if found.share:
        [line] = shares[0].get_lines()
        assert line.get_ydata().tolist() == [0, 0] + [0.25] * 5
        assert len(blocks.collections) == 2


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'plot_log needs matplotlib: pip install "kvjax\[plot\]"'):
        plot_log(log_report(LINES))
