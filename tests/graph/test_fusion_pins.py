"""Pins and fused groups."""

from __future__ import annotations

import pytest
from tests.fused_steps import LAYERS, fusible

from devplace.errors import GraphError, ProblemError
from devplace.graph import serialize
from devplace.graph.fusion import fuse, fuse_for
from devplace.graph.patterns import cut_by
from devplace.machine import load_machine
from devplace.problem import Problem

GROUP = "fused_r"
MACHINE = load_machine("k40x2")


def problem(graph: object, pins: dict[str, str], **demands: bool) -> Problem:
    """The graph on two GPUs and a CPU."""
    from devplace.cost.analytic import Analytic

    return Problem(graph, MACHINE, Analytic()(graph, MACHINE), pins=pins, **demands)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"one": "cuda:0"},
        {"t*": "cuda:0"},
        {"two": "cuda:0", "three": "cuda:0"},
        {GROUP: "cuda:1"},
        {"*": "cuda:0"},
        {"flat": "cuda:1"},
    ],
)
def test_pins_that_cut_no_group_leave_the_graph(pins: dict[str, str]) -> None:
    """Pins of none of its members, of all, or of views only: the graph itself is given back."""
    graph = fuse(fusible(LAYERS))
    assert fuse_for(graph, pins) is graph
    assert all(cut_by(op, pins) is None for op in graph.ops)


@pytest.mark.parametrize(
    "pins", [{"two": "cuda:0"}, {"three": "cuda:1"}, {"two": "cuda:0", "three": "cuda:1"}]
)
def test_pins_that_cut_a_group_part_it(pins: dict[str, str]) -> None:
    """Members that pins send elsewhere are apart afterwards, and the pins hold."""
    graph = fuse(fusible(LAYERS))
    with pytest.raises(ProblemError, match="cut a fused group"):
        problem(graph, pins)
    parted = fuse_for(graph, pins)
    assert not any(len({m.module for m in op.members if m.is_bound}) > 1 for op in parted.ops)
    assert problem(parted, pins).notes == ()


def test_the_refusal_names_pin_group_both_sides_and_what_to_do() -> None:
    """Pin, device, group, members with modules on both sides, the other pin, the next step."""
    graph = fuse(fusible(LAYERS))
    with pytest.raises(ProblemError) as caught:
        problem(graph, {"two": "cuda:0", "three": "cuda:1"})
    text = str(caught.value)
    for part in ("'two'", "cuda:0", repr(GROUP), "'r' (module 'two')", "'m' (module 'three')"):
        assert part in text
    assert "which 'three' sends to cuda:1" in text
    assert "fuse_for(graph, pins)" in text


def test_soft_pins_do_not_cut_either() -> None:
    """Softness is for missing kernels; a cut group is refused all the same."""
    with pytest.raises(ProblemError, match="cut a fused group"):
        problem(fuse(fusible(LAYERS)), {"two": "cuda:0"}, soft_pins=True)


def test_two_names_of_one_device_cut_nothing() -> None:
    """Pins to `0` and to `cuda:0` mean the same device."""
    checked = problem(fuse(fusible(LAYERS)), {"two": "0", "three": "cuda:0"})
    group = next(k for k, op in enumerate(checked.graph.ops) if op.members)
    allowed = checked.allowed[checked.core.tasks.group[checked.core.tasks.op_task[group]]]
    assert [n for n, yes in zip(MACHINE.device_names, allowed, strict=True) if yes] == ["cuda:0"]


def test_a_pin_of_a_member_pins_the_group() -> None:
    """A pattern that names all members by their modules binds the fused op."""
    checked = problem(fuse(fusible(LAYERS)), {"t*": "cuda:1"})
    assert checked.notes == ()


def test_a_pin_of_a_view_in_a_group_is_noted() -> None:
    """As on the plain graph: what it matches follows the ops it belongs to."""
    fused = problem(fuse(fusible(LAYERS)), {"flat": "cuda:1"})
    plain = problem(fusible(LAYERS), {"flat": "cuda:1"})
    assert fused.notes == plain.notes
    assert "changes nothing" in fused.notes[0]


def test_modules_of_members_are_named_when_a_pin_matches_nothing() -> None:
    """The list of modules has those whose ops all lie in groups."""
    with pytest.raises(ProblemError, match="flat, four, one, three, two"):
        problem(fuse(fusible(LAYERS)), {"five": "cuda:0"})


def test_a_graph_from_a_file_cannot_be_fused_again() -> None:
    """Its plain step is not in the file; the message says what to do."""
    saved = serialize.from_json(serialize.to_json(fuse(fusible(LAYERS))))
    assert fuse_for(saved, {"t*": "cuda:0"}) is saved
    with pytest.raises(GraphError, match=r"fuse_for\(fuse\(graph\), pins\)"):
        fuse_for(saved, {"two": "cuda:0"})


def test_a_plain_graph_is_left() -> None:
    """Nothing is fused, so nothing is cut."""
    graph = fusible(LAYERS)
    assert fuse_for(graph, {"two": "cuda:0"}) is graph
