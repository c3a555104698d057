"""What fused ops say of their members."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.fused_steps import LAYERS, TRAINING, fusible

from devplace.graph import Op, OpGraph, serialize
from devplace.graph.fusion import fuse
from devplace.graph.graph import Member
from devplace.graph.members import (
    calls_text,
    module_shares,
    modules_of,
    readers_in,
    stage_of,
    where_text,
)


def group_of(graph: OpGraph) -> Op:
    """The first fused op of a graph."""
    return next(op for op in graph.ops if op.members)


def test_members_tell_views_bytes_and_reads() -> None:
    """A view is a member that moves nothing; a member reads inputs of the group through it."""
    group = group_of(fuse(fusible(LAYERS)))
    found = [(m.name, m.is_view, m.moved_bytes, m.reads) for m in group.members]
    assert found == [("r", False, 200, (0,)), ("v", True, 0, ()), ("m", False, 100, ())]
    assert group.targets == ("relu", "mul")
    assert (where_text(group), calls_text(group)) == ("two, flat and 1 more", "relu, mul")


def test_a_view_of_an_input_passes_its_reads_on() -> None:
    """What reads a view that lies in the group reads what the view shows."""
    text = """
    x = input bytes=4
    p = aten.mm.default(x) bytes=4
    v = view(p) bytes=4
    a = relu(v) bytes=4
    b = add(a, p) bytes=4 result=output
    """
    graph = fuse(fusible(text))
    group = group_of(graph)
    assert [(m.name, m.reads) for m in group.members] == [("v", (0,)), ("a", (0,)), ("b", (0,))]
    assert [part.name for part in readers_in(graph, group, group.inputs[0])] == ["a", "b"]


def test_what_every_group_makes_anew_is_marked() -> None:
    """Small constants are members of every group that reads them, and pins do not bind them."""
    text = """
    x = input bytes=400
    c = full bytes=4 module=mask
    p = aten.mm.default(x) bytes=400
    a = add(p, c) bytes=400
    s = relu(a) bytes=400
    q = aten.mm.default(s) bytes=400
    b = add(q, c) bytes=400
    r = relu(b) bytes=400 result=output
    """
    graph = fuse(fusible(text))
    members = [m for op in graph.ops for m in op.members if m.name == "c"]
    assert len(members) == 2
    assert all(m.is_repeated and not m.is_bound for m in members)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=9), st.integers(0, 10**12))
def test_shares_add_up(sizes: list[int], amount: int) -> None:
    """The shares of modules add up to the whole, and are each within 1 of their part of it."""
    members = tuple(
        Member(f"m{k}", "add", "forward", f"module{k}", moved_bytes=size)
        for k, size in enumerate(sizes)
    )
    shares = module_shares(Op("group", "fused", members=members), amount)
    assert sum(shares.values()) == amount
    assert list(shares) == [f"module{k}" for k in range(len(sizes))]
    if sum(sizes):
        for share, size in zip(shares.values(), sizes, strict=True):
            assert abs(share * sum(sizes) - amount * size) < 2 * sum(sizes)


def test_shares_follow_bytes_and_leave_views_out() -> None:
    """200 bytes against 100: two thirds and one third; a view has nothing."""
    group = group_of(fuse(fusible(LAYERS)))
    assert module_shares(group, 90) == {"two": 60, "flat": 0, "three": 30}
    assert modules_of(group) == ("two", "flat", "three")


def test_members_that_move_nothing_share_equally() -> None:
    """Without known bytes every member but views counts the same."""
    members = (
        Member("a", "add", "forward", "one"),
        Member("v", "view", "forward", "flat", is_view=True),
        Member("b", "add", "forward", "two"),
    )
    assert module_shares(Op("g", "fused", members=members), 10) == {"one": 5, "flat": 0, "two": 5}


def test_a_plain_op_is_its_only_part() -> None:
    """All of a plain op belongs to its own module."""
    op = Op("a", "aten.add.Tensor", module="one")
    assert module_shares(op, 7) == {"one": 7}
    assert (modules_of(op), where_text(op), calls_text(op)) == (("one",), "one", "aten.add.Tensor")


def test_readers_are_found_through_views_outside() -> None:
    """A member that reads a view that stayed outside reads the tensor it shows."""
    text = """
    x = input bytes=4
    w = parameter bytes=8
    v = view(w) bytes=4
    p = aten.mm.default(x) bytes=4
    a = relu(p) bytes=4
    b = add(a, v) bytes=4 result=output
    """
    graph = fuse(fusible(text))
    weight = next(t for t, tensor in enumerate(graph.tensors) if tensor.name == "w")
    assert [part.name for part in readers_in(graph, group_of(graph), weight)] == ["b"]


def test_the_stage_of_a_tensor_is_that_of_its_member() -> None:
    """What the forward part of a mixed group makes is a forward value."""
    text = """
    x = input bytes=4
    p = aten.mm.default(x) bytes=4
    a = relu(p) bytes=4
    b = mul(a, p) bytes=8 stage=backward
    q = aten.mm.default(a, b) bytes=4 result=output stage=backward
    """
    graph = fuse(fusible(text))
    stages = {t.name: stage_of(graph, k) for k, t in enumerate(graph.tensors)}
    assert stages == {
        "x": "source", "p": "forward", "a": "forward", "b": "backward", "q": "backward"
    }  # fmt: skip


def test_members_are_in_files() -> None:
    """A fused graph read from a file has the same members."""
    graph = fuse(fusible(TRAINING))
    assert serialize.from_json(serialize.to_json(graph)).ops == graph.ops
