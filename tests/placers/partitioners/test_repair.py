"""Memory repair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placers.helpers import placed
from tests.strategies import random_problem

from devplace.errors import InfeasibleError
from devplace.placers import Budget, Evaluator, MinCut, MinCutRepaired, place
from devplace.placers.margin_retry import with_priority
from devplace.placers.partitioners.repair import repaired
from devplace.placers.simple.single import all_on
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.testing import brute_force, hand_machine, hand_problem

LAYERS = "\n".join(
    f"w{k} = parameter bytes=10 module=l.{k}\n"
    f"y{k} = f({f'y{k - 1}, ' if k else ''}w{k}) bytes=1 ns=10 module=l.{k}\n"
    f"u{k} = sgd(w{k}, y{k}) bytes=0 ns=1 replaces=w{k} module=l.{k}"
    for k in range(12)
)


def fix(problem: Problem, device: int = 0, evaluations: int = 100) -> tuple[Problem, np.ndarray]:
    """Everything on one device, repaired."""
    evaluate = Evaluator(problem, Budget(evaluations=evaluations))
    found = repaired(problem, all_on(problem, device), evaluate)
    assert evaluate.meter.num_evaluations <= evaluations
    assert not problem.violations(found)
    return problem, found.devices


def test_layers_are_spread_until_they_fit() -> None:
    """Twelve layers of 10 bytes, all on one of three devices of 50, end within every limit."""
    problem = hand_problem(LAYERS, hand_machine({"gpu:0": 50, "gpu:1": 50, "gpu:2": 50}))
    evaluate = Evaluator(problem, Budget(evaluations=100))
    start = all_on(problem, 0)
    assert not simulate(problem, start).is_feasible
    assert simulate(problem, repaired(problem, start, evaluate)).is_feasible


def test_what_fits_is_left_alone() -> None:
    """One evaluation, the same devices."""
    problem = hand_problem(LAYERS, hand_machine({"gpu:0": 500, "gpu:1": 500}))
    evaluate = Evaluator(problem, Budget(evaluations=100))
    start = all_on(problem, 0)
    assert repaired(problem, start, evaluate) is start
    assert evaluate.meter.num_evaluations == 1


def test_the_piece_with_the_least_traffic_moves() -> None:
    """Modules v and w need 60 bytes each and more for the update: w moves, as 1 byte of it is read
    elsewhere, but 30 of v."""
    problem = hand_problem(
        """
        v = parameter bytes=60 module=v
        w = parameter bytes=60 module=w
        a = f(v) bytes=30 ns=1 module=v
        b = f(w) bytes=1 ns=1 module=w
        v2 = sgd(v) bytes=60 ns=1 replaces=v module=v
        w2 = sgd(w) bytes=60 ns=1 replaces=w module=w
        c = f(a, b) bytes=1 ns=1 module=z
        """,
        hand_machine({"gpu:0": 155, "gpu:1": 155}),
    )
    _, devices = fix(problem)
    names = [op.name for op in problem.graph.ops]
    found = {name: problem.machine.device_names[d] for name, d in zip(names, devices, strict=True)}
    assert (found["v2"], found["w2"]) == ("gpu:0", "gpu:1")
    assert found["a"] == found["c"] == "gpu:0"


def test_the_cpu_helps_only_when_no_accelerator_has_room() -> None:
    """Twelve layers on two cards of 100 bytes leave the CPU alone; two cards of 30 do not."""
    machine = hand_machine({"cpu:0": 1000, "gpu:0": 100, "gpu:1": 100})
    problem, devices = fix(hand_problem(LAYERS, machine), device=1)
    assert set(devices.tolist()) == {1, 2}
    machine = hand_machine({"cpu:0": 1000, "gpu:0": 30, "gpu:1": 30})
    problem, devices = fix(hand_problem(LAYERS, machine), device=1)
    assert 0 in devices
    assert simulate(problem, Placement(devices)).is_feasible


def test_pins_are_kept_while_repairing() -> None:
    """Pinned layers stay on the full device; others make room."""
    machine = hand_machine({"gpu:0": 70, "gpu:1": 90})
    pins = {"l.3": "gpu:0", "l.7": "gpu:0"}
    problem = hand_problem(LAYERS, machine, pins=pins)
    evaluate = Evaluator(problem, Budget(evaluations=100))
    found = repaired(problem, all_on(problem, 0), evaluate)
    assert not problem.violations(found)
    assert simulate(problem, found).is_feasible


def test_a_pool_over_its_limit_is_relieved() -> None:
    """Two devices share 100 bytes; each limit alone would allow all of 120: some go elsewhere."""
    machine = hand_machine(
        {"gpu:0": 200, "gpu:1": 200, "gpu:2": 200}, pools={"ram": (100, ["gpu:0", "gpu:1"])}
    )
    problem = hand_problem(LAYERS, machine)
    evaluate = Evaluator(problem, Budget(evaluations=100))
    start = all_on(problem, 0)
    assert list(simulate(problem, start).missing_bytes) == ["ram"]
    assert simulate(problem, repaired(problem, start, evaluate)).is_feasible


def test_a_partition_is_repaired() -> None:
    """Equal work but unequal limits: the blind split breaks one, the repaired one does not."""
    reason = MinCut().supports(hand_problem("a = f ns=1", hand_machine({"gpu:0": 9})))
    if reason:
        pytest.skip(reason)
    problem = hand_problem(LAYERS, hand_machine({"gpu:0": 45, "gpu:1": 110}))
    blind = place(problem, MinCut(), Budget(evaluations=1), allow_infeasible=True)
    assert not blind.is_feasible
    assert place(problem, MinCutRepaired(), Budget(evaluations=60)).is_feasible
    assert placed(blind)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), part=st.floats(0.4, 1.0))
def test_repair_never_makes_it_worse(seed: int, part: float) -> None:
    """On random problems under tight limits: no more bytes over the limits than before, and legal.
    What no placement can satisfy stays unsatisfied."""
    loose = random_problem(seed, 12, 3)
    peak = simulate(loose, all_on(loose, 0)).peak_bytes.max()
    limit = max(1, int(peak * part))
    problem = Problem(loose.graph, hand_machine({f"gpu:{d}": limit for d in range(3)}), loose.costs)
    start = all_on(problem, 0)
    evaluate = Evaluator(problem, Budget(evaluations=100))
    found = repaired(problem, start, evaluate)
    assert not problem.violations(found)
    before, after = (
        sum(simulate(problem, with_priority(problem, one)).missing_bytes.values())
        for one in (start, found)
    )
    assert after <= before
    if problem.core.tasks.num_groups <= 6 and after == 0:
        try:
            brute_force(problem)
        except InfeasibleError:
            pytest.fail("repair found what brute force says there is not")
