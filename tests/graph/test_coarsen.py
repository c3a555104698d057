"""Decision classes: modules, main path and side path."""

from __future__ import annotations

import pytest

from devplace.graph import OpGraph
from devplace.graph.coarsen import coarsen, max_depth, side_owner
from devplace.testing import hand_graph

MLP = """
    x = input
    w1 = parameter module=fc1
    m[w1] = state module=fc1
    w2 = parameter module=fc2
    h = mm(x, w1) module=fc1
    a = relu(h) module=act
    y = mm(a, w2) module=fc2
    l = sum(y) result=loss
    gy = expand(l) stage=backward
    gw2 = mm(gy, a) stage=backward module=fc2
    ga = mm(gy, w2) stage=backward module=fc2
    gh = relu_back(ga, h) stage=backward module=act
    gw1 = mm(gh, x) stage=backward module=fc1
    {between}
    m2 = mul(m[w1], {g1}) stage=update module=fc1 replaces=m[w1]
    n1 = add(w1, m2) stage=update module=fc1 replaces=w1
    n2 = add(w2, {g2}) stage=update module=fc2 replaces=w2
"""
CLIP = """
    norm = norm(gw1, gw2) stage=update
    c1 = mul(gw1, norm) stage=update module=fc1
    c2 = mul(gw2, norm) stage=update module=fc2
"""


def mlp(clip: bool = False) -> OpGraph:
    """Two linear layers, one with momentum, as a hand-made training step."""
    names = {"between": CLIP, "g1": "c1", "g2": "c2"} if clip else {"between": "", "g1": "gw1", "g2": "gw2"}  # fmt: skip  # noqa: E501
    return hand_graph(MLP.format(**names))


def sides(graph: OpGraph) -> dict[str, str]:
    """Ops on the side path with the module they serve."""
    owners = zip(graph.ops, side_owner(graph), strict=True)
    return {op.name: owner for op, owner in owners if owner is not None}


def test_the_side_path_is_what_serves_one_parameter() -> None:
    """Weight gradients, updates, parameters and their state; gradients that flow on are not."""
    found = sides(mlp())
    assert {name: found.get(name) for name in ("gw2", "n2", "w2")} == dict.fromkeys(
        ("gw2", "n2", "w2"), "fc2"
    )
    assert {name: found.get(name) for name in ("gw1", "m2", "n1", "w1", "m[w1]")} == dict.fromkeys(
        ("gw1", "m2", "n1", "w1", "m[w1]"), "fc1"
    )
    assert not {"x", "h", "a", "y", "l", "gy"} & set(found)


def test_clipping_leaves_weight_gradients_on_the_side() -> None:
    """The norm of all gradients serves all parameters, but does not pull their gradients along."""
    found = sides(mlp(clip=True))
    assert {"gw1", "gw2", "c1", "c2"} <= set(found)
    assert "norm" not in found
    assert not {"x", "h", "a", "y", "l", "gy"} & set(found)


def test_a_forward_step_has_no_side_path() -> None:
    """Without updates everything is on the main path."""
    assert sides(hand_graph("w = parameter\nx = input\ny = mm(x, w) result=output")) == {}


def test_a_buffer_update_is_on_the_side() -> None:
    """New running statistics serve nothing but their buffer."""
    graph = hand_graph(
        """
        mean = buffer module=bn
        x = input
        y = norm(x) module=bn result=output
        now = stat(x) module=bn
        new = lerp(mean, now) module=bn replaces=mean
        """
    )
    assert set(sides(graph)) == {"mean", "now", "new"}


def test_classes_are_modules_times_path() -> None:
    """Every op has one class; labels say module and path; numbers follow the first op."""
    graph = mlp()
    found = coarsen(graph, 1)
    assert len(found.of_op) == len(graph.ops)
    assert set(found.of_op.tolist()) == set(range(found.num_classes))
    label = {op.name: found.label[c] for op, c in zip(graph.ops, found.of_op, strict=True)}
    assert label["gw2"] == label["n2"] == "fc2 side"
    assert label["y"] == "fc2 main"
    assert label["l"] == "(model) main"
    firsts = [found.of_op.tolist().index(c) for c in range(found.num_classes)]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(("depth", "count"), [(0, 1), (1, 2), (2, 3), (3, 4), (9, 4)])
def test_depth_cuts_module_paths(depth: int, count: int) -> None:
    """Deeper levels are finer; below the longest path nothing changes."""
    graph = hand_graph(
        """
        a = f module=enc.0.fc
        b = f(a) module=enc.0.act
        c = f(b) module=enc.1
        d = f(c) module=dec
        """
    )
    assert max_depth(graph) == 3
    assert coarsen(graph, depth).num_classes == count


def test_calls_and_micro_batches_split_classes() -> None:
    """Time steps of a cell are cut into runs; micro-batches are told apart on request."""
    lines = [f"c{k} = f module=cell call={k}" for k in range(4)]
    graph = hand_graph("\n".join(lines))
    assert coarsen(graph, 1).of_op.tolist() == [0, 0, 0, 0]
    assert coarsen(graph, 1, calls=2).of_op.tolist() == [0, 0, 1, 1]
    assert coarsen(graph, 1, calls=8).num_classes == 4
    two = hand_graph("a = f micro_batch=0\nb = f micro_batch=1")
    assert coarsen(two, 1).num_classes == 1
    assert coarsen(two, 1, by_micro_batch=True).label == (
        "(model) main batch 0",
        "(model) main batch 1",
    )


def test_a_captured_mlp_has_its_weight_gradients_on_the_side() -> None:
    """In a captured step of two layers, one product per layer is on the side path, and the rest
    of forward and backward on the main path."""
    import torch
    from torch import nn

    from devplace.step_capture import capture

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    graph = capture(
        model, (torch.zeros(2, 8), torch.zeros(2, 4)), nn.functional.mse_loss, optimizer
    )
    owner = side_owner(graph)
    products = [
        (op.stage, found)
        for op, found in zip(graph.ops, owner, strict=True)
        if op.target.startswith("aten.mm")
    ]
    assert sorted(found for stage, found in products if found and stage == "backward") == ["0", "2"]
    assert all(
        found is not None
        for op, found in zip(graph.ops, owner, strict=True)
        if op.stage == "update" and op.outputs and op.module
    )
    assert all(
        found is None for op, found in zip(graph.ops, owner, strict=True) if op.stage == "forward"
    )
