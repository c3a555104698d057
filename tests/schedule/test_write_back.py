"""When new state may overwrite the old, and that doing so changes no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.cpu import CpuExecutor
from devplace.run.cuda.device_pass import DevicePass, StateWrites
from devplace.run.state import ModelState
from devplace.schedule import Schedule, make_schedule
from devplace.schedule.write_back import DeviceWrites, write_backs
from devplace.step_capture import capture
from tests.run.models import Clipped, Normed, mean_square
from tests.run.placed import adam, sgd
from tests.run.tracing import place_by_module, random_placement


class NoCarrier:
    """For one device."""

    def send(self, transfer: int, value: Any) -> None:
        """Nothing is sent."""

    def receive(self, transfer: int) -> Any:
        """Nothing is received."""

    def flush(self) -> bool:
        """Nothing to wait for."""
        return False

    def join(self, transfer: int) -> None:
        """Nothing is sent."""

    def finish(self) -> None:
        """Nothing is sent."""


class NoRandom:
    """For a step without random ops."""

    def draws(self, name: str) -> bool:
        """None does."""
        return False


class Swapped(nn.Module):
    """Two buffers that change places, and a view of one that is handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.arange(4.0))
        self.register_buffer("second", torch.arange(4.0) + 10)

    def forward(self, x: Any) -> Any:
        first, second = self.first, self.second
        self.first, self.second = second, first
        return x + first, second[:2]


