"""The kept probe: found again, and never trusted when damaged or foreign."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.run.probe.fakes import KEY, FakeBench

from devplace.run.probe import ProbeReport
from devplace.run.probe.kept_probe import cached_report, keep_report, keep_text, kept_report
from devplace.run.probe.probe_run import run_probe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def report() -> ProbeReport:
    """A report of made-up devices."""
    return run_probe(FakeBench(2), KEY)


def test_a_machine_is_probed_once(folder: Path) -> None:
    """The second time the report comes from the file; another driver is probed anew."""
    calls = []

    def measure() -> ProbeReport:
        calls.append(1)
        return report()

    first = cached_report(KEY, measure)
    assert cached_report(KEY, measure) == first
    assert len(calls) == 1
    assert kept_report({**KEY, "driver": "other"}) is None
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("damage", ["half", "empty", "binary", "other key", "edited", "form"])
def test_a_damaged_file_is_not_trusted(folder: Path, damage: str) -> None:
    """Half-written, foreign or edited files count as none, and are replaced."""
    keep_report(report())
    (path,) = folder.iterdir()
    data = path.read_bytes()
    kept = json.loads(data)
    changed = {
        "half": data[: len(data) // 2],
        "empty": b"",
        "binary": b"\xff\xfe\x00",
        "edited": data.replace(b"9000", b"9001"),
        "form": json.dumps({**kept, "report": kept["report"].replace('"form":1', '"form":9')}),
        "other key": data,
    }[damage]
    if damage == "other key":
        keep_report(run_probe(FakeBench(2), {**KEY, "devices": "cuda:0=GPU-z"}))
        (other,) = set(folder.iterdir()) - {path}
        changed = other.read_bytes()
    assert changed != data
    path.write_bytes(changed.encode() if isinstance(changed, str) else changed)
    assert kept_report(KEY) is None
    found = cached_report(KEY, report)
    assert kept_report(KEY) == found


def test_a_probe_of_busy_gpus_is_not_kept(folder: Path) -> None:
    """Its times are those of slices that processes share a GPU in. It is used, and the next one
    measures again; a kept one of before counts as none."""
    good = report()
    pair = next(p for p in good.pairs if "engine" in p.hop_ns)
    slow = msgspec.structs.replace(pair, hop_ns={**pair.hop_ns, "engine": (4_638_563,) * 3})
    busy = msgspec.structs.replace(good, pairs=(slow, *(p for p in good.pairs if p != pair)))
    assert "1024 bytes from cuda:0 to cuda:1 took 4.6 ms by engine" in busy.disturbance
    assert cached_report(KEY, lambda: busy) == busy
    assert not folder.exists()
    keep_text("probe", KEY, busy.to_json().decode())
    assert kept_report(KEY) is None
    assert cached_report(KEY, lambda: good) == kept_report(KEY) == good


def test_a_cache_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is returned all the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path / "file" / "below"))
    assert keep_report(report()) is False
    assert cached_report(KEY, report).key == KEY
