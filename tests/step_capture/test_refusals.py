"""What cannot be one graph is refused in one sentence that names module and source line."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.step_capture.checks import batches, sgd, small_net, xent
from torch import nn

from devplace.errors import CaptureError
from devplace.step_capture import capture

HERE = r"test_refusals\.py:\d+"


class Layer(nn.Module):
    """A linear layer with something done to its output."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


class Holder(nn.Module):
    """Gives the layer a name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def refuse(model: nn.Module, message: str, **options: Any) -> None:
    """Capture must fail with the message, on one line."""
    x, y = batches()[0]
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, (x.float(), y), xent, sgd(model), **options)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_model_that_exits_does_not_end_the_process() -> None:
    """sys.exit in a forward pass is an error like any other, with its line."""

    def leave(h: torch.Tensor) -> torch.Tensor:
        raise SystemExit(0)

    refuse(Layer(leave), rf"{HERE}\): SystemExit: 0")


def keep_positive(h: torch.Tensor) -> torch.Tensor:
    """Branch on a value."""
    if h.sum() > 0:
        return h
    return -h


def test_branch_on_a_value_is_refused() -> None:
    """'if tensor' names the module and the line."""
    refuse(Holder(Layer(keep_positive)), rf"module 'inner' \({HERE}\) reads a value")


def test_item_is_refused() -> None:
    """.item() names the module and the line."""
    refuse(
        Holder(Layer(lambda h: h * h.mean().item())), rf"module 'inner' \({HERE}\) reads a value"
    )


def test_boolean_indexing_is_refused() -> None:
    """A result whose size depends on values names the op."""
    refuse(Holder(Layer(lambda h: h[h > 0])), rf"aten::nonzero at module 'inner' \({HERE}\)")


def test_cumulative_batch_norm_is_refused() -> None:
    """BatchNorm(momentum=None) reads its counter on the host."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None))
    refuse(model, r"Batch norm with momentum=None .*module '1'")


def drop_randomly(h: torch.Tensor) -> torch.Tensor:
    """Layer-drop decided by Python."""
    return h * 2 if random.random() < 0.5 else h


def test_s36_python_random_is_refused() -> None:
    """Layer-drop by random.random() would be frozen: module and line are named."""
    before = random.getstate()
    refuse(Holder(Layer(drop_randomly)), rf"module 'inner' \({HERE}\) draws from Python's")
    assert random.getstate() == before


def test_s36_other_host_generators_are_refused() -> None:
    """random.choice and NumPy's generator are found as well, and their state is put back."""
    before = np.random.get_state()[1].tolist()
    for function in (
        lambda h: h * random.choice([1.0, 2.0]),
        lambda h: h * float(np.random.rand()),
        lambda h: h * float(np.random.randint(3)),
    ):
        refuse(Holder(Layer(function)), rf"module 'inner' \({HERE}\) draws from Python's or")
    assert np.random.get_state()[1].tolist() == before


@torch.library.custom_op("devplace_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Has no fake kernel."""
    return x * 2


def test_s39_custom_operator_without_fake_kernel_is_named() -> None:
    """A custom operator that cannot run on fake tensors is named, with the way out."""
    refuse(
        Holder(Layer(lambda h: double(h))),
        rf"devplace_test::double at module 'inner' \({HERE}\) has none.*register_fake",
    )


def test_s41_changed_input_is_refused() -> None:
    """A step that normalises its input in place is refused with name and line."""

    class Normalise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[:, 0] -= 1.0
            x.sub_(x.mean())
            return self.linear(x)

    for chunks in (1, 2):
        refuse(Normalise(), rf"input '0' is written at the model \({HERE}\)", micro_batches=chunks)
    x = batches()[0][0].float()
    before = x.clone()
    with pytest.raises(CaptureError, match="clone"):
        capture(Normalise(), x)
    assert torch.equal(x, before)


def test_wrappers_are_refused_in_one_line() -> None:
    """DataParallel and scripted modules say what to pass instead."""
    refuse(nn.DataParallel(small_net()), r"DataParallel cannot be captured.*model\.module")
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        scripted = torch.jit.script(nn.Linear(8, 4))
    refuse(Holder(scripted), r"ScriptModule cannot be captured: module 'inner' is one")
    with pytest.raises(CaptureError, match=r"must be a torch\.nn\.Module, got function"):
        capture(keep_positive, batches()[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        torch.optim.SGD,
        torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]),
        torch.optim.SparseAdam([nn.Parameter(torch.zeros(1))]),
        type("MyAdam", (torch.optim.Adam,), {})([nn.Parameter(torch.zeros(1))]),
    ],
)
def test_other_optimizers_are_refused(optimizer: Any) -> None:
    """Anything but an instance whose update is known is refused with the list of these."""
    with pytest.raises(CaptureError, match=r"Adagrad, Adam, AdamW, .*, SGD\), got"):
        capture(small_net(), batches()[0], xent, optimizer)


def test_optimizer_of_another_model_is_refused() -> None:
    """An optimizer over parameters that are not the model's is a mistake."""
    with pytest.raises(CaptureError, match=r"shape \(16, 8\) in group 0 is not in it"):
        capture(small_net(), batches()[0], xent, sgd(small_net()))


