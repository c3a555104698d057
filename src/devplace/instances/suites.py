"""Suites: folders of instance files, by name."""

from __future__ import annotations

import os
from pathlib import Path

from devplace.errors import InputError, did_you_mean

SUITES = ("tarnawski", "pipedream", "piper", "doppler")
ALL = "public"
FOLDER_VARIABLE = "DEVPLACE_INSTANCES"
_NOT_INSTANCES = ("license", "licence", "source", "readme")
_SPLITS = "human-experts"
_SUFFIXES = (".json", ".txt")


def find(spec: str) -> list[Path]:
    """Files of a suite (a name, or a folder), or the one file.

    Suites are in `benchmarks/instances` of the repository; `DEVPLACE_INSTANCES` names another
    folder.

    Raises:
        InputError: No such suite, file or folder, or nothing in it.
    """
    path = Path(spec)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files(path, spec)
    if spec not in (*SUITES, ALL):
        hint = did_you_mean(spec, (*SUITES, ALL))
        raise InputError(
            f"There is no file, folder or suite {spec!r}.{hint} "
            f"Suites: {', '.join(SUITES)}, or {ALL} for all."
        )
    folder = _home(spec)
    names = SUITES if spec == ALL else (spec,)
    return [file for name in names for file in _files(folder / name, spec)]


def _home(spec: str) -> Path:
    given = os.environ.get(FOLDER_VARIABLE)
    places = [Path(given)] if given else []
    places += [Path(__file__).parents[3] / "benchmarks" / "instances"]
    places += [Path("benchmarks") / "instances"]
    for place in places:
        if (place / SUITES[0]).is_dir() or (place / spec).is_dir():
            return place
    raise InputError(
        f"The files of suite {spec!r} are not installed: they are in benchmarks/instances of "
        f"devplace's repository. Name a file or folder, or set {FOLDER_VARIABLE} to that folder."
    )


def _files(folder: Path, spec: str) -> list[Path]:
    found = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix in _SUFFIXES
        and file.is_file()
        and file.stem.lower() not in _NOT_INSTANCES
        and _SPLITS not in file.parts
    ]
    if not found:
        raise InputError(f"There are no instance files (.json, .txt) in {folder} for {spec!r}.")
    return found
