"""The measured timeline of a plan, kept in a file beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from devplace.errors import InputError, WriteError
from devplace.files import decode_json, read_whole, write_whole
from devplace.plan import Plan


class _Measured(msgspec.Struct):
    """The file beside a plan; see `MeasuredTimeline`."""

    graph: str
    placement: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]
    start_ns: list[int]
    finish_ns: list[int]
    transfer_start_ns: list[int]
    transfer_finish_ns: list[int]
    makespan_ns: int


def measured_path(plan_path: Path) -> Path:
    """Where the measured timeline of a plan is kept."""
    return plan_path.with_name(plan_path.name + ".measured.json")


def keep_measured(path: Path, plan: Plan, measured: Any) -> None:
    """Keep the measured timeline of a plan beside it.

    Raises:
        WriteError: It cannot be written there.
    """
    data = {
        "graph": plan.fingerprints.graph,
        "placement": plan.placement,
        "order": plan.order,
        "start_ns": measured.start_ns.tolist(),
        "finish_ns": measured.finish_ns.tolist(),
        "transfer_start_ns": measured.transfer_start_ns.tolist(),
        "transfer_finish_ns": measured.transfer_finish_ns.tolist(),
        "makespan_ns": measured.makespan_ns,
    }
    target = measured_path(path)
    try:
        write_whole(target, msgspec.json.encode(data))
    except OSError as error:
        raise WriteError(f"Cannot write {target}: {error.strerror}. Check the folder.") from error


def load_measured(path: Path, plan: Plan) -> Any:
    """The measured timeline, if there is one and it is of this plan."""
    import numpy as np

    target = measured_path(path)
    if not target.exists():
        return None
    try:
        data = decode_json(read_whole(target), _Measured)
        of_plan = (plan.fingerprints.graph, plan.placement, plan.order)
        if (data.graph, data.placement, data.order) != of_plan:
            return None
        from devplace.run.measured_timeline import MeasuredTimeline

        rows = (data.start_ns, data.finish_ns, data.transfer_start_ns, data.transfer_finish_ns)
        if [len(row) for row in rows] != [len(plan.ops)] * 2 + [len(data.transfer_start_ns)] * 2:
            raise ValueError("rows of unequal length")
        start, finish, sent, arrived = (np.array(row, np.int64) for row in rows)
        least = min(row.min(initial=0) for row in (start, sent))  # -1 where nothing ran
        if (
            least < -1
            or not 0 <= data.makespan_ns < 2**63
            or (start > finish).any()
            or (sent > arrived).any()
        ):
            raise ValueError("times out of range, or that end before they begin")
        return MeasuredTimeline(start, finish, sent, arrived, data.makespan_ns)
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"{target} is damaged ({type(error).__name__}). Remove it, or run the plan again."
        ) from error
