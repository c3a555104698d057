"""devplace's own search."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.strategies import random_graph, random_problem

from devplace.cost import CostTable
from devplace.errors import InfeasibleError, ProblemError
from devplace.graph import Op, OpGraph, StepResult, Tensor
from devplace.machine.detect import num_cores
from devplace.placers import Budget, Evaluator, Heft, Search, Single, place
from devplace.placers.annealing import Moves
from devplace.placers.local_search import search
from devplace.placers.local_search.starts import _placers, nested
from devplace.problem import Placement, Problem
from devplace.simulator.bounds import LowerBound, lower_bound
from devplace.testing import brute_force, hand_machine, hand_problem, tiny_problems
from devplace.testing.layered import layered_problem


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), part=st.floats(0.3, 1.0))
def test_memory_limits_are_kept_where_they_can_be(seed: int, part: float) -> None:
    """Where brute force finds a placement within tight limits, the search finds one as fast."""
    problem = random_problem(seed, 5, 2)
    assume(problem.core.tasks.num_groups > 1)
    free = brute_force(
        Problem(problem.graph, hand_machine({"gpu:0": 10**9, "gpu:1": 10**9}), problem.costs)
    )
    total = sum(tensor.num_bytes for tensor in problem.graph.tensors)
    machine = hand_machine({"gpu:0": max(1, int(total * part / 2)), "gpu:1": max(1, total // 2)})
    tight = Problem(problem.graph, machine, problem.costs)
    try:
        best = brute_force(tight)
    except InfeasibleError:
        return
    found = place(tight, Search(), Budget(evaluations=1000))
    assert found.is_feasible
    assert found.step_ns <= best.step_ns
    assert best.step_ns >= free.step_ns


def test_memory_is_spread_over_devices_one_cannot_hold() -> None:
    """Twelve layers of 10 bytes on three devices of 50: no device is over its limit."""
    lines = ["x = input bytes=1"]
    for k in range(12):
        read = f"y{k - 1}" if k else "x"
        lines += [f"w{k} = parameter bytes=10 module=l.{k}"]
        lines += [f"y{k} = f({read}, w{k}) bytes=1 ns=10 module=l.{k}"]
        lines += [f"u{k} = sgd(w{k}, y{k}) bytes=0 ns=1 replaces=w{k} module=l.{k}"]
    machine = hand_machine({"gpu:0": 50, "gpu:1": 50, "gpu:2": 50})
    result = place(hand_problem("\n".join(lines), machine), Search(), "3000ev")
    assert (result.timeline.peak_bytes <= 50).all()
    # 4 layers each: the chain, 12 x 10, crosses twice; the last device then has its 4 updates left
    assert result.step_ns == 126


@pytest.mark.parametrize(("num_ops", "evaluations"), [(40, 700), (1200, 150)])
def test_the_same_seed_and_evaluations_give_the_same_plan(
    num_ops: int, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are reproducible, whatever the number of cores (large problems use threads)."""
    problem = random_problem(5, num_ops, 3)
    plans = []
    for cores in (1, 3):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        found = place(problem, Search(), f"{evaluations}ev", seed=9, allow_infeasible=True)
        plans.append(found.plan)
    assert plans[0] == plans[1]


def test_a_step_of_nothing_but_sources_is_placed() -> None:
    """Two buffers that change places take no time and have no critical path to improve."""
    tensors = tuple(Tensor(name, (4,), "float32", 16) for name in "ab")
    ops = tuple(
        Op(name, "source", outputs=(k,), stage="source", role="buffer")
        for k, name in enumerate("ab")
    )
    swapped = (StepResult("a", 1, "buffer", 0), StepResult("b", 0, "buffer", 1))
    machine = hand_machine({"gpu:0": 99, "gpu:1": 99})
    costs = CostTable(np.zeros((2, 2), np.int64), "hand")
    problem = Problem(OpGraph("swap", ops, tensors, swapped), machine, costs)
    assert place(problem, Search(), "5000ev").step_ns == 0


def test_more_budget_is_not_worse() -> None:
    """With the trivial plans in both, ten times the evaluations find at least as good a plan."""
    for seed in range(4):
        problem = random_problem(seed, 60, 3)
        few = place(problem, Search(), Budget(evaluations=200), allow_infeasible=True)
        many = place(problem, Search(), Budget(evaluations=2000), allow_infeasible=True)
        missing = [sum(r.timeline.missing_bytes.values()) for r in (many, few)]
        assert (missing[0], many.step_ns) <= (missing[1], few.step_ns)


