"""Captured steps compute what eager torch.optim computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import Runner, assert_same_training, batches, small_net, xent
from torch import nn

from devplace.errors import CaptureError
from devplace.step_capture import capture

SGD_VARIANTS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.8, "weight_decay": 0.01},
    {"weight_decay": 0.1, "maximize": True},
]
ADAM_VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.01, "betas": (0.8, 0.95)}),
    (torch.optim.Adam, {"amsgrad": True, "eps": 1e-6}),
    (torch.optim.Adam, {"maximize": True}),
    (torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.2}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True, "foreach": True}),
]


@pytest.mark.parametrize("options", SGD_VARIANTS)
def test_sgd_variant_equals_eager(options: dict[str, Any]) -> None:
    """Every SGD option gives the numbers of torch.optim.SGD."""
    assert_same_training(
        small_net(), batches(), xent, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **options)
    )


@pytest.mark.parametrize(("kind", "options"), ADAM_VARIANTS)
def test_adam_variant_equals_eager(kind: Any, options: dict[str, Any]) -> None:
    """Every Adam and AdamW option gives the numbers of torch.optim."""
    assert_same_training(
        small_net(), batches(), xent, lambda m: kind(m.parameters(), lr=0.01, **options)
    )


def test_single_precision_sgd_is_close_to_the_last_bit() -> None:
    """In float32 the functional update differs from torch.optim by rounding only."""
    data = [(x.float(), y) for x, y in batches()]
    assert_same_training(
        small_net().float(),
        data,
        xent,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        tolerance=1e-6,
    )


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    # torch's add kernel on CPU rounds the learning rate to bfloat16, that on CUDA does not.
    [(torch.optim.SGD, 1e-2), (torch.optim.AdamW, 0.0)],
)
def test_low_precision_parameters_keep_full_precision_scalars(kind: Any, tolerance: float) -> None:
    """A learning rate that bfloat16 cannot hold still gives torch.optim's parameters."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    data = [(x.bfloat16(), y) for x, y in batches()]

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(x).float(), y)

    assert_same_training(
        model, data, loss, lambda m: kind(m.parameters(), lr=0.1234567), tolerance=tolerance
    )


def test_scalar_parameter_keeps_its_dtype() -> None:
    """A 0-dim float32 parameter is not widened by the 0-dim float64 learning rate."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.scale * x).square().mean()

    for kind in (torch.optim.SGD, torch.optim.Adam):
        graph = assert_same_training(
            Scale(),
            [torch.ones(3)] * 3,
            lambda m, x: m(x),
            lambda m, k=kind: k(m.parameters(), lr=0.1),
            tolerance=1e-6,
        )
        assert {graph.tensors[r.tensor].dtype for r in graph.results} == {"float32"}


def test_parameter_groups_have_their_own_settings() -> None:
    """Groups differ in learning rate, momentum and weight decay."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [
                {"params": [model[0].weight, model[3].bias], "lr": 0.3, "momentum": 0.5},
                {"params": [model[0].bias, model[3].weight], "weight_decay": 0.1},
            ],
            lr=0.05,
        )

    graph = assert_same_training(small_net(), batches(), xent, make)
    changed = {r.name for r in graph.results if r.role == "parameter"}
    assert changed == {"0.weight", "0.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_schedulers_change_the_learning_rate_without_a_new_capture(kind: Any) -> None:
    """The learning rate is an input, so StepLR and warm-up work on one graph."""
    for schedule in (
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: (n + 1) / 4),
    ):
        assert_same_training(
            small_net(),
            batches(4),
            xent,
            lambda m: kind(m.parameters(), lr=0.1),
            schedule=schedule,
        )


def test_one_cycle_changes_sgd_momentum_too() -> None:
    """SGD's momentum is an input as well."""
    assert_same_training(
        small_net(),
        batches(4),
        xent,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=6),
    )


def test_changed_fixed_option_is_refused() -> None:
    """A weight decay changed after capture is refused, not ignored."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    graph = capture(model, batches()[0], xent, optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(CaptureError, match=r"'weight_decay' of parameter group 0 is 0\.2"):
        graph.program.scalars(1, optimizer.param_groups)


def test_tensor_learning_rate_is_read() -> None:
    """A tensor learning rate gives its value."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))
    graph = capture(model, batches()[0], xent, optimizer)
    assert graph.program.scalars(1, optimizer.param_groups) == {"group0.neg_lr": -0.25}


def test_loaded_optimizer_continues_its_step_count() -> None:
    """Adam's bias correction goes on from the steps already taken."""
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(2):
        xent(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    graph = capture(model, batches()[0], xent, optimizer)
    values = graph.program.scalars(1, None)
    assert values["group0.bias_correction2_sqrt"] == (1 - 0.999**3) ** 0.5
    runner = Runner(graph, model)
    for binding in graph.program.bindings:
        if binding.kind == "state":
            parameter = model.get_parameter(binding.key)
            runner.values[binding.op] = optimizer.state[parameter][binding.slot]
    x, y = batches(3)[2]
    runner.step(1, (x, y))
    xent(model, x, y).backward()
    optimizer.step()
    for name, value in runner.named("parameter").items():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=1e-12, atol=0)


def test_clipping_equals_clip_grad_norm() -> None:
    """Gradients are clipped by their global norm, as torch.nn.utils does."""
    for limit in (0.05, 100.0):
        assert_same_training(
            small_net(),
            batches(),
            xent,
            lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
            clip_grad_norm=limit,
            after_backward=lambda m, c=limit: nn.utils.clip_grad_norm_(m.parameters(), c),
        )


def test_autocast_equals_eager_autocast() -> None:
    """With autocast the forward pass runs in bfloat16 where eager does."""

    def eager(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return xent(model, x, y)

    data = [(x.float(), y) for x, y in batches()]
    graph = assert_same_training(
        small_net().float(),
        data,
        xent,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        eager_loss=eager,
        autocast=torch.bfloat16,
        tolerance=1e-6,
    )
    assert any(graph.tensors[t].dtype == "bfloat16" for op in graph.ops for t in op.outputs)


def test_torch_loss_is_applied_to_output_and_target() -> None:
    """A torch function or loss module takes the model's output and the last input."""
    x, y = batches()[0]
    model = small_net()
    weight = torch.rand(4).double()
    for loss_fn in (F.cross_entropy, nn.CrossEntropyLoss(weight)):
        graph = capture(model, (x, y), loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
        got = Runner(graph, model).step(1, (x, y))[0]
        torch.testing.assert_close(got, loss_fn(model(x), y).detach())


def test_dropout_draws_are_listed_and_equal_eager_on_one_device() -> None:
    """Random ops are named in trace order; seeded like eager they give eager's numbers."""
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4), nn.Dropout(0.2))
    graph = assert_same_training(
        model.double(), batches(), xent, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    drawn = [op.name for op in graph.ops if op.is_random]
    assert len(drawn) == 2
    assert [graph.ops[graph.program.op_of[n]].name for n in graph.program.random_ops] == drawn


def test_evaluation_has_no_backward() -> None:
    """A loss without an optimizer is forward only and changes no parameter."""
    model = small_net()
    graph = capture(model, batches()[0], xent)
    assert graph.meta["mode"] == "eval-loss"
    assert {op.stage for op in graph.ops} == {"source", "forward"}
    assert [r.name for r in graph.results if r.role != "buffer"] == ["loss"]
