"""Fused steps: placed as unplaced, and as the steps that were fused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from devplace import placers, workloads
from devplace.cost.analytic import Analytic
from devplace.graph import OpGraph
from devplace.graph.fusion.call import FusedCall
from devplace.kernels import fused
from devplace.machine import load_machine
from devplace.problem import Problem
from devplace.run import check
from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.check import CheckReport, check_step
from devplace.run.compile import compile_step
from devplace.run.state import ModelState
from devplace.run.unplaced import run_unplaced
from devplace.step_capture import capture
from tests.run.models import Containers, Normed, Residual, Tied, mean_square, next_token
from tests.run.placed import NAMES, adam, at_random, sgd, train_eager
from tests.run.tracing import random_placement

# Of deep nets and of those that differ in depth only, two or three layers are enough.
FEWER: dict[str, dict[str, int]] = {
    name: {"layers": 2} for name in ("bert-base", "gpt-2", "llama", "vit-b-16", "moe")
}
LARGE = ("inception-v3", "resnet-152", "nmt-8", "bert-large")
# A copy takes other strides there, and another kernel, in plain steps too.
ROUNDED = ("vit-b-16",)
WORKLOADS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else [])
    for name in workloads.NAMES
]


def unplaced_steps(
    graph: OpGraph, model: Any, optimizer: Any, batch: Any, steps: int = 3
) -> list[list[Any]]:
    """The results of each of some steps, each continuing from the one before."""
    sources = {**ModelState(graph, model, optimizer).read(), **bind_inputs(graph, batch, {})}
    groups = None if optimizer is None else optimizer.param_groups
    found = []
    for number in range(1, steps + 1):
        sources |= bind_scalars(graph, number, groups)
        found.append(run_unplaced(graph, sources, 0, number))
        sources |= {
            result.replaces: value
            for result, value in zip(graph.results, found[-1], strict=True)
            if result.replaces >= 0
        }
    return found


def require_equal(first: list[list[Any]], second: list[list[Any]]) -> None:
    """All results of all steps are equal bit for bit."""
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.slow
def test_placed_fused_steps_equal_the_unplaced_ones(name: str) -> None:
    """At random on two and three devices, and by a search: bit for bit, three steps."""
    made = workloads.build(name, size="small", device="cpu", **FEWER.get(name, {}))
    optimizer = sgd(list(made.model.parameters()))
    graph = capture(made.model, made.inputs, made.loss_fn, optimizer, fuse=True)
    assert graph.plain is not None
    assert len(graph.ops) < len(graph.plain.ops)

    def require(report: CheckReport) -> None:
        assert report.steps == 3
        is_equal = report.is_bit_equal or (name in ROUNDED and report.worst.error < 1e-6)
        assert is_equal, report.worst

    for count in (3,) if name in LARGE else (2, 3):
        placed = random_placement(graph, count, count)
        require(check_step(graph, made.model, optimizer, made.inputs, *placed, NAMES[:count]))
    if name in LARGE:
        return
    machine = load_machine("cpux3")
    problem = Problem(graph, machine, Analytic()(graph, machine))
    plan = placers.place(problem, placers.Search(), "20ev").plan
    require(check(graph, plan, made.inputs, steps=3))


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [("resnet-50", 1), ("gnmt-4", 1), ("moe", 1), ("bert-base", 2), ("rnnlm", 2), ("gpt-2", 2)],
)
@pytest.mark.slow
def test_fusing_changes_no_bit(name: str, micro_batches: int) -> None:
    """Members run one by one give the plain step, where nothing is drawn and no gradient stacked:
    what is computed again is the same."""
    config: dict[str, Any] = {**FEWER.get(name, {}), "dropout": 0.0}
    if name == "resnet-50":  # has none
        config = {}
    made = workloads.build(name, size="small", device="cpu", **config)
    optimizer = torch.optim.Adam(made.model.parameters(), lr=1e-3)
    found = []
    for options in ({"fuse": True, "stack_gradients": False}, {}):
        step = (made.model, made.inputs, made.loss_fn, optimizer, micro_batches)
        graph = capture(*step, **options)
        found.append(unplaced_steps(graph, made.model, optimizer, made.inputs))
    require_equal(*found)


ACTIVATIONS = [nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid]


@st.composite
def nets(draw: st.DrawFn) -> nn.Module:
    """A few layers of width 8 in a row, some of them residual, some of them shared."""
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["linear", "norm", "act", "residual", "drop", "again"]))
        if kind == "again" and layers:
            layers.append(draw(st.sampled_from(layers)))
        elif kind == "norm":
            layers.append(nn.LayerNorm(8))
        elif kind == "act":
            layers.append(draw(st.sampled_from(ACTIVATIONS))())
        elif kind == "residual":
            layers.append(Residual(8))
        elif kind == "drop":
            layers.append(nn.Dropout(0.5))
        else:
            layers.append(nn.Linear(8, 8))
    return nn.Sequential(*layers, nn.Linear(8, 2))


@pytest.mark.usefixtures("one_by_one")
@settings(max_examples=12)
@given(
    net=nets(),
    make=st.sampled_from([sgd, adam, lambda p: torch.optim.AdamW(p, amsgrad=True)]),
    chunks=st.integers(1, 2),
    clip=st.sampled_from([None, 0.1]),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_any_small_net_gives_the_unplaced_numbers(
    net: nn.Module, make: Any, chunks: int, clip: float | None, seed: int
) -> None:
    """Fused and placed at random on three devices, bit for bit."""
    torch.manual_seed(seed)
    batch = (torch.randn(6, 8),)
    optimizer = make(list(net.parameters()))
    graph = capture(net, batch, mean_square, optimizer, chunks, clip_grad_norm=clip, fuse=True)
    placed = random_placement(graph, 3, seed)
    assert check_step(graph, net, optimizer, batch, *placed, NAMES, seed=seed).is_bit_equal


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("name", ["tied", "batch norm", "containers", "evaluation", "inference"])
def test_other_steps_give_the_plain_numbers_wherever_they_are(name: str) -> None:
    """Shared weights, running statistics, layers used twice; no update, no loss."""
    torch.manual_seed(0)
    cases: dict[str, tuple[Any, Any, Any]] = {
        "tied": (Tied(), (torch.randint(0, 7, (3, 5)),), next_token),
        "batch norm": (Normed(), (torch.randn(4, 2, 8, 8),), mean_square),
        "containers": (Containers(), (torch.randn(6, 4),), mean_square),
        "evaluation": (Normed(), (torch.randn(4, 2, 8, 8),), mean_square),
        "inference": (Normed().eval(), (torch.randn(4, 2, 8, 8),), None),
    }
    model, batch, loss = cases[name]
    optimizer = None if name in ("evaluation", "inference") else adam(list(model.parameters()))
    plain = capture(model, batch, loss, optimizer)
    graph = capture(model, batch, loss, optimizer, fuse=True, stack_gradients=False)
    require_equal(
        unplaced_steps(graph, model, optimizer, batch),
        unplaced_steps(plain, model, optimizer, batch),
    )
    assert check_step(graph, model, optimizer, batch, *at_random(1)(graph), NAMES).is_bit_equal


class Rotary(nn.Module):
    """Queries and keys turned by their position, as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.queries_and_keys = nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.queries_and_keys(x).view(3, 5, 2, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        turns = torch.polar(torch.ones(5, 4), torch.arange(20.0).view(5, 4)).t()
        queries, keys = (torch.view_as_real(torch.view_as_complex(x) * turns) for x in pairs)
        return queries * keys


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("fuse", [False, True])
def test_pairs_are_complex_numbers_on_every_device(fuse: bool) -> None:
    """Also where a part of a wider row was copied there."""
    torch.manual_seed(0)
    model, batch = Rotary(), (torch.randn(3, 5, 4),)
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer, fuse=fuse)
    for seed in range(4):
        placed = random_placement(graph, 3, seed)
        assert check_step(graph, model, optimizer, batch, *placed, NAMES).is_bit_equal


