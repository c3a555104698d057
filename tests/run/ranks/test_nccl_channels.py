"""What each process records for its GPU, tried on CPUs.

Threads stand for processes, memory of the CPU for that of GPUs, and queues for NCCL. Streams,
graphs and NCCL itself need GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from devplace.run.cuda import nccl_channels
from devplace.run.cuda.device_pass import DevicePass, StateWrites
from devplace.run.cuda.eager import EagerRunner
from devplace.run.cuda.nccl_channels import NcclChannels
from devplace.run.ranks.processes import Processes
from devplace.run.unplaced import run_unplaced
from devplace.schedule import Schedule, make_schedule
from devplace.schedule.linear import PushJoins, joined_before, linear_order
from devplace.schedule.write_back import write_backs
from tests.run.test_transient_values import FakeGpu, NoRandom, case
from tests.run.tracing import random_placement

PATIENCE_S = 60.0
"""After which a thread that waits for another gives up."""


class Stream:
    """A stream on which everything is done at once."""

    def wait_stream(self, _: Any) -> None:
        """All is done."""

    def wait_event(self, _: Any) -> None:
        """All is done."""

    def record_event(self) -> None:
        """Nothing to wait for."""


class Meetings:
    """Messages between threads; a sender waits until the receiver has come."""

    def __init__(self, size: int) -> None:
        pairs = [(a, b) for a in range(size) for b in range(size)]
        self.sent: dict[Any, SimpleQueue[Any]] = {pair: SimpleQueue() for pair in pairs}
        self.taken: dict[Any, SimpleQueue[Any]] = {pair: SimpleQueue() for pair in pairs}


class ThreadGroup:
    """What is needed of a group, and of NCCL's, for a thread in place of a process."""

    def __init__(self, rank: int, size: int, meetings: Meetings) -> None:
        self.rank, self.size, self._meetings = rank, size, meetings

    def send(self, message: Any, rank: int) -> None:
        """Wait for the receiver."""
        self._meetings.sent[self.rank, rank].put(message.clone())
        self._meetings.taken[self.rank, rank].get(timeout=PATIENCE_S)

    def receive(self, message: Any, rank: int) -> None:
        """Wait for the sender."""
        found = self._meetings.sent[rank, self.rank].get(timeout=PATIENCE_S)
        assert (found.shape, found.dtype) == (message.shape, message.dtype)
        message.copy_(found)
        self._meetings.taken[rank, self.rank].put(None)

    def run(self, job: Any) -> Any:
        """At once."""
        return job()


@pytest.fixture
def _threads_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues for NCCL, and no streams."""
    calls = SimpleNamespace(
        send=lambda tensor, rank, group: group.send(tensor, rank),
        recv=lambda tensor, rank, group: group.receive(tensor, rank),
    )
    monkeypatch.setattr(nccl_channels, "dist", calls)
    monkeypatch.setattr(nccl_channels, "Flags", lambda transfers, device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(FakeGpu, "main", Stream(), raising=False)
    monkeypatch.setattr(FakeGpu, "synchronize", lambda self: None)


def one_process(
    schedule: Schedule, values: dict[int, Any], group: Any, found: dict[int, Any]
) -> None:
    """Rehearse, then do a step as its graph would; leaves results and state in `found`."""
    rank, order, writes = group.rank, linear_order(schedule), write_backs(schedule)
    processes = Processes(group, schedule, range(group.size))
    gpu = FakeGpu(rank)
    for op, holders in schedule.holders.items():
        if rank in holders:
            gpu.buffers[op] = values[op].detach().clone()
    own = [place for place in order if place[0] == rank]
    devices: Any = {rank: gpu}
    random: Any = {rank: NoRandom()}
    with torch.no_grad():
        eager = EagerRunner(schedule, devices, random, own, writes, (), processes)
        eager._compute(1, {}, is_trial=True)
        channels = NcclChannels(schedule, gpu, eager.layouts, processes, group)
        channels.rehearse()
        carrier = channels.carrier(gpu, joined_before(schedule, order), None)
        one_pass = DevicePass(
            *(schedule, rank, gpu.torch_device, gpu.buffers),
            carrier,
            random[rank],
            StateWrites(writes[rank], strides=eager.strides),
            joins=PushJoins.of(schedule).when_over[rank],
        )
        for _, index in own:
            one_pass.run(index)
        kept = carrier.share_results(dict(one_pass.finish()))
    assert set(processes.owners()) == kept.keys()
    for index, result in enumerate(schedule.graph.results):
        if result.replaces >= 0 and schedule.device_of_op[result.replaces] == rank:
            kept[index] = gpu.buffers[result.replaces]
    found.update(kept)


@pytest.mark.usefixtures("_threads_as_processes")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["clipped", "normed", "nmt-2"])
@pytest.mark.slow
def test_what_processes_record_computes_the_step(name: str, size: int, seed: int) -> None:
    """Whatever the placement, no thread waits for ever, and every result is the unplaced one's."""
    graph, values = case(name)
    names = [f"cuda:{index}" for index in range(size)]
    schedule = make_schedule(graph, *random_placement(graph, size, seed), names)
    meetings, found = Meetings(size), {}
    threads = [
        threading.Thread(
            target=one_process,
            args=(schedule, values, ThreadGroup(rank, size, meetings), found),
            daemon=True,
        )
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * PATIENCE_S)
    expected = run_unplaced(graph, {op: v.detach().clone() for op, v in values.items()}, 0, 1)
    assert sorted(found) == list(range(len(graph.results)))
    for index, value in enumerate(expected):
        torch.testing.assert_close(found[index], value, rtol=1e-5, atol=1e-6)
