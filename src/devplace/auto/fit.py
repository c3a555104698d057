"""Does a model fit a machine, and what does it take: from shapes alone, nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from devplace.auto.largest_batch import LargestBatch, largest_batch
from devplace.auto.local_devices import MachineLike
from devplace.auto.planning import Target, find_target
from devplace.auto.step_variants import StepVariants
from devplace.device_kinds import GPU
from devplace.errors import CaptureError
from devplace.graph import Captured
from devplace.placers import Budget, Even, Greedy, Layers, Search, Single
from devplace.placers.margin_retry import Found, search
from devplace.placers.modules import module_chain
from devplace.placers.orders import held_back
from devplace.placers.simple.even import even_split
from devplace.placers.simple.layers import layers_over
from devplace.placers.simple.single import all_on
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.memory_bounds import least_needs

EVALUATIONS = 300
"""What a search may spend where no simple placement fits: 3 s for 9,000 ops (a core of an x86
server); it is tried for each number of devices."""
MICRO_BATCHES = 4
SIMPLE = (Even(), Layers(), Greedy())


@dataclass(frozen=True)
class Way:
    """A way to train, and the fewest devices on which it fits; if none, the nearest placement.

    Attributes:
        recompute: Whether repeated blocks are computed again in the backward pass.
        micro_batches: Chunks of the batch.
        devices: Names of the devices that the placement uses.
        step_ns: Predicted step time; of a placement that does not fit, as if it did.
        peak_bytes: Memory of the fullest device at its peak.
        missing_bytes: Device or pool -> bytes over its limit; empty if it fits.
        is_proved: Whether it is proved that no placement fits.
        reason: Why the step cannot be captured so; then there are no figures.
    """

    recompute: bool
    micro_batches: int
    devices: tuple[str, ...] = ()
    step_ns: int = 0
    peak_bytes: int = 0
    missing_bytes: dict[str, int] = field(default_factory=dict)
    is_proved: bool = False
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether a placement was found that fits."""
        return not self.reason and not self.missing_bytes


@dataclass(frozen=True)
class Fit:
    """Whether a step fits a machine, and what it takes.

    Attributes:
        model: Name of the step.
        machine: Name of the machine.
        devices: Names of the devices that were tried: its GPUs, if it has any.
        kind: `GPU`, if all of these are, else `device`.
        rows: Rows of the batch; 0 if no input has any.
        whole_ns: Time of the step as it is on the fastest single device, as if it had the memory.
        ways: As it is first.
        largest: Largest batches: as it is, and computing blocks again.
    """

    model: str
    machine: str
    devices: tuple[str, ...]
    kind: str
    rows: int
    whole_ns: int
    ways: tuple[Way, ...]
    largest: tuple[LargestBatch, ...] = ()

    @property
    def leanest(self) -> Way | None:
        """Of the ways that fit the one with the fewest devices; of several as it is, or the
        fastest."""
        fitting = [way for way in self.ways if way.fits]
        return min(
            fitting,
            key=lambda way: (len(way.devices), way is not self.ways[0], way.step_ns),
            default=None,
        )

    @property
    def best(self) -> Way | None:
        """As it is, if that fits, else the leanest."""
        return self.ways[0] if self.ways[0].fits else self.leanest

    @property
    def nearest(self) -> Way:
        """Of the ways that do not fit the one that misses least."""
        missing = [way for way in self.ways if way.missing_bytes]
        return min(missing, key=lambda way: sum(way.missing_bytes.values()))

    def slower(self, way: Way) -> float:
        """How much longer a step takes than as it is on one device that had the memory: 0.14 is
        14 %."""
        return way.step_ns / self.whole_ns - 1 if self.whole_ns else 0.0


def fit(
    model: Any,
    example_inputs: Any = (),
    loss_fn: Any = None,
    optimizer: Any = None,
    machine: MachineLike = "detect",
    limits: Mapping[str, int | str] | None = None,
    exclude: Sequence[str] = (),
    seed: int = 0,
    evaluations: int = EVALUATIONS,
    progress: Callable[[str], None] | None = None,
    **of_capture: Any,
) -> Fit:
    """Find out whether a step fits a machine, and what it takes.

    Times are analytic: nothing runs, and what lies on the meta device takes no memory. GPUs are
    added from the largest on; CPUs are left out where there are GPUs.

    Args:
        model, example_inputs, loss_fn, optimizer: As for `capture`.
        machine: See `find_machine`.
        limits, exclude: See `Problem`.
        seed: Of searches.
        evaluations: Simulations of a search where no simple placement fits.
        progress: Called with what is being done.
        of_capture: All else that `capture` takes, such as `autocast`, but for `micro_batches` and
            `recompute`, which vary.

    Raises:
        CaptureError: The step cannot be one graph.
        MachineError, ProblemError, InputError: No such machine, device or size.
    """
    tell = progress or (lambda text: None)
    fuse = of_capture.pop("fuse", None)
    steps = StepVariants(model, example_inputs, loss_fn, optimizer, of_capture, tell)
    target = find_target(machine, limits, exclude=exclude, device="cpu", fuse=fuse)
    found = fit_steps(steps, target, seed, evaluations)
    return replace(found, largest=largest_batches(steps, target))


