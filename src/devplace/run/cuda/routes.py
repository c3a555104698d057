"""Choose the route of each transfer: GPU to GPU, or through host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from devplace.device_kinds import is_host
from devplace.errors import PlanError
from devplace.schedule import Schedule

Route = Literal["peer", "staged", "up", "down", "inside"]


def find_routes(
    schedule: Schedule,
    has_peer_access: Callable[[str, str], bool],
    staged_pairs: frozenset[tuple[str, str]] = frozenset(),
) -> tuple[Route, ...]:
    """The way of every transfer.

    `peer`: the sender stores into the receiver's memory. `staged`: from GPU to GPU through pinned
    host memory. `up`: from a GPU to a CPU device. `down`: from a CPU device to a GPU. `inside`:
    between CPU devices.

    Args:
        schedule: What every device does.
        has_peer_access: Whether one GPU can store into another's memory, by their names.
        staged_pairs: (sender, receiver) whose direct link is not to be used.
    """
    routes: list[Route] = []
    for _, src, dst, _ in schedule.transfers:
        sender, receiver = schedule.device_names[src], schedule.device_names[dst]
        if is_host(sender):
            routes.append("inside" if is_host(receiver) else "down")
        elif is_host(receiver):
            routes.append("up")
        elif (sender, receiver) in staged_pairs or not has_peer_access(sender, receiver):
            routes.append("staged")
        else:
            routes.append("peer")
    return tuple(routes)


def check_cpu_ops(schedule: Schedule, runs_on_cpu: Callable[[Any], bool]) -> None:
    """Refuse ops on CPU devices that only GPUs can run, or that would draw other numbers there.

    Args:
        schedule: What every device does.
        runs_on_cpu: Whether the target of an FX node has a CPU form.

    Raises:
        PlanError: Names the first such op.
    """
    program = schedule.captured.program
    for device, instructions in enumerate(schedule.instructions):
        if not is_host(schedule.device_names[device]):
            continue
        for kind, index, _ in instructions:
            if kind != "call":
                continue
            node = program.calls[index].node
            if node.name in program.random_ops:
                reason = "draws random numbers, and a CPU draws others than a GPU from one seed"
            elif not runs_on_cpu(node.target):
                reason = "has no CPU form"
            else:
                continue
            op = schedule.graph.ops[index]
            where = f"module {op.module!r}" if op.module else "the model itself"
            raise PlanError(
                f"Ops on a CPU beside GPUs must run there as on a GPU: {op.name!r} ({op.target}, "
                f"{op.stage}, {where}) is placed on {schedule.device_names[device]} but "
                f"{reason}. Add {op.target!r} to unsupported_ops of that device in the machine "
                "file, or use the detected machine, and plan again."
            )


def has_cpu_form(target: Any) -> bool:
    """Whether torch can run an op's target on a CPU; plain Python functions are taken to."""
    import torch

    from devplace.graph.fusion.call import FusedCall

    if isinstance(target, FusedCall):
        return all(has_cpu_form(node.target) for node in target.graph.nodes)
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(target.name(), "CPU"))


def neighbours(transfers: list[int], *slots: Mapping[int, int]) -> list[list[int]]:
    """Cut a list of transfers where they do not lie side by side in all of these tables."""
    runs: list[list[int]] = []
    for transfer in transfers:
        if runs and all(slot[runs[-1][-1]] + 1 == slot[transfer] for slot in slots):
            runs[-1].append(transfer)
        else:
            runs.append([transfer])
    return runs
