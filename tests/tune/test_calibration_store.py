"""Constants learnt once and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from devplace.cost import CostTable
from devplace.machine import Machine
from devplace.plan.plan import machine_fingerprint
from devplace.problem import Problem
from devplace.run.probe import probe_key
from devplace.run.probe.kept_probe import keep_text
from devplace.tune.calibration import (
    LINK_CONSTANTS,
    Calibration,
    Observation,
    calibrated,
)
from devplace.tune.calibration_store import learn, learn_from
from devplace.tune.kept_calibration import KIND, kept_calibration
from devplace.tune.single_steps import MAX_KEPT, SingleStep, kept_steps, remembered
from tests.tune.test_calibration import START as NEAR
from tests.tune.test_calibration import TRUE, machine, observations, with_gaps

START = msgspec.structs.replace(
    NEAR,
    send_overhead_ns=800,
    receive_overhead_ns=600,
    send_share=0.03,
    receive_share=0.02,
    engine_factor=0.8,
)
"""Predicts the steps 10 to 15 % too short; NEAR is 2 % off."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a computer with a driver."""
    monkeypatch.setattr("devplace.run.probe.driver_version", lambda: "1.0")
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path))
    return tmp_path


def rows(steps: int | list[Observation], mode: str = "graph", prefix: str = "graph") -> list[Any]:
    """Measured plans with their problems; each of a graph of its own."""
    found = []
    for number, one in enumerate(observations(steps) if isinstance(steps, int) else steps):
        graph = SimpleNamespace(graph=f"{prefix} {number}")
        plan = SimpleNamespace(placement=one.placement, order=one.order, fingerprints=graph)
        row = SimpleNamespace(
            plan=plan,
            measured_ns=one.measured_ns,
            measurement=SimpleNamespace(timing=SimpleNamespace(mode=mode)),
        )
        found.append((row, Problem(one.graph, one.machine, one.costs)))
    return found


def singles(count: int, true: Calibration, priced_ns: int = 850) -> list[Observation]:
    """Steps on one GPU of several, with kernel gaps."""
    return with_gaps(observations(count, true, num_gpus=1, first_seed=20), true, priced_ns)


def with_gap(calibration: Calibration, gap_ns: int) -> Calibration:
    """These constants with another kernel gap."""
    return msgspec.structs.replace(calibration, kernel_gap_ns=gap_ns)


def keep(calibration: Calibration, *without: str) -> None:
    """As kept before, without some fields."""
    fields = {k: v for k, v in msgspec.to_builtins(calibration).items() if k not in without}
    keep_text(KIND, probe_key(machine()), msgspec.json.encode(fields).decode())


def test_constants_are_learnt_once_and_kept(folder: Path) -> None:
    """The first time they are fitted and written; then the kept ones stand."""
    assert kept_calibration(machine()) is None
    found = learn(machine(), rows(6), START)
    assert found is not None
    assert kept_calibration(machine()) == found
    assert learn(machine(), rows(6), START) is None
    assert len(list(folder.iterdir())) == 1


def test_what_cannot_be_bettered_is_not_kept(folder: Path) -> None:
    """Constants that are right already leave nothing to keep."""
    assert learn(machine(), rows(5), TRUE) is None
    assert list(folder.iterdir()) == []


def test_small_errors_are_left(folder: Path) -> None:
    """Constants that are 2 % off are not fitted to six plans: that may be chance."""
    assert learn(machine(), rows(6), NEAR) is None
    assert list(folder.iterdir()) == []


def test_errors_of_op_times_are_not_put_down_to_transfers(folder: Path) -> None:
    """Ops priced 5 % too long change no constant of transfers where the same steps ran on one GPU
    too, which shows it; without these the constants move."""
    several, alone = (
        rows(
            [
                replace(
                    one,
                    costs=replace(
                        one.costs, compute_ns=(one.costs.compute_ns * 1.05).astype("int64")
                    ),
                )
                for one in observations(6, num_gpus=num_gpus)
            ]
        )
        for num_gpus in (3, 1)
    )
    assert learn(machine(), [*several, *alone], TRUE) is None
    assert learn(machine(), several, TRUE) is not None


