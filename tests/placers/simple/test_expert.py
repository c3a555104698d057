"""Published rules per model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from devplace import workloads
from devplace.cost import Analytic
from devplace.graph import OpGraph
from devplace.machine import presets
from devplace.placers import Budget, Expert, place
from devplace.placers.simple.expert import RULES
from devplace.problem import Problem
from devplace.step_capture import capture
from devplace.testing import hand_machine, hand_problem


@cache
def graph_of(name: str, **config: Any) -> OpGraph:
    """One training step of a small workload."""
    workload = workloads.build(name, size="small", **config)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    return capture(workload.model, workload.inputs, workload.loss_fn, optimizer, name=name)


def problem_of(name: str, machine: str = "k40x4", **demands: Any) -> Problem:
    graph, found = graph_of(name), presets.get(machine)
    return Problem(graph, found, Analytic()(graph, found), **demands)


def modules(problem: Problem) -> dict[str, set[str]]:
    """Devices of the forward and backward ops of each module."""
    result = place(problem, Expert(), Budget(evaluations=2), allow_infeasible=True)
    names = problem.machine.device_names
    found: dict[str, set[str]] = {}
    for op, device in zip(problem.graph.ops, result.plan.placement, strict=True):
        if op.stage in ("forward", "backward") and not op.is_view and op.module:
            found.setdefault(op.module, set()).add(names[device])
    return found


@pytest.mark.parametrize("name", workloads.NAMES)
def test_every_workload_has_a_rule(name: str) -> None:
    """Each built-in model matches exactly one family."""
    from fnmatch import fnmatch

    assert sum(any(fnmatch(name, p) for p in rule.models) for rule in RULES) == 1


@pytest.mark.slow
def test_lstm_layers_have_a_device_each() -> None:
    """Layer k of encoder and decoder on card k; embeddings first, attention and softmax last."""
    layers = len({m for m in (op.module for op in graph_of("nmt-4").ops) if "encoder.cells" in m})
    assert layers == 4
    found = modules(problem_of("nmt-4"))
    for k in range(4):
        assert found[f"encoder.cells.{k}"] == found[f"step.cells.{k}"] == {f"cuda:{k}"}
    assert found["encoder.embedding"] == found["target_embedding"] == {"cuda:0"}
    for name in ("step.attention.query", "step.attention.score", "step.projection"):
        assert found[name] == {"cuda:3"}


def test_fewer_devices_than_layers_get_runs_of_layers() -> None:
    """Four layers on two cards: two each; on eight cards the last four are idle."""
    found = modules(problem_of("nmt-4", "k40x2"))
    assert [found[f"encoder.cells.{k}"] for k in range(4)] == [{"cuda:0"}] * 2 + [{"cuda:1"}] * 2
    found = modules(problem_of("nmt-4", "k40x8"))
    assert set.union(*found.values()) == {f"cuda:{k}" for k in range(4)}


def test_a_dropout_shared_by_layers_follows_them() -> None:
    """With dropout the one module for all layers is on every layer's card but the last."""
    workload = workloads.build("nmt-4", size="small", dropout=0.1)
    graph = capture(workload.model, workload.inputs, workload.loss_fn, name="nmt-4")
    machine = presets.get("k40x4")
    found = modules(Problem(graph, machine, Analytic()(graph, machine)))
    assert found["encoder.dropout"] == {"cuda:0", "cuda:1", "cuda:2"}


@pytest.mark.slow
def test_transformer_blocks_are_divided_evenly() -> None:
    """Blocks in equal runs, embeddings first, head last."""
    found = modules(problem_of("bert-base", "k40x2"))
    blocks = 1 + max(int(name.split(".")[1]) for name in found if name.startswith("blocks."))
    for name, devices in found.items():
        if name.startswith("blocks."):
            first = int(name.split(".")[1]) < (blocks + 1) // 2
            assert devices == {"cuda:0" if first else "cuda:1"}, name
    assert found["segment_embedding"] == found["norm"] == {"cuda:0"}
    assert found["head.0"] == found["head.2"] == {"cuda:1"}


@pytest.mark.slow
def test_experts_are_spread_and_the_rest_is_not() -> None:
    """Every expert is on one card, all cards have experts, attention and gate are on the first.
    What a mixture itself does is beside the expert it feeds or reads."""
    found = modules(problem_of("moe"))
    experts = {name: d for name, d in found.items() if ".experts." in name}
    assert set.union(*experts.values()) == {f"cuda:{k}" for k in range(4)}
    assert all(len(devices) == 1 for devices in experts.values())
    rest = {name: d for name, d in found.items() if not name.endswith("mixture")}
    assert all(d == {"cuda:0"} for name, d in rest.items() if name not in experts)


@pytest.mark.slow
def test_image_classifiers_stay_on_one_device_if_they_fit() -> None:
    """All on the first card; with too little memory, contiguous parts on all cards."""
    problem = problem_of("resnet-50")
    result = place(problem, Expert(), Budget(evaluations=2))
    assert set(modules(problem)["classifier"]) == {"cuda:0"}
    assert (result.timeline.peak_bytes > 0).sum() == 1
    need = int(result.timeline.peak_bytes.max())
    tight = problem_of("resnet-50", limits={f"cuda:{k}": need * 2 // 3 for k in range(4)})
    found = modules(tight)
    assert found["stem.0"] == {"cuda:0"}
    assert found["classifier"] == {"cuda:3"}
    assert place(tight, Expert(), Budget(evaluations=2)).is_feasible


def test_other_models_are_refused() -> None:
    """The reason points to the placer that needs no rule."""
    problem = hand_problem("a = f ns=1", hand_machine({"gpu:0": 9}))
    assert "`layers`" in Expert().supports(problem)
