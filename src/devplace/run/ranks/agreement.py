"""Whether all processes have the same step and plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from devplace.graph.serialize import fingerprint
from devplace.run.ranks.group import Group
from devplace.run.ranks.processes import Processes
from devplace.run.ranks.split import split_devices
from devplace.run.state import steps_at_capture
from devplace.schedule import Schedule


def joined(
    group: Group, seed: int, ranks: Mapping[str, int] | None = None, takes_rows: bool = False
) -> Callable[[Schedule], Processes]:
    """What `compile_step` takes as `join`, for all processes of a group.

    Args:
        group: The processes.
        seed: Of the random ops.
        ranks: As of `split_devices`.
        takes_rows: As of `Processes`.
    """

    def join(schedule: Schedule) -> Processes:
        rank_of = split_devices(schedule.device_names, group.size, ranks)
        require_agreement(group, schedule, seed, rank_of, takes_rows)
        return Processes(group, schedule, rank_of, takes_rows)

    return join


def require_agreement(
    group: Group, schedule: Schedule, seed: int, rank_of: Sequence[int], takes_rows: bool
) -> None:
    """Refuse to run a step together with processes that have another one.

    Raises:
        PlanMismatchError: Names a process that differs from the first, and in what.
        RankError: A process failed, or did not come.
    """
    graph = schedule.captured
    transfers = [transfer._asdict() for transfer in schedule.transfers]
    lines = [[tuple(one) for one in some] for some in schedule.instructions]
    group.require_equal(
        "step",
        {
            "captured step": f"{graph.name!r} with {len(graph.ops)} ops ({fingerprint(graph)})",
            "devices": ", ".join(schedule.device_names),
            "plan": _digest([schedule.device_of_op, transfers, lines]),
            "seed": seed,
            "ranks of the devices": list(rank_of),
            "kind of batch": "sharded" if takes_rows else "whole",
            "steps made before capture": max(steps_at_capture(graph).values(), default=0),
        },
    )


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
