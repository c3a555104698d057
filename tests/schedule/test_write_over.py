"""What fused ops write over, and that doing so changes no number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from devplace.run.batch_inputs import bind_scalars
from devplace.run.cpu import CpuExecutor
from devplace.run.cuda.device_pass import DevicePass, StateWrites
from devplace.schedule import Schedule, make_schedule
from devplace.schedule.write_back import DeviceWrites, write_backs
from devplace.step_capture import capture
from tests.run.models import mean_square
from tests.run.tracing import place_by_module, random_placement
from tests.schedule.test_write_back import NoCarrier, NoRandom, case, run_pass, sources_of


def fused(name: str, count: int = 1, place: Any = None, **options: Any) -> tuple[Schedule, Any]:
    """A fused step and what each device writes over; ops in the order of the trace."""
    model, batch, loss, optimizer = case(name)
    graph = capture(model, batch, loss, optimizer, fuse=True, **options)
    placed = place_by_module(graph, place or (lambda op: 0), count)
    schedule = make_schedule(graph, *placed, ("a", "b")[:count])
    return schedule, write_backs(schedule)


def names_over(schedule: Schedule, writes: DeviceWrites, device: int = 0) -> dict[str, set[str]]:
    """Fused op -> sources that it writes over; each output over the source it replaces."""
    graph = schedule.graph
    replaced = {tensor: source for source, tensor in graph.replaced.items()}
    found = {}
    for index, over in writes.fused.items():
        kind, what, _ = schedule.instructions[device][index]
        op = graph.ops[what]
        assert kind == "call"
        assert [write.output for write in over] == sorted({write.output for write in over})
        for write in over:
            source = replaced[op.outputs[write.output]]
            assert graph.ops[source].outputs[0] == op.inputs[write.input]
            found.setdefault(op.name, set()).add(graph.ops[source].name)
    return found


@pytest.mark.parametrize(("name", "slots"), [("sgd", 1), ("adam", 2), ("amsgrad", 3)])
def test_fused_updates_write_over_all_they_replace(name: str, slots: int) -> None:
    """A weight and its state by one kernel: where a group of several outputs makes them."""
    schedule, (writes,) = fused(name)
    graph = schedule.graph
    found = names_over(schedule, writes)
    over = set().union(*found.values())
    weights = {graph.ops[k].name for k in graph.replaced if "weight" in graph.ops[k].name}
    assert len(weights) == 2 * (1 + slots)
    assert weights <= over
    assert {len(names & weights) for names in found.values()} <= {0, 1 + slots}
    assert not any(write.is_in_place for some in writes.after.values() for write in some)


def test_a_group_of_one_output_writes_over_its_source() -> None:
    """SGD with weight decay and no momentum: the call itself is the new weight."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    graph = capture(model, (torch.randn(8, 4),), mean_square, optimizer, fuse=True)
    placed = place_by_module(graph, lambda op: 0, 1)
    schedule = make_schedule(graph, *placed, ("a",))
    (writes,) = write_backs(schedule)
    assert list(names_over(schedule, writes).values()) == [{"weight"}]
    ((index, (over,)),) = writes.fused.items()
    assert (over.output, over.pushes) == (0, ())
    assert graph.program.calls[schedule.instructions[0][index].what].node.target.num_outputs == 1


@pytest.mark.usefixtures("one_by_one")
def test_what_is_read_after_a_group_is_not_written_over_by_it() -> None:
    """A first layer's weight is updated before the backward pass of the layer reads it, if the
    order says so; then the new value is copied when it has been read."""
    model, batch, loss, optimizer = case("adam")
    graph = capture(model, batch, loss, optimizer, fuse=True)
    devices, (order,) = place_by_module(graph, lambda op: 0, 1)
    weight = graph.op_index["two.weight"]
    update = graph.producer[graph.replaced[weight]]
    value = graph.ops[weight].outputs[0]
    views = {t for op in graph.ops if op.alias_of == value for t in op.outputs}
    readers = [k for k in order if {value, *views} & set(graph.ops[k].inputs) and k != update]
    late = readers[-1]
    assert graph.ops[late].stage == "backward"
    for comes_late in (True, False):
        rest = [k for k in order if k not in (late, update)]
        pair = [update, late] if comes_late else [late, update]
        place = order_that_runs(graph, rest, pair)
        schedule = make_schedule(graph, devices, [place], ("a",))
        (writes,) = write_backs(schedule)
        over = set().union(*names_over(schedule, writes).values())
        assert ("two.weight" in over) != comes_late
        assert "exp_avg[two.weight]" in over
        check_steps(schedule, model, batch, optimizer)


