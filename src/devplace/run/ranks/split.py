"""Which process drives which devices, and its part of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from devplace.device_kinds import is_host
from devplace.errors import InputError, did_you_mean
from devplace.schedule import Schedule


def split_devices(
    names: Sequence[str], num_ranks: int, given: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """Process that drives each device.

    By default the devices are split in order, as evenly as can be. Beside GPUs only these are
    split, and a CPU goes with the GPU that follows it, or if there is none, the last one.

    Args:
        names: Of the plan's devices. Shape `[D]`.
        num_ranks: Processes.
        given: Device name -> process, for all devices.

    Raises:
        InputError: Fewer devices than processes, or a mapping that is not one of these.

    Example:
        >>> split_devices(["cpu:0", "cuda:0", "cuda:1", "cpu:1", "cuda:2", "cuda:3"], 2)
        (0, 0, 0, 1, 1, 1)
    """
    if given is not None:
        return _as_given(names, num_ranks, given)
    own = [name for name in names if not is_host(name)] or list(names)
    if len(own) < num_ranks:
        raise InputError(
            f"Every process drives a device: there are {num_ranks} processes and {len(own)} "
            f"devices ({', '.join(own)}). Start fewer processes, or plan for more devices."
        )
    ranks = {name: k * num_ranks // len(own) for k, name in enumerate(own)}
    found: list[int] = []
    after = num_ranks - 1
    for name in reversed(names):
        after = ranks.get(name, after)
        found.append(after)
    return tuple(reversed(found))


def _as_given(names: Sequence[str], num_ranks: int, given: Mapping[str, int]) -> tuple[int, ...]:
    for name, rank in given.items():
        if name not in names:
            raise InputError(
                f"ranks must name devices of the plan: got {name!r}.{did_you_mean(name, names)} "
                f"They are {', '.join(names)}."
            )
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < num_ranks:
            raise InputError(
                f"ranks must give every device a process from 0 to {num_ranks - 1}: {name!r} has "
                f"{rank!r}."
            )
    left = [name for name in names if name not in given]
    if left:
        raise InputError(f"ranks must give every device a process: {', '.join(left)} have none.")
    return tuple(given[name] for name in names)


def part_of(schedule: Schedule, rank_of: Sequence[int], rank: int) -> Schedule:
    """What the devices of one process do, load and give; devices of others do nothing there."""
    mine = [owner == rank for owner in rank_of]
    holders = {
        op: tuple(device for device in devices if mine[device])
        for op, devices in schedule.holders.items()
    }
    return replace(
        schedule,
        instructions=tuple(
            some if own else () for some, own in zip(schedule.instructions, mine, strict=True)
        ),
        results=tuple(
            some if own else () for some, own in zip(schedule.results, mine, strict=True)
        ),
        holders={op: devices for op, devices in holders.items() if devices},
    )
