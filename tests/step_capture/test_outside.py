"""What a step would keep outside the model, or on the host, is refused and left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.run.placed import adam, at_random, largest_difference, make_step, train_eager
from torch import nn
from torch.nn import functional as F

from devplace.errors import CaptureError
from devplace.step_capture import capture


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


def plain(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def refusal(net: Any, loss: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(net, batch(), loss, adam(list(net.parameters())))
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Centred(nn.Module):
    """A loss with a running mean, replaced or written in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.in_place = in_place
        self.last: Any = None

    def forward(self, output: Any, y: Any) -> Any:
        self.last = output
        if self.in_place:
            self.centre.mul_(0.9).add_(0.1 * output.detach().mean(0))
        else:
            self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        return F.cross_entropy(output - self.centre, y)


@pytest.mark.parametrize("in_place", [True, False])
def test_state_of_a_loss_module_is_refused_and_left_as_it_was(in_place: bool) -> None:
    """Given itself or in a closure; its buffer would stay at its first value."""
    loss = Centred(in_place)
    found = refusal(model(), loss)
    assert "'loss_fn.centre' is not" in found or "loss_fn.centre goes from" in found
    assert "part of the model" in found
    assert "loss.centre" in refusal(model(), lambda m, x, y: loss(m(x), y))
    assert type(loss.centre) is torch.Tensor
    assert not loss.centre.any()
    assert loss.last is None


class Annealed(nn.Module):
    """Divides by a temperature that every call lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.temperature = 1.0

    def forward(self, x: Any) -> Any:
        self.temperature *= 0.9
        return self.layer(x) / self.temperature


def test_a_number_that_a_step_changes_and_uses_is_refused() -> None:
    """An annealed temperature, or a count in the loss function, would stay at its first value."""
    net = Annealed()
    assert "'temperature' of the model goes from 1.0 to 0.9" in refusal(net, plain)
    assert net.temperature == 1.0
    steps, seen = 0, {"count": 0}

    def warmed(model: Any, x: Any, y: Any) -> Any:
        nonlocal steps
        steps += 1
        return plain(model, x, y) * min(1.0, steps / 10)

    def counted(model: Any, x: Any, y: Any) -> Any:
        seen["count"] += 1
        return plain(model, x, y)

    assert "steps goes from 0 to 1" in refusal(model(), warmed)
    net = model()
    assert capture(net, batch(), counted, adam(list(net.parameters())))
    assert steps == 0
    assert seen == {"count": 0}


def test_trained_parameters_from_elsewhere_are_refused() -> None:
    """A list made outside of the loss function holds tensors that would get no gradient."""
    net = model()
    parameters = list(net.parameters())

    def decayed(model: Any, x: Any, y: Any) -> Any:
        return plain(model, x, y) + 0.01 * sum(p.square().sum() for p in parameters)

    found = refusal(net, decayed)
    assert "'0.weight' from elsewhere" in found
    assert "model.get_parameter('0.weight')" in found


def test_a_module_beside_the_model_may_share_its_weights() -> None:
    """Their gradients are those of both uses."""
    net = model()
    beside = nn.Linear(4, 5, bias=False)
    beside.weight = net[0].weight

    def loss(model: Any, x: Any, y: Any) -> Any:
        return plain(model, x, y) + F.linear(x, model[0].weight).square().mean()

    twin, optimizer = copy.deepcopy(net), adam(list(net.parameters()))
    step = make_step(
        net,
        batch(),
        lambda m, x, y: plain(m, x, y) + beside(x).square().mean(),
        optimizer,
        at_random(0),
    )
    for _ in range(3):
        step(*batch())
    step.sync()
    train_eager(twin, adam(list(twin.parameters())), [batch()] * 3, loss)
    assert largest_difference(net, twin) < 1e-6


def test_groups_may_have_names_and_entries_of_the_users() -> None:
    """torch keeps `param_names` there, training code its own notes."""
    net = model()
    twin = copy.deepcopy(net)

    def made(each: Any) -> Any:
        group = {"params": list(each.named_parameters()), "note": ["decoder"], "lr_scale": (1, "x")}
        return torch.optim.AdamW([group], lr=0.01)

    step = make_step(net, batch(), plain, made(net), at_random(0))
    step(*batch())
    step.sync()
    train_eager(twin, made(twin), [batch()], plain)
    assert largest_difference(net, twin) < 1e-6


class Gaussian(nn.Module):
    """Samples around its mean."""

    def __init__(self, checks: bool | None) -> None:
        super().__init__()
        self.mean, self.checks = nn.Linear(4, 3), checks

    def forward(self, x: Any) -> Any:
        mean = self.mean(x)
        scale = torch.ones_like(mean)
        return torch.distributions.Normal(mean, scale, validate_args=self.checks).rsample()


@pytest.mark.parametrize("checks", [None, True, False])
def test_a_distribution_may_check_its_arguments(checks: bool | None) -> None:
    """The check reads values, but decides nothing; the step is that without it."""
    net = Gaussian(checks)
    graph = capture(net, batch(), plain, adam(list(net.parameters())))
    without = Gaussian(False)
    other = capture(without, batch(), plain, adam(list(without.parameters())))
    assert [op.target for op in graph.ops] == [op.target for op in other.ops]


class Packed(nn.Module):
    """An RNN over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 3)

    def forward(self, x: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(1), [6])
        return self.rnn(packed)[0].data


def test_ops_without_a_fixed_size_are_told_what_helps() -> None:
    """Masks are no way around packing; formatting a loss is a read of its value."""
    assert "Run the RNN on the padded sequences" in refusal(Packed(), plain)

    def told(model: Any, x: Any, y: Any) -> Any:
        return plain(model, x, y) * len(f"{plain(model, x, y):.3f}")

    assert "reads a value" in refusal(model(), told)


def test_nested_tensors_are_refused_and_masks_are_not() -> None:
    """An encoder in eval mode makes one of its input where a mask pads it, unless told not to."""
    x, mask = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for is_nested in (True, False):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=is_nested).eval()
        given = {"src": x, "src_key_padding_mask": mask}
        if is_nested:
            with pytest.raises(CaptureError, match="enable_nested_tensor=False"):
                capture(net, given)
        else:
            step = make_step(net, given, None, None, at_random(0))
            with torch.no_grad():
                torch.testing.assert_close(step(**given), net(**given))


def test_a_model_made_under_inference_mode_cannot_be_trained() -> None:
    """torch cannot either."""
    with torch.inference_mode():
        net = model()
    assert "inference_mode" in refusal(net, plain)