def test_few_or_eager_plans_teach_nothing(folder: Path) -> None:
    """Fewer than four plans, or plans run op by op, are not fitted to."""
    assert learn(machine(), rows(3), START) is None
    assert learn(machine(), rows(6, mode="eager"), START) is None


def test_a_damaged_file_counts_as_none(folder: Path) -> None:
    """A changed calibration is not used."""
    learn(machine(), rows(6), START)
    (path,) = folder.iterdir()
    path.write_text(path.read_text().replace("engine_factor", "engine_faktor"))
    assert kept_calibration(machine()) is None


@pytest.mark.parametrize("gap_ns", [400, 2_000])
def test_the_gap_is_learnt_from_call_to_call(folder: Path, gap_ns: int) -> None:
    """One step on one GPU at a time: the fourth different one gives it; constants of transfers and
    the machine's fingerprint stay."""
    steps = rows(singles(4, with_gap(START, gap_ns)))
    for row in (*steps[:3], steps[0]):
        assert learn(machine(), [row], START) is None
    assert kept_calibration(machine()) is None
    found = learn(machine(), steps[3:], START)
    assert found is not None
    assert kept_calibration(machine()) == found
    assert (found.kernel_gap_ns, found.num_gap_steps, found.num_steps) == (gap_ns, 4, 0)
    before, after = (machine_fingerprint(calibrated(machine(), by)) for by in (START, found))
    assert before == after
    assert learn(machine(), steps, START) is None


def test_each_new_step_improves_the_gap(folder: Path) -> None:
    """Further steps move it, but from the first constants on, so that no number of calls takes it
    farther than the largest change; a step that was there before does not."""
    steps = rows(singles(4, with_gap(START, 3_200)))
    first = learn(machine(), steps, START)
    assert first is not None
    assert first.kernel_gap_ns == 3_200
    assert learn(machine(), steps[:1], START) is None
    slow = rows(singles(4, with_gap(START, 50_000)), prefix="slow")
    second = learn(machine(), slow, START)
    assert second is not None
    assert second.num_gap_steps == 8
    assert second.kernel_gap_ns == 4 * START.kernel_gap_ns


def test_a_machine_with_one_gpu_keeps_its_gap(folder: Path) -> None:
    """Its key needs no links; the costs of its steps may hold any gap."""
    gpu = machine().devices[0]
    alone = Machine("alone", (gpu,), ())
    found = []
    for one in singles(4, with_gap(START, 1_500), priced_ns=300):
        costs = CostTable(
            one.costs.compute_ns[:, :1],
            "profiled",
            kernel_gap_ns=300,
            kernels=one.costs.kernels[:, :1],
        )
        found.append(replace(one, machine=alone, costs=costs, order=one.order[:1]))
    learnt = learn(alone, rows(found), START)
    assert learnt is not None
    assert learnt.kernel_gap_ns == 1_500
    assert kept_calibration(alone) == learnt
    assert kept_calibration(machine()) is None


def test_a_call_on_one_gpu_teaches_the_gap(folder: Path) -> None:
    """Choosing between plans hands on what ran on a machine with one GPU, which is not probed."""
    alone = Machine("alone", machine().devices[:1], ())
    for number, one in enumerate(singles(4, with_gap(START, 1_500))):
        costs = replace(
            one.costs,
            compute_ns=one.costs.compute_ns[:, :1],
            origin="profiled",
            kernels=one.costs.kernels[:, :1],
        )
        one = replace(one, machine=alone, costs=costs, order=one.order[:1])
        ((row, problem),) = rows([one], prefix=f"call {number}")
        row.candidate = SimpleNamespace(problem=problem)
        learn_from([row], 60.0, lambda text: None)
    found = kept_calibration(alone)
    assert found is not None
    assert (found.kernel_gap_ns, found.num_gap_steps) == (1_500, 4)


