"""Search each capture of a step, then choose a plan by measuring the best ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from devplace.auto.budget_clock import BudgetClock
from devplace.auto.calibration_store import learn
from devplace.auto.candidates import Candidate, candidates
from devplace.auto.confirm import Confirmation, confirm_trials
from devplace.auto.measure import Measurer, Trial
from devplace.auto.measured_costs import HOPPER, price, probed_machine
from devplace.auto.ordinary import time_ordinary
from devplace.auto.step_sources import step_sources
from devplace.cost.worker_process import WorkerProcess
from devplace.errors import InfeasibleError
from devplace.graph import Captured
from devplace.machine import Machine
from devplace.placers import Placer, Result, Search, Single, place
from devplace.problem import Problem

_TOO_SLOW = (
    "No plan was measured within {:.3g} s, so the best predicted one is used unmeasured: the "
    "computer is busy, or steps take long. Give a larger budget, as budget='5min'."
)
Tell = Callable[[str], None]
_Pair = tuple[Candidate, Trial]


@dataclass(frozen=True)
class Searched:
    """What was found for one capture.

    Attributes:
        graph: The captured step.
        result: Of its search.
    """

    graph: Captured = field(repr=False)
    result: Result

    @property
    def prefix(self) -> str:
        """For names of its candidates."""
        count = self.graph.meta.get("micro_batches", 1)
        return f"{count} micro-batches, " if count > 1 else ""


@dataclass(frozen=True)
class Choice:
    """Candidates in the order in which they should be used.

    Attributes:
        ranked: Candidates with their graphs, best first.
        confirmation: What was measured, if it was.
        notes: For the report.
    """

    ranked: tuple[tuple[Candidate, Captured], ...]
    confirmation: Confirmation | None
    notes: tuple[str, ...] = ()


def search(
    graphs: Sequence[Captured],
    machine: Machine,
    demands: Mapping[str, Any],
    placer: Placer | None,
    clock: BudgetClock,
    seed: int,
    confirms: bool,
    tell: Tell,
    child: WorkerProcess | None = None,
) -> list[Searched]:
    """Place every capture; those that do not fit are left out.

    Ops are timed in `child`.

    Raises:
        InfeasibleError: None fits.
    """
    found: list[Searched] = []
    first_error: InfeasibleError | None = None
    for number, graph in enumerate(graphs):
        costs = price(graph, machine, demands["exclude"], child=child)
        problem = Problem(graph, machine, costs, **demands)
        chosen = placer or (Search() if len(problem.usable_devices) > 1 else Single())
        budget = clock.search_budget(len(graphs) - number, confirms)
        tell(f"searching ({number + 1} of {len(graphs)})")
        try:
            result = place(problem, chosen, budget, seed)
        except InfeasibleError as error:
            first_error = first_error or error
            continue
        if result.is_interrupted:
            raise KeyboardInterrupt
        found.append(Searched(graph, result))
    if not found:
        assert first_error is not None
        raise first_error
    return found


def _notes(searches: Sequence[Searched]) -> tuple[str, ...]:
    results = [searched.result for searched in searches]
    found = [note for r in results for note in (*r.timeline.problem.notes, *r.notes)]
    return tuple(dict.fromkeys(found))


def choose(
    searches: Sequence[Searched],
    arguments: tuple[Any, Any, Any, Any],
    measurer: Measurer | None,
    clock: BudgetClock,
    tell: Tell,
) -> Choice:
    """Measure the candidates of all searches and rank them; without measuring, by prediction.

    Where the time is too short for any, a warning says so and predictions decide.

    Args:
        searches: At least one.
        arguments: Model, optimizer, inputs and keyword inputs.
        measurer: What runs them, or None.
        clock: Bounds the measuring.
        tell: Told what is being measured.

    Raises:
        ExecutionError: None of them ran, for other reasons than time.
    """
    notes = _notes(searches)
    if measurer is None:
        best = sorted(searches, key=lambda s: s.result.step_ns)
        ranked = [
            (Candidate(s.prefix + s.result.placer, s.result.plan, s.result.step_ns), s.graph)
            for s in best
        ]
        return Choice(tuple(ranked), None, notes)
    trials = _trials(searches, arguments)
    found = [candidate for candidate, _ in trials]
    confirmation = confirm_trials(
        found,
        [trial for _, trial in trials],
        measurer,
        clock.confirm_seconds(),
        lambda name: tell(f"measuring {name}"),
        lambda: time_ordinary(searches[0].graph, *arguments),
    )
    graph_of = {id(candidate): trial.graph for candidate, trial in trials}
    rows = confirmation.ranked or confirmation.untimed
    if not rows:
        _ = confirmation.best  # says why none ran
    elif not confirmation.ranked:
        warnings.warn(_TOO_SLOW.format(confirmation.seconds), stacklevel=3)
    else:
        _learn(confirmation, searches, graph_of, clock, tell)
    ranked = [(row.candidate, graph_of[id(row.candidate)]) for row in rows]
    return Choice(tuple(ranked), confirmation, notes)


def _learn(
    confirmation: Confirmation,
    searches: Sequence[Searched],
    graph_of: Mapping[int, Captured],
    clock: BudgetClock,
    tell: Tell,
) -> None:
    """Calibrate this machine with what was measured, unless it is calibrated."""
    problems = {id(one.graph): one.result.timeline.problem for one in searches}
    first = next(iter(problems.values()))
    has_gpu = any(device.kind == "gpu" for device in first.machine.devices)
    if not has_gpu or first.costs.origin != "profiled":
        return
    tell("calibrating the machine")
    pairs = [(row, problems[id(graph_of[id(row.candidate)])]) for row in confirmation.rows]
    learn(probed_machine(first.machine), pairs, HOPPER, clock.left_s)


def _trials(searches: Sequence[Searched], arguments: tuple[Any, Any, Any, Any]) -> list[_Pair]:
    """What to run: the best single device, every search's best by prediction, then the others."""
    singles: list[_Pair] = []
    bests: list[_Pair] = []
    others: list[_Pair] = []
    for number, one in enumerate(searches):
        sources = step_sources(one.graph, *arguments)
        found = candidates(one.result) if number == 0 else candidates(one.result, 0)
        for candidate in found:
            named = replace(candidate, name=one.prefix + candidate.name)
            pair = (named, Trial(named.name, named.plan, one.graph, sources))
            if candidate.is_single:
                if number == 0 or not singles:
                    singles.append(pair)
            elif candidate.plan is one.result.plan:
                bests.append(pair)
            else:
                others.append(pair)
    bests.sort(key=lambda pair: pair[0].predicted_ns)
    others.sort(key=lambda pair: pair[0].predicted_ns)
    return [*singles[:1], *bests, *singles[1:], *others]
