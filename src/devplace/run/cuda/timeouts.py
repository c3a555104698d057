"""Find the cause among several transfers that timed out."""

from __future__ import annotations

from collections.abc import Sequence

from devplace.schedule import InstructionKind, Schedule


def first_cause(schedule: Schedule, late: Sequence[int]) -> int:
    """Of transfers that did not come in time, one that was not late because of another.

    A device that waits in vain sends what comes after too late, so others wait in vain as well.

    Args:
        schedule: What every device does.
        late: The first late transfer of every device that waited in vain; not empty.
    """
    waited = {schedule.transfers[transfer].dst: transfer for transfer in late}
    for transfer in late:
        sender = schedule.transfers[transfer].src
        above = waited.get(sender)
        if above is None:
            return transfer
        received = _position(schedule, sender, "receive", above)
        if _position(schedule, sender, "send", transfer) < received:
            return transfer
    return late[0]


def _position(schedule: Schedule, device: int, kind: InstructionKind, transfer: int) -> int:
    found = enumerate(schedule.instructions[device])
    return next(k for k, (what, _, which) in found if what == kind and which == transfer)
