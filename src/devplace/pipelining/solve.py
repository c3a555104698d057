"""Solve a max-load problem: bounds, contiguous split, search, and CP-SAT where it is installed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from devplace.errors import InputError
from devplace.pipelining import plain_search
from devplace.pipelining.cp_sat import cp_model
from devplace.pipelining.integer_programme import bin_packing, solve_exactly
from devplace.pipelining.items import Items, make_items
from devplace.pipelining.load_bounds import item_bound, quick_bound, why_infeasible
from devplace.pipelining.load_problem import I32, LoadProblem, broken_rule, check_devices, loads
from devplace.pipelining.native import solvers_module
from devplace.pipelining.starts import simple_starts

NEVER = int(np.iinfo(np.int64).max)
DEFAULT_SECONDS = 60.0
MAX_IDEALS = 60_000  # above it, orders instead of all ideals: seconds and 1 GB at 8 devices
MAX_EXACT_CHOICES = 300_000  # booleans; above it building the model takes longer than it helps
EXACT_CHOICES_PER_S = 60_000  # building the model alone takes this long
SMALL_CHOICES = 1000  # booleans; below it the search has ended long before its share of time


@dataclass(frozen=True, eq=False)
class LoadSolution:
    """Answer to a load problem.

    Attributes:
        device: Device of each node; None where no placement was found. `[N]`
        value_ps: Largest load; None where no placement was found.
        bound_ps: No placement has a smaller largest load.
        status: `optimal` (value equals bound), `feasible`, `infeasible` (proved) or `unknown`.
        seconds: Time taken.
        seed: Seed of the search.
        how: What gave the placement, or why there is none.
        evaluations: Moves that the search tried.
    """

    device: I32 | None
    value_ps: int | None
    bound_ps: int
    status: str
    seconds: float
    seed: int
    how: str
    evaluations: int = 0

    @property
    def gap(self) -> float | None:
        """`value / bound - 1`; None where there is no value or no positive bound."""
        if self.value_ps is None:
            return None
        if self.value_ps == self.bound_ps:
            return 0.0
        return self.value_ps / self.bound_ps - 1 if self.bound_ps > 0 else None


def solve(
    problem: LoadProblem,
    seconds: float | None = None,
    seed: int = 0,
    threads: int = 2,
    hint: I32 | None = None,
    max_evaluations: int | None = None,
    exact: bool = True,
) -> LoadSolution:
    """Smallest largest load found in the time given, with the best bound at hand.

    Args:
        seconds: Wall-clock time; None: `DEFAULT_SECONDS`, or where moves are counted no limit.
        hint: A placement to start from; it may break the memory limit. `[N]`
        max_evaluations: Moves that the search may try, shared out between its threads. With one
            thread, no `seconds` and `exact=False` the answer depends on the seed only.
        exact: Let CP-SAT try too, where OR-Tools is installed. Where only moves are counted and
            none led within memory, it looks for a packing in any case, with counted work.

    Raises:
        ProblemError: The hint does not fit the problem.
        InputError: `seconds` is not positive.
    """
    check_seconds(seconds)
    given = None if hint is None else check_devices(problem, hint)
    return _Run(problem, seconds, seed, max(1, threads), max_evaluations, exact).run(given)


def check_seconds(seconds: float | None) -> None:
    """Refuse a time that is not positive.

    Raises:
        InputError: Names it.
    """
    if seconds is not None and not seconds > 0:
        raise InputError(f"seconds must be positive, got {seconds}. Give for example 60.")


def solve_contiguous(problem: LoadProblem, seconds: float = 60.0) -> LoadSolution:
    """Best split in which the devices can be ordered so that the forward pass only goes forward.

    Backward nodes follow the forward nodes of their class. All such splits are tried where the
    precedence order has at most 60,000 ideals; `status` is then `optimal`, which here means best of
    its kind, and `bound_ps` its value. Otherwise, and without the native module, only runs of
    topological orders are tried and `status` is `feasible`.

    Source: Tarnawski et al. (2020), arXiv 2006.16423, section 5.1.
    """
    start = time.monotonic()
    items = make_items(problem)
    device, value, complete = _contiguous(items, seconds, MAX_IDEALS)
    bound = max(quick_bound(items), item_bound(items, None, 0.0))
    took = time.monotonic() - start
    reason = why_infeasible(items)
    if device is None:
        status = "infeasible" if complete or reason else "unknown"
        return LoadSolution(None, None, bound, status, took, 0, reason or "no contiguous split")
    if complete:
        bound = value
    how = "contiguous split" + ("" if complete else " along topological orders")
    status = "optimal" if complete else "feasible"
    return LoadSolution(items.spread(device), value, bound, status, took, 0, how)


def _contiguous(items: Items, seconds: float, max_ideals: int) -> tuple[I32 | None, int, bool]:
    """Placement of items, its value, and whether all contiguous splits were tried."""
    native = solvers_module()
    if items.num_items == 0:
        return np.zeros(0, np.int32), 0, True
    if native is None:
        device, value = plain_search.contiguous(items)
        complete = False
    else:
        device, value, complete = native.contiguous(items, max_ideals, seconds, NEVER)
    return (device if len(device) else None), int(value), bool(complete)


class _Run:
    """One solve: the best placement of items so far and the bound, passed on from step to step."""

    def __init__(
        self,
        problem: LoadProblem,
        seconds: float | None,
        seed: int,
        threads: int,
        max_evaluations: int | None,
        exact: bool,
    ) -> None:
        self.started = time.monotonic()
        self.problem, self.items = problem, make_items(problem)
        self.seconds, self.seed, self.threads = seconds or DEFAULT_SECONDS, seed, threads
        self.max_evaluations = max_evaluations
        self.is_timed = seconds is not None or max_evaluations is None
        self.exact = exact and has_exact() and self._choices() <= MAX_EXACT_CHOICES
        self.native = solvers_module()
        self.device: I32 | None = None
        self.value, self.bound, self.how = NEVER, 0, "no placement within memory was found"
        self.broken: list[I32] = []  # placements above a memory limit, for the search to repair
        self.proved_infeasible = False
        self.evaluations = 0

    def run(self, hint: I32 | None) -> LoadSolution:
        items = self.items
        reason = why_infeasible(items)
        if reason:
            self.proved_infeasible, self.how = True, reason
            return self._answer()
        if items.num_items == 0:
            self._offer(np.zeros(0, np.int32), "nothing to place")
            return self._answer()
        self.bound = max(quick_bound(items), item_bound(items, self.native, 0.05 * self._left()))
        if hint is not None:
            self._offer(items.gather(hint), "hint")
        self._start_contiguous()
        for device in simple_starts(items):
            self._offer(device, "simple split")
        for step, share in self._steps():
            if self._settled():
                break
            step(share)
        if not self.is_timed and not self._settled():
            self._pack(None)
        return self._answer()

    def _steps(self) -> list[tuple[Callable[[float], None], float]]:
        """What to do with which share of the time that is left."""
        if not self.exact:
            return [(self._search, 1.0)]
        if not self.is_timed:
            return [(self._search, 1.0), (self._prove, 0.2)]
        if self._choices() <= SMALL_CHOICES:
            return [(self._search, 0.1), (self._prove, 1.0)]
        return [(self._search, 0.12), (self._prove, 0.2), (self._search, 0.65), (self._prove, 1.0)]

    def _left(self) -> float:
        """Seconds left; plenty where moves alone are counted."""
        return self._left_by_clock() if self.is_timed else 1e6

    def _left_by_clock(self) -> float:
        return max(0.01, self.seconds - (time.monotonic() - self.started))

    def _choices(self) -> int:
        return (self.items.num_items + len(self.items.net_ps)) * self.items.num_devices

    def _settled(self) -> bool:
        return self.proved_infeasible or (self.device is not None and self.value <= self.bound)

    def _offer(self, device: I32, how: str) -> None:
        """Take a placement of items if it is valid and better; keep it as a start otherwise."""
        spread = self.items.spread(device)
        if broken_rule(self.problem, spread):
            self.broken.append(device)
            return
        value = int(loads(self.problem, spread).max())
        if value < self.value:
            self.device, self.value, self.how = device, value, how

    def _start_contiguous(self) -> None:
        limit = MAX_IDEALS if self.is_timed else 2000
        device, _, _ = _contiguous(self.items, 0.05 * self._left(), limit)
        if device is not None:
            self._offer(device, "contiguous split")

    def _search(self, share: float) -> None:
        able = self._able()
        starts = [
            d for d in [self.device, *simple_starts(self.items), *self.broken] if d is not None
        ]
        starts = [d for d in starts if able(d)]
        seconds, most = share * self._left(), 2**62
        if self.max_evaluations is not None:
            most = self.max_evaluations - self.evaluations
        if self.native is None:
            device, over, _, tried = plain_search.search(
                self.items, starts, seconds, most, self.seed, self.bound
            )
        else:
            device, over, _, tried = self.native.search(
                self.items,
                np.concatenate(starts).astype(np.int32) if starts else np.zeros(0, np.int32),
                seconds,
                most,
                self.seed,
                self.threads,
                self.bound,
            )
        self.evaluations += int(tried)
        if over == 0:
            self._offer(device, "search")

    def _able(self) -> Any:
        """Whether a placement of items respects `can_accelerate`."""
        unable, k = self.items.can_accelerate == 0, self.items.num_accelerators
        return lambda device: not (device[unable] < k).any()

    def _prove(self, share: float) -> None:
        if not self.exact:
            return
        seconds = share * self._left_by_clock()
        if self._choices() > EXACT_CHOICES_PER_S * seconds:
            return
        if self.device is None:
            self._pack(seconds)
            return
        answer = solve_exactly(
            self.items, seconds, self.device, self.bound, self.threads, self.seed
        )
        self.bound = max(self.bound, answer.bound_ps)
        if answer.device is not None:
            self._offer(answer.device, "CP-SAT")

    def _pack(self, seconds: float | None) -> None:
        """Where nothing was found: anything within memory, or the proof that there is none."""
        if self.device is not None or not has_exact() or self._choices() > MAX_EXACT_CHOICES:
            return
        threads = 1 if seconds is None else self.threads
        packed = bin_packing(self.items, seconds, threads, self.seed)
        if packed.status == "infeasible":
            self.proved_infeasible = True
            self.how = "the sizes cannot be packed into the accelerators (CP-SAT)"
        if packed.device is not None:
            self._offer(packed.device, "CP-SAT packing")

    def _answer(self) -> LoadSolution:
        device = None if self.device is None else self.items.spread(self.device)
        value = None if device is None else self.value
        status = "infeasible" if self.proved_infeasible else "unknown"
        if device is not None:
            status = "optimal" if self.value <= self.bound else "feasible"
        took = time.monotonic() - self.started
        return LoadSolution(
            device, value, self.bound, status, took, self.seed, self.how, self.evaluations
        )


def has_exact() -> bool:
    """Whether OR-Tools is installed."""
    try:
        cp_model()
    except InputError:
        return False
    return True
