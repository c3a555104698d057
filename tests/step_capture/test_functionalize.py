"""Writes in place, through views of any kind, give what eager mode gives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.step_capture.checks import Runner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from devplace.step_capture import capture, functionalize
from devplace.step_capture.tags import Tag, Tagger

aten = torch.ops.aten

VIEWS: list[Callable[[Any], Any]] = [
    lambda t: t,
    lambda t: t[1],
    lambda t: t[:, 1:3],
    lambda t: t.t(),
    lambda t: t.view(-1)[2:7],
    lambda t: t.diagonal(),
    lambda t: t.split(2)[1],
    lambda t: t.unbind(1)[0],
    lambda t: t.as_strided((2, 3), (5, 1), 1),
    lambda t: t.t()[1:].unsqueeze(0),
]
WRITES: list[Callable[[Any, Any], Any]] = [
    lambda v, x: v.add_(1.5),
    lambda v, x: v.mul_(x.sum()),
    lambda v, x: v.copy_(x.view(-1)[: v.numel()].view(v.shape)),
    lambda v, x: v.zero_(),
    lambda v, x: v.fill_(x[0, 0]),
    lambda v, x: v.masked_fill_(v > 0, 0.25),
    lambda v, x: v.clamp_(min=-0.5),
]
STEPS = st.tuples(
    st.integers(0, 1),
    st.integers(0, len(VIEWS) - 1),
    st.integers(0, len(WRITES) - 1),
    st.integers(0, len(VIEWS) - 1),
)


class Writing(nn.Module):
    """Writes to two tensors and to a buffer in turn, and reads them in between."""

    def __init__(self, steps: list[tuple[int, int, int, int]], has_buffer: bool) -> None:
        super().__init__()
        self.steps, self.has_buffer = steps, has_buffer
        self.register_buffer("kept", torch.arange(16.0).view(4, 4) / 7 - 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What was read."""
        tensors = [x * 2, self.kept if self.has_buffer else x - 1]
        early = [tensors[0].t()[1], tensors[1][0]]  # views that are made before the writes
        found = []
        for tensor, place, write, read in self.steps:
            WRITES[write](VIEWS[place](tensors[tensor]), x)
            found.append(VIEWS[read](tensors[1 - tensor]) * 1.0 + early[tensor].sum())
        return [*found, *tensors, *early]


@settings(max_examples=25)
@example([(1, 3, 5, 0), (0, 0, 0, 4)], False)  # a mask through a transposed view
@given(st.lists(STEPS, min_size=1, max_size=6), st.booleans())
def test_any_order_of_writes_and_reads_is_as_in_eager_mode(
    steps: list[tuple[int, int, int, int]], has_buffer: bool
) -> None:
    """Bit for bit, the buffer after the step included."""
    model, x = Writing(steps, has_buffer), torch.linspace(-1, 1, 16).view(4, 4)
    graph = capture(model, x)
    assert not any(
        op.target.split(".")[1].endswith("_") for op in graph.ops if op.target != "source"
    )
    runner = Runner(graph, model)
    got, want = runner.step(1, x), model(x)
    outputs = [
        value for result, value in zip(graph.results, got, strict=True) if result.role == "output"
    ]
    assert len(outputs) == len(want)
    for one, other in zip(outputs, want, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(runner.named("buffer")["kept"], model.kept)


def test_only_what_is_written_is_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One write through a view does not cost a second trace of all."""

    class Deep(nn.Module):
        """Many ops, and one row that is written."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Something."""
            for _ in range(30):
                x = (x * 1.1).tanh()
            out = x.clone()
            out[0] = x[1]
            return out * 2

    found: list[functionalize._Writes] = []

    class Noted(functionalize._Writes):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            found.append(self)

    monkeypatch.setattr(functionalize, "_Writes", Noted)
    graph = capture(Deep(), torch.randn(3, 2))
    assert [op.target for op in graph.ops].count("aten.tanh.default") == 30
    assert sorted(str(node.target) for node in found[0].inside) == [
        "aten.copy_.default",
        "aten.select.int",
    ]


def test_names_of_one_memory_are_told_apart_from_two_memories() -> None:
    """Two nodes that take the same output of an op: a write to one is read through the other."""
    mode, graph = FakeTensorMode(), torch.fx.Graph()

    def add(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        with mode:
            value = target(*torch.fx.node.map_arg(args, lambda each: each.meta["val"]))
        node.meta.update(val=value, tag=Tag("forward", ""))
        return node

    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(3, 2)
    both = add(aten.sort.default, x)
    one, other = add(operator.getitem, both, 0), add(operator.getitem, both, 0)
    add(aten.fill_.Scalar, add(aten.select.int, one, 0, 0), 7.0)
    graph.output([add(aten.mul.Tensor, other, 1.0)])
    gm = torch.fx.GraphModule(nn.Module(), graph)
    functionalize.make_functional(gm, Tagger(nn.Module()))
    gm.graph.lint()
    gm.recompile()
    (found,) = gm(torch.tensor([[2.0, 1.0], [4.0, 3.0], [6.0, 5.0]]))
    assert found[0].tolist() == [7.0, 7.0]
    assert found[1:].tolist() == [[3.0, 4.0], [5.0, 6.0]]
