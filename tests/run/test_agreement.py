"""The executor copies exactly what the planner prices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from devplace.problem.core import build_tasks
from devplace.schedule import make_schedule
from devplace.step_capture import capture
from tests.run.models import Normed, Residual, Tied, mean_square, next_token
from tests.run.placed import NAMES, adam
from tests.run.tracing import snap


def gates(model: Any, x: Any) -> Any:
    return mean_square(model, x[None])


class Recurrent(torch.nn.Module):
    """Three steps of an LSTM cell, whose gates are parts of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(6, 4)

    def forward(self, x: Any) -> Any:
        return self.lstm(x.expand(3, -1, -1))[0]


CASES = {
    "residual": (lambda: Residual(6), lambda: (torch.randn(4, 6),), mean_square),
    "norm": (lambda: Normed(0.5), lambda: (torch.randn(4, 2, 6, 6),), mean_square),
    "tied": (Tied, lambda: (torch.randint(0, 7, (3, 5)),), next_token),
    "lstm": (Recurrent, lambda: (torch.randn(4, 6),), gates),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_transfers_are_those_the_simulator_prices(case: str, seed: int) -> None:
    """Same tensors to the same devices, same bytes, for random colocated placements."""
    make_model, make_batch, loss = CASES[case]
    model = make_model()
    graph = capture(model, make_batch(), loss, adam(list(model.parameters())))
    tasks = build_tasks(graph)
    rng = np.random.default_rng(seed)
    device_of_task = rng.integers(3, size=tasks.num_groups)[tasks.group]
    wanted = [0] * len(graph.ops)
    for task, op in enumerate(tasks.task_op):
        wanted[op] = int(device_of_task[task])
    schedule = make_schedule(graph, *snap(graph, wanted, 3), NAMES)
    priced = set()
    for carrier, tensor in enumerate(tasks.carrier_tensor):
        home = schedule.device_of_op[graph.producer[tensor]]
        for task in tasks.cons[tasks.cons_ptr[carrier] : tasks.cons_ptr[carrier + 1]]:
            device = int(device_of_task[task])
            if device != home:
                priced.add((int(tensor), home, device, int(tasks.carrier_bytes[carrier])))
    assert set(schedule.transfers) == priced
    assert len(schedule.transfers) == len(priced)
