"""Which ops are fused."""

from __future__ import annotations

import graphlib
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graph.fusion.records import Made

from devplace.graph import Op, OpGraph
from devplace.graph.fusion import groups
from devplace.graph.fusion.groups import MAX_REPEATED_BYTES, Groups, Part, find_groups

SMALL = MAX_REPEATED_BYTES


def names(graph: OpGraph, part: Part | None = None) -> list[str]:
    """Groups, each as the names of its members."""
    found = find_groups(graph, part)
    return sorted(" ".join(graph.ops[k].name for k in members) for members in found.members)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    """Small graphs of sources, own calls, fusible ops and views, in every stage and part."""
    made, whole, late = Made(), [], []
    for k in range(draw(st.integers(1, 3))):
        role = draw(st.sampled_from(["input", "scalar", "parameter"]))
        made.source(f"s{k}", role, draw(st.sampled_from([SMALL, 4000])))
        whole.append(f"s{k}")
    is_cut = draw(st.booleans())
    for k in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["own", "fusible", "fusible", "fusible", "view"]))
        reads = tuple(draw(st.lists(st.sampled_from(whole), max_size=3, unique=True)))
        size = draw(st.sampled_from([SMALL, 4000]))
        depends = bool(late and set(late) & set(reads))
        stages = ["update", "backward"] if depends else ["forward", "backward", "update"]
        fields: dict[str, Any] = {
            "stage": draw(st.sampled_from(stages)),
            "module": draw(st.sampled_from(["", "a", "b"])),
            "micro_batch": draw(st.integers(-1, 1)) if is_cut else -1,
            "pays_alone": draw(st.booleans()),
        }
        fields["is_recomputed"] = fields["stage"] == "backward" and draw(st.booleans())
        if kind == "view" and reads:
            made.view(f"o{k}", reads[0], **fields)
        elif kind == "fusible":
            made.fusible(f"o{k}", *reads, num_bytes=size, **fields)
        else:
            made.own(f"o{k}", *reads, num_bytes=size, **fields)
        whole.append(f"o{k}")
        if fields["stage"] != "forward":
            late.append(f"o{k}")
    for k in range(draw(st.integers(0, 3))):
        made.source(f"c{k}", "buffer", SMALL)
        made.fusible(f"n{k}", f"c{k}", num_bytes=SMALL, stage="forward")
        made.result(f"n{k}", "state", replaces=f"c{k}")
    for name in draw(st.lists(st.sampled_from(whole), max_size=2, unique=True)):
        made.result(name)
    return made.graph()


parts = st.dictionaries(
    st.sampled_from([*(f"o{k}" for k in range(14)), "n0", "n1"]),
    st.sampled_from(["x", "y"]),
    max_size=8,
)


def keys(graph: OpGraph, index: int, pins: dict[str, str]) -> list[Hashable]:
    """What keeps an op apart from others: its pin, and its micro-batch."""
    is_cut = any(each.micro_batch > 0 for each in graph.ops)
    op = graph.ops[index]
    is_joined = is_sum(graph, index) or is_summand(graph, index)
    return [pins.get(op.name), (-1 if is_joined else op.micro_batch) if is_cut else None]


def is_sum(graph: OpGraph, index: int) -> bool:
    """Whether a fusible op of one micro-batch reads what another has made."""
    op = graph.ops[index]
    read = {graph.ops[maker].micro_batch for maker, reader in edges(graph) if reader == index}
    return op.is_fusible and op.micro_batch >= 0 and bool(read - {-1, op.micro_batch})


def is_summand(graph: OpGraph, index: int) -> bool:
    """Whether an op is a cast of a gradient of one micro-batch that is summed over all."""
    op = graph.ops[index]
    if op.micro_batch < 0 or op.stage != "backward" or not (op.is_fusible or op.is_view):
        return False
    if is_sum(graph, index):
        return False
    if any(result.tensor in op.outputs for result in graph.results):
        return False
    sizes = [sum(graph.tensors[t].num_bytes for t in some) for some in (op.inputs, op.outputs)]
    readers = [reader for maker, reader in edges(graph) if maker == index]
    of_none = (
        graph.ops[r].micro_batch < 0 or is_sum(graph, r) or is_summand(graph, r) for r in readers
    )
    return bool(readers) and sizes[0] <= sizes[1] and all(of_none)


