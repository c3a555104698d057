"""What a step keeps in memory, told beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from devplace.cost import CostTable
from devplace.graph import Captured
from devplace.graph.program import Call
from devplace.problem import Placement, Problem
from devplace.run.cuda.device_pass import DevicePass, StateWrites
from devplace.schedule import Schedule, linear_order, make_schedule, write_backs
from devplace.schedule.linear import PushJoins, lane_of
from devplace.schedule.live import Change, memory_changes
from devplace.simulator.in_order import simulate_in_order
from devplace.step_capture import capture
from devplace.testing import hand_machine
from tests.run.tracing import random_placement, trace
from tests.schedule.test_write_back import NoRandom, case, sources_of

Alive = list[set[int]]


class LatePushes:
    """One device's pushes, which are over when they are joined and not before."""

    def __init__(self, schedule: Schedule, joins: PushJoins, mail: dict[int, Any]) -> None:
        self._schedule, self._joins, self._mail = schedule, joins, mail
        self._flying: dict[int, list[tuple[int, Any]]] = {}

    def send(self, transfer: int, value: Any) -> None:
        lane = lane_of(self._schedule.transfers[transfer])
        self._flying.setdefault(lane, []).append((transfer, value))
        self._mail[transfer] = value.clone()

    def receive(self, transfer: int) -> Any:
        for send in self._joins.before_wait.get(transfer, ()):
            self.join(send)
        return self._mail[transfer]

    def join(self, transfer: int) -> None:
        line = self._flying.get(lane_of(self._schedule.transfers[transfer]), [])
        if transfer in [sent for sent, _ in line]:
            while line.pop(0)[0] != transfer:
                pass

    def flush(self) -> bool:
        return False

    def finish(self) -> None:
        self._flying.clear()


class Watched(DevicePass):
    """A step that tells which of the tensors it made still have their memory."""

    refs: dict[int, StorageWeakRef]

    def _keep(self, call: Call, made: Any) -> None:
        super()._keep(call, made)
        program, graph = self._schedule.captured.program, self._schedule.graph
        op = program.op_of[call.node.name]
        held = {value.untyped_storage().data_ptr() for value in self._sources.values()}
        for tensor in () if graph.ops[op].is_view else graph.ops[op].outputs:
            value = self._values.get(tensor)
            if value is not None and value.untyped_storage().data_ptr() not in held:
                self.refs[tensor] = StorageWeakRef(value.untyped_storage())

    def alive(self) -> set[int]:
        return {tensor for tensor, ref in self.refs.items() if not ref.expired()}


def watched(schedule: Schedule, buffers: list[dict[int, Any]], joins: PushJoins) -> list[Alive]:
    """Per device: what is alive after each instruction of a real step, the second of two."""
    mail: dict[int, Any] = {}
    writes, strides = write_backs(schedule), [{} for _ in buffers]
    found: list[Alive] = [[] for _ in buffers]
    for is_trial in (True, False):
        passes: list[Any] = []
        for device, own in enumerate(buffers):
            carrier: Any = LatePushes(schedule, joins, mail)
            state = StateWrites(writes[device], is_trial, strides[device])
            cpu, when_over = torch.device("cpu"), joins.when_over[device]
            passes.append(
                Watched(schedule, device, cpu, own, carrier, NoRandom(), state, None, when_over)  # type: ignore[arg-type]
            )
            passes[-1].refs = {}
        with torch.no_grad():
            for device, index in linear_order(schedule):
                passes[device].run(index)
                if not is_trial:
                    found[device].append(passes[device].alive())
        for one in passes:
            one.finish()
    return found


def told(changes: list[Change], num_instructions: int) -> Alive:
    """The same from the changes of one device."""
    alive: set[int] = set()
    of = {change.at: change for change in changes}
    found = []
    for index in range(num_instructions):
        _, joined, _, taken, freed = of.get(index, Change(index, (), -1, (), ()))
        alive -= set(joined)
        alive |= set(taken)
        alive -= set(freed)
        found.append(set(alive))
    return found


def check(graph: Captured, values: dict[int, Any], num_devices: int, seed: int) -> Schedule:
    """A real step has in memory what was told, after every instruction on every device."""
    names = [f"cuda:{k}" for k in range(num_devices)]
    schedule = make_schedule(graph, *random_placement(graph, num_devices, seed), names)
    joins, writes = PushJoins.of(schedule), write_backs(schedule)
    buffers = [
        {
            op: value.clone()
            for op, value in values.items()
            if device in schedule.holders.get(op, ())
        }
        for device in range(num_devices)
    ]
    found = watched(schedule, buffers, joins)
    kept = set(graph.program.tensor_of.values())  # outputs that nobody reads are not
    for device in range(num_devices):
        changes = list(memory_changes(schedule, device, writes[device], joins))
        expected = [alive & kept for alive in told(changes, len(found[device]))]
        assert found[device] == expected
    return schedule


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), num_devices=st.integers(1, 3))
@pytest.mark.parametrize("name", ["sgd", "adam", "normed", "counting", "swapped"])
@pytest.mark.slow
def test_what_is_in_memory_is_told_beforehand(name: str, seed: int, num_devices: int) -> None:
    """On random placements, with updates written over old values, views and pushes."""
    model, batch, loss, optimizer = case(name)
    graph = capture(model, batch, loss, optimizer)
    check(graph, sources_of(graph, model, batch, optimizer, 1), num_devices, seed)


def mixed_sizes() -> Captured:
    """Tensors from 4 bytes to 8 MiB that grow as they are mixed, and views of their parts."""

    def mix(*vectors: torch.Tensor) -> list[torch.Tensor]:
        now = list(vectors)
        for _ in range(4):
            now = [(now[k] + now[k - 1][:1]).sin() for k in range(len(now))]
        return now

    shapes = [(1, 1), (1, 2**19), (4, 1), (1, 1)]
    names = [f"v{k}" for k in range(len(shapes))]
    sources = {n: ("input", torch.ones(shape)) for n, shape in zip(names, shapes, strict=True)}
    return trace(mix, sources, [(f"out{k}", "output") for k in range(len(names))])


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), num_devices=st.integers(2, 4))
@pytest.mark.slow
def test_pushes_keep_their_memory_until_they_are_joined(seed: int, num_devices: int) -> None:
    """Large ones until they should be over, small ones until a wait needs them."""
    graph = mixed_sizes()
    values = {op: torch.ones(graph.tensors[op].shape) for op in range(4)}
    check(graph, values, num_devices, seed)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), num_devices=st.integers(1, 4))
def test_what_crosses_in_the_simulator_crosses_in_the_schedule(seed: int, num_devices: int) -> None:
    """Each tensor once per reader, with the same size."""
    graph = mixed_sizes()
    placement, order = random_placement(graph, num_devices, seed)
    names = [f"cuda:{k}" for k in range(num_devices)]
    schedule = make_schedule(graph, placement, order, names)
    zeros = np.zeros((len(graph.ops), num_devices), np.int64)
    problem = Problem(graph, hand_machine(dict.fromkeys(names, 2**40)), CostTable(zeros, "none"))
    placed = Placement(np.array(placement, np.int32))
    simulated = simulate_in_order(problem, placed, order).transfers
    assert sorted((t.tensor, t.src, t.dst) for t in simulated) == sorted(
        (t.tensor, t.src, t.dst) for t in schedule.transfers
    )
