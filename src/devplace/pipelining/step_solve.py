"""Place a step so that its largest load in a full pipeline is smallest, within memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from devplace.pipelining.effort import SolverEffort
from devplace.pipelining.items import make_items
from devplace.pipelining.load_bounds import item_bound, quick_bound
from devplace.pipelining.load_problem import I32, I64, LoadProblem
from devplace.pipelining.native import solvers_module
from devplace.pipelining.pairwise import improve
from devplace.pipelining.solve import NEVER, LoadSolution, solve, solve_contiguous
from devplace.pipelining.step_problem import PS_PER_NS, StepProblem
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.simulator.bounds import lower_bound

_ROUNDS = 6  # models of memory, each closer to what simulations of the last one's answer told
_MAX_TRIED = 2000  # placements; above it they are searched
_SINGLES_LEAVE = 0.5  # of the time, by trying single devices of a large machine
_SHARES = (0.15, 0.25, 0.4)  # of what is left, for each level of classes, coarse to fine


@dataclass(frozen=True, eq=False)
class StepLoadSolution:
    """A step placed for a full pipeline.

    Attributes:
        device: Device of each task; None where nothing was found. `[N]`
        loads_ns: Load of each device. `[D]`
        over_bytes: Bytes above memory limits when the step runs alone; 0 when it fits.
        bound_ns: No placement has a smaller largest load.
        how: What gave the placement.
        evaluations: Moves tried and placements simulated.
        seconds: Time taken.
        is_interrupted: Whether Ctrl-C ended the search.
        notes: What the user should know of the search.
    """

    device: I32
    loads_ns: I64
    over_bytes: int
    bound_ns: int
    how: str
    evaluations: int
    seconds: float
    is_interrupted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def value_ns(self) -> int:
        """The largest load."""
        return int(self.loads_ns.max())


def place_step(
    problem: Problem,
    effort: SolverEffort,
    hints: Sequence[I32] = (),
    progress: Callable[[float], None] | None = None,
    load_ns: int | None = None,
    start: I32 | None = None,
) -> StepLoadSolution:
    """Smallest largest load found.

    Memory is checked as for every plan: by a simulation of one step. The search models it by a sum
    of what tasks hold: parameters in full, everything else by a share that simulations tell.

    Args:
        hints: Placements to start from and to fall back on. `[N]` each
        load_ns: `LowerBound.load_ns` of the problem, if known.
        start: A placement that is tried before all others. `[N]`
    """
    first = [] if start is None else [start]
    return _Run(StepProblem(problem), effort, progress, load_ns).run(first, hints)


def contiguous_step(problem: Problem, seconds: float) -> I32 | None:
    """Device of each task in the best split found in which the forward pass only goes forward; None
    where no split fits the parameters. `[N]`

    Parameters sit with the first op that reads them. Ops are cut one by one, and module call by
    module call, where all cuts can more often be tried.
    """
    step = StepProblem(problem)
    splits = _contiguous_splits(step, seconds / 2)
    return min(splits, key=lambda d: int(step.prices.loads_ns(d).max()), default=None)


def _contiguous_splits(step: StepProblem, seconds: float) -> list[I32]:
    """The best split of module calls, and that of single ops. `[N]` each"""
    fine = step.attached()
    splits = []
    for level in (fine.coarser(by_call=True), fine):
        model = level.dearest(level.permanent_bytes, with_cpus=False)
        if model.num_accelerators:
            found = solve_contiguous(model, seconds)
            splits += [] if found.device is None else [level.spread(found.device)]
    return splits


def load_bound(problem: Problem, seconds: float = 1.0, load_ns: int | None = None) -> int:
    """A largest load that no placement can be below, ns.

    Args:
        load_ns: `LowerBound.load_ns` of the problem, if known.
    """
    quick = _quick_bound(StepProblem(problem).cheapest(), seconds)
    return max(quick, lower_bound(problem).load_ns if load_ns is None else load_ns)


def _quick_bound(relaxed: LoadProblem, seconds: float) -> int:
    items = make_items(relaxed)
    bound = max(quick_bound(items), item_bound(items, solvers_module(), seconds))
    return -(-bound // PS_PER_NS)


def together(problem: Problem, device: I32) -> I32:
    """The placement with backward ops where their forward ops are: each class goes where most of
    its work lies. `[N]`"""
    step = StepProblem(problem)
    return step.together(device)[step.of_task]


class _Run:
    """One search: the best placement so far, and the bound."""

    def __init__(
        self,
        step: StepProblem,
        effort: SolverEffort,
        progress: Callable[[float], None] | None,
        load_ns: int | None,
    ) -> None:
        self.step, self.problem, self.effort = step, step.problem, effort
        self.load_ns = load_ns
        self.progress = progress
        self.started = time.monotonic()
        self.key: tuple[int, int, int] = (NEVER, NEVER, NEVER)
        self.device: I32 | None = None  # of each task
        self.how, self.bound, self.moves, self.simulated = "", 0, 0, 0
        self.share = 0.0  # of what passes through memory that counts as held
        self.seen: dict[bytes, bool] = {}  # whether a placement of tasks fits

    def run(self, first: Sequence[I32], hints: Sequence[I32]) -> StepLoadSolution:
        interrupted = False
        try:
            for device in first:
                self.offer(self.step.together(device)[self.step.of_task], "the start")
            self._singles()
            for device in hints:
                if self._is_late():
                    break
                self.offer(self.step.together(device)[self.step.of_task], "a simple split")
            if self._are_few():
                self._try_all()
            else:
                if not self._is_late():
                    self._start()
                self._search()
        except KeyboardInterrupt:
            if self.device is None:
                raise
            interrupted = True
        assert self.device is not None, "a step has a placement on some device"
        return StepLoadSolution(
            self.device,
            self.step.prices.loads_ns(self.device),
            self.key[0],
            self.bound,
            self.how,
            self.moves + self.simulated,
            time.monotonic() - self.started,
            interrupted,
        )

    def _singles(self) -> None:
        """Single devices, with half of what may be spent at most."""
        begun, spent = self._left(), self._spent
        for d in self.problem.usable_devices:
            if self.device is not None:
                most = self.effort.evaluations
                is_much = most is not None and self._spent - spent >= _SINGLES_LEAVE * most
                if is_much or self._left() < _SINGLES_LEAVE * begun:
                    break
            whole = np.full(len(self.step.first), d, np.int32)
            self.offer(self.step.legal(whole)[self.step.of_task], "one device")

    def offer(self, device: I32, how: str) -> bool:
        """Take a placement of tasks if it is better; whether it is known to fit."""
        name = device.tobytes()
        if name in self.seen:
            return self.seen[name]
        if self._is_spent():
            return False
        timeline = simulate(self.problem, Placement(self.problem.spaces.op_devices(device)))
        self.simulated += 1
        over = sum(timeline.missing_bytes.values())
        key = (over, int(self.step.prices.loads_ns(device).max()), timeline.makespan_ns)
        if over:
            self.share = max(self.share * 1.1, self._share(device, timeline.peak_bytes))
        if key < self.key:
            self.key, self.device, self.how = key, device, how
        self.seen[name] = over == 0
        return over == 0

    def _share(self, device: I32, peaks: I64) -> float:
        """Part of what passes through the fullest device's memory that is there at once."""
        limits = np.array(self.problem.limit_bytes)
        worst = int((peaks - limits).argmax())
        here = device == worst
        permanent = int(self.step.permanent_bytes[here].sum())
        passing = int(self.step.passing_bytes[here].sum())
        return min(4.0, max(0.0, (int(peaks[worst]) - permanent) / passing)) if passing else 0.0

    def _are_few(self) -> bool:
        """Whether all placements of classes can be tried."""
        choices = self.step.allowed.sum(axis=1)
        return bool(np.log(np.maximum(choices, 1)).sum() <= np.log(_MAX_TRIED))

    def _try_all(self) -> None:
        """All placements by rising largest load, up to the first that fits: there is no better."""
        options = [np.flatnonzero(row).tolist() for row in self.step.allowed]
        rows = [np.array(row, np.int32)[self.step.of_task] for row in product(*options)]
        rows.sort(key=lambda device: int(self.step.prices.loads_ns(device).max()))
        for device in rows:
            if self._is_late() or (self._is_spent() and device.tobytes() not in self.seen):
                return self._bound()
            if self.offer(device, "all placements tried"):
                break
        if self.key[0] == 0:
            self.bound = self.key[1]

    def _start(self) -> None:
        for device in _contiguous_splits(self.step, 0.05 * self._left()):
            self.offer(device, "contiguous split")
        self.share = 0.0  # of what the search's own answers need, not of simple ones

    def _search(self) -> None:
        self._bound()
        if not self._settled():
            self._levels()
        if self.progress is not None:
            self.progress(1.0)

    def _levels(self) -> None:
        """Levels of classes from coarse to fine, then all tasks again as memory turns out."""
        joined = self.step.attached()
        levels = [joined.coarser(by_call=False), joined.coarser(by_call=True), joined, self.step]
        sizes = [len(level.first) for level in levels]
        levels = [v for v, size in zip(levels[:-1], sizes[:-1], strict=True) if size < sizes[-1]]
        for level, share in zip(levels, _SHARES[-len(levels) :], strict=False):
            if not self._settled():
                self._solve(level, share)
        if not self.step.is_uniform:
            for level in [*levels, self.step]:
                if not self._settled():
                    self._improve(level)
        for turn in range(_ROUNDS):
            if self._settled():
                break
            sure = self._is_roomy() or (turn > 0 and self.key[0] == 0)
            self._solve(self.step, 0.98 if sure or turn + 1 == _ROUNDS else 0.4)
            if sure:
                break

    def _bound(self) -> None:
        """Lower bounds; with CP-SAT's where the machine is no plain one and the graph is small."""
        if self.load_ns is None:
            self.load_ns = lower_bound(self.problem).load_ns
        self.bound = self.load_ns
        if self._is_late():
            return
        relaxed = self.step.cheapest()
        seconds = 0.05 * self._left() if self.effort.seconds is not None else 86_400.0
        self.bound = max(self.bound, _quick_bound(relaxed, seconds))
        if not self.step.is_uniform:
            self._relaxed(self._attempt(self.step, relaxed, 0.1))

    def _is_roomy(self) -> bool:
        """Whether any device holds everything at once."""
        tasks, limits = self.problem.core.tasks, self.problem.limit_bytes
        once = tasks.made_bytes.sum() + tasks.workspace_bytes.sum() + tasks.const_bytes.sum()
        total = int(once + tasks.carrier_bytes.sum())
        return total <= min(limits) and not len(self.problem.machine.pools)

    def _improve(self, step: StepProblem) -> None:
        """Moves of single classes, from the best placement so far."""
        assert self.device is not None
        sizes = np.bincount(step.of_task, self._held(), len(step.first)).astype(np.int64).tolist()
        moves = self._moves(0.3)
        most = 2**62 if moves is None else moves
        start = step.together(self.device)
        device, tried = improve(step, [start], sizes, 0.4 * self._left(), most, self.effort.seed)
        self.moves += tried
        self.offer(device[step.of_task], "moves of classes")

    def _held(self) -> I64:
        passing = np.ceil(self.share * self.step.passing_bytes).astype(np.int64)
        held: I64 = self.step.permanent_bytes + passing
        return held

    def _settled(self) -> bool:
        return self.key[:2] <= (0, self.bound) or self._is_late() or self._moves(1.0) == 0

    @property
    def _spent(self) -> int:
        return self.moves + self.simulated

    def _is_spent(self) -> bool:
        """Whether nothing more may be simulated; one placement always may."""
        most = self.effort.evaluations
        return self.device is not None and most is not None and self._spent >= most

    def _is_late(self) -> bool:
        return self._left() <= 0.02

    def _left(self) -> float:
        if self.effort.seconds is None:
            return 86_400.0
        return max(0.01, self.effort.seconds - (time.monotonic() - self.started))

    def _moves(self, share: float) -> int | None:
        """Moves of a share of what is left, beside the simulation of what they lead to."""
        if self.effort.evaluations is None:
            return None
        left = self.effort.evaluations - self._spent - 1
        return max(1, int(share * left)) if left > 0 else 0

    def _solve(self, level: StepProblem, share: float) -> None:
        """Solve the model of a level in a share of what is left, and take what it gives."""
        if level.is_uniform and self.share == 0:
            found = self._attempt(level, level.cheapest(), share)
            if level is self.step:
                self._relaxed(found)
            return
        fast = self.step.prices.accelerators
        only_fast = not level.is_uniform and bool(level.allowed[:, fast].any(axis=1).all())
        self._attempt(level, level.dearest(self._held(), with_cpus=not only_fast), share)

    def _relaxed(self, found: LoadSolution) -> None:
        """Take the bound of a relaxation of the whole problem."""
        self.bound = max(self.bound, -(-found.bound_ps // PS_PER_NS))

    def _attempt(self, level: StepProblem, model: LoadProblem, share: float) -> LoadSolution:
        if self.progress is not None and self.effort.seconds is not None:
            self.progress(min(1.0, 1 - self._left() / self.effort.seconds))
        counted = self.effort.seconds is None
        found = solve(
            model,
            None if counted else share * self._left(),
            self.effort.seed,
            1 if counted else self.effort.threads,
            hint=self._hint(level, model),
            max_evaluations=self._moves(share),
            exact=not counted,
        )
        self.moves += found.evaluations
        if found.device is None:
            self.share *= 0.8  # a model that nothing fits asks for too much
        else:
            device = level.spread(found.device)
            self.offer(device if level.is_uniform else self._exchanged(level, device), found.how)
        return found

    def _exchanged(self, level: StepProblem, device: I32) -> I32:
        """The best that exchanging the contents of two devices at a time leads to: a model does not
        tell devices apart. `[N]`"""
        classes, loads = device[level.first], self.step.prices.loads_ns
        value, usable = int(loads(device).max()), self.problem.usable_devices
        better = True
        while better:
            better = False
            for a, b in combinations(usable, 2):
                other = np.where(classes == a, b, np.where(classes == b, a, classes))
                other = level.legal(other.astype(np.int32))
                now = int(loads(other[level.of_task]).max())
                if now < value:
                    classes, value, better = other, now, True
        return classes[level.of_task]

    def _hint(self, level: StepProblem, model: LoadProblem) -> I32 | None:
        """The best placement so far as nodes of a model."""
        if self.device is None:
            return None
        prices = self.step.prices
        devices = [*prices.accelerators, *prices.cpus][: model.num_devices]
        number = np.full(len(prices.pays), -1, np.int32)
        number[devices] = np.arange(len(devices))
        node = number[level.together(self.device)[level.of_task]]
        color = model.color[: len(node)]
        of_color = np.zeros(int(color.max(initial=0)) + 1, np.int32)
        of_color[color] = node
        hint: I32 = of_color[model.color]
        return hint if (node >= 0).all() else None
