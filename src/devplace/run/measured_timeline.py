"""The measured timeline of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MeasuredTimeline:
    """Start and finish of every op and transfer of one step, ns since the step began.

    Attributes:
        start_ns: Start of each op, -1 for sources and views. int64, shape `[V]`.
        finish_ns: Finish of each op, -1 likewise. int64, shape `[V]`.
        transfer_start_ns: Start of each transfer, in the order of `Schedule.transfers`; -1 for
            those that another process sends. int64.
        transfer_finish_ns: When each transfer had arrived. int64.
        makespan_ns: Duration of the whole step, from the first copy of the batch, or if that is not
            brought in the start, to the last thread done.
    """

    start_ns: NDArray[np.int64]
    finish_ns: NDArray[np.int64]
    transfer_start_ns: NDArray[np.int64]
    transfer_finish_ns: NDArray[np.int64]
    makespan_ns: int

    def after(self, batch_ns: int) -> MeasuredTimeline:
        """The same step, begun by bringing in the batch, which took so long, ns."""

        def later(times: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.where(times < 0, times, times + batch_ns)

        return MeasuredTimeline(
            later(self.start_ns),
            later(self.finish_ns),
            later(self.transfer_start_ns),
            later(self.transfer_finish_ns),
            self.makespan_ns + batch_ns,
        )


def make_timeline(
    num_ops: int,
    ops: list[tuple[int, int, int]],
    transfers: list[tuple[int, int]],
    begin_ns: int,
    end_ns: int,
) -> MeasuredTimeline:
    """Collect absolute `(op, start, finish)` and `(start, finish)` records into arrays.

    An op that runs as several calls spans from its first start to its last finish.
    """
    start = np.full(num_ops, -1, dtype=np.int64)
    finish = np.full(num_ops, -1, dtype=np.int64)
    for op, began, ended in ops:
        if start[op] < 0:
            start[op] = began - begin_ns
        finish[op] = ended - begin_ns
    times = np.array(transfers, dtype=np.int64).reshape(-1, 2)
    times = np.where(times > 0, times - begin_ns, -1)
    for array in (start, finish, times):
        array.setflags(write=False)
    return MeasuredTimeline(start, finish, times[:, 0], times[:, 1], end_ns - begin_ns)