def test_missing_loss_is_refused() -> None:
    """Training without a loss says how to give one."""
    model = small_net()
    with pytest.raises(CaptureError, match=r"returned \(6, 4\)\. Pass loss_fn"):
        capture(model, batches()[0][0], None, sgd(model))
    with pytest.raises(CaptureError, match=r"loss_fn returned shape \(6, 4\)"):
        capture(model, batches()[0], lambda m, x, y: m(x), sgd(model))
    with pytest.raises(CaptureError, match=r"the model gets all inputs .*too many positional"):
        capture(model, batches()[0], None, sgd(model))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda h: h * float(h.detach().numpy().sum()), "reads a value"),
        (lambda h: h + torch.rand(4, generator=torch.Generator()), r"own torch\.Generator"),
        (
            lambda h: h * (torch.manual_seed(0).initial_seed() + 1),
            "must not seed torch's generator",
        ),
        (lambda h: h * h.unique().sum(), r"aten::_unique2 at module 'inner'"),
    ],
)
def test_other_host_work_is_refused(function: Callable[..., Any], message: str) -> None:
    """NumPy values, own generators, seeding and data-dependent sizes are named."""
    batches()  # it seeds torch's generator, here and in `refuse`
    before = torch.get_rng_state()
    refuse(Holder(Layer(function)), message)
    assert torch.equal(torch.get_rng_state(), before)


def test_odd_inputs_and_losses_are_refused() -> None:
    """A loss that is no function, sparse and nested inputs."""
    x = batches()[0][0].float()
    with pytest.raises(CaptureError, match=r"must be a function of .* got 'mse'"):
        capture(nn.Linear(8, 4), x, "mse")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"'0' is torch\.sparse_coo"):
        capture(nn.Linear(8, 4), x.to_sparse())
    nested = torch.nested.nested_tensor([x, x], layout=torch.jagged)
    with pytest.raises(CaptureError, match="'0' is nested"):
        capture(nn.Linear(8, 4), (nested,))


def test_loss_with_outputs_is_refused() -> None:
    """(loss, logits) is not (loss_sum, weight)."""
    model = small_net()
    with pytest.raises(CaptureError, match=r"shape \(6, 4\)\. Return the loss alone"):
        capture(model, batches()[0], lambda m, x, y: (xent(m, x, y), m(x)), sgd(model))


def test_options_that_make_no_sense_are_refused() -> None:
    """A clipping norm without an optimizer or not positive, and a surrounding autocast."""
    model = small_net()
    for limit in (0.0, float("nan"), "1"):
        with pytest.raises(CaptureError, match="clip_grad_norm must be positive"):
            capture(model, batches()[0], xent, sgd(model), clip_grad_norm=limit)
    with pytest.raises(CaptureError, match="needs an optimizer"):
        capture(model, batches()[0], xent, clip_grad_norm=1.0)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="pass autocast="),
    ):
        capture(model, batches()[0], xent, sgd(model))


def test_loss_without_gradient_is_refused() -> None:
    """A detached loss cannot be trained."""
    model = small_net()
    with pytest.raises(CaptureError, match="does not require gradients"):
        capture(model, batches()[0], lambda m, x, y: xent(m, x, y).detach(), sgd(model))


def test_sparse_gradient_is_refused() -> None:
    """A sparse embedding gradient names the parameter."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"'0.weight' gets one\. Set sparse=False"):
        capture(model, torch.arange(3), lambda m, x: m(x).sum(), sgd(model))


@pytest.mark.slow
def test_state_in_plain_attributes_is_refused() -> None:
    """A tensor attribute that the step reads and replaces, or writes, would be lost."""

    class Counter(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.total = torch.zeros(4)
            self.in_place = in_place

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            if self.in_place:
                self.total += h.detach().mean(0)
            else:
                self.total = self.total + h.detach().mean(0)
            return h + self.total

    for in_place in (True, False):
        model = Counter(in_place)
        refuse(model, r"'total'.* (is not, but is read and changed|goes from).*register_buffer")
        assert torch.equal(model.total, torch.zeros(4))


def test_own_mistake_is_told_with_its_line() -> None:
    """A shape error inside the model names its module and line."""
    refuse(Holder(nn.Linear(9, 4)), r"fails eagerly, too, at module 'inner'.*RuntimeError")


def test_lazy_parameter_is_refused() -> None:
    """An uninitialised parameter has no shape to plan with."""
    model = nn.LazyLinear(4)
    with pytest.raises(CaptureError, match="'weight' has no shape yet"):
        capture(model, batches()[0][0])


def test_half_precision_training_is_refused() -> None:
    """float16 needs loss scaling."""
    refuse(small_net(), "needs loss scaling", autocast=torch.float16)


def test_parameters_over_one_storage_are_refused() -> None:
    """Two trained Parameter objects over one storage are not one parameter."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    refuse(model, "'1.weight' and '0.weight' are different tensors over one storage")


def test_replaced_parameter_is_refused() -> None:
    """A Parameter assigned anew in forward is neither trained nor kept."""

    class Replace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight
            self.weight = nn.Parameter(torch.zeros(8, 4))
            return y

    refuse(Replace(), "'weight' is assigned anew")


def test_a_step_is_captured_for_a_known_device_type() -> None:
    """`device` is cpu or cuda; a model on the meta device can be captured for either."""
    model = small_net()
    refuse(model, "captured for 'cpu' or 'cuda', got device='tpu'", device="tpu")
    if not torch.cuda.is_available():
        refuse(model, "captured for CUDA where torch finds a GPU, and it finds none", device="cuda")
