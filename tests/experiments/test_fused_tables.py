"""The page of fused steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from experiments.gpu.fused import Job, best_of, make_jobs, ours, run_within
from experiments.gpu.fused_rows import ROWS, TRIED
from experiments.gpu.group import ROWS as GROUP_ROWS

EXPERIMENTS = str(Path(__file__).parents[2] / "experiments")
MADE = {
    "card": "NVIDIA H200",
    "cards": 2,
    "uuid": "GPU-1",
    "cores": 32,
    "driver": "580",
    "torch": "2.11.0",
    "cuda": "13.0",
    "python": "3.12.3",
    "seed": 0,
    "commit": "abc1234",
    "pass": "time",
}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which is run from its folder."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import fused_tables

    yield fused_tables
    for name in ("fused_tables", "common"):
        sys.modules.pop(name, None)


def line(peer: str, ms: float | None, row: str = "gpt-2-32", **more: Any) -> dict[str, Any]:
    """What `experiments.gpu.fused` writes of one peer."""
    about = {"row": row, "workload": row[:5], "number_format": "bf16", "batch": 32}
    times = {"ms": ms, "status": "ok"} if ms is not None else {"status": "failed"}
    return about | {"optimizer": "sgd", "peer": peer} | times | MADE | more


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    """A folder with these lines."""
    folder.mkdir()
    (folder / "fused.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return folder


def cells(page: str, start: str) -> list[list[str]]:
    """Cells of the rows of all tables that begin with a text."""
    found = [each for each in page.splitlines() if each.startswith(f"| {start}")]
    return [[cell.strip() for cell in each.strip("|").split("|")] for each in found]


def test_one_row_has_all_peers_of_its_run(tables: Any, tmp_path: Path) -> None:
    """Times, ratio, memory and seconds of compiling of one GPU; of two, the best way of each."""
    predicted = {"predicted_ms": 70.25, "reserved_bytes": [20 * 10**9]}
    folder = written(
        tmp_path / "one",
        line("compile", 90.0, **{"pass": "warm", "compile_s": 61.2}),
        line("fused", 70.0, **predicted, seconds={"1": {"profile": 31.0}}),
        line("compile", 80.0, compile_s=9.0, reserved_bytes=[25 * 10**9]),
        line("autotune", 76.0, compile_s=200.0),
        line("fused-2", 44.0, predicted_ms=40.0, micro_batches=2),
        line("ddp-compiled", 50.0),
        line("ddp-graphs", 42.0),
        line("ddp-graphs", None, reason="killed after 5 s"),
        line("fsdp-compiled", None, reason="did not compile within 200 s"),
    )
    page = tables.gpu_fused(tables.collect([folder], ["A note."]))
    one, two = cells(page, "gpt-2, batch 32, bf16")
    assert one[1:7] == ["0", "**70.0**", "80.0", "76.0", "0.88", "70.2"]
    assert one[7:] == ["20.0", "25.0", "31, 61, 200"]
    assert two[1:7] == ["0", "44.0", "2", "40.0", "0.55", "80.0"]
    assert two[7:] == ["**42.0** (reduce-overhead)", "", ""]
    assert "- gpt-2-32, fsdp-compiled, run 0: did not compile within 200 s" in page
    assert "2 x NVIDIA H200, 32 cores, driver 580, torch 2.11.0" in page
    assert "- A note." in page


def test_runs_that_are_there_can_stay(tables: Any, tmp_path: Path) -> None:
    """A new run is added to them; kernels count in the pass that compiled them."""
    old = tables.collect([written(tmp_path / "a", line("fused", 70.0, uuid="GPU-2"))], ["Old."])
    new = written(
        tmp_path / "b",
        line("fused", None, row="bert-large-32", seconds={"1": {"kernels": 25.0}})
        | {"pass": "warm"},
        line("fused", 26.0, row="bert-large-32", seconds={"1": {"kernels": 0.1}}),
        line("compile", 80.0),
    )
    page = tables.gpu_fused(tables.collect([new], ["New."], json.loads(json.dumps(old))))
    first, second, added = cells(page, "gpt") + cells(page, "bert")
    assert first[1:4] == ["0", "**70.0**", ""]
    assert second[1:4] == ["1", "", "**80.0**"]
    assert added[-1] == "25, -, -"
    assert page.index("- Old.") < page.index("- New.")


def test_machines_are_not_mixed(tables: Any, tmp_path: Path) -> None:
    """Figures of another machine are no row of their own where one machine has both."""
    first = written(tmp_path / "a", line("fused", 70.0, uuid="GPU-2"))
    second = written(tmp_path / "b", line("compile", 80.0), line("fused", 75.0))
    page = tables.gpu_fused(tables.collect([first, second], []))
    (row,) = cells(page, "gpt-2")
    assert row[1:4] == ["1", "**75.0**", "80.0"]
    (row,) = cells(tables.gpu_fused(tables.collect([first], [])), "gpt-2")
    assert row[1:4] == ["0", "**70.0**", ""]


def test_jobs_come_row_by_row_and_groups_last() -> None:
    """Ours runs on as many GPUs as there are, others on several only where a row says so."""
    jobs = make_jobs(["bert-large-32", "nmt-8"], ["fused", "compile", "autotune", "ddp"], [1, 2])
    assert jobs == [
        Job("bert-large-32", "fused", 2),
        Job("bert-large-32", "compile", 1),
        Job("nmt-8", "fused", 2),
        Job("nmt-8", "compile", 1),
        Job("bert-large-32", "autotune", 1),
        Job("nmt-8", "autotune", 1),
        Job("bert-large-32", "ddp", 2),
    ]
    assert {way for ways in TRIED.values() for way in ways} <= set(GROUP_ROWS)
    assert {peer for row in ROWS.values() for peer in row.peers} == set(TRIED)


def plan(name: str, ms: float, gpus: int = 2, count: int = 1) -> dict[str, Any]:
    """A plan that `experiments.gpu.plans` measured."""
    return {
        "micro_batches": count,
        "name": name,
        "gpus": gpus,
        "predicted_ns": 10**6,
        "predicted_peak": {"cuda:0": 5},
        "measured_ns": round(ms * 1e6),
        "round_ns": [round(ms * 1e6)] * 3,
        "peak": {"cuda:0": 7},
        "mode": "graph",
    }


def test_what_was_measured_again_counts() -> None:
    """Of each number of micro-batches the plan that was confirmed, if there is one; not layers."""
    first = [plan("search", 3.0), plan("runner-up 1", 2.0), plan("confirmed", 2.5)]
    other = [plan("search", 2.4, count=2)]
    assert best_of([*first, *other]) == other[0]
    assert best_of(first) == first[2]
    assert best_of([]) is None
    alone, layers = plan("one graph", 4.0, gpus=1), plan("layers", 1.0)
    found = {"rows": [alone, layers, *first], "captures": [{"micro_batches": 1, "seconds": {}}]}
    one, two = ours(found, "fused", 2, None)
    assert (one["peer"], one["gpus"], one["ms"], one["reserved_bytes"]) == ("fused", 1, 4.0, [7])
    assert (two["peer"], two["gpus"], two["ms"], two["plan"]) == ("fused-2", 2, 2.5, "confirmed")
    assert len(two["plans"]) == 4
    (failed,) = ours({"rows": [], "captures": []}, "fused", 1, "killed after 5 s")
    assert (failed["status"], failed["reason"]) == ("failed", "killed after 5 s")


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    """The reason says so; one that fails gives its last line."""
    log = tmp_path / "log"
    forever = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run_within(forever, log, 0.5) == "killed after 0 s"
    failing = [sys.executable, "-c", "raise SystemExit('no such model')"]
    assert run_within(failing, log, 600.0) == "ended with code 1: no such model"
    assert run_within([sys.executable, "-c", ""], log, 600.0) is None