def test_plans_of_one_step_do_not_move_the_gap(folder: Path) -> None:
    """A first call on several GPUs fits constants of transfers; the gap, which differs from step to
    step, waits for four different steps on one GPU, and leaves constants of transfers then."""
    true = with_gap(TRUE, 1_000)
    plans = [*with_gaps(observations(6, true), true), *singles(1, true)]
    first = learn(machine(), rows(plans), START)
    assert first is not None
    assert (first.num_steps, first.num_gap_steps) == (6, 0)
    assert first.kernel_gap_ns == START.kernel_gap_ns
    later = rows(singles(4, true), prefix="later")
    assert learn(machine(), later[:2], START) is None
    second = learn(machine(), later[2:], START)
    assert second is not None
    assert (second.kernel_gap_ns, second.num_gap_steps) == (1_000, 5)
    for name in (*LINK_CONSTANTS, "num_steps"):
        assert getattr(second, name) == getattr(first, name)
    assert kept_calibration(machine()) == second


def test_transfers_are_learnt_after_the_gap(folder: Path) -> None:
    """A machine whose gap is known keeps it when plans on several GPUs come."""
    true = with_gap(TRUE, 400)
    assert learn(machine(), rows(singles(4, true)), START) is not None
    found = learn(machine(), rows(with_gaps(observations(6, true), true, 400)), START)
    assert found is not None
    assert (found.kernel_gap_ns, found.num_gap_steps, found.num_steps) == (400, 4, 6)


def test_a_calibration_without_a_gap_is_read_and_completed(folder: Path) -> None:
    """One kept before there was a gap counts as one with the default; the gap is then fitted, and
    what was kept of transfers stays."""
    old = msgspec.structs.replace(TRUE, num_steps=6, median_error=0.02)
    keep(old, "kernel_gap_ns", "num_gap_steps")
    found = kept_calibration(machine())
    assert found == old
    assert found is not None
    assert (found.kernel_gap_ns, found.num_gap_steps) == (850, 0)
    assert learn(machine(), rows(6), START) is None
    found = learn(machine(), rows(singles(4, with_gap(TRUE, 400))), START)
    assert found is not None
    assert found.kernel_gap_ns == 400
    for name in (*LINK_CONSTANTS, "num_steps"):
        assert getattr(found, name) == getattr(old, name)


def test_a_right_gap_is_left(folder: Path) -> None:
    """Four steps that the gap predicts exactly leave nothing to keep."""
    assert learn(machine(), rows(singles(4, START)), START) is None
    assert kept_calibration(machine()) is None


def test_plans_on_cpus_or_without_known_gaps_are_not_remembered(folder: Path) -> None:
    """Steps that say nothing about the gap: on a CPU, costs without a mark, eager."""
    steps = singles(4, with_gap(START, 400))
    cards = machine()
    cpu = msgspec.structs.replace(cards.devices[0], kind="cpu")
    mixed = Machine("mixed", (cpu, *cards.devices[1:]), cards.links)
    for one in (
        rows([replace(one, machine=mixed) for one in steps]),
        rows([replace(one, costs=replace(one.costs, kernels=None)) for one in steps]),
        rows(steps, mode="eager"),
    ):
        assert learn(cards, one, START) is None
    assert list(folder.iterdir()) == []


def test_steps_are_remembered_without_time_to_fit(folder: Path) -> None:
    """At the end of a budget nothing is fitted, but what was measured counts the next time."""
    steps = rows(singles(4, with_gap(START, 400)))
    assert learn(machine(), steps, START, seconds=0) is None
    assert len(kept_steps(machine())) == 4
    assert learn(machine(), [], START) is not None


def test_the_newest_steps_are_remembered(folder: Path) -> None:
    """A step counts once, as measured last, and old ones make room."""
    one = SingleStep(graph="a", device="cuda:0", base_ns=10, num_kernels=1, measured_ns=20)
    again = msgspec.structs.replace(one, measured_ns=25)
    other = msgspec.structs.replace(one, graph="b")
    assert remembered(machine(), [one, other, again]) == [other, again]
    assert kept_steps(machine()) == [other, again]
    many = [msgspec.structs.replace(one, graph=str(number)) for number in range(MAX_KEPT)]
    assert remembered(machine(), many) == many
    (path,) = folder.iterdir()
    path.write_text(path.read_text().replace("base_ns", "basis_ns"))
    assert kept_steps(machine()) == []