def trained(graph: OpGraph, model: Any, optimizer: Any, batch: Any) -> tuple[list[float], Any]:
    """Losses of three placed steps, and the trained model."""
    model, optimizer = copy.deepcopy((model, optimizer))
    with compile_step(model, optimizer, graph, *at_random(0)(graph), NAMES) as step:
        losses = [float(step(*batch)) for _ in range(3)]
        step.sync()
    return losses, model


def require_close(first: Any, second: Any, tolerance: float) -> None:
    """All parameters differ by no more than this share of the largest one of each tensor."""
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        error, scale = (one - other).detach().abs().max(), other.detach().abs().max()
        assert float(error) <= tolerance * max(float(scale), 1e-3)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 2)]
    return nn.Sequential(*layers)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@pytest.mark.usefixtures("no_kernels_yet")
@pytest.mark.slow
def test_compiled_steps_give_the_numbers_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 with layer norm, GELU, dropout and AdamW: placed as unplaced bit for bit; the loss
    within 1e-5 of what the members give one by one, parameters within 1e-4."""
    model, batch = mlp(), (torch.randn(6, 8),)
    optimizer = adamw(model.parameters())
    graph = capture(model, batch, mean_square, optimizer, fuse=True)
    report = check_step(graph, model, optimizer, batch, *random_placement(graph, 3, 0), NAMES)
    assert report.is_bit_equal
    losses, compiled = trained(graph, model, optimizer, batch)
    assert fused.failures() == {}
    monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    monkeypatch.setattr(fused, "_kernels", {})
    expected, other = trained(graph, model, optimizer, batch)
    targets = {node.target for node in graph.program.module.graph.nodes}
    assert fused.failures().keys() == {t.name for t in targets if isinstance(t, FusedCall)}
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(set(losses)) == 3
    require_close(compiled, other, 1e-4)


@pytest.mark.usefixtures("no_kernels_yet")
@pytest.mark.slow
def test_compiled_steps_in_bfloat16_follow_eager() -> None:
    """Within 2e-2; what stays in a kernel is not rounded to bfloat16."""
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2))
    torch.manual_seed(0)
    batch = (torch.randn(6, 8),)
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer, autocast=torch.bfloat16, fuse=True)
    assert check_step(graph, model, optimizer, batch, *at_random(1)(graph), NAMES).is_bit_equal
    losses, compiled = trained(graph, model, optimizer, batch)
    assert fused.failures() == {}

    def loss(model: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_square(model, x)

    twin = copy.deepcopy(model)
    expected = train_eager(twin, sgd(list(twin.parameters())), [batch] * 3, loss)
    assert losses == pytest.approx(expected, rel=2e-2)
    require_close(compiled, twin, 2e-2)