def order_that_runs(graph: Any, rest: list[int], pair: list[int]) -> list[int]:
    """Ops in an order that can be run, those of a pair one after the other."""
    needs = {}
    root = list(range(len(graph.ops)))
    for index, op in enumerate(graph.ops):
        if op.is_view:
            root[index] = root[graph.producer[op.alias_of]]
        elif not op.is_source:
            above = {root[graph.producer[t]] for t in op.inputs}
            needs[index] = {up for up in above if not graph.ops[up].is_source}
    needs[pair[1]].add(pair[0])
    done: list[int] = []
    todo = [*pair, *rest]
    while todo:
        ready = next(k for k in todo if needs[k] <= set(done))
        done.append(ready)
        todo.remove(ready)
    return done


def check_steps(schedule: Schedule, model: Any, batch: Any, optimizer: Any) -> None:
    """Three steps over the same buffers equal three steps that keep old and new state apart."""
    graph = schedule.graph
    executor = CpuExecutor(schedule)
    buffers = {}
    for op, value in sources_of(graph, model, batch, optimizer, 1).items():
        executor.put(op, value)
        buffers[op] = value.detach().clone()
    before = {op: value.clone() for op, value in buffers.items()}
    places = {op: value.data_ptr() for op, value in buffers.items()}
    (writes,) = write_backs(schedule)
    strides: dict[Any, tuple[int, ...]] = {}
    run_pass(schedule, buffers, StateWrites(writes, is_trial=True, strides=strides))
    assert all(torch.equal(buffers[op], value) for op, value in before.items())
    groups = None if optimizer is None else optimizer.param_groups
    for number in (1, 2, 3):
        for op, value in bind_scalars(graph, number, groups).items():
            executor.put(op, value)
            buffers[op].copy_(value)
        expected = executor.step(number).results
        found = run_pass(schedule, buffers, StateWrites(writes, strides=strides))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
        assert all(torch.equal(buffers[op], executor.get(op)) for op in graph.replaced)
    assert {op: value.data_ptr() for op, value in buffers.items()} == places
    executor.close()


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("name", ["sgd", "adam", "amsgrad", "normed", "swapped", "counting"])
def test_fused_steps_written_over_give_the_same_numbers(name: str) -> None:
    """Groups write into the old values' memory, a trial into none; no number is another one."""
    model, batch, loss, optimizer = case(name)
    graph = capture(model, batch, loss, optimizer, fuse=True)
    schedule = make_schedule(graph, *random_placement(graph, 1, 1), ("cpu:0",))
    check_steps(schedule, model, batch, optimizer)


def test_a_group_waits_until_what_it_writes_over_has_left() -> None:
    """A weight that another device reads is sent; the group on its home names that push."""
    schedule, devices = fused("adam", 2, lambda op: 1 if op.stage in ("forward", "backward") else 0)
    over = [write for some in devices[0].fused.values() for write in some]
    graph = schedule.graph
    pushed = {transfer for write in over for transfer in write.pushes}
    assert pushed
    assert {graph.tensors[schedule.transfers[k].tensor].name for k in pushed} == {
        "one.weight",
        "two.weight",
    }


def test_a_group_joins_its_pushes_before_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The carrier is asked to wait for them before the kernel runs, and in a trial too."""
    monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    schedule, (writes,) = fused("adam")
    model, batch, _, optimizer = case("adam")
    index, over = next((k, some) for k, some in writes.fused.items() if len(some) > 1)
    marked = {k: tuple(w._replace(pushes=(7,)) for w in some) for k, some in writes.fused.items()}
    joined: list[int] = []

    class Noting(NoCarrier):
        def join(self, transfer: int) -> None:
            joined.append(transfer)

    buffers = {
        op: value.detach().clone()
        for op, value in sources_of(schedule.graph, model, batch, optimizer, 1).items()
    }
    state = StateWrites(replace(writes, fused=marked))
    one: Any = DevicePass(
        schedule,
        0,
        torch.device("cpu"),
        buffers,
        Noting(),
        NoRandom(),
        state,  # type: ignore[arg-type]
    )
    with torch.no_grad():
        for k in range(index):
            one.run(k)
        joined.clear()
        one.run(index)
    assert joined == [7] * len(over)
