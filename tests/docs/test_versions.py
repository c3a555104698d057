"""The list of a site's versions."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import devplace

CONF = Path(__file__).parents[2] / "docs" / "conf.py"


def test_the_newest_version_comes_first(tmp_path: Path) -> None:
    """0.10.0 is newer than 0.9.0; this version is listed with what is there; folders without
    pages of a version are not; a build that failed lists nothing."""
    for name in ("0.9.0", "0.10.0", "0.9.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "objects.inv").touch()
    (tmp_path / "assets").mkdir()
    list_versions = runpy.run_path(str(CONF))["list_versions"]
    app = SimpleNamespace(
        outdir=tmp_path / devplace.__version__, builder=SimpleNamespace(name="html")
    )
    list_versions(app, ValueError("no pages"))
    assert not (tmp_path / "index.html").exists()
    list_versions(app, None)
    newest, *listed = re.findall('href="(.*?)/index.html"', (tmp_path / "index.html").read_text())
    assert newest == listed[0] == "0.10.0"
    assert listed.index("0.10.0") < listed.index("0.9.1") < listed.index("0.9.0")
    assert devplace.__version__ in listed
    assert "assets" not in listed
