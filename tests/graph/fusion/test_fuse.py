"""Fused graphs: their records, and that these need no program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.graph.fusion.records import BYTES, Made
from tests.graph.fusion.test_groups import graphs
from tests.step_capture.checks import batches, sgd, small_net, xent
from torch import nn

from devplace.graph import Captured, Op, OpGraph
from devplace.graph.fusion import fuse
from devplace.graph.patterns import pinned_part
from devplace.graph.serialize import fingerprint, from_json, to_json
from devplace.step_capture import capture


def step() -> Made:
    """Product, chain of three with a view, product; a parameter's new value of its gradient."""
    made = Made()
    made.source("x")
    made.source("p", "parameter", 8000)
    made.own("mm", "x", "p")
    made.fusible("a", "mm", flops=5, workspace_bytes=70, module="one", source_line="m.py:3")
    made.view("turned", "a")
    made.fusible("b", "turned", "mm", num_bytes=9000, flops=7, module="two", call=1)
    made.fusible("c", "b", num_bytes=100, flops=11, workspace_bytes=30, target="aten.sum.default")
    made.own("grad", "a", "b", num_bytes=8000, stage="backward")
    made.fusible("scaled", "grad", num_bytes=8000, stage="update", module="one")
    made.fusible("new", "p", "scaled", num_bytes=8000, stage="update", module="one")
    made.result("c", "loss")
    made.result("new", "parameter", replaces="p")
    return made


def by_name(graph: OpGraph) -> dict[str, Op]:
    """Ops by name."""
    return {op.name: op for op in graph.ops}


def tensors(graph: OpGraph, ids: tuple[int, ...]) -> list[str]:
    """Names of tensors."""
    return [graph.tensors[k].name for k in ids]


def test_a_group_is_one_op_with_what_its_members_read_and_make() -> None:
    """Reads the product, and the view's base is made inside; gives what others read."""
    graph = step().graph()
    fused = fuse(graph)
    assert list(by_name(fused)) == ["x", "p", "mm", "fused_b", "grad", "fused_scaled"]
    group = by_name(fused)["fused_b"]
    assert tensors(fused, group.inputs) == ["mm"]
    assert tensors(fused, group.outputs) == ["a", "b", "c"]
    assert (group.bytes_read, group.bytes_written) == (BYTES, BYTES + 9000 + 100)
    assert (group.flops, group.workspace_bytes) == (5 + 7 + 11, 70)
    assert [(m.name, m.module, m.call, m.source_line) for m in group.members] == [
        ("a", "one", 0, "m.py:3"),
        ("turned", "", 0, ""),
        ("b", "two", 1, ""),
        ("c", "", 0, ""),
    ]
    assert [m.name for m in group.members if m.is_view] == ["turned"]
    assert group.targets == ("t", "t", "aten.sum.default")
    assert (group.module, group.call, group.stage) == ("two", 1, "forward")
    assert not group.is_fusible
    assert fused.plain is graph
    assert fused.meta["fuse"] is True


def test_results_and_what_they_replace_stay() -> None:
    """Named as before, of the same tensors, over the same sources."""
    fused = fuse(step().graph())
    assert [(r.name, r.role) for r in fused.results] == [("c", "loss"), ("p", "parameter")]
    assert tensors(fused, tuple(r.tensor for r in fused.results)) == ["c", "new"]
    assert fused.replaced == {fused.op_index["p"]: fused.results[1].tensor}
    update = by_name(fused)["fused_scaled"]
    assert tensors(fused, update.inputs) == ["grad", "p"]
    assert tensors(fused, update.outputs) == ["new"]
    assert (update.stage, update.module) == ("update", "one")


def test_only_picked_rows_of_a_table_are_read() -> None:
    """A gather that reads 300 of 8000 bytes; beside a view of the table all of it counts."""
    for has_view in (False, True):
        made = Made()
        made.source("x")
        made.own("table", "x", num_bytes=8000)
        made.fusible("rows", "table", num_bytes=300, bytes_read=300)
        made.fusible("a", "rows")
        if has_view:
            made.view("turned", "table")
            made.fusible("b", "turned", "a")
        made.result(made.ops[-1].name)
        (group,) = [op for op in fuse(made.graph()).ops if op.members]
        assert group.bytes_read == (8000 if has_view else 300)


