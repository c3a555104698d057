"""CTC losses, whose kernel keeps a table of a size that lengths in tensors decide, are captured."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.placed_steps import assert_as_eager
from torch import nn

import devplace as dp
from devplace.graph.fx_data import nodes_as_data


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 7).double()


def speech(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape).double()


def words(*shape: int) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randint(1, 7, shape)


def _numbers(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(m(x).log_softmax(-1), y, (9, 8), (3, 2))


def _tensors(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lengths = torch.full((2,), 9), torch.full((2,), 2)
    return F.ctc_loss(m(x).log_softmax(-1), y, *lengths, blank=0, reduction="sum")


def _one_after_the_other(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = m(x).log_softmax(-1)
    return nn.CTCLoss()(scores, y.flatten()[:5], torch.tensor([9, 8]), torch.tensor([3, 2]))


def _too_short(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = m(x).log_softmax(-1)
    return F.ctc_loss(scores, y, [9, 1], [3, 3], reduction="none", zero_infinity=True).mean()


def _one_sequence(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(m(x[:, 0]).log_softmax(-1), y[0], torch.tensor(9), torch.tensor(3))


def _after_writes(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = m(x).clone()
    scores[:, 0].mul_(2)
    scores[1:, 1] += 1
    return _numbers(nn.Identity(), scores, y)


@pytest.mark.parametrize(
    "loss",
    [_numbers, _tensors, _one_after_the_other, _too_short, _one_sequence, _after_writes],
)
def test_ctc_losses_train_as_in_eager_mode(loss: Any) -> None:
    """Lengths as numbers or tensors, targets padded or joined, all reductions."""
    assert_as_eager(model(), (speech(9, 2, 4), words(2, 3)), loss)


def _with_lengths(m: nn.Module, x: Any, y: Any, times: Any, lengths: Any) -> torch.Tensor:
    return F.ctc_loss(m(x).log_softmax(-1), y, times, lengths)


def captured(net: nn.Module, *lengths: int, **options: Any) -> Any:
    batch = (speech(9, 2, 4), words(2, 3), torch.tensor([9, 8]), torch.tensor(lengths))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return dp.capture(net, batch, _with_lengths, optimizer, **options), batch


def test_a_step_takes_targets_of_other_lengths() -> None:
    """What the kernel keeps is wide enough for the longest that the batch can hold."""
    net = model()
    graph, batch = captured(net, 1, 1)
    problem = dp.Problem(graph, machine := dp.load_machine("cpux2"), dp.Analytic()(graph, machine))
    plan = dp.place(problem, dp.placers.Random(), "3ev").plan
    for lengths in ([3, 2], [1, 3], [2, 0]):
        given = (*batch[:3], torch.tensor(lengths))
        with dp.compile(graph, plan) as step:
            want = float(_with_lengths(net, *given).detach())
            assert float(step(*given)) == pytest.approx(want, rel=1e-12)
            step.sync()


def test_micro_batches_of_a_ctc_loss() -> None:
    """They are compared with the whole batch, so their loss is its."""
    graph, _ = captured(model(), 3, 2, micro_batches=2, batch_dims={0: 1})
    assert not graph.meta.get("unchecked")


@pytest.mark.slow
def test_a_fresh_process_knows_the_ops(tmp_path: Any) -> None:
    """As the one that measures them."""
    graph, _ = captured(model(), 3, 2)
    (tmp_path / "nodes").write_bytes(pickle.dumps(nodes_as_data(graph.program.module.graph)))
    code = (
        "import pathlib, pickle; from devplace.graph.fx_data import graph_from_data as read\n"
        f"nodes = pickle.loads(pathlib.Path({str(tmp_path / 'nodes')!r}).read_bytes())\n"
        "print(*[n.target for n in read(nodes).nodes if 'ctc' in str(n.target)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "devplace.ctc_loss.default",
        "devplace.ctc_loss_backward.default",
    ]
