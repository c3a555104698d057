"""Everything shown in the README and the docs works as shown.

Per page, in order and in one temporary folder:

- `python` blocks are executed in one namespace; one that starts with `# file: NAME` is written to
  that file instead;
- `toml` blocks are read as machine files, and written where they start with `# file: NAME`;
- in `console` blocks the lines `$ devplace ...` are run; `# exit N` behind one is its exit code,
  and `> FILE` at the end keeps what it prints;
- a `text` block after `<!-- output -->` is what the block before it prints;
- `<!-- not run: REASON -->` before a block lets it be.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if "_build" not in path.parts
)
FENCE = re.compile(r"^```([a-z]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- ((?:(?!-->).)*) -->\s*\Z", re.DOTALL)
OTHER_COMMANDS = (
    "make",
    "pip",
    "git",
    "python",
    "cat",
    ".ci/run",
    "nvidia-smi",
    "pytest",
    "torchrun",
)


@dataclass
class Block:
    """One fenced block of a page.

    Attributes:
        language: Behind the opening fence.
        text: What is inside.
        line: Line number of the opening fence.
        remark: HTML comment right before it, if any.
    """

    language: str
    text: str
    line: int
    remark: str


def blocks(page: str) -> list[Block]:
    """Fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        remark = COMMENT.search(before)
        found.append(
            Block(
                match.group(1),
                match.group(2),
                before.count("\n") + 1,
                remark.group(1) if remark else "",
            )
        )
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No plan was measured within")  # on a slow or busy computer
def test_snippets(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's snippets run, and print what the page says they print."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    names: dict[str, Any] = {"__name__": "__docs__"}
    printed = ""
    for block in blocks(page):
        where = f"{page}:{block.line}"
        if block.remark.startswith("not run: "):
            continue
        if block.remark == "output":
            assert printed.strip() == block.text.strip(), where
        elif block.text.startswith("# file: "):
            name, _, rest = block.text.removeprefix("# file: ").partition("\n")
            Path(name.strip()).write_text(rest, encoding="utf-8")
            monkeypatch.delitem(sys.modules, Path(name.strip()).stem, raising=False)
        elif block.language == "python":
            printed = run_python(block, where, names)
        elif block.language == "toml":
            from devplace.machine import toml

            toml.loads(block.text, where)
        elif block.language == "console":
            printed = run_console(block, where)


def run_python(block: Block, where: str, names: dict[str, Any]) -> str:
    """Execute a block and return what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * block.line + block.text, where, "exec"), names)
    return out.getvalue()


def run_console(block: Block, where: str) -> str:
    """Run the `$ devplace` lines of a block and return what the last one prints."""
    printed = ""
    for line in block.text.splitlines():
        if not line.startswith("$ "):
            continue
        command, _, remark = line[2:].partition("  # ")
        words = shlex.split(command)
        if words[0] != "devplace":
            assert words[0] in OTHER_COMMANDS, f"{where}: {line}"
            continue
        expected = int(remark.removeprefix("exit ")) if remark.startswith("exit ") else 0
        words, target = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, "")
        code, printed = run_devplace(words[1:])
        assert code == expected, f"{where}: {line}\n{printed}"
        if target:
            Path(target).write_text(printed, encoding="utf-8")
    return printed


def run_devplace(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of one command, in this process."""
    from click.testing import CliRunner

    from devplace.cli.commands import devplace
    from devplace.errors import DevplaceError

    done = CliRunner().invoke(devplace, arguments)
    if isinstance(done.exception, DevplaceError):
        return done.exception.exit_code, f"{done.output}devplace: {done.exception}"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_links_inside_the_repository_lead_somewhere() -> None:
    """Relative links in README, CONTRIBUTING and docs point to files that exist."""
    broken = []
    for page in PAGES:
        text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if not re.match(r"[a-z]+:", target) and not ((ROOT / page).parent / target).exists():
                broken.append(f"{page}: {target}")
    assert broken == []


def test_every_page_is_in_a_table_of_contents() -> None:
    """Each page of the docs can be reached from the index."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.removeprefix("docs/").removesuffix(".md") for page in PAGES if "docs/" in page]
    assert [page for page in pages if page != "index" and page not in index.split()] == []