def fit_steps(
    steps: StepVariants, target: Target, seed: int = 0, evaluations: int = EVALUATIONS
) -> Fit:
    """The same of a step that is tried on several machines; without largest batches.

    Raises:
        CaptureError: The step cannot be one graph.
        ProblemError: An op that no device can run.
    """
    problem = _problem(target, steps.capture(fuse=target.fuse))
    names = _by_room(problem)
    single = [simulate(problem, all_on(problem, d)) for d in problem.usable_devices]
    ways = [_way(problem, names, False, 1, seed, evaluations)]
    for recompute, micro_batches in _others(steps.capture(fuse=target.fuse)):
        steps.tell(f"placing on {target.machine.name}")
        try:
            graph = steps.capture(recompute, micro_batches, fuse=target.fuse)
        except CaptureError as error:
            ways.append(Way(recompute, micro_batches, reason=str(error)))
            continue
        priced = _problem(target, graph)
        ways.append(_way(priced, names, recompute, micro_batches, seed, evaluations))
    labels = {target.machine.devices[d].traits.label for d in problem.usable_devices}
    return Fit(
        problem.graph.name,
        target.machine.name,
        names,
        GPU.label if labels == {GPU.label} else "device",
        _rows(steps),
        min(timeline.makespan_ns for timeline in single),
        tuple(ways),
    )


def largest_batches(steps: StepVariants, target: Target) -> tuple[LargestBatch, ...]:
    """The largest batch on all devices: as it is, and with blocks computed again if they can be."""

    def excess(graph: Captured) -> list[list[int]]:
        problem = _problem(target, graph)
        return [_excess(problem, placement) for placement in _same_for_all(problem)]

    def nearest(graph: Captured) -> Timeline:
        return _nearest(_problem(target, graph)).timeline

    found = [largest_batch(steps, False, excess, nearest, target.fuse)]
    if steps.capture(fuse=target.fuse).meta["mode"] == "train":
        found.append(largest_batch(steps, True, excess, nearest, target.fuse))
    return tuple(found)


def _same_for_all(problem: Problem) -> list[Placement]:
    """Simple placements that do not depend on limits: one device, modules in equal shares."""
    devices, chain = problem.accelerators, module_chain(problem)
    largest = max(devices, key=lambda d: problem.limit_bytes[d])
    found = [all_on(problem, largest), even_split(problem, chain, devices)]
    return [*found, layers_over(problem, chain, devices)]


def _excess(problem: Problem, placement: Placement) -> list[int]:
    """Bytes over the limit of each device and pool, in the order that needs least memory."""
    *_, leanest = held_back(problem, placement)
    timeline, wires = simulate(problem, leanest), problem.core.wires
    over = timeline.peak_bytes - wires.limit_bytes
    return [*over.tolist(), *(timeline.pool_peak_bytes - wires.pool_limit_bytes).tolist()]


def _rows(steps: StepVariants) -> int:
    try:
        return steps.rows
    except CaptureError:
        return 0


def _others(graph: Captured) -> tuple[tuple[bool, int], ...]:
    """Recompute and micro-batches of the other ways that a step of this kind has."""
    if graph.meta["mode"] == "inference":
        return ()
    if graph.meta["mode"] == "train":
        return (True, 1), (False, MICRO_BATCHES), (True, MICRO_BATCHES)
    return ((False, MICRO_BATCHES),)


def _problem(target: Target, graph: Captured) -> Problem:
    """The step on the accelerators of a machine."""
    problem = target.problem(graph)
    used = problem.accelerators
    names = problem.machine.device_names
    return replace(problem, exclude=[name for d, name in enumerate(names) if d not in used])


def _by_room(problem: Problem) -> tuple[str, ...]:
    """Usable devices, those with the most memory first."""
    room = problem.limit_bytes
    order = sorted(problem.usable_devices, key=lambda d: (-room[d], d))
    return tuple(problem.machine.device_names[d] for d in order)


def _way(
    problem: Problem,
    names: Sequence[str],
    recompute: bool,
    micro_batches: int,
    seed: int,
    evaluations: int,
) -> Way:
    """Try 1, 2, 4, ... devices, and all, until the step fits."""
    counts = [2**k for k in range(len(names).bit_length()) if 2**k < len(names)]
    nearest: Found | None = None
    for count in (*counts, len(names)):
        left_out = [name for name in problem.machine.device_names if name not in names[:count]]
        part = replace(problem, exclude=left_out)
        found = _nearest(part, seed, evaluations)
        if nearest is None or found.over_bytes < nearest.over_bytes:
            nearest = found
        if not found.over_bytes:
            break
    assert nearest is not None
    timeline = nearest.timeline
    peaks = timeline.peak_bytes
    return Way(
        recompute,
        micro_batches,
        tuple(problem.machine.device_names[d] for d in peaks.nonzero()[0]),
        timeline.makespan_ns,
        int(peaks.max()),
        timeline.missing_bytes,
        is_proved=bool(nearest.over_bytes and least_needs(problem).lack),
    )


def _nearest(problem: Problem, seed: int = 0, evaluations: int = 0) -> Found:
    """The fastest simple placement that fits; else what a search finds; else the nearest."""
    placers = (Single(),) if len(problem.usable_devices) == 1 else SIMPLE
    able = [placer for placer in placers if not placer.supports(problem)]
    found = [search(problem, placer, Budget(), seed) for placer in able]
    if evaluations and all(one.over_bytes for one in found) and not least_needs(problem).lack:
        found.append(search(problem, Search(), Budget(evaluations=evaluations), seed))
    return min(found, key=lambda one: (one.over_bytes, one.timeline.makespan_ns))
