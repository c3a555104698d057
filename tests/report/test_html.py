"""The HTML page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.report.steps import chain_graph, machine, make_problem, placed

from devplace.errors import InputError
from devplace.graph import OpGraph
from devplace.report import Skipped, html_report, save_html_report
from devplace.run.measured_timeline import MeasuredTimeline


class Page(HTMLParser):
    """Collects tags, attributes and texts; complains of tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: dict[str, str] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self._into = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self._into = dict(attrs).get("id") or ("" if tag == "script" else self._into)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.ids[self._into] = self.ids.get(self._into, "") + data


def test_page_is_self_contained_and_complete() -> None:
    """Tags match, nothing is fetched, and chart data equal the timeline."""
    problem = make_problem(chain_graph(2), machine(2))
    result = placed(problem, {"layer0": "cuda:0"}, "cuda:1")
    text = html_report(result, [result, Skipped("ilp", "more than 20 groups")])
    page = Page(text)
    assert page.open == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    data = json.loads(page.ids["data"].strip())
    assert data["makespan_ns"] == result.step_ns
    labels = [(track["label"], track["kind"]) for track in data["tracks"]]
    assert labels == [
        ("cuda:0", "device"),
        ("memory", "memory"),
        ("cuda:1", "device"),
        ("memory", "memory"),
        ("cuda:0->cuda:1", "link"),
        ("cuda:1->cuda:0", "link"),
    ]
    busy = [
        sum(track["finish"]) - sum(track["start"])
        for track in data["tracks"]
        if track["kind"] == "device"
    ]
    assert busy == result.timeline.busy_ns.tolist()
    assert "more than 20 groups" in page.ids["comparison"]
    assert "6 ms predicted" in page.ids["summary"]


def test_the_page_folds_says_what_helps_and_has_scales() -> None:
    """Equal layers are one row until opened, with memory by module; changes are simulated ones;
    curves of memory have their peak beside them; a measured run stands beside the plan."""
    result = placed(make_problem(chain_graph(2), machine(2)))
    page = Page(html_report(result))
    assert page.open == []
    assert "memory at the peak" in page.ids["modules"]
    assert "cuda:1 twice as fast" in page.ids["faster"]
    assert "measured" not in page.ids
    assert "fillText(bytes(track.peak)" in html_report(result)
    assert "prefers-color-scheme: dark" in html_report(result)
    spent = result.timeline
    none = np.zeros(0, np.int64)
    times = (spent.start_ns, spent.finish_ns * 2, none, none)
    run = MeasuredTimeline(*times, spent.makespan_ns * 2)
    assert "-50%" in Page(html_report(result, measured=run)).ids["measured"]


def test_names_cannot_break_out_of_the_page() -> None:
    """Model, module and op names with markup in them are shown, not obeyed."""
    evil = "</script><script>alert(1)</script>"
    plain = chain_graph(1)
    ops = tuple(
        msgspec.structs.replace(op, module=evil) if op.name == "f0" else op for op in plain.ops
    )
    graph = OpGraph(evil, ops, plain.tensors, plain.results)
    text = html_report(placed(make_problem(graph, machine(1))))
    assert "alert(1)</script>" not in text
    assert Page(text).open == []


def test_page_is_written_or_the_error_says_why(tmp_path: Path) -> None:
    """A page is written as UTF-8; a path that cannot be written is a user error."""
    result = placed(make_problem(chain_graph(1), machine(1)))
    save_html_report(tmp_path / "report.html", result)
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    with pytest.raises(InputError, match="Cannot write report"):
        save_html_report(tmp_path / "no" / "report.html", result)
