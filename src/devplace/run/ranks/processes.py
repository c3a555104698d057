"""One step over several processes: each one's part, the messages of a step, and weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from devplace.device_kinds import is_host
from devplace.errors import InputError
from devplace.run.copies import clone_tensor
from devplace.run.mailbox import Mailbox
from devplace.run.ranks.group import Group
from devplace.run.ranks.messages import message_bytes, pack, unpack
from devplace.run.ranks.split import part_of
from devplace.run.ranks.turns import Turns
from devplace.schedule import PlannedTransfer, Schedule
from devplace.schedule.linear import crosses, meeting_order


class Processes:
    """The processes of one step, as this one sees them.

    Everything that is sent goes through one thread and in one order that all processes share, so
    that none waits for ever (`meeting_order` has the proof).

    Args:
        group: The processes.
        schedule: What every device does, in all processes.
        rank_of: Process that drives each device. Shape `[D]`.
        takes_rows: Whether each process is given its rows of the batch alone.

    Attributes:
        schedule: As given.
        part: What the devices of this process do.
        is_mine: Whether this process drives each device. Shape `[D]`.
        order: Transfers between processes that this one takes part in, in their order.
    """

    def __init__(
        self, group: Group, schedule: Schedule, rank_of: Sequence[int], takes_rows: bool = False
    ) -> None:
        self.group = group
        self.part = _with_own_gpus(part_of(schedule, rank_of, group.rank))
        self.is_mine = tuple(rank == group.rank for rank in rank_of)
        self.schedule = schedule
        self._rank_of = tuple(rank_of)
        self._takes_rows = takes_rows
        self.order = tuple(
            transfer
            for transfer in meeting_order(schedule, rank_of)
            if group.rank in self.ends(transfer)
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the process that weights come from and go to."""
        return bool(self.group.rank == 0)

    def copy(self, value: Any, transfer: PlannedTransfer) -> Any:
        """What is put into the mailbox for a transfer: a copy, or the message of one."""
        return pack(value) if crosses(transfer, self._rank_of) else clone_tensor(value)

    def ends(self, transfer: int) -> tuple[int, int]:
        """Sending and receiving process of a transfer."""
        record = self.schedule.transfers[transfer]
        return self._rank_of[record.src], self._rank_of[record.dst]

    def carry_step(self, mailbox: Mailbox) -> None:
        """Send and receive what crosses in one step.

        Raises:
            StoppedError: The step was given up.
            RankError: Another process failed.
        """
        for transfer in self.order:
            sender, receiver = self.ends(transfer)
            if sender == self.group.rank:
                self.group.send(mailbox.receive(transfer), receiver)
            else:
                tensor = self.schedule.transfers[transfer].tensor
                mailbox.hand_over(transfer, self.receive(tensor, sender))

    def share_results(self, mine: Mapping[int, Any]) -> dict[int, Any]:
        """The results of a step that replace nothing, of all processes.

        Args:
            mine: Those that this one made, by index.
        """
        graph, everyone = self.schedule.graph, range(self.group.size)

        def job() -> dict[int, Any]:
            return {
                k: self._spread(graph.results[k].tensor, mine.get(k), owner, everyone)
                for k, owner in self.owners().items()
            }

        return self.group.run(job)

    def owners(self) -> dict[int, int]:
        """Results that replace nothing, by index, and the processes that make them."""
        results = self.schedule.graph.results
        found = {
            index: self._rank_of[device]
            for device, places in enumerate(self.schedule.results)
            for index, _ in places
            if results[index].replaces < 0
        }
        return dict(sorted(found.items()))

    def empty_result(self, index: int, torch_device: Any) -> Any:
        """Room for a result of another process, on a device."""
        graph = self.schedule.graph
        record = graph.tensors[graph.results[index].tensor]
        return torch.empty(record.shape, dtype=getattr(torch, record.dtype), device=torch_device)

    def spread_weights(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Values of the first process, for every source that this one holds.

        Args:
            values: Source op -> its value in the first process, in others one of its kind.
        """
        graph = self.schedule.graph

        def job() -> dict[int, Any]:
            found = {}
            for op, value in values.items():
                readers = {self._rank_of[device] for device in self.schedule.holders[op]}
                tensor = graph.ops[op].outputs[0]
                if self.group.rank in readers | {0}:
                    made = self._spread(tensor, value, 0, readers)
                    if self.group.rank in readers:
                        found[op] = made
            return found

        return self.group.run(job)

    def gather_weights(
        self, get: Callable[[int], Any], ops: Iterable[int], everywhere: bool
    ) -> dict[int, Any]:
        """Values of sources, brought to the first process or to all of them.

        Args:
            get: Source op -> its value, for those that live here.
            ops: Sources that the step replaces.
            everywhere: Whether all processes get them.
        """
        graph, readers = self.schedule.graph, range(self.group.size if everywhere else 1)

        def job() -> dict[int, Any]:
            found = {}
            for op in sorted(ops):
                home = self._rank_of[self.schedule.device_of_op[op]]
                value = get(op) if home == self.group.rank else None
                if self.group.rank in {home, *readers}:
                    found[op] = self._spread(graph.ops[op].outputs[0], value, home, readers)
            return found

        return self.group.run(job)

    def number(self, value: int, owner: int = 0) -> int:
        """An integer of a process, the first one by default, in all of them."""

        def job() -> int:
            message = torch.tensor([value], dtype=torch.int64, device="cpu")
            if self.group.rank != owner:
                self.group.receive(message, owner)
                return int(message.item())
            for rank in range(self.group.size):
                if rank != owner:
                    self.group.send(message, rank)
            return value

        return self.group.run(job)

    def largest(self, value: int) -> int:
        """The largest of the integers of all processes."""
        return max(self.number(value, rank) for rank in range(self.group.size))

    def whole(self, op: int, name: str, value: Any) -> Any:
        """An input of all processes' rows, for those that hold it; others get one without values.

        Raises:
            InputError: The rows are not an even share of the captured batch.
        """
        shape = self.schedule.graph.tensors[self.schedule.graph.ops[op].outputs[0]].shape
        if not self._takes_rows or not isinstance(value, torch.Tensor) or value.shape == shape:
            return value
        size = self.group.size
        shorter = [d for d, (a, b) in enumerate(zip(value.shape, shape, strict=False)) if a != b]
        is_share = value.dim() == len(shape) and len(shorter) == 1
        if not is_share or value.shape[shorter[0]] * size != shape[shorter[0]]:
            raise InputError(
                f"With batch='sharded' each of {size} processes gives an equal part of the rows: "
                f"input {name!r} has shape {list(value.shape)}, the step was captured with "
                f"{list(shape)}. Pad the batch, or give the whole of it (batch='whole')."
            )
        readers = {self._rank_of[device] for device in self.schedule.holders.get(op, ())}

        def job() -> Any:
            parts = []
            for rank in range(size):
                if self.group.rank in readers | {rank}:
                    parts.append(self._spread_like(value, rank, readers))
            return torch.cat(parts, shorter[0]) if self.group.rank in readers else None

        made = self.group.run(job)
        return value.new_empty(shape) if made is None else made

    def _spread(self, tensor: int, value: Any, owner: int, readers: Iterable[int]) -> Any:
        """Send a value from its owner to others; this process is one of them."""
        if owner != self.group.rank:
            return self.receive(tensor, owner)
        self._send_to(value, readers)
        return value

    def _spread_like(self, value: Any, owner: int, readers: Iterable[int]) -> Any:
        if owner != self.group.rank:
            return self._receive_as(value.shape, value.dtype, owner)
        self._send_to(value, readers)
        return value.cpu()

    def _send_to(self, value: Any, readers: Iterable[int]) -> None:
        others = sorted(set(readers) - {self.group.rank})
        message = pack(value) if others else None
        for rank in others:
            self.group.send(message, rank)

    def receive(self, tensor: int, rank: int) -> Any:
        """A tensor of the graph, from a process that sends it."""
        record = self.schedule.graph.tensors[tensor]
        return self._receive_as(record.shape, getattr(torch, record.dtype), rank)

    def _receive_as(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Any:
        message = torch.empty(message_bytes(shape, dtype), dtype=torch.uint8, device="cpu")
        self.group.receive(message, rank)
        return unpack(message, shape, dtype)


class Mail:
    """Messages of a step that a single thread runs, in the order that all processes share.

    Args:
        processes: All of them.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._turns = Turns(processes.order, self._receive)
        self._came: dict[int, tuple[Any, bool]] = {}

    def send(self, transfer: int, value: Any) -> None:
        """Send a tensor, after what comes before it."""
        self._turns.before_send(transfer)
        group, receiver = self._processes.group, self._processes.ends(transfer)[1]
        where = torch.tensor([value.is_cuda], dtype=torch.uint8, device="cpu")
        message = pack(value)
        for each in (where, message):
            group.run(partial(group.send, each, receiver))

    def receive(self, transfer: int) -> tuple[Any, bool]:
        """A tensor on the CPU, and whether its sender had it on a GPU."""
        self._turns.until_received(transfer)
        value, was_on_gpu = self._came.pop(transfer)
        return value, was_on_gpu

    def _receive(self, transfer: int) -> None:
        group, sender = self._processes.group, self._processes.ends(transfer)[0]
        where = torch.empty(1, dtype=torch.uint8, device="cpu")
        group.run(partial(group.receive, where, sender))
        tensor = self._processes.schedule.transfers[transfer].tensor
        value = group.run(partial(self._processes.receive, tensor, sender))
        self._came[transfer] = value, bool(where.item())


def _with_own_gpus(part: Schedule) -> Schedule:
    """The GPU of a part under the name it has on this host: that of the local rank."""
    count = torch.cuda.device_count()
    if not count:
        return part
    name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % count}"
    names = (
        name if some and not is_host(old) else old
        for old, some in zip(part.device_names, part.instructions, strict=True)
    )
    return replace(part, device_names=tuple(names))