INGREDIENTS = (
    Search(structural=False),
    Search(levels=1),
    Search(temperature=0.0),
    Search(width=1),
    Search(heuristics=False),
    Search(improves_order=False),
    Search(refines=False),
    Search(moves=Moves(*[0.0] * 8)),
    Search(moves=Moves(0.2, 0.2, 0.2, 0.2, 1.0, 1.0, 1.0, 0.5)),
)


@pytest.mark.parametrize("placer", INGREDIENTS, ids=range(len(INGREDIENTS)))
def test_the_search_works_without_any_of_its_ingredients(placer: Search) -> None:
    """The budget is kept, and the plan is no worse than one device."""
    problem = layered_problem(1000, 3)
    result = place(problem, placer, "900ev", 3)
    assert result.evaluations <= 900
    assert result.step_ns < place(problem, Single()).step_ns


def test_list_schedulers_are_left_out_where_they_would_take_all_the_time() -> None:
    """They are plain Python; a budget of simulations always has them."""
    problem = layered_problem(2000, 8)
    few = _placers(problem, Budget(seconds=0.1))
    assert _placers(problem, Budget(evaluations=10)) == _placers(problem, Budget(seconds=10.0))
    names = {placer.name for placer in _placers(problem, Budget(seconds=10.0))}
    assert names - {placer.name for placer in few} == {"heft", "etf", "m-etf", "mayer"}


def test_further_devices_come_by_speed_then_by_links() -> None:
    """The fastest first, of equal ones those of its host; a CPU only where it is no slower."""
    names = ("a:0", "b:0", "a:1", "a:slow", "a:fast", "cpu:0", "cpu:1")
    across = {(one, other): 0.01 for one in names for other in names if one[0] != other[0]}
    machine = hand_machine(dict.fromkeys(names, 10**6), slow=across)
    ns = "100,100,100,400,50,90,500"
    text = f"o0 = f ns={ns} bytes=8\no1 = f(o0) ns={ns} bytes=8"
    problem = hand_problem(text, machine)
    found = [names[d] for d in nested(problem)]
    assert found == ["a:fast", "cpu:0", "a:0", "a:1", "b:0", "a:slow"]


def test_pins_and_exclusions_hold() -> None:
    """Pinned ops stay, excluded devices stay empty."""
    machine = hand_machine({"gpu:0": 999, "gpu:1": 999, "gpu:2": 999})
    text = "\n".join(f"o{k} = f ns=10" for k in range(6))
    problem = hand_problem(text, machine, pins={"o0": "gpu:1"}, exclude=["gpu:2"])
    result = place(problem, Search(), "500ev")
    assert result.placement.devices[0] == 1
    assert set(result.placement.devices) == {0, 1}
    assert result.step_ns == 30


@pytest.mark.slow
def test_s61_a_time_limit_holds_on_a_random_graph() -> None:
    """2,000 ops, limit 5 s: a feasible plan within 5 s on each core and what a slow one needs
    before and after, with its gap to a bound; more work is not worse."""
    rng = np.random.default_rng(0)
    graph = random_graph(rng, 2000)
    machine = hand_machine({f"gpu:{k}": 10**9 for k in range(4)}, latency_ns=20)
    works = np.array([not (op.is_source or op.is_view) for op in graph.ops])
    times = rng.integers(1, 1000, (len(graph.ops), 1)) * works[:, None]
    problem = Problem(graph, machine, CostTable(np.tile(times, (1, 4)).astype(np.int64), "hand"))
    bound = lower_bound(problem)
    begin = time.process_time()  # of this process: others may be busy
    result = place(problem, Search(), "5s", bound=bound)
    assert time.process_time() - begin < 5 * num_cores() + 10
    assert result.is_feasible
    assert result.gap >= 0
    less, more = (place(problem, Search(), f"{n}ev", bound=bound) for n in (2_000, 10_000))
    assert more.step_ns <= less.step_ns


def test_a_start_whose_order_cannot_finish_is_refused() -> None:
    """An order in which an op waits for one behind it is no start."""
    problem = hand_problem("a = f ns=5\nb = f(a) ns=5", hand_machine({"gpu:0": 9, "gpu:1": 9}))
    start = Placement(np.zeros(2, np.int32), order=((1, 0), ()))
    with pytest.raises(ProblemError, match="can never finish"):
        place(problem, Search(start=start), "10ev")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(2, 25))