class Counting(nn.Module):
    """A buffer read again after its new value is known, and the new value handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        old = self.count
        self.count = old + 1
        return x * self.count + old, self.count


def case(name: str) -> tuple[Any, Any, Any, Any]:
    """Model, batch, loss and optimizer."""
    torch.manual_seed(0)
    if name == "swapped":
        return Swapped(), (torch.randn(4),), None, None
    if name == "counting":
        return Counting(), (torch.randn(3),), None, None
    if name == "normed":
        model, batch = Normed(), (torch.randn(4, 2, 8, 8),)
        return model, batch, mean_square, adam(list(model.parameters()))
    model = Clipped()
    makers: dict[str, Callable[[Any], Any]] = {
        "sgd": sgd,
        "adam": adam,
        "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    }
    optimizer = makers[name](list(model.parameters()))
    return model, (torch.randn(8, 4),), mean_square, optimizer


def sources_of(graph: Any, model: Any, batch: Any, optimizer: Any, number: int) -> dict[int, Any]:
    """A value per source op."""
    groups = None if optimizer is None else optimizer.param_groups
    return {
        **ModelState(graph, model, optimizer).read(),
        **bind_inputs(graph, batch, {}),
        **bind_scalars(graph, number, groups),
    }


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As logical devices compute: sums over several threads round in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["sgd", "adam", "amsgrad", "normed", "swapped", "counting"])
def test_writing_in_place_gives_the_same_numbers(name: str) -> None:
    """Three steps over the same buffers equal three steps that keep old and new state apart."""
    model, batch, loss, optimizer = case(name)
    graph = capture(model, batch, loss, optimizer)
    placed = random_placement(graph, 1, 0)
    schedule = make_schedule(graph, *placed, ("cpu:0",))
    executor = CpuExecutor(schedule)
    buffers = {}
    for op, value in sources_of(graph, model, batch, optimizer, 1).items():
        executor.put(op, value)
        buffers[op] = value.detach().clone()
    places = {op: value.data_ptr() for op, value in buffers.items()}
    (writes,) = write_backs(schedule)
    strides: dict[Any, tuple[int, ...]] = {}
    run_pass(schedule, buffers, StateWrites(writes, is_trial=True, strides=strides))
    for number in (1, 2, 3):
        groups = None if optimizer is None else optimizer.param_groups
        for op, value in bind_scalars(graph, number, groups).items():
            executor.put(op, value)
            buffers[op].copy_(value)
        expected = executor.step(number).results
        found = run_pass(schedule, buffers, StateWrites(writes, strides=strides))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
        assert all(torch.equal(buffers[op], executor.get(op)) for op in graph.replaced)
    assert {op: value.data_ptr() for op, value in buffers.items()} == places


def run_pass(schedule: Schedule, buffers: dict[int, Any], state: StateWrites) -> dict[int, Any]:
    """One step of one device; the results that replace nothing."""
    one: Any = DevicePass(
        schedule,
        0,
        torch.device("cpu"),
        buffers,
        NoCarrier(),
        NoRandom(),
        state,  # type: ignore[arg-type]
    )
    with torch.no_grad():
        for index in range(len(schedule.instructions[0])):
            one.run(index)
        return {result: value.clone() for result, value in one.finish()}


@pytest.mark.parametrize(("name", "slots"), [("sgd", 2), ("adam", 3), ("amsgrad", 4)])
def test_optimizers_are_computed_in_place(name: str, slots: int) -> None:
    """Every parameter and every slot of its state is written by the op that computes it."""
    model, batch, loss, optimizer = case(name)
    graph = capture(model, batch, loss, optimizer)
    (writes,) = write_backs(make_schedule(graph, *random_placement(graph, 1, 0), ("cpu:0",)))
    found = [write for some in writes.after.values() for write in some]
    assert len(found) == len(graph.replaced) == slots * len(list(model.parameters()))
    assert all(write.is_in_place for write in found)
    assert not writes.at_end
    assert {t for dropped in writes.drops.values() for t in dropped} == {w.tensor for w in found}


def test_a_decayed_moment_lies_where_the_moment_was() -> None:
    """Adam's second moment times its decay, to which the gradient is added later, needs no memory
    of its own; where something else reads the moment later, it does."""
    model, batch, loss, optimizer = case("adam")
    graph = capture(model, batch, loss, optimizer)
    schedule = make_schedule(graph, *random_placement(graph, 1, 0), ("cpu:0",))
    (writes,) = write_backs(schedule)
    writes_of = {write.source: k for k, some in writes.after.items() for write in some}
    squares = [op for op in graph.replaced if "exp_avg_sq" in graph.ops[op].name]
    assert sorted(scratch.source for scratch in writes.scratch.values()) == sorted(squares)
    for index, scratch in writes.scratch.items():
        assert index < writes_of[scratch.source]
        assert graph.ops[schedule.instructions[0][index].what].outputs == (scratch.tensor,)
    model, batch, loss, optimizer = case("counting")
    graph = capture(model, batch, loss, optimizer)
    schedule = make_schedule(graph, *random_placement(graph, 1, 0), ("cpu:0",))
    assert not write_backs(schedule)[0].scratch


def test_a_trial_takes_no_second_value_and_changes_none() -> None:
    """Trying a step with Adam leaves all sources alone and finds the layouts of the step itself."""
    model, batch, loss, optimizer = case("adam")
    graph = capture(model, batch, loss, optimizer)
    schedule = make_schedule(graph, *random_placement(graph, 1, 0), ("cpu:0",))
    buffers = {
        op: value.detach().clone()
        for op, value in sources_of(graph, model, batch, optimizer, 1).items()
    }
    before = {op: value.clone() for op, value in buffers.items()}
    (writes,) = write_backs(schedule)
    tried: dict[Any, tuple[int, ...]] = {}
    run_pass(schedule, buffers, StateWrites(writes, is_trial=True, strides=tried))
    assert all(torch.equal(buffers[op], value) for op, value in before.items())
    found: dict[Any, tuple[int, ...]] = {}
    run_pass(schedule, buffers, StateWrites(writes, strides=found))
    assert {node: tried[node] for node in found} == found
    assert set(found) <= set(tried)


def test_the_old_value_is_kept_while_it_is_read() -> None:
    """New counts wait for the last reader of the old ones; swapped buffers wait for the end."""
    writes = {}
    for name in ("counting", "swapped"):
        model, batch, loss, optimizer = case(name)
        graph = capture(model, batch, loss, optimizer)
        schedule = make_schedule(graph, *random_placement(graph, 1, 0), ("cpu:0",))
        (writes[name],) = write_backs(schedule)
        instructions = schedule.instructions[0]
    assert len(writes["swapped"].at_end) == 2
    assert not writes["swapped"].after
    ((index, (write,)),) = writes["counting"].after.items()
    assert not write.is_in_place
    assert not write.may_stand_in
    assert index > 0
    assert instructions


@pytest.mark.parametrize("seed", range(5))
def test_no_reader_of_an_old_value_comes_after_its_write(seed: int) -> None:
    """On random placements nothing that a source feeds runs after the source was overwritten."""
    model, batch, loss, optimizer = case("normed")
    graph = capture(model, batch, loss, optimizer)
    schedule = make_schedule(graph, *random_placement(graph, 3, seed), ("a", "b", "c"))
    all_writes = write_backs(schedule)
    assert sum(map(count, all_writes)) == len(graph.replaced)
    for instructions, writes in zip(schedule.instructions, all_writes, strict=True):
        for index, some in writes.after.items():
            for write in some:
                touched = tainted(schedule, write.source)
                sent = [t for kind, what, t in instructions if kind == "send" and what in touched]
                assert sorted(write.pushes) == sorted(sent)
                for kind, what, _ in instructions[index + 1 :]:
                    assert not (kind == "send" and what in touched)
                    assert kind != "call" or not touched & set(graph.ops[what].inputs)


def count(writes: DeviceWrites) -> int:
    """How many write-backs there are."""
    return len(writes.at_end) + sum(map(len, writes.after.values()))


def tainted(schedule: Schedule, source: int) -> set[int]:
    """Tensors in the memory of a source: its value and views, worked out from the FX graph."""
    program = schedule.captured.program
    nodes = list(program.module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    found = {
        node
        for node, binding in zip(placeholders, program.bindings, strict=True)
        if binding.op == source
    }
    calls = [node for node in nodes if node.op == "call_function"]
    for node in calls:
        is_view = schedule.graph.ops[program.op_of[node.name]].is_view
        if is_view and node.all_input_nodes[:1] and node.all_input_nodes[0] in found:
            found.add(node)
    return {program.tensor_of[node.name] for node in found if node.name in program.tensor_of}


def test_a_pushed_source_is_overwritten_only_after_the_push() -> None:
    """A parameter that another device needs is sent, and its write-back names that push."""
    model, batch, loss, optimizer = case("adam")
    graph = capture(model, batch, loss, optimizer)
    placed = place_by_module(graph, lambda op: 1 if op.stage == "forward" else 0, 2)
    schedule = make_schedule(graph, *placed, ("a", "b"))
    writes = [w for device in write_backs(schedule) for some in device.after.values() for w in some]
    assert any(write.pushes for write in writes)
