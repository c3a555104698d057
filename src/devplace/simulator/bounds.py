"""Lower bounds: no placement and no order can make a step shorter than this."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.problem import Problem

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
_ROUNDS = 150
_CUTS = 24


@dataclass(frozen=True)
class LowerBound:
    """Lower bounds on the step time, and on memory.

    Attributes:
        critical_path_ns: Longest chain of ops, each on its fastest allowed device, transfers free.
        load_ns: Work shared out perfectly over all devices, each op in the best possible mix.
        combined_ns: Best of `head + load of the ops in between + tail` over cuts of the graph;
            never below the two others.
        static_bytes: Bytes that must be somewhere during the whole step (parameters, state).
        capacity_bytes: Memory of all usable devices together.
        is_infeasible: Proof that no placement fits.
    """

    critical_path_ns: int
    load_ns: int
    combined_ns: int
    static_bytes: int
    capacity_bytes: int
    is_infeasible: bool

    @property
    def step_ns(self) -> int:
        """The largest of the time bounds."""
        return max(self.critical_path_ns, self.load_ns, self.combined_ns)


def lower_bound(problem: Problem) -> LowerBound:
    """Bounds from critical path, load, and their best combination.

    The load bound is the Lagrangian dual of fractional assignment: for any weights `w_d >= 0` with
    sum 1, `sum_v min_d w_d p[v, d] / streams_d` is a lower bound on the largest load; weights are
    improved by multiplicative updates. The combination uses that ops with a head of at least `h`
    (longest path before them) and a tail of at least `q` (longest path after them) all run inside
    a window of `step - h - q`.

    Complexity: O(150 N D + 24 N log N) with numpy, about 0.3 s for 25,000 ops and 8 devices.
    """
    tasks, wires = problem.core.tasks, problem.core.wires
    usable = list(problem.usable_devices)  # a weight on any other would weaken the bound
    allowed = problem.allowed[tasks.group][:, usable]
    duration = np.where(allowed, wires.duration_ns[:, usable], np.iinfo(np.int64).max)
    shortest = duration.min(axis=1)
    head, tail = _heads(problem, shortest), _tails(problem, shortest)
    path = int((head + shortest + tail).max(initial=0))
    share = duration / wires.streams[None, usable]
    weights = _dual_weights(share)
    work = (share * weights[None, :]).min(axis=1)
    static = int(tasks.storage_bytes[_is_permanent(problem)].sum())
    capacity = _capacity(problem)
    return LowerBound(
        critical_path_ns=path,
        load_ns=_round_up(work.sum()),
        combined_ns=max(path, _combine(head, tail, work)),
        static_bytes=static,
        capacity_bytes=capacity,
        is_infeasible=static > capacity or _one_op_too_large(problem),
    )


def _heads(problem: Problem, shortest: I64) -> I64:
    tasks = problem.core.tasks
    head = np.zeros(tasks.num_tasks, np.int64)
    in_ptr, makers = tasks.in_ptr.tolist(), tasks.carrier_maker[tasks.in_carrier].tolist()
    ends, length = head.tolist(), shortest.tolist()
    for v in range(tasks.num_tasks):
        begin = max((ends[u] for u in makers[in_ptr[v] : in_ptr[v + 1]]), default=0)
        head[v] = begin
        ends[v] = begin + length[v]
    return head


def _tails(problem: Problem, shortest: I64) -> I64:
    tasks = problem.core.tasks
    cons_ptr, cons = tasks.cons_ptr.tolist(), tasks.cons.tolist()
    out_ptr, length = tasks.out_ptr.tolist(), shortest.tolist()
    tail = [0] * tasks.num_tasks
    for v in range(tasks.num_tasks - 1, -1, -1):
        readers = cons[cons_ptr[out_ptr[v]] : cons_ptr[out_ptr[v + 1]]]
        tail[v] = max((tail[c] + length[c] for c in readers), default=0)
    return np.array(tail, np.int64)


def _dual_weights(share: F64) -> F64:
    """Weights that make the load bound large; any weights are valid."""
    count = share.shape[1]
    weights = np.full(count, 1 / count)
    best, best_value = weights, -1.0
    for round_ in range(_ROUNDS):
        cost = share * weights[None, :]
        choice = cost.argmin(axis=1)
        value = float(cost.min(axis=1).sum())
        if value > best_value:
            best, best_value = weights, value
        load = np.bincount(choice, share[np.arange(len(share)), choice], count)
        top = load.max(initial=0)
        if top <= 0:
            break
        step = 2.0 / (round_ + 4) * load / top
        # exp(step) to second order: exp itself rounds differently on different processors
        weights = weights * (1 + step + step * step / 2)
        weights = weights / weights.sum()
    return best


def _combine(head: I64, tail: I64, work: F64) -> int:
    best = 0.0
    levels = np.linspace(0, 1, _CUTS)
    for low in np.unique(np.quantile(head, levels, method="nearest")) if len(head) else ():
        inside = head >= low
        tails, works = tail[inside], work[inside]
        order = np.argsort(tails, kind="stable")[::-1]  # equal tails alike on every machine
        total = np.cumsum(works[order])
        best = max(best, float((total + tails[order]).max() + low))
    return _round_up(best)


def _round_up(value: float) -> int:
    """Smallest integer not clearly below `value`: floating sums may be a hair too large."""
    return int(np.ceil(value * (1 - 1e-12) - 1e-6))


def _is_permanent(problem: Problem) -> NDArray[np.bool_]:
    """Storages that are there when the step begins: sources that are replaced, unless nothing
    reads their old value."""
    tasks = problem.core.tasks
    owner = tasks.storage_maker
    is_kept = (np.diff(tasks.out_ptr)[owner] > 0) | (tasks.storage_held > 0)
    return tasks.is_source[owner].astype(bool) & is_kept


def _capacity(problem: Problem) -> int:
    wires = problem.core.wires
    total, pools = 0, wires.pool_limit_bytes.astype(object).copy()
    per_pool = [0] * len(pools)
    for d in problem.usable_devices:
        if wires.pool[d] < 0:
            total += int(wires.limit_bytes[d])
        else:
            per_pool[wires.pool[d]] += int(wires.limit_bytes[d])
    return total + sum(min(int(a), b) for a, b in zip(pools, per_pool, strict=True))


def _one_op_too_large(problem: Problem) -> bool:
    tasks, wires = problem.core.tasks, problem.core.wires
    largest = max((int(wires.limit_bytes[d]) for d in problem.usable_devices), default=0)
    sizes = np.where(tasks.is_source > 0, 0, tasks.made_bytes + tasks.workspace_bytes)
    return bool(len(sizes) and int(sizes.max()) > largest)
