"""The last probe of this machine, kept on disk."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from devplace.files import cache_folder, decode_json, read_whole, write_whole
from devplace.run.probe.report import ProbeReport

_log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A report in a file: its text, and a checksum over it."""

    sha256: str
    report: str


def kept_report(key: dict[str, str]) -> ProbeReport | None:
    """The report kept for this key; a damaged, half-written or foreign file counts as none."""
    text = kept_text("probe", key)
    if text is None:
        return None
    try:
        report = ProbeReport.from_json(text)
    except ValueError as error:
        _log.warning("Kept probe is not used: %s", error)
        return None
    if report.key != key:
        _log.warning("Kept probe is not used: it is of another machine")
        return None
    return None if report.disturbance else report


def keep_report(report: ProbeReport) -> bool:
    """Keep a report for its key, whole or not at all; tells whether it was kept, as one is that was
    not disturbed and could be written."""
    if report.disturbance:
        _log.warning(report.disturbance)
        return False
    return keep_text("probe", report.key, report.to_json().decode())


def kept_text(kind: str, key: dict[str, str]) -> str | None:
    """The text of this kind kept for this key; a damaged or half-written file counts as none."""
    path = _path(kind, key)
    try:
        kept = decode_json(read_whole(path), _Kept)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("Kept %s %s is not used: %s", kind, path, error)
        return None
    if kept.sha256 != _checksum(kept.report):
        _log.warning("Kept %s %s is not used: it was changed", kind, path)
        return None
    return kept.report


def keep_text(kind: str, key: dict[str, str], text: str) -> bool:
    """Keep a text of this kind for this key, whole or not at all; tells whether it was written."""
    path = _path(kind, key)
    data = msgspec.json.encode(_Kept(sha256=_checksum(text), report=text))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        _log.warning("The %s could not be kept in %s: %s", kind, path, error)
        return False
    return True


def cached_report(key: dict[str, str], measure: Callable[[], ProbeReport]) -> ProbeReport:
    """The report kept for this key, else a new one, which is kept."""
    found = kept_report(key)
    if found is None:
        found = measure()
        keep_report(found)
    return found


def _path(kind: str, key: dict[str, str]) -> Path:
    text = msgspec.json.encode(dict(sorted(key.items())))
    return cache_folder() / f"{kind}-{hashlib.sha256(text).hexdigest()[:20]}.json"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
