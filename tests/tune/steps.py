"""Small captured steps with plans, to be measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from devplace.cost.analytic import Analytic
from devplace.graph import OpGraph
from devplace.machine import Machine, load_machine
from devplace.placers import Result, Search, place
from devplace.problem import Problem
from devplace.step_capture import capture
from devplace.tune.measure import Trial
from devplace.tune.step_sources import step_sources

LONG_S = 600.0
"""Time for a plan that a slow computer keeps, the start of its process included, s."""


class Tagger(nn.Module):
    """Embedding, two layers with dropout, batch norm and a head: most kinds of source."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, words: Any) -> Any:
        hidden = self.drop(self.two(self.one(self.embed(words)).relu()))
        return self.head(self.norm(hidden))


def tagger() -> tuple[Any, Any, Any]:
    """Model, batch and loss."""
    torch.manual_seed(0)
    batch = (torch.randint(0, 50, (12,)), torch.randint(0, 5, (12,)))
    return Tagger(), batch, F.cross_entropy


def captured(device: str | None = None) -> tuple[OpGraph, Any, Any, Any]:
    """Graph, model, optimizer and batch."""
    model, batch, loss = tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return capture(model, batch, loss, optimizer, device=device), model, optimizer, batch


def placed(graph: OpGraph, machine: Machine | None = None, evaluations: int = 60) -> Result:
    """A plan of a short search, on two logical CPU devices."""
    machine = machine or load_machine("cpux2")
    problem = Problem(graph, machine, Analytic()(graph, machine))
    return place(problem, Search(), f"{evaluations}ev")


def trials(names: Sequence[str]) -> list[Trial]:
    """The same plan under several names."""
    graph, model, optimizer, batch = captured()
    plan = placed(graph).plan
    sources = step_sources(graph, model, optimizer, batch)
    return [Trial(name, plan, graph, sources) for name in names]


def hostile(actions: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Command of a measuring process that does these things, one per plan."""
    file = folder / "actions.txt"
    file.write_text(" ".join(actions))
    return sys.executable, str(Path(__file__).with_name("hostile.py")), str(file)