def edges(graph: OpGraph) -> Iterator[tuple[int, int]]:
    """(maker, reader) pairs."""
    for index, op in enumerate(graph.ops):
        yield from ((graph.producer[tensor], index) for tensor in op.inputs)


def require_no_cycle(graph: OpGraph, found: Groups) -> None:
    """Contract every group, and sort what is left."""
    unit: dict[int, Hashable] = {k: k for k in range(len(graph.ops))}
    for number, members in enumerate(found.members):
        unit |= {k: ("group", number) for k in members if k not in found.repeated}
    sorter: graphlib.TopologicalSorter[Hashable] = graphlib.TopologicalSorter()
    for maker, reader in edges(graph):
        if unit[maker] != unit[reader]:
            sorter.add(unit[reader], unit[maker])
    sorter.prepare()  # raises CycleError


def is_connected(graph: OpGraph, members: set[int]) -> bool:
    """Whether one can walk from member to member along edges."""
    reached = {min(members)}
    while True:
        more = {
            end
            for pair in edges(graph)
            if set(pair) <= members and reached & set(pair)
            for end in pair
        }
        if more <= reached:
            return reached == members
        reached |= more


@settings(max_examples=300)
@given(graph=graphs(), pins=parts, most=st.sampled_from([2, 3, 256]))
@pytest.mark.slow
def test_groups_of_any_graph_can_be_contracted(
    graph: OpGraph, pins: dict[str, str], most: int
) -> None:
    """No cycle; every op in one group at most; connected; of one part; not too large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "MAX_MEMBERS", most)
        found = find_groups(graph, lambda op: pins.get(op.name))
    require_no_cycle(graph, found)
    inside = [set(members) - found.repeated for members in found.members]
    assert sum(map(len, inside)) == len(set().union(*inside))
    for members in inside:
        assert len(members) <= most
        assert all(graph.ops[k].is_fusible or graph.ops[k].is_view for k in members)
        is_counting = {graph.ops[k].name[0] for k in members} == {"n"}
        assert is_counting or is_connected(graph, members)
        for one in zip(*(keys(graph, k, pins) for k in members), strict=True):
            assert len({key for key in one if key is not None}) <= 1
        for maker, reader in edges(graph):
            both = [graph.ops[k] for k in (maker, reader)]
            if {maker, reader} <= members and {op.stage for op in both} == {"update"}:
                assert both[0].module == both[1].module
    for members in found.members:
        assert list(members) == sorted(members)
        made = {t for k in members for t in graph.ops[k].outputs}
        for k in set(members) & found.repeated:  # what they need is there, or a small source
            for tensor in graph.ops[k].inputs:
                assert tensor in made or graph.ops[graph.producer[tensor]].is_source


def test_a_product_parts_the_chain_around_it() -> None:
    """What is before it is one group, what is after it another one."""
    made = Made()
    made.source("x")
    made.fusible("a", "x")
    made.fusible("b", "a")
    made.own("mm", "b")
    made.fusible("c", "mm")
    made.fusible("d", "c")
    assert names(made.graph()) == ["a b", "c d"]


def test_a_residual_across_a_product_joins_what_is_behind_it() -> None:
    """`b + mm(b)`: the sum is as deep as the product, so it is not in the group of `b`."""
    made = Made()
    made.source("x")
    made.fusible("a", "x")
    made.fusible("b", "a")
    made.own("mm", "b")
    made.fusible("sum", "b", "mm")
    made.fusible("c", "sum")
    assert names(made.graph()) == ["a b", "sum c"]


def test_branches_that_meet_at_one_depth_are_one_group() -> None:
    """Two products of one depth, read by one sum; views on the way are members."""
    made = Made()
    made.source("x")
    made.own("left", "x")
    made.own("right", "x")
    made.view("turned", "left")
    made.fusible("sum", "turned", "right")
    made.fusible("c", "sum")
    assert names(made.graph()) == ["turned sum c"]


def test_a_late_copy_joins_its_reader() -> None:
    """What the backward pass computes again from forward values waits for who reads it there; the
    forward op of the same depth stays with the forward pass."""
    made = Made()
    made.source("x")
    made.own("mm", "x")
    made.fusible("gelu", "mm")
    made.fusible("scaled", "gelu")
    made.own("loss", "scaled")
    made.own("grad", "loss", stage="backward")
    made.fusible("again", "mm", stage="backward")
    made.fusible("times", "again", "grad", stage="backward")
    assert names(made.graph()) == ["again times", "gelu scaled"]


def test_a_block_that_is_computed_again_stays_out_of_the_forward_pass() -> None:
    """Its first ops read what is there early, as those that they copy do; they belong to the copy's
    product, and with that to the backward pass."""
    made = Made()
    made.source("x")
    made.own("before", "x")
    made.fusible("given", "before")
    made.fusible("a", "given")
    made.fusible("b", "a")
    made.own("product", "b")
    made.own("loss", "product")
    made.own("gradient", "loss", stage="backward")
    again = {"stage": "backward", "is_recomputed": True}
    made.fusible("a2", "given", **again)
    made.fusible("b2", "a2", **again)
    made.own("p2", "b2", **again)
    made.fusible("d", "gradient", "p2", stage="backward")
    made.fusible("e", "d", stage="backward")
    assert names(made.graph()) == ["a2 b2", "d e", "given a b"]


def test_constants_are_made_in_every_group_that_reads_them() -> None:
    """A number and what is computed of it; two groups have both. A large constant is made once."""
    made = Made()
    made.source("x")
    made.fusible("one", num_bytes=4)
    made.fusible("two", "one", num_bytes=4)
    made.fusible("mask")
    made.fusible("cut", "mask", num_bytes=SMALL + 4)
    made.fusible("a", "x", "two")
    made.fusible("b", "a", "cut")
    made.own("mm", "b")
    made.fusible("c", "mm", "two")
    made.fusible("d", "c", "cut")
    graph = made.graph()
    assert names(graph) == ["one two c d", "one two mask cut a b"]
    repeated = find_groups(graph).repeated
    assert {graph.ops[k].name for k in repeated} == {"one", "two", "mask"}


def test_small_reads_of_scalars_are_repeated_and_those_of_parameters_are_not() -> None:
    """A learning rate times two is anybody's; a parameter's value is that of its device."""
    made = Made()
    made.source("rate", "scalar", 8)
    made.source("p", "parameter", 8)
    made.fusible("double", "rate", num_bytes=8)
    made.fusible("of_p", "p", num_bytes=8)
    made.fusible("new", "double", "of_p", num_bytes=8)
    made.result("new", "parameter", replaces="p")
    graph = made.graph()
    assert [graph.ops[k].name for k in find_groups(graph).repeated] == ["double"]
    assert names(graph) == ["double of_p new"]


def test_a_long_chain_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven ops with three at most are groups of three, three and one; one alone is no group."""
    monkeypatch.setattr(groups, "MAX_MEMBERS", 3)
    made = Made()
    made.source("o")
    for k in range(7):
        made.fusible("o" * (k + 2), "o" * (k + 1))
    assert [name.count(" ") + 1 for name in names(made.graph())] == [3, 3]


