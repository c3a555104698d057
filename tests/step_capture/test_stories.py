"""What users of other tools ran into: each test is named after the story's number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import Runner, assert_same_training, batches, sgd, small_net, xent
from torch import nn

from devplace.errors import CaptureError
from devplace.step_capture import capture


class Tied(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def token_loss(model: nn.Module, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per token."""
    return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())


def token_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches of tokens and targets."""
    torch.manual_seed(2)
    return [(torch.randint(0, 12, (4, 3)), torch.randint(0, 12, (4, 3))) for _ in range(3)]


def test_s33_one_graph_covers_loss_backward_and_update() -> None:
    """Ordinary model, loss and optimizer: one graph, equal to eager after three steps."""
    graph = assert_same_training(small_net(), batches(), xent, sgd)
    assert {op.stage for op in graph.ops} == {"source", "forward", "backward", "update"}


def test_s44_tied_weights_are_one_parameter_with_one_gradient_and_state() -> None:
    """Embedding tied to head, three Adam steps equal eager; one source, one state."""
    for chunks in (1, 2):
        graph = assert_same_training(
            Tied().double(),
            token_batches(),
            token_loss,
            lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
            micro_batches=chunks,
        )
    names = [op.name for op in graph.ops if op.is_source]
    assert "embedding.weight" in names
    assert "head.weight" not in names
    assert graph.program.buffers_shared == {"head.weight": "embedding.weight"}
    assert sum("exp_avg[" in name for name in names) == 3


def test_s45_ties_are_found_by_identity_not_by_name() -> None:
    """Weight and bias tied at once; names that share a prefix are not tied."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Linear(8, 8, dtype=torch.float64)
            self.layer2 = nn.Linear(8, 8, dtype=torch.float64)
            self.layer2.weight, self.layer2.bias = self.layer1.weight, self.layer1.bias
            self.compute = nn.Linear(8, 4, bias=False, dtype=torch.float64)
            self.compute.weight_sub = nn.Linear(4, 4, bias=False, dtype=torch.float64)
            self.register_buffer("table", torch.ones(8, dtype=torch.float64))
            self.register_buffer("same_table", self.table)
            self.register_buffer("view_of_table", self.table[:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer2(torch.tanh(self.layer1(x))) + self.same_table * self.view_of_table
            return self.compute.weight_sub(self.compute(h))

    graph = assert_same_training(Model(), batches(), xent, sgd)
    assert graph.program.buffers_shared == {
        "layer2.weight": "layer1.weight",
        "layer2.bias": "layer1.bias",
        "same_table": "table",
        "view_of_table": "table",
    }
    parameters = [op.name for op in graph.ops if op.role == "parameter"]
    assert parameters == [
        "layer1.weight",
        "layer1.bias",
        "compute.weight",
        "compute.weight_sub.weight",
    ]


def test_s46_batch_norm_buffers_equal_eager_after_three_steps() -> None:
    """Conv, norm and dropout: running statistics and counter are eager's."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 4, 3),
        nn.BatchNorm1d(4),
        nn.Dropout(0.3),
        nn.Flatten(),
    )
    graph = assert_same_training(
        nn.Sequential(model, nn.Linear(24, 4)).double(), batches(), xent, sgd
    )
    assert [r.name for r in graph.results if r.role == "buffer"] == [
        "0.2.running_mean",
        "0.2.running_var",
        "0.2.num_batches_tracked",
    ]


def test_s51_lazy_optimizer_state_is_there_from_the_first_step() -> None:
    """Adam's state is a source before step 1, all zeros; the optimizer itself stays empty."""
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    graph = capture(model, batches()[0], xent, optimizer)
    assert not optimizer.state
    state = [b for b in graph.program.bindings if b.kind == "state"]
    assert len(state) == 2 * 6
    replaced = {r.replaces for r in graph.results if r.role == "state"}
    assert replaced == {b.op for b in state}
    first, second = (graph.program.scalars(n, None) for n in (1, 2))
    assert first.keys() == second.keys()
    assert first["group0.neg_step_size"] == -(0.01 / (1 - 0.9))


def test_s37_the_training_flag_is_remembered() -> None:
    """Functional dropout with training=self.training: captured as it was, and said so."""

    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.linear(x), 0.5, training=self.training)

    model = Drop().double()
    x = batches()[0][0]
    train = capture(model, x)
    assert train.program.training
    assert train.program.random_ops
    evaluation = capture(model.eval(), x)
    assert not evaluation.program.training
    assert not evaluation.meta["training"]
    assert not evaluation.program.random_ops
    torch.testing.assert_close(Runner(evaluation, model).step(1, x)[0], model(x).detach())


def test_s42_compiled_modules_are_captured_as_what_they_compile() -> None:
    """A torch.compile-d model, a compiled submodule and an in-place compiled one all work."""
    plain = small_net()
    data = batches()[0]
    want = capture(plain, data, xent, sgd(plain))
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    got = capture(compiled, data, xent, sgd(compiled))
    assert got.ops == want.ops
    assert got.name == "Sequential"
    in_place = copy.deepcopy(plain)
    in_place[0].compile(backend="eager")
    assert capture(in_place, data, xent, sgd(in_place)).ops == want.ops
    inner = copy.deepcopy(plain)
    inner[0] = torch.compile(inner[0], backend="eager")
    modules = {op.module for op in capture(inner, data, xent, sgd(inner)).ops}
    assert "0._orig_mod" in modules


class Rotary(nn.Module):
    """No parameters, one non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cos(self.angles) + x.roll(1, -1) * torch.sin(self.angles)


def test_s78_one_module_may_be_called_in_two_places() -> None:
    """A rotary module called at the start and again in the middle keeps its name and call index."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.rotary(torch.tanh(self.a(self.rotary(x)))))

    graph = assert_same_training(Model().double(), batches(), xent, sgd)
    calls = {op.call for op in graph.ops if op.module == "rotary" and not op.is_source}
    assert calls == {0, 1}


def test_s76_skips_over_several_stages_are_ordinary_edges() -> None:
    """A residual chain with skips over one and three blocks is captured exactly."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = [x]
            for block in self.blocks:
                seen.append(torch.relu(block(seen[-1])) + seen[-1] + seen[max(0, len(seen) - 3)])
            return self.head(seen[-1])

    graph = assert_same_training(Chain().double(), batches(rows=7), xent, sgd, micro_batches=4)
    assert graph.num_edges > len(graph.ops)


def test_s16_weights_read_by_other_modules_are_ordinary_uses() -> None:
    """A sibling's weight read through a functional call, and a bare parameter in an einsum."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"used": nn.Linear(8, 8), "borrowed": nn.Linear(8, 8)})
            self.bare = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.linear(self.layers["used"](x), self.layers["borrowed"].weight)
            return torch.einsum("bi,ij->bj", h, self.bare)

    graph = assert_same_training(Model().double(), batches(), xent, sgd)
    changed = {r.name for r in graph.results if r.role == "parameter"}
    assert changed == {"bare", "layers.used.weight", "layers.used.bias", "layers.borrowed.weight"}


def test_s35_value_check_deep_inside_names_the_line() -> None:
    """A finite check deep inside a layer is refused with its line; the branch is never guessed."""

    class Guard(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.isnan(x).any():
                raise ValueError("not finite")
            return x

    model: Any = nn.Sequential(nn.Sequential(nn.Linear(8, 4), Guard()))
    x, y = batches()[0]
    with pytest.raises(CaptureError, match=r"module '0\.1' \(test_stories\.py:\d+\)"):
        capture(model, (x.float(), y), xent, sgd(model))
