"""Favourite children: the reader that each op should share its device with, from a linear program.

The program (Hanen and Munier 1995; Jeon et al. 2020, Baechi) has a start `s_i` per op, the
step `w`, and `0 <= x_ij <= 1` per edge, 0 if j is the favourite child of i: minimise w subject to
`s_i + p_i + c_ij x_ij <= s_j`, `s_i + p_i <= w`, and `sum_j x_ij >= readers - 1` (at most one
favourite child), `sum_i x_ij >= makers - 1` (favourite of at most one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TaskDag:
    """Tasks in topological order and what it costs to separate two.

    Attributes:
        time: Of each task. `[N]`
        src, dst: Of each edge, `src < dst`, no edge twice. `[E]`
        cost: Time to send what the edge carries. `[E]`
    """

    time: F64
    src: I64
    dst: I64
    cost: F64


def favourite_children(dag: TaskDag, threshold: float, most: int) -> I64:
    """Favourite child of each task, or -1. `[N]`

    Chains (an only reader whose only maker it is) are joined first, which changes nothing: an edge
    within a chain is free of all demands. What is left is cut in topological order into parts of at
    most `most` tasks, solved one by one; an edge between parts is nobody's favourite.

    Args:
        dag: Tasks and edges.
        threshold: Edges with `x` below it are favourites; below 0.5 there is never more than one
            of a task.
        most: Tasks per linear program.
    """
    favourite = np.full(len(dag.time), -1, np.int64)
    chained = _chained(dag)
    favourite[dag.src[chained]] = dag.dst[chained]
    head = np.arange(len(dag.time))
    for src, dst in zip(dag.src[chained].tolist(), dag.dst[chained].tolist(), strict=True):
        head[dst] = head[src]  # edges of chains are sorted by their reader, so heads are final
    last = np.arange(len(dag.time))
    last[head] = np.arange(len(dag.time))  # the largest task of a chain comes last and stays
    joined = _join(dag, head, chained)
    number = np.unique(head)
    for begin in range(0, len(number), most):
        end = min(begin + most, len(number))
        inside = (joined.src >= begin) & (joined.src < end)
        inside &= (joined.dst >= begin) & (joined.dst < end)
        part = TaskDag(
            joined.time[begin:end],
            joined.src[inside] - begin,
            joined.dst[inside] - begin,
            joined.cost[inside],
        )
        if len(part.src) == 0:
            continue
        chosen = solve(part) < threshold
        favourite[last[number[part.src[chosen] + begin]]] = number[part.dst[chosen] + begin]
    return favourite


def _chained(dag: TaskDag) -> I64:
    """Edges from a task's only reader's only maker, sorted by reader."""
    readers = np.bincount(dag.src, minlength=len(dag.time))
    makers = np.bincount(dag.dst, minlength=len(dag.time))
    chained = np.flatnonzero((readers[dag.src] == 1) & (makers[dag.dst] == 1))
    order: I64 = chained[np.argsort(dag.dst[chained], kind="stable")]
    return order


def _join(dag: TaskDag, head: I64, chained: I64) -> TaskDag:
    """The graph of chains, each numbered by its head."""
    rank = np.zeros(len(dag.time), np.int64)
    number = np.unique(head)
    rank[number] = np.arange(len(number))
    of_task = rank[head]
    kept = np.ones(len(dag.src), bool)
    kept[chained] = False
    time = np.bincount(of_task, dag.time, len(number)).astype(np.float64)
    src, dst = of_task[dag.src[kept]], of_task[dag.dst[kept]]
    return TaskDag(time, src, dst, dag.cost[kept])


def solve(dag: TaskDag) -> F64:
    """`x` of each edge in an optimum of the linear program. `[E]`"""
    import highspy

    class Quiet(highspy.Highs):  # type: ignore[misc]
        """HiGHS that does not print its banner on creation either."""

        def enableCallbacks(self) -> None:  # noqa: N802
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    solver = Quiet()
    for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        solver.setOptionValue(option, value)
    solver.passModel(_program(dag, highspy))
    solver.run()
    values = np.array(solver.getSolution().col_value)
    if len(values) == 0:
        raise AssertionError(f"no optimum of a feasible program: {solver.getModelStatus()}")
    return values[: len(dag.src)]


def _program(dag: TaskDag, highspy: Any) -> Any:
    """Columns: x of edges, starts, w. Rows: one per edge, one per task, then the sums."""
    edges, count = len(dag.src), len(dag.time)
    unit = max(float(dag.time.max(initial=0.0)), float(dag.cost.max(initial=0.0)), 1.0)
    time, cost = dag.time / unit, dag.cost / unit
    each, task = np.arange(edges), np.arange(count)
    lists = [
        # s_j - s_i - c_ij x_ij >= p_i
        (each, each, -cost),
        (each, edges + dag.src, -np.ones(edges)),
        (each, edges + dag.dst, np.ones(edges)),
        # w - s_i >= p_i
        (edges + task, edges + task, -np.ones(count)),
        (edges + task, np.full(count, edges + count), np.ones(count)),
    ]
    low = [time[dag.src], time]
    row = edges + count
    for ends in (dag.src, dag.dst):
        degree = np.bincount(ends, minlength=count)
        several = degree[ends] > 1
        with_sum, index = np.unique(ends[several], return_inverse=True)
        lists.append((row + index, each[several], np.ones(len(index))))
        low.append((degree[with_sum] - 1).astype(np.float64))
        row += len(with_sum)
    rows, columns, values = (np.concatenate(parts) for parts in zip(*lists, strict=True))
    order = np.lexsort((columns, rows))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = edges + count + 1, row
    lp.col_cost_ = np.append(np.zeros(edges + count), 1.0)
    lp.col_lower_ = np.zeros(edges + count + 1)
    lp.col_upper_ = np.append(np.ones(edges), np.full(count + 1, highspy.kHighsInf))
    lp.row_lower_ = np.concatenate(low)
    lp.row_upper_ = np.full(row, highspy.kHighsInf)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.append(0, np.cumsum(np.bincount(rows, minlength=row)))
    lp.a_matrix_.index_ = columns[order]
    lp.a_matrix_.value_ = values[order]
    return lp
