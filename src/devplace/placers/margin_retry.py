"""Run a placer, and again with a memory margin if fragmentation breaks a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from devplace.placers.budget import Budget
from devplace.placers.counted_simulator import Evaluator, Measure
from devplace.placers.orders import best_of, held_back, priorities_of
from devplace.placers.placer import Placer
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, make_kernel, simulate
from devplace.units import format_bytes

I64 = NDArray[np.int64]

MAX_RUNNERS_UP = 6
MAX_ROUNDS = 3
MAX_KNOWN = 64


@dataclass(frozen=True)
class Found:
    """What the searches for a plan gave.

    Attributes:
        placement: Devices and priorities.
        timeline: Its simulation.
        evaluations: Simulations used.
        seconds: Wall-clock time, s.
        history: (evaluations, seconds, step_ns) at each improvement.
        runners_up: The best other placements.
        is_interrupted: Whether Ctrl-C ended it.
        notes: What the user should know.
        proved_ns: A step time that the placer proved no placement that fits can beat.
        is_infeasible: Whether it proved that none fits.
        others: All other placements that it remembers.
        least_ns: A value of the objective that the search proved no placement can beat; 0: none
            but what `proved_ns` says.
    """

    placement: Placement
    timeline: Timeline
    evaluations: int
    seconds: float
    history: tuple[tuple[int, float, int], ...]
    runners_up: tuple[Placement, ...]
    is_interrupted: bool
    notes: tuple[str, ...] = ()
    proved_ns: int = 0
    is_infeasible: bool = False
    others: tuple[Placement, ...] = ()
    least_ns: int = 0

    @property
    def over_bytes(self) -> int:
        """Bytes over all limits."""
        return sum(self.timeline.missing_bytes.values())


def search(
    problem: Problem,
    placer: Placer,
    budget: Budget,
    seed: int,
    progress: Callable[[float], None] | None = None,
    measure: Measure | None = None,
    least_ns: int = 0,
) -> Found:
    """Let `placer` place `problem`; again, with lower limits, where only gaps are too much.

    Placers see what is in use at once, which one simulation tells. What is reserved beyond that
    (`gap_bytes`) is known of finished placements only. Where the found one exceeds a limit by that
    alone, the search is done again, with the same seed, the same evaluations and half the seconds,
    under limits lowered by the gaps; if need be once more, with the largest gap kept free on every
    GPU, as the same ops may have gone to another one. Lowered limits also shut out placements that
    fit: the one that the placer started from, and those that it remembers, are looked at as well.
    `least_ns` is a step time that no placement that fits can beat, if one is known.
    """
    rounds = [_search(problem, problem, placer, budget, seed, progress, measure, least_ns)]
    if budget.seconds is not None:
        budget = replace(budget, seconds=budget.seconds / 2)
    room = np.zeros(len(problem.machine.devices), np.int64)
    while len(rounds) < MAX_ROUNDS and not rounds[-1].is_interrupted:
        if not _lacks_only_gaps(rounds[-1].timeline):
            break
        room = np.maximum(room, rounds[-1].timeline.gap_bytes)
        if len(rounds) == MAX_ROUNDS - 1:
            room[problem.core.wires.fixed_buffers.astype(bool)] = room.max()
        rounds.append(
            _search(_lowered(problem, room), problem, placer, budget, seed, None, measure, least_ns)
        )
    best = min(rounds, key=lambda found: (found.over_bytes, found.timeline.makespan_ns))
    if not _lacks_only_gaps(rounds[0].timeline):
        return best
    before = rounds[: rounds.index(best)]
    spent, seconds = sum(f.evaluations for f in before), sum(f.seconds for f in before)
    best = replace(
        best,
        evaluations=sum(found.evaluations for found in rounds),
        seconds=sum(found.seconds for found in rounds),
        history=tuple((n + spent, s + seconds, step) for n, s, step in best.history),
        notes=(*best.notes, *((_note(problem, room),) if len(rounds) > 1 else ())),
        proved_ns=rounds[0].proved_ns,  # the others had lower limits
        is_infeasible=rounds[0].is_infeasible,
    )
    start: Placement | None = getattr(placer, "start", None)
    known = [] if start is None else [start]
    known += [other for found in rounds for other in found.others]
    best = _fitting(problem, best, known)
    return best if measure is not None else _with_end(best)


def with_priority(problem: Problem, placement: Placement) -> Placement:
    """The placement with explicit priorities: its own, or critical-path ones.

    Where these do not fit, or there are micro-batches, other orders are tried as well
    (`priorities_of`), and where none fits those that hold ops back (`held_back`). Taken is what
    needs least memory beyond the limits, then least time, then least memory at all.
    """
    if placement.priority is not None:
        return placement
    device = problem.task_devices(placement)
    priority = make_kernel(problem.core).priority(device)
    found = Placement(placement.devices, problem.spaces.ops_from_tasks(priority), placement.order)
    if found.order is not None:
        return found
    merit = partial(_merit, problem)
    best, (over, *_) = best_of(problem, priorities_of(problem, found), merit)
    if not over:
        return best
    return min(best, *held_back(problem, found), key=merit)


def _merit(problem: Problem, placement: Placement) -> tuple[int, int, int]:
    timeline = simulate(problem, placement)
    peak = int(timeline.peak_bytes.sum())
    return sum(timeline.missing_bytes.values()), timeline.makespan_ns, peak


def _search(
    narrowed: Problem,
    problem: Problem,
    placer: Placer,
    budget: Budget,
    seed: int,
    progress: Callable[[float], None] | None,
    measure: Measure | None,
    least_ns: int,
) -> Found:
    evaluate = Evaluator(narrowed, budget, progress=progress, measure=measure, least_ns=least_ns)
    interrupted = False
    try:
        placement = placer(narrowed, evaluate, np.random.default_rng(seed))
    except KeyboardInterrupt:
        if evaluate.history.best is None:
            raise
        placement, interrupted = evaluate.history.best, True
    seconds = evaluate.meter.seconds
    broken = problem.violations(placement)
    if broken:
        raise AssertionError(f"placer {placer.name} broke a demand: {broken[0]}")
    placement = with_priority(problem, placement)
    found = Found(
        placement,
        simulate(problem, placement),
        max(1, evaluate.meter.num_evaluations),  # the plan itself is simulated in any case
        seconds,
        tuple(evaluate.history.points),
        evaluate.history.next_best(MAX_RUNNERS_UP),
        interrupted,
        tuple(evaluate.notes),
        proved_ns=evaluate.proved_ns,
        is_infeasible=evaluate.is_infeasible,
        others=evaluate.history.next_best(MAX_KNOWN),
    )
    return found if measure is not None else _with_end(found)


def _lacks_only_gaps(timeline: Timeline) -> bool:
    """Whether what is in use at once would fit, and what is reserved does not."""
    return timeline.fits_in_use and not timeline.is_feasible


def _fitting(problem: Problem, best: Found, known: list[Placement]) -> Found:
    """What was found, or the fastest of the known placements that fits where that is better."""
    placements = [with_priority(problem, placement) for placement in known]
    simulated = [(simulate(problem, placement), placement) for placement in placements]
    for timeline, placement in sorted(simulated, key=lambda pair: pair[0].makespan_ns):
        if best.over_bytes == 0 and timeline.makespan_ns >= best.timeline.makespan_ns:
            break
        if timeline.is_feasible:  # replays the heaps, so only of what would be taken
            best = replace(best, placement=placement, timeline=timeline)
            break
    return best


def _with_end(found: Found) -> Found:
    """With a history of simulated steps that ends with what was found, which lowered limits or the
    better order may have left out."""
    step = found.timeline.makespan_ns
    if not found.timeline.is_feasible or (found.history and found.history[-1][2] == step):
        return found
    before = tuple(point for point in found.history if point[2] > step)
    return replace(found, history=(*before, (found.evaluations, found.seconds, step)))


def _lowered(problem: Problem, room: I64) -> Problem:
    """The problem with room left on every device; a limit of 0, which says not used, stays."""
    rows = zip(problem.machine.device_names, problem.limit_bytes, room, strict=True)
    left = {name: max(min(1, limit), limit - int(gap)) for name, limit, gap in rows}
    return replace(problem, limits=left)


def _note(problem: Problem, room: I64) -> str:
    parts = [
        f"{format_bytes(int(gap))} on {name}"
        for name, gap in zip(problem.machine.device_names, room, strict=True)
        if gap
    ]
    return f"searched again with room left for gaps between tensors: {', '.join(parts)}"
