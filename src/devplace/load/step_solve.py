"""Place a step so that its largest load in a full pipeline is smallest, within memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from devplace.load.bounds import item_bound, quick_bound
from devplace.load.items import make_items
from devplace.load.native import solvers_module
from devplace.load.pairwise import improve
from devplace.load.problem import I32, I64, LoadProblem
from devplace.load.solve import NEVER, LoadSolution, solve, solve_contiguous
from devplace.load.step_problem import PS_PER_NS, StepProblem
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.simulator.bounds import lower_bound

_ROUNDS = 4  # models of memory, each closer to what simulations of the last one's answer told


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
    """

    device: I32
    loads_ns: I64
    over_bytes: int
    bound_ns: int
    how: str
    evaluations: int
    seconds: float
    is_interrupted: bool = False

    @property
    def value_ns(self) -> int:
        """The largest load."""
        return int(self.loads_ns.max())


@dataclass(frozen=True)
class Effort:
    """What a search may spend.

    Attributes:
        seconds: Wall-clock time; None where only moves count, on one thread, so that the answer
            depends on the seed alone.
        evaluations: Moves; None for no limit.
        seed: Of all randomness.
        threads: Threads of the search.
    """

    seconds: float | None = 30.0
    evaluations: int | None = None
    seed: int = 0
    threads: int = 2


def place_step(
    problem: Problem,
    effort: Effort,
    hints: Sequence[I32] = (),
    progress: Callable[[float], None] | None = None,
) -> StepLoadSolution:
    """Smallest largest load found.

    Memory is checked as for every plan: by a simulation of one step. The search models it by a sum
    of what tasks hold: parameters in full, everything else by a share that simulations tell.

    Args:
        hints: Placements to start from and to fall back on. `[N]` each
    """
    return _Run(StepProblem(problem), effort, progress).run(hints)


def contiguous_step(problem: Problem, seconds: float) -> I32 | None:
    """Device of each task in the best split found in which the forward pass only goes forward; None
    where no split fits the parameters. `[N]`

    Ops are cut one by one, and module call by module call, where all cuts can more often be tried.
    """
    fine = StepProblem(problem).attached()
    best: tuple[int, I32] | None = None
    for step in (fine.coarser(by_call=True), fine):
        model = step.dearest(step.permanent_bytes, with_cpus=False)
        found = solve_contiguous(model, seconds)
        if found.device is not None:
            device = step.spread(found.device)
            value = int(step.prices.loads_ns(device).max())
            best = (value, device) if best is None or value < best[0] else best
    return None if best is None else best[1]


