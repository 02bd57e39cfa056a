# SPDX-License-Identifier: Apache-2.0
"""Bars of the benchmarks, and the pages of docs/performance that are written from results."""

import json
import re
import subprocess

import pytest

from benchmarks import kernels, pages, replay
from benchmarks.common import Bar, require_bars
from tests.drive import ROOT

NAMES = [name for group in pages.GROUPS.values() for name in group]
WHERE = {
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"python": "3.12.1", "jax": "0.12.0"},
    "cpu": "a CPU, 2 cores",
}


def results_of(folder, **metrics):
    """The results of benchmarks with these metrics."""
    for name, values in metrics.items():
        (folder / f"{name}.json").write_text(json.dumps({"benchmark": name, **WHERE, "metrics": values}))
    return pages.Results(folder)


def rows_of(page):
    """The cells of all rows in the tables of a page."""
    return [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| [^-]", line)]


def test_every_benchmark_of_make_has_bars_and_a_section():
    command = ["make", "-s", "--eval", "names:; @echo $(BENCHMARKS)", "names"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(made) == sorted(NAMES)
    for name in NAMES:
        bars = pages.of_name(name).bars
        texts = [bar.what for bar in bars.values()]
        assert texts and len(set(texts)) == len(texts), name
        for bar in bars.values():
            assert re.fullmatch(r"[^|\n]{5,100}", bar.what) and None in (bar.at_least, bar.at_most), bar


def test_bars_say_what_is_met():
    at_least, at_most = Bar("fast", at_least=1.5, aim=2.5), Bar("slow", at_most=1.7, aim=1.3)
    assert [at_least.verdict(x) for x in (1.4, 1.5, 2.5)] == ["missed", "met", "aim reached"]
    assert [at_most.verdict(x) for x in (1.8, 1.7, 1.3)] == ["missed", "met", "aim reached"]
    assert [Bar("count", "", aim=5).verdict(x) for x in (6, 5)] == ["", "aim reached"]
    assert Bar("time").verdict(1) == "" and Bar("count", "", at_most=0).verdict(0) == "met"
    require_bars({"fast": 1.5, "other": 0}, {"fast": at_least, "absent": at_most})
    with pytest.raises(SystemExit, match=r"benchmark failed: slow is 1\.8x, the bar at most 1\.7x, aim 1\.3x"):
        require_bars({"slow": 1.8}, {"slow": at_most})


def test_values_are_shown_with_three_digits_and_their_unit():
    assert [Bar("", "µs").shown(x) for x in (61.2345, 0.0123456, 0)] == ["61.2 µs", "0.0123 µs", "0 µs"]
    assert [Bar("", "/s").shown(241_832.4), Bar("", "").shown(11_147), Bar("").shown(3_412.3)] == [
        "241,832/s", "11,147", "3,412x",
    ]  # fmt: skip
    assert Bar("", "share").shown(0.8891) == "88.9 %" and Bar("", "share", at_least=0.88).bounds() == "at least 88 %"
    assert Bar("", at_most=1.03).shown(1.0304) == "1.0304x"  # not like the bar that it misses
    assert [Bar("").shown(x) for x in (1.004, 1.5, 1.30)] == ["1.00x", "1.5x", "1.3x"]


def test_pages_say_what_is_met_missed_and_not_run(tmp_path):
    metrics = {"step_us": 61.234, "admit_us": 150.02, "call_us": 500.0}
    results = results_of(tmp_path, bookkeeping=metrics, memory={}, compile={"first_warm_s": 7.04})
    pages.write(results, tmp_path / "docs")
    text = (tmp_path / "docs/all.md").read_text()
    assert text.startswith("<!-- `python -m benchmarks.pages` has written this page")
    bars = pages.of_name("bookkeeping").bars
    assert f"| {bars['step_us'].what} | 61.2 µs | at most 130 µs: met |\n" in text
    assert f"| {bars['admit_us'].what} | 150.02 µs | at most 150 µs: **missed** |\n" in text
    assert f"| {bars['call_us'].what} | 500 µs | |\n" in text
    assert f"| {bars['vmap_growth'].what} | not measured | at most 2x |\n" in text
    assert "Run on 2026-01-02: python 3.12.1, jax 0.12.0; a CPU, 2 cores." in text
    not_run = pages.of_name("offload").bars["to_host_of_device_put"].what
    assert f"| {not_run} | not run | at least 0.8x |\n" in text
    assert "are lost in reading: see [attention](#attention)" in text and "![" not in text
    assert "`make bench-bookkeeping` | 1 of 2 met |" in text and "`make bench-events` | not run |" in text
    usual = (tmp_path / "docs/index.md").read_text()
    assert len(rows_of(usual)) == 1 + len(pages.USUAL) == 13
    assert (
        f"| {bars['admit_us'].what} | 150.02 µs | at most 150 µs: **missed** | [Bookkeeping](all.md#bookkeeping) |"
        in usual
    )
    assert all(row[2] for row in rows_of(usual)), "a figure without a bar"
    found = pages.readme(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n", results)
    assert found.startswith(f"before\n{pages.BEGIN}\n| ") and found.endswith(f"\n{pages.END}\nafter\n")
    assert len(rows_of(found)) == 7 and "old" not in found and found.count("Run on") == 1
    assert "256 rows, 65,536 blocks | 61.2 µs | `python -m benchmarks.bookkeeping` |" in found
    assert "| not run | `python -m benchmarks.serving` |" in found


def test_links_lead_to_headings(tmp_path):
    pages.write(pages.Results(tmp_path), tmp_path)
    for page in ("index", "all"):
        links = re.findall(r"\]\(((?:\w+\.md)?)(?:#([\w-]+))?\)", (tmp_path / f"{page}.md").read_text())
        assert len(links) >= len(pages.USUAL)
        for target, anchor in links:
            if target == "tpu.md":  # `make tpu-check` writes it
                continue
            headings = re.findall(r"^#+ (.*)$", (tmp_path / (target or f"{page}.md")).read_text(), re.M)
            slugs = [heading.lower().replace(" ", "-") for heading in headings]
            assert slugs.count(anchor) == 1 or not anchor, anchor


def test_rows_of_the_committed_pages_are_bars():
    texts = {bar.what for name in NAMES for bar in pages.of_name(name).bars.values()}
    text = (ROOT / "docs/performance/all.md").read_text()
    figures = text[text.index("\n## Metadata") : text.index("\n## On a GPU")]
    assert len(rows_of(figures)) > 100 and {row[0] for row in rows_of(figures)} <= {*texts, "value"}
    assert not re.search(r"benchmarks\.\w+ .*--quick", text)  # figures of tiny shapes
    usual = rows_of((ROOT / "docs/performance/index.md").read_text())
    assert {tuple(row[:3]) for row in usual[1:]} <= {tuple(row) for row in rows_of(figures)}


def test_the_page_says_what_a_gpu_has_measured(tmp_path):
    file = tmp_path / "gpu_first.json"
    text = pages.measured(file)
    assert "**Nothing is measured yet.**" in text and text.count("| not measured |") == len(kernels.BARS)
    metrics = {"triton": {"decode_32x4096_b16_us": 150.0, "decode_ragged_b16_of_copy": 0.9}}
    result = {"about": {"device": "H200"}, "sections": {"decode_ragged": {"metrics": metrics}}}
    file.write_text(json.dumps({"benchmark": "gpu_first", **result}))
    text = pages.measured(file)
    assert "| `decode_32x4096_b16_us` | triton | 150: **missed** | at most 139 |" in text
    assert "1.11x the time of a copy: decode_ragged_b16 triton" in text and "Nothing is measured" not in text


def test_figures_of_a_replay_are_sorted_by_way():
    metrics = {"max_tokens_waits_reused": 3, "batch_alone_reused": 4, "batch_alone_first_token_p50": 5}
    found = replay.by_way(metrics)
    assert found["max_tokens_waits"] == {"reused": 3}
    assert found["batch_alone"] == {"reused": 4, "first_token_p50": 5} and found["num_tokens_alone"] == {}
