"""Whether a Python file that a plan names may be run: a plan may come from anybody.

Files that were named on the command line are the user's own. They are remembered by path and
content, so that a plan can be used where it was made without a question.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path

import click

from devplace.cli.imported import is_imported
from devplace.cli.plan_files import model_file
from devplace.errors import InputError
from devplace.files import cache_folder, read_whole, write_whole


def python_file(model: str) -> str:
    """The Python file that a model's name would have run; empty if there is none."""
    return "" if is_imported(model) else model_file(model)


def remember(model: str) -> None:
    """Note that the user has named this model; where that cannot be kept, they are asked."""
    file = python_file(model)
    if file:
        with contextlib.suppress(OSError):
            mark = _mark(file)
            mark.parent.mkdir(parents=True, exist_ok=True)
            write_whole(mark, b"")


def require_trust(model: str, plan: Path, is_trusted: bool) -> None:
    """Ask before the Python file that a plan names is run; on a terminal yes or no.

    Args:
        model: The model, its file as found from here.
        plan: The plan that names it.
        is_trusted: Whether the user has said so before.

    Raises:
        InputError: It is not known, and nobody can be asked, or the answer is no.
    """
    file = python_file(model)
    if not file or is_trusted or _is_known(file):
        return
    told = f"{plan} names the Python file {os.path.abspath(file)}, which this command would run."
    if sys.stdin.isatty() and sys.stderr.isatty():
        if click.confirm(f"{told} Run it?", err=True):
            return
        raise InputError(f"{file} was not run. Nothing was done.")
    raise InputError(
        f"{told} If you know what is in it, add --trust, or name the model yourself: "
        f"--model {model}."
    )


def _is_known(file: str) -> bool:
    try:
        return _mark(file).is_file()
    except OSError:
        return False


def _mark(file: str) -> Path:
    digest = hashlib.sha256(f"{os.path.realpath(file)}\n".encode(errors="surrogateescape"))
    digest.update(read_whole(file))
    return cache_folder() / "trusted" / digest.hexdigest()