def load_bound(problem: Problem, seconds: float = 1.0) -> int:
    """A largest load that no placement can be below, ns."""
    items = make_items(StepProblem(problem).cheapest())
    bound = max(quick_bound(items), item_bound(items, solvers_module(), seconds))
    return max(-(-bound // PS_PER_NS), lower_bound(problem).load_ns)


def together(problem: Problem, device: I32) -> I32:
    """The placement with backward ops where their forward ops are: each class goes where most of
    its work lies. `[N]`"""
    step = StepProblem(problem)
    return step.together(device)[step.of_task]


class _Run:
    """One search: the best placement so far, and the bound."""

    def __init__(
        self, step: StepProblem, effort: Effort, progress: Callable[[float], None] | None
    ) -> None:
        self.step, self.problem, self.effort = step, step.problem, effort
        self.progress = progress
        self.started = time.monotonic()
        self.key: tuple[int, int, int] = (NEVER, NEVER, NEVER)
        self.device: I32 | None = None  # of each task
        self.how, self.bound, self.moves, self.simulated = "", 0, 0, 0
        self.share = 0.0  # of what passes through memory that counts as held
        self.seen: set[bytes] = set()

    def run(self, hints: Sequence[I32]) -> StepLoadSolution:
        interrupted = False
        try:
            for device in hints:
                self.offer(self.step.together(device)[self.step.of_task], "a simple split")
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

    def offer(self, device: I32, how: str) -> bool:
        """Take a placement of tasks if it is better; whether it fits."""
        if device.tobytes() in self.seen:
            return self.key[0] == 0
        self.seen.add(device.tobytes())
        timeline = simulate(self.problem, Placement(self.problem.expand(device)))
        self.simulated += 1
        over = sum(timeline.missing_bytes.values())
        key = (over, int(self.step.prices.loads_ns(device).max()), timeline.makespan_ns)
        if over:
            self.share = max(self.share * 1.1, self._share(device, timeline.peak_bytes))
        if key < self.key:
            self.key, self.device, self.how = key, device, how
        return over == 0

    def _share(self, device: I32, peaks: I64) -> float:
        """Part of what passes through the fullest device's memory that is there at once."""
        limits = np.array(self.problem.limit_bytes)
        worst = int((peaks - limits).argmax())
        here = device == worst
        permanent = int(self.step.permanent_bytes[here].sum())
        passing = int(self.step.passing_bytes[here].sum())
        return min(4.0, max(0.0, (int(peaks[worst]) - permanent) / passing)) if passing else 0.0

    def _search(self) -> None:
        relaxed, uniform = self.step.cheapest(), self.step.is_uniform
        self.bound = lower_bound(self.problem).load_ns
        found = self._solve(relaxed, (0.98 if self._is_roomy() else 0.4) if uniform else 0.2)
        self.bound = max(self.bound, -(-found.bound_ps // PS_PER_NS))
        fits = self._offer(found)
        if not self._settled() and not self.step.is_uniform:
            self._differing()
        for _ in range(_ROUNDS):
            if self._settled() or (fits and self.share == 0):
                break
            model = self.step.dearest(self._held(), with_cpus=True)
            fits = self._offer(self._solve(model, 0.4)) and self.key[0] == 0
        if not self._settled() and self.share == 0 and self.step.is_uniform:
            found = self._solve(relaxed, 1.0)
            self.bound = max(self.bound, -(-found.bound_ps // PS_PER_NS))
            self._offer(found)
        if self.progress is not None:
            self.progress(1.0)

    def _is_roomy(self) -> bool:
        """Whether any device holds everything at once."""
        tasks, limits = self.problem.core.tasks, self.problem.limit_bytes
        once = tasks.made_bytes.sum() + tasks.workspace_bytes.sum() + tasks.const_bytes.sum()
        total = int(once + tasks.carrier_bytes.sum())
        return total <= min(limits) and not len(self.problem.machine.pools)

    def _differing(self) -> None:
        """Devices or links that differ: solve as if they did not, then move classes one by one."""
        if self.step.prices.cpus and self.step.allowed[:, self.step.prices.accelerators].any(1).all():
            self._offer(self._solve(self.step.dearest(self._held(), with_cpus=False), 0.5))
        joined = self.step.attached()
        for step in (joined.coarser(by_call=False), joined.coarser(by_call=True), self.step):
            self._improve(step)

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
        spent = self.effort.evaluations is not None and self.moves >= self.effort.evaluations
        return self.key[:2] <= (0, self.bound) or self._left() <= 0.02 or spent

    def _left(self) -> float:
        if self.effort.seconds is None:
            return 86_400.0
        return max(0.01, self.effort.seconds - (time.monotonic() - self.started))

    def _moves(self, share: float) -> int | None:
        if self.effort.evaluations is None:
            return None
        return max(1, int(share * (self.effort.evaluations - self.moves)))

    def _solve(self, model: LoadProblem, share: float) -> LoadSolution:
        """One solution of a model in a share of what is left."""
        if self.progress is not None and self.effort.seconds is not None:
            self.progress(min(1.0, 1 - self._left() / self.effort.seconds))
        counted = self.effort.seconds is None
        found = solve(
            model,
            share * self._left(),
            self.effort.seed,
            1 if counted else self.effort.threads,
            hint=self._hint(model),
            max_evaluations=self._moves(share),
            exact=not counted,
        )
        self.moves += found.evaluations
        return found

    def _hint(self, model: LoadProblem) -> I32 | None:
        """The best placement so far as nodes of a model."""
        if self.device is None:
            return None
        prices = self.step.prices
        devices = [*prices.accelerators, *prices.cpus][: model.num_devices]
        number = np.full(len(prices.pays), -1, np.int32)
        number[devices] = np.arange(len(devices))
        node = number[self.device]
        first = self.step.first[self.step.of_task]
        color = model.color[: len(node)]
        if (node < 0).any() or (node != node[first]).any():
            return None
        of_color = np.zeros(int(color.max(initial=0)) + 1, np.int32)
        of_color[color] = node
        hint: I32 = of_color[model.color]
        return hint

    def _offer(self, found: LoadSolution) -> bool:
        if found.device is None:
            return False
        return self.offer(self.step.spread(found.device), found.how)
