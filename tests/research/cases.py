"""What tests of learned placers share: small problems, exact expectations, curves."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from devplace.placers import Budget, Evaluator
from devplace.problem import Problem
from devplace.research.environment import Environment
from devplace.research.grouping import colocation
from devplace.research.options import TrainingOptions
from devplace.testing import hand_machine, hand_problem


def three_ops(memory: int = 100) -> Problem:
    """Two branches and their join on unequal devices; 3 groups, 8 placements, one optimum: 28."""
    return hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=1 ns=20,30
        b = g(x) bytes=1 ns=25,20
        c = join(a, b) bytes=1 ns=5,50 result=output
        """,
        hand_machine({"gpu:0": memory, "gpu:1": memory}, latency_ns=2),
    )


def layered(layers: int = 12, width: int = 3) -> Problem:
    """Branches that meet after each layer: 48 groups on 3 devices, where placement matters."""
    lines = ["x0 = input bytes=10"]
    for k in range(layers):
        lines += [f"b{k}_{w} = f{w}(x{k}) bytes=20 ns={60 + 10 * w}" for w in range(width)]
        reads = ", ".join(f"b{k}_{w}" for w in range(width))
        lines.append(f"x{k + 1} = join({reads}) bytes=10 ns=10")
    machine = hand_machine({"gpu:0": 9000, "gpu:1": 9000, "gpu:2": 9000}, latency_ns=5)
    return hand_problem("\n".join(lines), machine)


def environment(problem: Problem, evaluations: int = 10**6) -> Environment:
    """Every colocation group by itself."""
    return Environment(Evaluator(problem, Budget(evaluations=evaluations)), colocation(problem))


def all_actions(groups: int, actions: int) -> NDArray[np.int64]:
    """Every placement. `[A^M, M]`"""
    return np.array(list(itertools.product(range(actions), repeat=groups)))


def exact_gradient(logits: torch.Tensor, rewards: NDArray[np.float64]) -> torch.Tensor:
    """Gradient of the expected reward by enumeration, for logits `[M, A]`."""
    logits = logits.detach().clone().requires_grad_()
    probability = torch.softmax(logits, -1)
    every = all_actions(*logits.shape)
    expected = torch.zeros((), dtype=logits.dtype)
    for row, reward in zip(every, rewards, strict=True):
        expected = (
            expected
            + float(reward) * torch.stack([probability[m, a] for m, a in enumerate(row)]).prod()
        )
    expected.backward()
    assert logits.grad is not None
    return logits.grad


def curves(folder: Path) -> list[dict[str, float | None]]:
    """Rows of the only run in a folder."""
    (found,) = folder.glob("*/curves.csv")
    with found.open() as file:
        return [
            {name: float(value) if value else None for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def logged(placer: Any, folder: Path, **options: Any) -> Any:
    """The placer with a folder for its curves."""
    return replace(placer, training=TrainingOptions(log_dir=folder, device="cpu", **options))
