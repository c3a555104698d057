"""Capture on a CUDA build, for models on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import assert_same_training, batches, small_net, xent
from torch import nn

from devplace.run.seeds import RandomKeys
from devplace.step_capture import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:RNN module weights"),  # of the eager copy
]


class Everything(nn.Module):
    """Convolution, norm, LSTM, attention and dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True)
        self.qkv = nn.Linear(16, 48)
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.conv(x[:, None])), inplace=True).transpose(1, 2)
        h = self.lstm(h)[0]
        q, k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(self.drop(h).mean(1))


def on_gpu(data: list[Any], dtype: torch.dtype) -> list[Any]:
    """The batches on the GPU."""
    return [(x.to("cuda", dtype), y.cuda()) for x, y in data]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_small_net_equals_eager_on_the_gpu(optimizer: str, chunks: int) -> None:
    """Float64 on the GPU, whole and in micro-batches."""

    def eager(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        parts = zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True)
        return sum(xent(m, a, b) * (len(a) / len(x)) for a, b in parts)

    graph = assert_same_training(
        small_net().cuda(),
        on_gpu(batches(), torch.float64),
        xent,
        lambda m: getattr(torch.optim, optimizer)(m.parameters(), lr=0.01),
        eager_loss=eager,
        micro_batches=chunks,
        tolerance=1e-8,  # Adam enlarges rounding where the gradient is nearly zero
    )
    assert graph.meta["device"] == "cuda"


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_gpu_kernels_equal_eager(rate: float) -> None:
    """Convolution, norm, LSTM, attention and dropout in float32, with eager's random numbers."""
    torch.manual_seed(0)
    graph = assert_same_training(
        Everything(rate).cuda(),
        on_gpu(batches(), torch.float32),
        xent,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        tolerance=1e-4,
    )
    assert len(graph.program.random_ops) == (1 if rate else 0)
    modules = {name for name, _ in Everything(rate).named_modules()}
    assert {op.module for op in graph.ops} <= modules


def test_gpu_autocast_equals_eager() -> None:
    """bfloat16 autocast on the GPU."""

    def eager(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return xent(m, x, y)

    torch.manual_seed(0)
    assert_same_training(
        Everything(0.0).cuda(),
        on_gpu(batches(), torch.float32),
        xent,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        eager_loss=eager,
        autocast=torch.bfloat16,
        tolerance=2e-3,
    )


def test_gpu_generator_is_unchanged() -> None:
    """Capturing dropout on the GPU draws nothing and allocates nothing that stays."""
    model = Everything(0.5).cuda()
    ((x, y),) = on_gpu(batches(1), torch.float32)
    torch.cuda.manual_seed(7)
    before, held = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    capture(model, (x, y), xent, torch.optim.Adam(model.parameters(), lr=0.1))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.cuda.memory_allocated() == held


class Draws(nn.Module):
    """Random numbers of all kinds that are drawn by counters."""

    def forward(self, x: torch.Tensor) -> Any:
        numbers = [torch.rand_like(x, dtype=d) for d in (torch.float32, torch.float64, x.dtype)]
        mask = torch.native_dropout(x * 1, 0.3, True)[1]
        ranged = torch.empty_like(x, dtype=torch.float32).uniform_(-1, 3)
        return *numbers, mask, torch.bernoulli(numbers[0]), ranged


@pytest.mark.filterwarnings("ignore")  # of importing the compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_counters_give_the_numbers_of_the_cpu(compiled: bool) -> None:
    """Equal in every bit, also by kernels that Inductor makes."""
    found = []
    for device in ("cpu", "cuda"):
        x = torch.ones(300, 70, dtype=torch.bfloat16, device=device)
        graph = capture(Draws(), x, fuse=True)
        program = graph.program
        assert not program.random_ops
        keys = [key.to(device) for key in RandomKeys(graph).of_step(7, 3).values()]
        module: Any = torch.fx.GraphModule({}, program.module.graph)
        run = torch.compile(module) if compiled and device == "cuda" else module
        found.append([made.cpu() for made in run(x, *keys)])
    assert all(map(torch.equal, *found))
