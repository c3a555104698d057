"""Readers of files: good files for each, and a function that reads a file and uses what it gave."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import devplace as dp
from devplace.bench.best_known import FILE, load_best_known
from devplace.bench.run import solve
from devplace.bench.solvers import Effort
from devplace.cli.measured_file import keep_measured, load_measured, measured_path
from devplace.cost.price_cache import TimingCache
from devplace.graph import serialize
from devplace.instances import load_instance
from devplace.kernels.store import KernelStore
from devplace.machine import toml
from devplace.placers import Budget, PostPpo
from devplace.report import read_pins
from devplace.research.curves import Curves
from devplace.research.options import TrainingOptions
from devplace.research.training import Training
from devplace.run.measured_timeline import MeasuredTimeline
from devplace.testing.hand import hand_graph
from tests.instances import files as instance_files
from tests.research.cases import three_ops

GRAPH = """
x = input bytes=64
w = parameter bytes=128
a = mm(x, w) bytes=256 flops=4000 module=encoder
b = relu(a) bytes=256 module=encoder
c = view(b) bytes=256
d = mm(c, w) bytes=32 flops=900 module=head
l = sum(d) bytes=4 result=loss
"""


@dataclass(frozen=True)
class Reader:
    """A reader.

    Attributes:
        name: What it reads.
        good: Files that it accepts.
        file: Name of a file that it reads.
        read: Reads a file, and uses what was in it; raises only errors of devplace.
    """

    name: str
    good: tuple[bytes, ...]
    file: str
    read: Callable[[Path], Any]


def _graph() -> Any:
    return hand_graph(GRAPH)


def _problem(graph: Any, machine: Any) -> Any:
    return dp.Problem(graph, machine, dp.Analytic()(graph, machine))


def _step_ns(problem: Any) -> int:
    """Time of everything on the first device that may have all."""
    devices = np.zeros(problem.core.tasks.num_tasks, np.int32)
    timeline = dp.simulate(problem, dp.Placement(problem.spaces.op_devices(devices)))
    assert 0 <= timeline.makespan_ns < 2**63
    assert all(0 <= peak < 2**63 for peak in timeline.peak_bytes.tolist())
    return int(timeline.makespan_ns)


def _read_graph(path: Path) -> None:
    graph = serialize.load(path)
    assert serialize.from_json(serialize.to_json(graph)) == graph
    _step_ns(_problem(graph, dp.load_machine("cpux2")))


def _read_machine(path: Path) -> None:
    machine = toml.load(path)
    assert toml.loads(toml.dumps(machine)) == machine
    if len(machine.devices) < 10:
        _step_ns(_problem(_graph(), machine))


@cache
def _plan() -> Any:
    graph, machine = _graph(), dp.load_machine("cpux2")
    return dp.place(_problem(graph, machine), dp.placers.Search(), "20ev", 0).plan


def _read_plan(path: Path) -> None:
    plan = dp.load_plan(path)
    problem = _problem(_graph(), dp.load_machine("cpux2"))
    plan.check(problem)
    timeline = plan.timeline(problem)
    assert timeline.makespan_ns > 0
    assert sum(map(len, timeline.order)) == sum(map(len, plan.order))


def _read_measured(path: Path) -> None:
    plan = _plan()
    found = load_measured(path.with_name("plan.json"), plan)
    if found is not None:
        assert len(found.start_ns) == len(plan.ops)
        assert 0 <= found.makespan_ns < 2**63
        assert (found.start_ns <= found.finish_ns).all()


def _measured(folder: Path) -> bytes:
    plan = _plan()
    times = np.arange(len(plan.ops), dtype=np.int64)
    empty = np.zeros(1, np.int64)
    keep_measured(folder / "plan.json", plan, MeasuredTimeline(times, times + 1, empty, empty, 9))
    return measured_path(folder / "plan.json").read_bytes()


def _read_instance(path: Path) -> None:
    instance = load_instance(path)
    row = solve(instance, Effort(Budget(evaluations=5)))
    numbers = [number for number in (row.value, row.bound) if number is not None]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)


def _read_best_known(path: Path) -> None:
    load_best_known(path)


def _read_curves(path: Path) -> None:
    curves = Curves(path.parent, 2)
    curves.add({"evaluations": 60, "seconds": 1.5, "best_ns": None})
    curves.close()
    assert path.read_bytes().count(b"\n") == 4


def _train(folder: Path, budget: str, resume: bool = False) -> Any:
    training = TrainingOptions(log_dir=folder / "runs", resume=resume)
    return dp.place(three_ops(), PostPpo(training=training), budget, 0)


def _checkpoint(folder: Path) -> bytes:
    _train(folder, "40ev")
    (path,) = folder.glob("runs/*/checkpoint.pt")
    return path.read_bytes()


def _read_checkpoint(path: Path) -> None:
    run = _run()
    assert run._load(path) == 2
    assert run.evaluate.meter.num_evaluations == 40


@cache
def _run() -> Any:
    """A run that can load checkpoints of its like."""
    caught: list[Any] = []
    track = Training.track
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:

        def keep(self: Training, **parts: Any) -> None:
            caught.append(self)
            track(self, **parts)

        patch.setattr(Training, "track", keep)
        _train(Path(folder), "20ev")
    return caught[0]


def _timings(folder: Path) -> bytes:
    cache = TimingCache(folder / "timings.sqlite")
    cache.write("here", {"a": (5, 6), "b": (7, 8)})
    return (folder / "timings.sqlite").read_bytes()


def _read_timings(path: Path) -> None:
    cache = TimingCache(path)
    found = cache.read("here", ["a", "b"])
    assert {"a": (5, 6), "b": (7, 8)}.items() >= found.items()
    cache.write("here", {"c": (1, 1)})


def _kernel(store: KernelStore) -> bytes:
    store.write("key", "print('kernel')\n")
    return store.path("key").read_bytes()


def _read_device_map(path: Path) -> None:
    pins = read_pins(path)
    graph, machine = _graph(), dp.load_machine("cpux2")
    dp.Problem(graph, machine, dp.Analytic()(graph, machine), pins=pins)


def _read_kernel(path: Path) -> None:
    store = KernelStore("fuzz")
    object.__setattr__(store, "folder", path.parent)
    assert store.read("key") in (None, "print('kernel')\n")


def _read_budget(path: Path) -> None:
    budget = Budget.parse(path.read_bytes().decode(errors="replace"))
    assert budget.seconds is None or 0 < budget.seconds < math.inf
    assert budget.evaluations is None or 0 < budget.evaluations < 2**63
    dataclasses.replace(budget)


def all_readers(folder: Path) -> list[Reader]:
    """Every reader of files in this process."""
    formats = {
        "tarnawski": instance_files.tarnawski(),
        "piper": instance_files.piper(),
        "pipedream": instance_files.PIPEDREAM,
        "doppler": instance_files.DOPPLER,
    }
    machines = [dp.load_machine(name) for name in ("cpux2", "k40x2", "rtx4090x2")]
    curves = b"evaluations,seconds,best_ns\n20,0.5,99\n40,1.0,\n"
    return [
        Reader("machine", tuple(toml.dumps(m).encode() for m in machines), "m.toml", _read_machine),
        Reader("graph", (serialize.to_json(_graph()),), "graph.json", _read_graph),
        Reader("plan", (_plan().to_json(),), "plan.json", _read_plan),
        Reader("measured", (_measured(folder),), "plan.json.measured.json", _read_measured),
        *(
            Reader(name, (text.encode(),), "i.json", _read_instance)
            for name, text in formats.items()
        ),
        Reader("best-known", (FILE.read_bytes()[:3000] + b"]",), "known.json", _read_best_known),
        Reader("curves", (curves,), "curves.csv", _read_curves),
        Reader("checkpoint", (_checkpoint(folder),), "checkpoint", _read_checkpoint),
        Reader("timings", (_timings(folder),), "t.sqlite", _read_timings),
        Reader("kernel", (_kernel(KernelStore("fuzz")),), "key.py", _read_kernel),
        Reader(
            "device-map",
            (b'{"": "cpu:0"}', b'{"encoder": "cpu:1", "head": "cpu"}'),
            "map.json",
            _read_device_map,
        ),
        Reader("budget", (b"30s,2000ev", b"2min", b"500 ev"), "budget", _read_budget),
    ]


NAMES = (
    *("machine", "graph", "plan", "measured", "tarnawski", "piper", "pipedream", "doppler"),
    *("best-known", "curves", "checkpoint", "timings", "kernel", "budget", "device-map"),
)
