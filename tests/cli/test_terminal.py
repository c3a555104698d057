r"""Control characters of names are shown, never sent to the terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from tests.cli.runner import devplace

from devplace.cli.console import console
from devplace.cli.terminal import raw, shown, shows_control_characters

BAD = "x\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"
MACHINE = """
name = "NAME"
[[devices]]
name = "cpu:NAME"
kind = "cpu"
model = "NAME"
memory = "4 GiB"
bandwidth = "10 GB/s"
flops = "100 GFLOP/s"
[[devices]]
name = "cpu:1"
memory = "4 GiB"
bandwidth = "10 GB/s"
flops = "100 GFLOP/s"
[[links]]
src = "cpu:NAME"
dst = "cpu:1"
both = true
bandwidth = "6 GB/s"
[sources]
"NAME" = "NAME"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine whose names steer terminals."""
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in BAD)
    path = tmp_path / "evil.toml"
    path.write_text(MACHINE.replace("NAME", escaped))
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("größe 😀 [/red]\n\t", "größe 😀 [/red]\n\t"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x00\x07\x7f\x9b", "\\x00\\x07\\x7f\\x9b"),
        ("a\rb", "a\\rb"),
        ("\u202e\u2066\ud800", "\\u202e\\u2066\\ud800"),
    ],
)
def test_what_steers_is_written_out(text: str, expected: str) -> None:
    """Letters of all languages stay; controls, turns of direction and half letters do not."""
    assert shown(text) == expected


def test_all_that_is_printed_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`raw` is for what writes its own controls."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    with shows_control_characters():
        print("\x1b[2J")
        sys.stdout.writelines(["\a"])
        raw(sys.stdout).write("\x1b[1m")
        assert not hasattr(sys.stdout, "buffer")
    assert stream.getvalue() == "\\x1b[2J\n\\x07\x1b[1m"
    assert sys.stdout is stream


def has_controls(text: str) -> bool:
    """Whether anything but lines and tabs would steer a terminal."""
    return any(not (letter.isprintable() or letter in "\n\t") for letter in text)


def test_names_of_a_machine_are_shown_escaped(machine: Path, tmp_path: Path) -> None:
    """In tables, lists and errors, and whole where there is room."""
    done = devplace("machines", str(machine), cwd=tmp_path, COLUMNS="400")
    assert done.returncode == 0, done.stderr
    assert not has_controls(done.stdout)
    assert f"cpu:{shown(BAD)}" in done.stdout
    wrong = devplace("plan", "nmt-2", "--machine", str(machine), "--pin", f"x={BAD}", cwd=tmp_path)
    assert wrong.returncode == 2
    assert not has_controls(wrong.stderr)
    missing = devplace("explain", f"no{BAD}.json", cwd=tmp_path)
    assert missing.returncode == 2
    assert not has_controls(missing.stderr)
    usage = devplace("plan", "nmt-2", "--seed", BAD, cwd=tmp_path)
    assert usage.returncode == 2
    assert not has_controls(usage.stderr)


def test_a_terminal_gets_styles_but_no_controls_of_names(machine: Path) -> None:
    """Bold headers, and names escaped, on a real terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "devplace", "machines", str(machine)]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ):
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            said += part
    os.close(ours)
    assert b"\x1b[1m" in said
    assert b"\x1b[2J" not in said
    assert b"\x1b]0;" not in said
    assert b"\x07" not in said


def test_no_figure_of_a_table_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """A table whose figures need more than the terminal has is printed as wide as they are."""
    table = Table()
    for number in range(12):
        table.add_column(f"c{number}", no_wrap=True)
    table.add_row(*["1,234,567,890"] * 12)
    console().print(table)
    assert capsys.readouterr().out.count("1,234,567,890") == 12
