"""Max load as an integer programme for CP-SAT (OR-Tools, `devplace[exact]`).

Minimise `T` over placements `x[i, d]` of items and payments `y[e, d]` of nets, with

- one device for each item: `sum_d x[i, d] = 1` (`_placements`);
- memory: `sum_i size[i] x[i, d] <= memory` on accelerators (`_placements`);
- payments: `y[e, d] >= x[u, d] - x[v, d]` for ends `u, v` of `e` (`_payments`; each end with
  the next in a ring is enough);
- loads: `sum_i time[i] x[i, d] + sum_e cost[e] y[e, d] <= T` (`_loads`);
- equal devices are told apart by their first items (`_break_symmetry`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import reduce
from math import gcd, isqrt
from typing import Any

import numpy as np

from devplace.pipelining.cp_sat import cp_model, solve
from devplace.pipelining.items import Items
from devplace.pipelining.load_problem import I32

_MAX_LITERALS = 2 * 10**6  # of what tells equal devices apart: some tenths of a second


@dataclass(frozen=True)
class ExactAnswer:
    """What CP-SAT found: a placement of items or None, the bound it proved, and its status."""

    device: I32 | None
    bound_ps: int
    status: str


def solve_exactly(
    items: Items,
    seconds: float,
    hint: I32 | None = None,
    bound_ps: int = 0,
    threads: int = 1,
    seed: int = 0,
) -> ExactAnswer:
    """Solve with CP-SAT, from a hint if there is one.

    Args:
        hint: Device of each item. `[M]`
        bound_ps: A lower bound known before.

    Raises:
        InputError: OR-Tools is not installed.
    """
    cp, began = cp_model(), time.monotonic()
    model = _Model(cp, items, bound_ps, hint)
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, began + seconds - time.monotonic())
    solver.parameters.num_workers = max(1, threads)
    solver.parameters.random_seed = seed % 2**31
    status = solve(solver, model.model)
    if status == cp.INFEASIBLE:
        return ExactAnswer(None, bound_ps, "infeasible")
    bound = max(bound_ps, round(solver.best_objective_bound) * model.unit)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return ExactAnswer(None, bound, "unknown")
    device = np.array(
        [next(d for d, x in row if solver.boolean_value(x)) for row in model.choices], np.int32
    )
    return ExactAnswer(device, bound, "optimal" if status == cp.OPTIMAL else "feasible")


def bin_packing(items: Items, seconds: float | None, threads: int, seed: int) -> ExactAnswer:
    """Any placement within memory, or the proof that there is none.

    Args:
        seconds: Time it may take; None: as much work as CP-SAT counts as 5 s.

    Raises:
        InputError: OR-Tools is not installed.
    """
    cp, began = cp_model(), time.monotonic()
    model = _Model(cp, items, 0, None, only_memory=True)
    solver = cp.CpSolver()
    if seconds is None:
        solver.parameters.max_deterministic_time = 5.0
    else:
        solver.parameters.max_time_in_seconds = max(0.01, began + seconds - time.monotonic())
    solver.parameters.num_workers = max(1, threads)
    solver.parameters.random_seed = seed % 2**31
    status = solve(solver, model.model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return ExactAnswer(None, 0, "infeasible" if status == cp.INFEASIBLE else "unknown")
    device = np.array(
        [next(d for d, x in row if solver.boolean_value(x)) for row in model.choices], np.int32
    )
    return ExactAnswer(device, 0, "feasible")


class _Model:
    def __init__(
        self, cp: Any, items: Items, bound_ps: int, hint: I32 | None, only_memory: bool = False
    ) -> None:
        self.model = cp.CpModel()
        self.items = items
        times = np.concatenate([items.accelerator_ps, items.cpu_ps, items.net_ps])
        self.unit = reduce(gcd, times.tolist(), 0) or 1  # smaller numbers, the same problem
        self.by_work = np.argsort(-items.accelerator_ps, kind="stable").tolist()
        self.choices: list[list[tuple[int, Any]]] = []
        self._placements()
        self._break_symmetry()
        if only_memory:
            return
        self.paid: dict[tuple[int, int], Any] = {}
        self._payments()
        self._loads(-(-bound_ps // self.unit))
        if hint is not None:
            self._hint(self._relabel(hint))

    def _placements(self) -> None:
        items, model = self.items, self.model
        k = items.num_accelerators
        for i in range(items.num_items):
            able = bool(items.can_accelerate[i]) and items.size_bytes[i] <= items.memory_bytes
            devices = range(0 if able else k, items.num_devices)
            row = [(d, model.new_bool_var(f"x{i}_{d}")) for d in devices]
            if row:
                model.add_exactly_one(x for _, x in row)
            else:
                model.add_bool_or([])
            self.choices.append(row)
        self.on = [dict(row) for row in self.choices]
        if int(items.size_bytes.sum()) <= items.memory_bytes:
            return
        for d in range(k):
            held = [
                (self.on[i][d], int(items.size_bytes[i]))
                for i in range(items.num_items)
                if d in self.on[i]
            ]
            model.add(sum(x * size for x, size in held) <= items.memory_bytes)

    def _break_symmetry(self) -> None:
        """The next device of a kind is used only after the one before it, by order of work; told
        of the first items only, for it takes their number squared."""
        items = self.items
        most = min(4 * items.num_devices, isqrt(_MAX_LITERALS // max(1, items.num_devices)))
        k = items.num_accelerators
        for first, count in ((0, k), (k, items.num_cpus)):
            for position, i in enumerate(self.by_work[:most]):
                for d in range(first + 1, first + count):
                    if d not in self.on[i]:
                        continue
                    earlier = [
                        self.on[j][d - 1] for j in self.by_work[:position] if d - 1 in self.on[j]
                    ]
                    self.model.add_bool_or([*earlier, self.on[i][d].negated()])

    def _payments(self) -> None:
        items, model = self.items, self.model
        for e in range(len(items.net_ps)):
            ends = items.pins[items.net_ptr[e] : items.net_ptr[e + 1]].tolist()
            for d in range(items.num_accelerators):
                here = [self.on[i].get(d) for i in ends]
                if all(x is None for x in here):
                    continue
                paid = model.new_bool_var(f"y{e}_{d}")
                self.paid[e, d] = paid
                for x, after in zip(here, here[1:] + here[:1], strict=True):
                    if x is not None:
                        others = [] if after is None else [after]
                        model.add_bool_or([x.negated(), *others, paid])

    def _loads(self, bound: int) -> None:
        items, unit = self.items, self.unit
        k = items.num_accelerators
        most = int(items.accelerator_ps.sum() + items.net_ps.sum() + items.cpu_ps.sum())
        self.value = self.model.new_int_var(bound, max(bound, most // unit), "load")
        for d in range(items.num_devices):
            time = items.accelerator_ps if d < k else items.cpu_ps
            terms = [
                self.on[i][d] * (int(time[i]) // unit) for i in range(len(time)) if d in self.on[i]
            ]
            terms += [
                paid * (int(items.net_ps[e]) // unit)
                for (e, at), paid in self.paid.items()
                if at == d
            ]
            self.model.add(sum(terms) <= self.value)
        self.model.minimize(self.value)

    def _relabel(self, device: I32) -> I32:
        """The same placement with devices numbered as `_break_symmetry` wants."""
        k = self.items.num_accelerators
        label: dict[int, int] = {}
        following = [0, k]
        for i in self.by_work:
            d = int(device[i])
            if d not in label:
                kind = int(d >= k)
                label[d] = following[kind]
                following[kind] += 1
        return np.array([label[int(d)] for d in device], np.int32)

    def _hint(self, device: I32) -> None:
        k = self.items.num_accelerators
        for i, row in enumerate(self.choices):
            for d, x in row:
                self.model.add_hint(x, bool(device[i] == d))
        load = [0] * self.items.num_devices
        for i, d in enumerate(device.tolist()):
            time = self.items.accelerator_ps if d < k else self.items.cpu_ps
            load[d] += int(time[i])
        for (e, d), paid in self.paid.items():
            ends = self.items.pins[self.items.net_ptr[e] : self.items.net_ptr[e + 1]]
            here = int((device[ends] == d).sum())
            pays = 0 < here < len(ends)
            load[d] += pays * int(self.items.net_ps[e])
            self.model.add_hint(paid, pays)
        self.model.add_hint(self.value, max(load) // self.unit)