def test_micro_batches_are_kept_apart() -> None:
    """Ops of two micro-batches, and what adds up theirs, are three groups."""
    made = Made()
    made.source("x")
    made.fusible("sum", "x")
    for k in range(2):
        made.fusible(f"a{k}", "x", micro_batch=k)
        made.fusible(f"b{k}", f"a{k}", micro_batch=k)
    made.fusible("c", "b0", "b1")
    made.fusible("d", "c")
    assert names(made.graph()) == ["a0 b0", "a1 b1", "c d"]


def test_casts_of_gradients_belong_to_their_sum() -> None:
    """Gradients of two micro-batches are cast where they are summed and used, whichever comes
    first; what is larger before than after is not, nor what the step gives."""
    made = Made()
    made.source("w", "parameter")
    for k in range(2):
        fields = {"stage": "backward", "micro_batch": k}
        made.own(f"product{k}", "w", *([f"product{k - 1}"] if k else []), num_bytes=2000, **fields)
        made.fusible(f"cast{k}", f"product{k}", **fields)
        made.own(f"rows{k}", f"product{k}", num_bytes=8000, **fields)
        made.fusible(f"twice{k}", f"rows{k}", num_bytes=8000, **fields)
        made.fusible(f"total{k}", f"twice{k}", **fields)
    made.fusible("sum", "cast0", "cast1", stage="backward", micro_batch=1)
    made.fusible("new", "w", "sum", stage="update")
    made.fusible("rest", "total0", "total1", stage="backward")
    made.fusible("last", "rest", stage="update")
    made.result("new", "parameter", "w")
    made.result("last")
    both = ["cast0 cast1 sum new", "rest last"]
    assert names(made.graph()) == [*both, "twice0 total0", "twice1 total1"]
    made.result("cast0")
    assert "cast1 sum new" in names(made.graph())


