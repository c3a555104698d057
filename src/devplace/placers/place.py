"""Run a placer: owns clock, seed, budget and history, and checks what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from devplace.errors import InfeasibleError, InputError, ProblemError, did_you_mean
from devplace.placers.budget import Budget
from devplace.placers.evaluate import Measure
from devplace.placers.placer import Placer
from devplace.placers.rounds import search, with_priority
from devplace.placers.simple.single import all_on
from devplace.plan import Plan, make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.bounds import LowerBound, Status, lower_bound
from devplace.simulator.needs import tightest
from devplace.units import format_bytes

OBJECTIVES = ("latency", "throughput")


@dataclass(frozen=True)
class Result:
    """What a placer found.

    Attributes:
        placement: Devices and priorities.
        timeline: Its simulation, done again after the placer ended.
        plan: The same as a plan that can be saved and run.
        placer: Name of the placer.
        seed: Seed it ran with.
        evaluations: Simulations it used.
        seconds: Wall-clock time it took, s.
        history: (evaluations, seconds, step_ns) at each improvement.
        bound: Lower bounds of the problem.
        is_interrupted: Whether the placer was stopped by Ctrl-C; this is the best it had found.
        runners_up: The best other feasible placements it saw that differ in kind, fastest first.
        notes: What the user should know of the search.
    """

    placement: Placement = field(repr=False)
    timeline: Timeline = field(repr=False)
    plan: Plan = field(repr=False)
    placer: str
    seed: int
    evaluations: int
    seconds: float
    history: tuple[tuple[int, float, int], ...] = field(repr=False)
    bound: LowerBound
    is_interrupted: bool = False
    runners_up: tuple[Placement, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def step_ns(self) -> int:
        """Predicted step time."""
        return self.timeline.makespan_ns

    @property
    def objective(self) -> str:
        """What was to be small: `latency` (one step) or `throughput` (largest load)."""
        return "latency"

    @property
    def value_ns(self) -> int:
        """What was to be small: the predicted step time."""
        return self.step_ns

    @property
    def is_feasible(self) -> bool:
        """Whether every memory limit holds."""
        return self.timeline.is_feasible

    @property
    def gap(self) -> float:
        """How far the step is above the lower bound: step / bound - 1."""
        return self.bound.gap(self.step_ns)

    @property
    def status(self) -> Status:
        """`optimal`, `feasible`, `infeasible` (proved) or `unknown`: `LowerBound.status`."""
        return self.bound.status(self.step_ns, self.is_feasible)


def place(
    problem: Problem,
    placer: Placer,
    budget: Budget | str | None = None,
    seed: int = 0,
    *,
    objective: str = "latency",
    request: dict[str, Any] | None = None,
    allow_infeasible: bool = False,
    bound: LowerBound | None = None,
    progress: Callable[[float], None] | None = None,
    measure: Measure | None = None,
) -> Result:
    """Place `problem` with `placer`.

    Args:
        problem: What is placed.
        placer: Who places it.
        budget: Budget, or text such as `30s` or `2000ev`; 30 s by default. Spent again, up to
            twice, where gaps between tensors make the found placement too large (`search`).
        seed: Seed of all randomness. The same seed and evaluations give the same plan.
        objective: `latency`, the time of one step, or `throughput`, the largest load of a device in
            a full pipeline of steps (see `devplace.load.step_loads`). For `throughput` the result
            is a `ThroughputResult`, `search` is a solver of its own, whose evaluations are moves
            tried and placements simulated, and the placements of other placers are valued after
            their backward ops have gone to their forward ops.
        request: How the problem came about (model, machine ...), kept in the plan.
        allow_infeasible: Return the best placement even if it breaks a memory limit.
        bound: Lower bounds, if already known.
        progress: Called with the part of the budget spent so far, 0 to 1.
        measure: Runs a placement and gives its step time in ns, or None if it failed; the placer
            then learns from these times instead of simulated ones, and `history` holds them. The
            result's own step time is simulated in any case. If it has a method `many`, that gets
            all placements of an update at once, and gives a list.

    Ctrl-C ends the placer; if it had found something, that is returned.

    Raises:
        InfeasibleError: Nothing within the memory limits was found; says what is missing where.
        ProblemError: The placer does not support the problem.
        InputError: A budget that is not positive, or an unknown objective.
    """
    budget = Budget.parse(budget)
    if objective not in OBJECTIVES:
        raise InputError(
            f"Unknown objective {objective!r}.{did_you_mean(str(objective), OBJECTIVES)} "
            f"Known: {', '.join(OBJECTIVES)}."
        )
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"A seed must be a whole number, 0 or more, got {seed!r}.")
    if isinstance(placer, (str, type)) or not callable(placer):
        raise InputError(
            f"A placer must be an instance such as placers.Search(), got {placer!r}. "
            f"placers.by_name('search') gives one by name."
        )
    reason = placer.supports(problem)
    if reason:
        raise ProblemError(f"Placer {placer.name} cannot place this: {reason}. Choose another one.")
    bound = bound or lower_bound(problem)
    if bound.is_infeasible and not allow_infeasible:
        raise _no_room(problem, bound)
    if objective == "throughput":
        from devplace.placers.throughput import place_throughput

        if measure is not None:
            raise InputError(
                "A measurement times one step and cannot stand for the largest load: leave out "
                "measure, or use objective='latency'."
            )
        return place_throughput(
            problem, placer, budget, seed, bound, request, allow_infeasible, progress
        )
    found = search(problem, placer, budget, seed, progress, measure, bound.step_ns)
    placement, timeline = found.placement, found.timeline
    bound = replace(bound, proved_ns=max(bound.proved_ns, found.proved_ns))
    if found.is_infeasible and not bound.lack:
        bound = replace(bound, lack="exact")
    if not timeline.is_feasible and not allow_infeasible:
        raise infeasible(timeline, placer.name, bound)
    made = made_for(problem, placer, seed, request)
    plan = make_plan(timeline, placement.priority, made, bound.step_ns)
    return Result(
        placement,
        timeline,
        plan,
        placer.name,
        seed,
        found.evaluations,
        found.seconds,
        found.history,
        bound,
        found.is_interrupted,
        found.runners_up,
        found.notes,
    )


def made_for(
    problem: Problem, placer: Placer, seed: int, request: dict[str, Any] | None
) -> dict[str, Any]:
    """The request of a plan: how it was made."""
    made: dict[str, Any] = {"placer": placer.name, "seed": seed, "limits": dict(problem.limits)}
    made |= {"pins": dict(problem.pins), "exclude": list(problem.exclude)}
    return {**made, **(request or {})}


def infeasible(timeline: Timeline, placer: str, bound: LowerBound | None = None) -> InfeasibleError:
    """The error for a placement that does not fit: which limit, how much is missing, what helps,
    and whether it is proved that nothing fits.

    Args:
        timeline: The nearest placement found.
        placer: Name of the placer.
        bound: Bounds of the problem, with what the placer proved.
    """
    if bound is not None and bound.lack not in ("", "exact"):
        return _no_room(timeline.problem, bound)
    missing = timeline.missing_bytes
    worst = max(missing, key=lambda name: missing[name])
    need = _needed_bytes(timeline)[worst]
    first = (
        f"No placement can fit (proved by placer {placer}): in the nearest one"
        if bound is not None and bound.is_infeasible
        else f"Placer {placer} found no placement within the memory limits (whether there is one "
        f"is unknown): in the nearest one"
    )
    return InfeasibleError(
        f"{first} {worst} needs "
        f"{format_bytes(need)}, {format_bytes(missing[worst])} more than its limit of "
        f"{format_bytes(need - missing[worst])}. {_remedy(timeline)}{_surely(timeline)}",
        missing,
    )


def _needed_bytes(timeline: Timeline) -> dict[str, int]:
    """What each over-full device or pool would need, by name."""
    machine = timeline.problem.machine
    peaks = dict(zip(machine.device_names, timeline.peak_bytes, strict=True))
    peaks |= {
        pool.name: peak for pool, peak in zip(machine.pools, timeline.pool_peak_bytes, strict=True)
    }
    return {name: int(peaks[name]) for name in timeline.missing_bytes}


def _remedy(timeline: Timeline) -> str:
    """What would make this very placement fit, to the byte."""
    problem, needed = timeline.problem, _needed_bytes(timeline)
    index = problem.machine.device_index
    limits = ", ".join(f"{name}={need}" for name, need in needed.items())
    if all(
        name in index and need <= problem.machine.devices[index[name]].usable_bytes
        for name, need in needed.items()
    ):
        first = f"Raise the limits to at least {limits} (bytes)"
    else:
        first = f"It would fit with usable memory of at least {limits} (bytes)"
    return f"{first}, lower the batch size, or add a device."


def _surely(timeline: Timeline) -> str:
    """What is enough whatever the placer finds: room for everything on one device."""
    single = _nearest_single(timeline.problem)
    if not single.missing_bytes or _needed_bytes(single) == _needed_bytes(timeline):
        return ""
    limits = ", ".join(f"{name}={need}" for name, need in _needed_bytes(single).items())
    return f" With {limits} (bytes) one device holds the whole step."


def _nearest_single(problem: Problem) -> Timeline:
    placements = [all_on(problem, device) for device in problem.usable_devices]
    single = [simulate(problem, with_priority(problem, one)) for one in placements]
    return min(single, key=lambda timeline: sum(timeline.missing_bytes.values()))


def _no_room(problem: Problem, bound: LowerBound) -> InfeasibleError:
    nearest = _nearest_single(problem)
    lacking = bound.static_bytes - bound.capacity_bytes
    if bound.lack == "op":
        op, needed, room = tightest(problem)
        why = (
            f"op {problem.graph.ops[op].name!r} alone needs {format_bytes(needed)} with what it "
            f"reads or what must sit with it, a device that may run it can hold "
            f"{format_bytes(room)} at most"
        )
    elif bound.lack == "bound groups":
        why = "what may only go to some of the devices needs more memory than these have"
    else:
        why = (
            f"parameters, optimizer state and inputs alone need "
            f"{format_bytes(bound.static_bytes)}, all usable devices together have "
            f"{format_bytes(bound.capacity_bytes)}, {format_bytes(lacking)} too little"
        )
    return InfeasibleError(
        f"No placement can fit (proved): {why}. {_remedy(nearest)}",
        {"all devices": lacking} if lacking > 0 else nearest.missing_bytes,
    )