def test_views_that_others_read_are_rebuilt_outside() -> None:
    """Of a group's output its owner is given, and the chain of views follows it."""
    made = Made()
    made.source("x")
    made.fusible("a", "x")
    made.fusible("b", "a")
    made.view("turned", "b")
    made.view("again", "turned")
    made.own("mm", "again")
    made.result("turned")
    fused = fuse(made.graph())
    assert list(by_name(fused)) == ["x", "fused_a", "turned", "again", "mm"]
    ops = by_name(fused)
    assert tensors(fused, ops["fused_a"].outputs) == ["b"]
    assert tensors(fused, (ops["turned"].alias_of, ops["again"].alias_of)) == ["b", "turned"]
    assert tensors(fused, (fused.results[0].tensor,)) == ["turned"]
    assert [m.name for m in ops["fused_a"].members if not m.is_view] == ["a", "b"]


def test_views_of_a_product_are_made_inside_and_outside() -> None:
    """A group and a product read one view: each its own, of the product's result."""
    made = Made()
    made.source("x")
    made.own("mm", "x")
    made.view("turned", "mm")
    made.fusible("a", "turned")
    made.fusible("b", "a")
    made.own("mm2", "turned", "b")
    fused = fuse(made.graph())
    assert set(by_name(fused)) == {"x", "mm", "fused_a", "turned", "mm2"}
    group = by_name(fused)["fused_a"]
    assert tensors(fused, group.inputs) == ["mm"]
    assert tensors(fused, group.outputs) == ["b"]


def test_constants_that_an_own_call_reads_stay_too() -> None:
    """Made in the group and once outside; one that only groups read is not."""
    made = Made()
    made.source("x")
    made.fusible("one", num_bytes=4)
    made.fusible("two", num_bytes=4)
    made.fusible("a", "x", "one")
    made.fusible("b", "a", "two")
    made.own("mm", "b", "one")
    fused = fuse(made.graph())
    assert set(by_name(fused)) == {"x", "one", "fused_a", "mm"}
    assert tensors(fused, by_name(fused)["fused_a"].inputs) == ["x"]
    assert [m.name for m in by_name(fused)["fused_a"].members] == ["one", "two", "a", "b"]


def test_ops_of_which_nothing_is_read_stay_as_they_are() -> None:
    """A group that gives nothing is none."""
    made = Made()
    made.source("x")
    made.fusible("a", "x")
    made.fusible("b", "a")
    made.own("mm", "x")
    made.result("mm")
    assert list(by_name(fuse(made.graph()))) == ["x", "a", "b", "mm"]


def test_what_reads_nothing_stays_as_it_is() -> None:
    """A table of positions that only a product reads would be a group without inputs."""
    made = Made()
    made.source("x")
    made.fusible("positions")
    made.fusible("scaled", "positions")
    made.fusible("table", "scaled")
    made.own("mm", "x", "table")
    made.result("mm", "output")
    fused = fuse(made.graph())
    assert list(by_name(fused)) == ["x", "positions", "scaled", "table", "mm"]


def test_equal_groups_have_equal_targets() -> None:
    """The same calls, shapes and wiring; another shape, call or wiring is another kernel."""

    def target(call: str = "t", size: int = BYTES, crossed: bool = False) -> str:
        made = Made()
        made.source("x", num_bytes=size)
        made.source("y", num_bytes=size)
        made.fusible("a", "x", num_bytes=size, target=call)
        made.fusible("b", *(("a", "y") if not crossed else ("y", "a")), num_bytes=size)
        made.result("b")
        (group,) = [op for op in fuse(made.graph()).ops if op.members]
        return group.target

    found = [target(), target(call="u"), target(size=800), target(crossed=True)]
    assert target() == found[0]
    assert len(set(found)) == 4


@settings(max_examples=200)
@given(graph=graphs())
@pytest.mark.slow
def test_any_graph_can_be_fused(graph: OpGraph) -> None:
    """Records are valid, names unique; results and sources stay; every op runs, or is dead;
    fusing what came from a file gives the same."""
    fused = fuse(graph)  # OpGraph checks order, names and sizes
    assert [(r.name, r.role) for r in fused.results] == [(r.name, r.role) for r in graph.results]
    for old, new in zip(graph.results, fused.results, strict=True):
        assert graph.tensors[old.tensor] == fused.tensors[new.tensor]
    kept = {op.name for op in fused.ops} | {m.name for op in fused.ops for m in op.members}
    assert {op.name for op in graph.ops if op.is_source} <= kept
    assert {op.name for op in graph.ops if not (op.is_fusible or op.is_view)} <= kept
    known = {tensor.name: tensor for tensor in graph.tensors}
    assert all(known[tensor.name] == tensor for tensor in fused.tensors)
    again = fuse(from_json(to_json(graph)))
    assert again == fused
    assert fingerprint(again) == fingerprint(fused)