def test_updates_of_modules_are_kept_apart() -> None:
    """Norms of two gradients, their factor and what is multiplied by it are five groups."""
    made = Made()
    made.source("g")
    for module in "ab":
        made.own(f"grad_{module}", "g", stage="backward")
        made.fusible(f"square_{module}", f"grad_{module}", stage="update", module=module)
        made.fusible(f"norm_{module}", f"square_{module}", stage="update", module=module)
    made.fusible("total", "norm_a", "norm_b", stage="update")
    made.fusible("factor", "total", stage="update")
    for module in "ab":
        made.fusible(f"times_{module}", f"grad_{module}", "factor", stage="update", module=module)
        made.fusible(f"new_{module}", f"times_{module}", stage="update", module=module)
    pairs = ["norm_a", "norm_b", "total factor", "times_a new_a", "times_b new_b"]
    pairs[:2] = [f"square_{module} norm_{module}" for module in "ab"]
    assert names(made.graph()) == sorted(pairs)


def test_updates_stay_with_a_fusible_gradient() -> None:
    """Also those of two modules, where one op makes the gradients of both."""
    made = Made()
    made.source("g")
    made.fusible("grad", "g", stage="backward")
    for module in "ab":
        made.fusible(f"step_{module}", "grad", stage="update", module=module)
        made.fusible(f"new_{module}", f"step_{module}", stage="update", module=module)
    assert names(made.graph()) == ["grad step_a new_a step_b new_b"]


def test_what_decays_joins_the_update() -> None:
    """A moment times its rate reads no gradient, but waits for who reads both; so the old moment is
    read by the kernel that makes the new one."""
    made = Made()
    made.source("x")
    made.source("rate", "scalar", 8)
    made.source("moment", "state")
    made.fusible("decayed", "moment", "rate", stage="update", module="a")
    made.own("mm", "x")
    made.own("grad", "mm", stage="backward")
    made.fusible("new", "decayed", "grad", stage="update", module="a")
    made.result("new", "state", replaces="moment")
    assert names(made.graph()) == ["decayed new"]


def test_parts_are_kept_apart() -> None:
    """Ops with different keys, whatever lies between them; without keys they are one group."""
    made = Made()
    made.source("x")
    for one, other in ("xa", "ab", "bc", "cd", "de", "ef"):
        made.fusible(other, one)
    graph = made.graph()
    key = {"a": 1, "b": 1, "e": 2, "f": 2}

    def part(op: Op) -> int | None:
        return key.get(op.name)

    assert names(graph) == ["a b c d e f"]
    assert names(graph, part) == ["a b", "c d", "e f"]


def test_an_op_alone_is_no_group_unless_that_pays() -> None:
    """A sum alone may be compiled; a sum of two own calls' results may not; views do not count."""
    for pays in (False, True):
        made = Made()
        made.source("x")
        made.own("mm", "x")
        made.view("turned", "mm")
        made.fusible("sum", "turned", pays_alone=pays)
        assert names(made.graph()) == (["turned sum"] if pays else [])


def test_counters_of_one_part_are_one_group() -> None:
    """Small state that only its update reads; not what is read besides, nor what is large."""
    made = Made()
    for name, size in (("a", SMALL), ("b", SMALL), ("c", SMALL), ("read", SMALL), ("large", 4000)):
        made.source(name, "buffer", size)
        made.fusible(f"{name}'", name, num_bytes=size)
        made.result(f"{name}'", "state", replaces=name)
    made.own("reader", "read'")
    assert names(made.graph()) == ["a' b' c'"]
    assert names(made.graph(), lambda op: op.name == "b'") == ["a' c'"]


def test_views_of_sources_stay_outside() -> None:
    """A kernel reads a part of a parameter as a tensor of its own."""
    made = Made()
    made.source("p", "parameter")
    made.view("half", "p")
    made.view("again", "half")
    made.fusible("a", "again")
    made.fusible("b", "a")
    assert names(made.graph()) == ["a b"]


def test_random_numbers_wait_for_their_reader() -> None:
    """What is computed of the step's keys alone joins who reads it, at any depth."""
    made = Made()
    made.source("keys", "scalar", 4000)
    made.source("x")
    made.fusible("mask", "keys")
    made.own("mm", "x")
    made.own("mm2", "mm")
    made.fusible("drop", "mm2", "mask")
    assert names(made.graph()) == ["mask drop"]
