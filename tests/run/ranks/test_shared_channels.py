"""What each process of one host records for its GPU, tried on CPUs.

Threads stand for processes and memory of the CPU for that of GPUs. Streams, graphs, kernels and
shared memory itself need GPUs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch

from devplace.run.cuda import peer_channels, shared_channels
from devplace.run.cuda.device import Flags
from devplace.run.cuda.device_pass import DevicePass, StateWrites
from devplace.run.cuda.eager import EagerRunner
from devplace.run.cuda.shared_channels import SharedChannels
from devplace.run.ranks.processes import Processes
from devplace.run.unplaced import run_unplaced
from devplace.schedule import Schedule, make_schedule
from devplace.schedule.linear import PushJoins, linear_order
from devplace.schedule.write_back import write_backs
from tests.run.ranks.test_nccl_channels import PATIENCE_S, Meetings, Stream, ThreadGroup
from tests.run.test_transient_values import FakeGpu, NoRandom, case
from tests.run.tracing import random_placement

STEPS = 3


class Table:
    """What threads give each other: everyone's part, once all have come."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: dict[Any, dict[int, Any]] = {}
        self._change = threading.Condition()

    def exchange(self, topic: Any, rank: int, value: Any) -> list[Any]:
        """All parts by rank."""
        with self._change:
            parts = self._parts.setdefault(topic, {})
            parts[rank] = value
            self._change.notify_all()
            assert self._change.wait_for(lambda: len(parts) == self._size, PATIENCE_S), topic
            return [parts[k] for k in range(self._size)]


class SharingGroup(ThreadGroup):
    """A thread in place of a process, which also exchanges."""

    def __init__(self, rank: int, size: int, meetings: Meetings, table: Table) -> None:
        super().__init__(rank, size, meetings)
        self._table, self._count = table, 0

    def exchange(self, topic: str, value: Any, _: str) -> list[Any]:
        """As a group's."""
        self._count += 1
        return self._table.exchange((topic, self._count), self.rank, value)


def store(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
    """A push by two blocks, done at once."""
    assert source.shape == buffer.shape
    buffer.copy_(source)
    flag.add_(2)
    return 2


def spin(flags: Flags, transfers: Any, _: int) -> None:
    """Wait until all of these have come."""
    until = time.monotonic() + PATIENCE_S
    for transfer in transfers:
        slot = flags.slot(transfer)
        due = int(flags.epoch) * int(flags.blocks[slot])
        while int(flags.counter(transfer)) < due:
            assert time.monotonic() < until, f"{transfer} did not come"
            time.sleep(1e-4)


def wanted(offer: dict[int, Any], _: Any, wants: Any) -> dict[int, Any]:
    """Those of the offered tensors that this thread sends to."""
    return {key: tensor for key, tensor in offer.items() if wants(key)}


@pytest.fixture
def _threads_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores in the same memory for pushes, and no streams."""
    monkeypatch.setattr(shared_channels, "push", store)
    monkeypatch.setattr(shared_channels, "offer_tensors", dict)
    monkeypatch.setattr(
        shared_channels,
        "open_tensors",
        lambda offer, _, wants: {k: offer[k] for k in offer if wants(k)},
    )
    monkeypatch.setattr(
        shared_channels, "copy_by_engine", lambda source, target, _: target.copy_(source)
    )
    monkeypatch.setattr(peer_channels, "wait", spin)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(FakeGpu, "main", Stream(), raising=False)
    monkeypatch.setattr(FakeGpu, "synchronize", lambda self: None)


def one_process(
    schedule: Schedule, values: dict[int, Any], group: Any, found: list[dict[int, Any]]
) -> None:
    """Rehearse, then do steps as its graph would; leaves results and state of each in `found`."""
    rank, order, writes = group.rank, linear_order(schedule), write_backs(schedule)
    processes = Processes(group, schedule, range(group.size))
    gpu = FakeGpu(rank)
    for op, holders in schedule.holders.items():
        if rank in holders:
            gpu.buffers[op] = values[op].detach().clone()
    own = [place for place in order if place[0] == rank]
    random: Any = {rank: NoRandom()}
    joins = PushJoins.of(schedule)
    with torch.no_grad():
        eager = EagerRunner(schedule, {rank: gpu}, random, own, writes, (), processes)
        eager._compute(1, {}, is_trial=True)
        channels = SharedChannels(processes, gpu, eager.layouts)
        channels.rehearse()
        group.exchange("capture", "", "the capture")
        for each in found:
            carrier = channels.carrier(gpu, joins.before_wait, None)
            one_pass = DevicePass(
                *(schedule, rank, gpu.torch_device, gpu.buffers),
                carrier,
                random[rank],
                StateWrites(writes[rank], strides=eager.strides),
                joins=joins.when_over[rank],
            )
            carrier.begin()
            channels.flags[rank].epoch.add_(1)
            for _, index in own:
                one_pass.run(index)
            kept = carrier.share_results(dict(one_pass.finish()))
            assert set(processes.owners()) == kept.keys()
            for index, result in enumerate(schedule.graph.results):
                if result.replaces >= 0 and schedule.device_of_op[result.replaces] == rank:
                    kept[index] = gpu.buffers[result.replaces].clone()
            each.update(kept)


@pytest.mark.usefixtures("_threads_as_processes")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["clipped", "normed", "nmt-2"])
@pytest.mark.slow
def test_what_processes_record_computes_every_step(name: str, size: int, seed: int) -> None:
    """Whatever the placement and however threads run, none waits for ever or writes over what
    another still reads: results and state of each step are the unplaced ones."""
    graph, values = case(name)
    names = [f"cuda:{index}" for index in range(size)]
    schedule = make_schedule(graph, *random_placement(graph, size, seed), names)
    meetings, table = Meetings(size), Table(size)
    found: list[dict[int, Any]] = [{} for _ in range(STEPS)]
    threads = [
        threading.Thread(
            target=one_process,
            args=(schedule, values, SharingGroup(rank, size, meetings, table), found),
            daemon=True,
        )
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * PATIENCE_S)
    now = {op: value.detach().clone() for op, value in values.items()}
    for number, seen in enumerate(found, 1):
        expected = run_unplaced(graph, now, 0, number)
        assert sorted(seen) == list(range(len(graph.results)))
        for index, value in enumerate(expected):
            torch.testing.assert_close(seen[index], value, rtol=1e-4, atol=1e-5)
            if graph.results[index].replaces >= 0:
                now[graph.results[index].replaces] = seen[index]
