"""Updates of 16-bit parameters: to the bits of casts, in no more memory than eager torch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import devplace as dp
from devplace.graph.overwrite import OUT_FORMS
from devplace.step_capture.optimizers import wide

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, ::2],
    "one number": lambda x: x[0, 0].clone(),
    "empty": lambda x: x[:0],
}


def tensors(op: str, layout: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Arguments of an op: tensors of several pieces, and a number that 16 bits cannot hold."""
    random = torch.Generator().manual_seed(0)
    count = {"mul": 1, "div": 1, "addcmul": 2, "scaled_add": 2, "addcdiv": 3}[op]
    made = [torch.rand(7, 23, generator=random).to(dtype) + 0.5 for _ in range(count)]
    return [LAYOUTS[layout](x) for x in made] + [torch.tensor(0.1234567, dtype=torch.float64)]


@pytest.mark.parametrize("dtype", wide.LOW_PRECISION)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", wide.FORMS)
def test_pieces_give_the_bits_of_casts(
    op: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In new memory and over any of what they read, whatever its layout."""
    monkeypatch.setattr(wide, "PIECE", 50)
    want = wide.by_casts(op, *tensors(op, layout, dtype))
    got = wide.in_pieces(op, *tensors(op, layout, dtype))
    assert torch.equal(got, want)
    assert got.dtype is dtype
    *whole, number = tensors(op, layout, dtype)
    over = getattr(torch.ops.devplace, f"wide_{op}").out
    for out in whole:
        kept = out.clone()
        assert over(*whole, number, out=out) is out
        assert torch.equal(out, want)
        out.copy_(kept)


@pytest.mark.parametrize("dtype", wide.LOW_PRECISION)
def test_momentum_is_torchs_to_the_bit(dtype: torch.dtype) -> None:
    """The buffer that SGD leaves after three steps: products are rounded before they are added."""
    random = torch.Generator().manual_seed(0)
    linear = nn.Linear(16, 16, bias=False, dtype=dtype)
    x = torch.randn(4, 16, generator=random).to(dtype)
    graph = dp.capture(
        linear, (x, x), F.mse_loss, optim.SGD(linear.parameters(), lr=0.125, momentum=0.9)
    )
    twin = nn.Linear(16, 16, bias=False, dtype=dtype)
    twin.load_state_dict(linear.state_dict())
    eager = optim.SGD(twin.parameters(), lr=0.125, momentum=0.9)
    machine = dp.load_machine("cpux2")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
    with dp.compile(graph, dp.place(problem, dp.placers.Single(), "9ev").plan) as step:
        for _ in range(3):
            step(x, x)
            eager.zero_grad()
            F.mse_loss(twin(x), x).backward()
            eager.step()
        step.sync()
    assert torch.equal(linear.weight, twin.weight)


def test_each_can_write_over_what_it_reads() -> None:
    """So that new parameters and state lie where the old ones lay."""
    assert {f"devplace.wide_{op}.default" for op in wide.FORMS} <= OUT_FORMS.keys()


def adamw(parameters: Any) -> Any:
    """AdamW as most take it."""
    return optim.AdamW(parameters)


def momentum(parameters: Any) -> Any:
    """SGD with all options."""
    return optim.SGD(parameters, momentum=0.9, nesterov=True, weight_decay=0.1)


# What torch's single-tensor update has beside parameter, gradient and state: AdamW a square root
# and its quotient; SGD the gradient with the decay, and that with the momentum.
EAGER = [
    (adamw, 4 + 2),
    (optim.Adam, 4 + 2),
    (lambda p: optim.Adam(p, amsgrad=True), 5 + 2),
    (lambda p: optim.SGD(p, lr=0.1), 2),
    (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), 3),
    (momentum, 3 + 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "times"), EAGER)
def test_an_update_needs_no_more_than_eager_mode(make: Any, times: int, dtype: torch.dtype) -> None:
    """Of one large parameter: the peak, in units of its bytes."""
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096, bias=False, dtype=dtype), torch.zeros(2, 4096, dtype=dtype)
    graph = dp.capture(model, (x, x), F.mse_loss, make(model.parameters()))
    machine = dp.load_machine("h100x1")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine), exclude=["cpu:0"])
    peak = dp.place(problem, dp.placers.Single(), "9ev").plan.predicted.peak_bytes["cuda:0"]
    small = 2**20  # activations
    assert peak <= times * 4096**2 * dtype.itemsize + small


def test_casts_are_left_to_a_compiler() -> None:
    """In a fused step an update is one group, which takes no memory beside."""
    with torch.device("meta"):
        model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        x = torch.zeros(2, 64, dtype=torch.bfloat16)
    graph = dp.capture(model, (x, x), F.mse_loss, adamw(model.parameters()), fuse=True)
    assert not any("wide" in op.target for op in graph.ops)
    (update,) = [op for op in graph.ops if op.stage == "update" and not op.is_source]
    assert len(update.members) > 5