def test_the_result_is_never_worse_than_a_start_with_an_order(seed: int, num_ops: int) -> None:
    """Also under a budget that leaves nothing for chains."""
    problem = random_problem(seed, num_ops, 3)
    built = [Heft().build(problem, contention).in_order() for contention in (False, True)]
    for start in built:
        key = Evaluator(problem, Budget(evaluations=1))(start).key
        for budget in (1, 40):
            evaluate = Evaluator(problem, Budget(evaluations=budget))
            found = Search(start=start)(problem, evaluate, np.random.default_rng(seed))
            assert Evaluator(problem, Budget(evaluations=1))(found).key <= key


def test_nothing_is_prepared_for_a_budget_that_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the starts took the budget, no classes are made: on large graphs they take seconds."""
    monkeypatch.setattr(Search, "_levels", lambda *_: pytest.fail("levels were made"))
    problem = layered_problem(600, 3)
    assert place(problem, Search(), "2ev").evaluations == 2
    assert place(problem, Search(), "0.000001s").is_feasible


NO_BOUND = LowerBound(0, 0, 0, 0, 0)
TINY = {tiny.name: tiny for tiny in tiny_problems()}


def ten_ops() -> Problem:
    """Four chains between an op that they all read and one that reads them all."""
    lines = ["x = input bytes=1", "a = f(x) bytes=1 ns=10"]
    for k in range(4):
        lines += [f"b{k} = f(a) bytes=1 ns=20", f"c{k} = f(b{k}) bytes=1 ns=20"]
    lines += ["d = f(c0, c1, c2, c3) bytes=1 ns=10 result=output"]
    return hand_problem("\n".join(lines), hand_machine({"gpu:0": 999, "gpu:1": 999}))


@pytest.mark.parametrize("name", ["chain", "branches", "backfill", "unequal"])
def test_the_search_ends_where_nothing_better_can_be_found(name: str) -> None:
    """A step as short as the lower bound ends it at once; the plan is that of the whole budget."""
    problem = TINY[name].problem
    early = place(problem, Search(), "200000ev")
    assert early.status == "optimal"
    assert early.evaluations < 50
    whole = place(problem, Search(), "3000ev", bound=NO_BOUND)
    assert whole.evaluations > early.evaluations
    assert early.plan.placement == whole.plan.placement
    assert early.plan.order == whole.plan.order


def test_a_bound_that_is_reached_on_the_way_ends_the_search() -> None:
    """Also within chains: the search is over with the placement that reached it."""
    problem = layered_problem(100, 3)
    whole = place(problem, Search(), "1500ev", bound=NO_BOUND)
    reached = LowerBound(whole.step_ns, 0, 0, 0, 0)
    early = place(problem, Search(), "1500ev", bound=reached)
    assert (early.step_ns, early.status) == (whole.step_ns, "optimal")
    assert early.plan.placement == whole.plan.placement
    assert early.plan.order == whole.plan.order
    assert early.evaluations <= whole.evaluations


def test_the_search_ends_where_all_placements_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten ops on two devices: all 1,024 placements, some orders, and a few rounds of both; the
    optimum is not proved, yet the budget is not used up. The same seed gives the same plan."""
    monkeypatch.setattr(search, "MAX_TRIED", 20_000)
    monkeypatch.setattr(search, "PATIENCE", 300)
    problem = ten_ops()
    budget = Budget(seconds=10**6, evaluations=10**7)
    first, second = (place(problem, Search(), budget, 4, bound=NO_BOUND) for _ in range(2))
    assert first.plan == second.plan
    assert first.status == "feasible"
    assert 1024 < first.evaluations < 20_000
    # two chains on each device; a crosses before those beside d, the others end 1 before these
    assert first.step_ns == 10 + 1 + 80 + 10


def test_nothing_is_left_to_try_after_all_placements_in_all_orders() -> None:
    """Of three ops on two devices there are 8 placements and 6 orders: then the search is over."""
    problem = TINY["branches"].problem
    tried = place(problem, Search(), "200000ev", bound=NO_BOUND)
    assert tried.step_ns == TINY["branches"].step_ns
    assert 8 * 7 < tried.evaluations < 8 * 7 + 30


def test_measured_times_know_no_bound() -> None:
    """A measured step may be shorter than the bound of the predicted ones, and the next shorter."""
    problem = TINY["chain"].problem
    evaluate = Evaluator(problem, Budget(evaluations=20), measure=lambda _: 1, least_ns=15)
    evaluate(Placement(np.zeros(len(problem.graph.ops), np.int32)))
    assert not evaluate.is_optimal
    assert not evaluate.is_over
