"""The HTML page, drawn and used in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.report.steps import chain_graph, machine, make_problem, placed

from devplace.graph import OpGraph
from devplace.report import html_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium to draw the page"),
]
USE = """
<script>
const seen = {errors: []};
window.addEventListener("error", event => seen.errors.push(event.message));
const box = canvas.getBoundingClientRect();
function point(kind, px, py, more) {
  const at = {clientX: box.left + px, clientY: box.top + py, bubbles: true, pointerId: 1, ...more};
  canvas.dispatchEvent(new (kind === "wheel" ? WheelEvent : PointerEvent)(kind, at));
}
point("pointermove", LEFT + 2, TOP + 5);
seen.tip = tip.textContent;
const pixel = draw2d.getImageData(LEFT + 2, TOP + 5, 1, 1).data;
seen.drawn = [...pixel];
seen.forward = colour("forward");
point("wheel", LEFT + 300, TOP + 5, {deltaY: -500});
seen.zoomed = view[1] - view[0] < total;
canvas.dispatchEvent(new MouseEvent("dblclick"));
seen.whole = view[1] - view[0] === total;
const rows = () => [...document.querySelectorAll("#modules tr")].filter(row => !row.hidden).length;
seen.rows = [rows()];
for (const row of document.querySelectorAll("tr.fold")) { row.click(); seen.rows.push(rows()); }
const out = document.createElement("pre");
out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.append(out);
</script>
"""

DARK = """
<script>
const mode = document.createElement("p"); mode.id = "dark";
const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
mode.textContent = r + g + b < 384; mode.hidden = true; document.body.append(mode);
</script>
"""


def browse(page: Path, *options: str) -> str:
    """What a browser prints of a page."""
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", *options]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    url = page.as_uri()
    ended = subprocess.run([*command, profile, url], capture_output=True, text=True, timeout=900)
    return ended.stdout


def alike() -> OpGraph:
    """A chain of four layers whose modules are numbered blocks."""
    graph = chain_graph(4)
    named = [structs.replace(op, module=op.module.replace("layer", "layer.")) for op in graph.ops]
    return OpGraph(graph.name, tuple(named), graph.tensors, graph.results)


@pytest.fixture(scope="module")
def page() -> str:
    """Of a plan on two devices."""
    problem = make_problem(alike(), machine(2))
    result = placed(problem, {}, "cuda:1")
    return html_report(result, [result])


def test_the_timeline_is_drawn_and_answers(page: str, tmp_path: Path) -> None:
    """An op has its stage's colour and tells what it is; wheel and double click zoom; rows of equal
    layers unfold."""
    used = tmp_path / "used.html"
    used.write_text(page.replace("</body>", USE + "</body>"))
    found = re.search('<pre id="seen">(.*?)</pre>', browse(used, "--dump-dom"), re.S)
    assert found is not None
    seen: dict[str, Any] = json.loads(found[1].replace("&quot;", '"'))
    assert seen["errors"] == []
    assert seen["tip"].startswith("f0: 1 ms from 0 ns")
    red, green, blue, _ = seen["drawn"]
    assert f"#{red:02x}{green:02x}{blue:02x}" == seen["forward"].strip()
    assert seen["zoomed"]
    assert seen["whole"]
    assert seen["rows"] == sorted(set(seen["rows"]))
    assert len(seen["rows"]) > 1


@pytest.mark.parametrize("theme", [(), ("--force-dark-mode",)])
def test_pictures_in_light_and_dark(page: str, tmp_path: Path, theme: tuple[str, ...]) -> None:
    """A screenshot is left among the test's files, light or dark as the reader's system is."""
    shown, picture = tmp_path / "page.html", tmp_path / "page.png"
    shown.write_text(page.replace("</body>", DARK + "</body>"))
    dom = browse(shown, *theme, "--dump-dom")
    assert f'<p id="dark" hidden="">{str(bool(theme)).lower()}</p>' in dom
    browse(shown, *theme, "--window-size=1400,1400", f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