@pytest.fixture(scope="module")
def captured() -> Captured:
    """A fused training step: layer norm, GELU, dropout, Adam."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    x, y = batches()[0]
    return capture(model, (x.float(), y), xent, torch.optim.Adam(model.parameters()), fuse=True)


def test_a_captured_graph_is_fused_from_its_records_alone(captured: Captured) -> None:
    """Its plain form, written to a file and read again, gives the same fused graph."""
    plain = captured.plain
    assert isinstance(plain, Captured)
    assert plain.plain is None
    assert captured.program is not plain.program
    loaded = from_json(to_json(plain))
    again = fuse(loaded)
    assert not isinstance(again, Captured)
    assert again == captured == again
    assert fingerprint(again) == fingerprint(captured) != fingerprint(plain)
    assert from_json(to_json(captured)) == captured
    assert again.plain is loaded


def test_the_program_has_a_call_for_every_op(captured: Captured) -> None:
    """Nodes are named in `op_of`, tensors have the shape of their record, sources are bound."""
    program = captured.program
    nodes = list(program.module.graph.nodes)
    assert {n.name for n in nodes if n.op == "call_function"} == program.op_of.keys() - {
        n.name for n in nodes if n.op == "placeholder"
    }
    for name, tensor in program.tensor_of.items():
        (node,) = (n for n in nodes if n.name == name)
        record = captured.tensors[tensor]
        assert tuple(node.meta["val"].shape) == record.shape
        assert str(node.meta["val"].dtype) == f"torch.{record.dtype}"
    sources = [k for k, op in enumerate(captured.ops) if op.is_source]
    assert [binding.op for binding in program.bindings] == sources
    assert set(program.op_of.values()) == set(range(len(captured.ops)))


def test_pins_part_groups() -> None:
    """Pinned to two devices, two halves of a chain are two groups; unpinned it is one, and one
    that a pin names by a member is matched."""
    made = Made()
    made.source("x")
    for k, (one, other) in enumerate(("xa", "ab", "bc", "cd")):
        made.fusible(other, one, module=f"net.{k // 2}")
    made.result("d")
    graph = made.graph()
    pins = {"net.0": "gpu:0", "net": "gpu:1"}
    assert [op.name for op in fuse(graph, pinned_part({})).ops] == ["x", "fused_a"]
    fused = fuse(graph, pinned_part(pins))
    assert [op.name for op in fused.ops] == ["x", "fused_a", "fused_c"]
    assert [op.module for op in fused.ops[1:]] == ["net.0", "net.1"]
    pins = {"net.0": "gpu:0"}
    assert [op.name for op in fuse(graph, pinned_part(pins)).ops] == ["x", "fused_a", "fused_c"]


def test_a_fused_graph_is_fused_no_further(captured: Captured) -> None:
    """Its ops are not fusible."""
    bare = from_json(to_json(captured))
    assert [op.name for op in fuse(bare).ops] == [op.name for op in captured.ops]


def test_numbers_of_micro_batches_are_kept_in_the_records() -> None:
    """Groups belong to one micro-batch each, and none is lost; those of none hold sums over them
    and the casts of their gradients."""
    model = small_net()
    graph = capture(model, batches()[0], xent, sgd(model), micro_batches=2, fuse=True)
    plain = graph.plain
    assert plain is not None
    of_op = {op.name: op.micro_batch for op in plain.ops}
    groups = [op for op in graph.ops if op.members]
    assert {op.micro_batch for op in groups} == {-1, 0, 1}
    members = [(op, m) for op in groups for m in op.members if not m.is_repeated]
    others = [(op, m) for op, m in members if of_op[m.name] != op.micro_batch]
    assert others
    assert all(op.micro_batch == -1 and m.stage == "backward" for op, m in others)


def test_casts_of_gradients_are_summed_where_they_are_used() -> None:
    """Under autocast the new weight is one op of two low-precision gradients, and weights are cast
    once for both micro-batches."""
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 4))
    batch = torch.randn(8, 32), torch.randint(4, (8,))
    options: dict[str, Any] = {"micro_batches": 2, "autocast": torch.bfloat16, "fuse": True}
    graph = capture(model, batch, xent, sgd(model), **options)
    producer = graph.producer
    for result in graph.results:
        if not result.name.endswith("weight"):
            continue
        op = graph.ops[producer[result.tensor]]
        low = [t for t in op.inputs if graph.tensors[t].dtype == "bfloat16"]
        assert len(low) == 2
        assert {m.target for m in op.members} >= {"aten._to_copy.default", "aten.add.Tensor"}
    casts = [
        op for op in graph.ops if op.target == "aten._to_copy.default" and op.stage == "forward"
    ]
    assert sum(graph.ops[producer[op.inputs[0]]].role == "parameter" for op in casts) == 4
