"""Steps that look as if values decided something, and are captured."""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.placed_steps import assert_as_eager, planned
from torch import distributions, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import devplace as dp


def net(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between, float64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 8).double(), torch.randint(3, (6,))


# ---- transforms of torch.func over modules


def _adapted(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    params = dict(m.named_parameters())
    inner = grad(lambda p: F.cross_entropy(functional_call(m, p, (x,)), y))(params)
    return F.cross_entropy(
        functional_call(m, {k: v - 0.1 * inner[k] for k, v in params.items()}, (x,)), y
    )


def _per_sample(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def one(p: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(m, p, (a[None],)), b[None])

    found = vmap(grad(one), (None, 0, 0))(dict(m.named_parameters()), x, y)
    return sum(g.flatten(1).square().sum(1).sqrt().mean() for g in found.values())


def _ensemble(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = {k: torch.stack([v, 2 * v]) for k, v in m.named_parameters()}
    return F.cross_entropy(vmap(lambda p: functional_call(m, p, (x,)))(both).mean(0), y)


def _forward_mode(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return jvp(m, (x,), (torch.ones_like(x),))[1].square().mean()


def _jacobian(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return vmap(jacrev(lambda one: m(one)))(x).square().mean()


def _hessian(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return vmap(hessian(lambda one: m(one).sum()))(x).square().mean()


def _laplacian(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def one(a: torch.Tensor) -> torch.Tensor:
        slope = grad(lambda b: m(b).square().sum())
        axes = torch.eye(8, dtype=a.dtype)
        return torch.stack([jvp(slope, (a,), (axis,))[1] @ axis for axis in axes]).sum()

    return vmap(one)(x).square().mean()


def _volume(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    slopes = vmap(jacfwd(jacfwd(lambda one: m(one)[:1])))(x)
    return torch.linalg.slogdet(slopes[:, 0] + torch.eye(8).double())[1].mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own rules for jvp
@pytest.mark.parametrize(
    "loss",
    [
        *(_adapted, _per_sample, _ensemble, _forward_mode, _jacobian),
        *(_hessian, _laplacian, _volume),
    ],
)
def test_transforms_over_functional_call(loss: Any) -> None:
    """The wrapped parameters that a transform puts into a module are no state of it."""
    assert_as_eager(net(8, 5, 3), rows(), loss)


# ---- checks of values that decide nothing


def _density(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = m(x)
    policy = distributions.Categorical(logits=out)
    normal = distributions.MultivariateNormal(out, torch.eye(3).double(), validate_args=True)
    positive = distributions.Gamma(out.exp(), 1.0)
    return -(
        policy.log_prob(y).mean()
        + policy.entropy().mean()
        + normal.log_prob(out.detach()).mean()
        + positive.log_prob(out.exp()).mean()
        + distributions.Geometric(torch.sigmoid(out)).log_prob(torch.ones_like(out)).mean()
    )


def test_distributions_that_check_their_arguments() -> None:
    """A check raises an error in eager mode or does nothing."""
    assert_as_eager(net(8, 5, 3), rows(), _density)


def test_torchs_own_checks_of_values() -> None:
    """`torch._check` and its like, as libraries call them: no number decides anything else."""

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all((y >= 0) & (y < 3))
        torch._check_tensor_all_with(ValueError, x.isfinite(), lambda: "not finite")
        torch._check(len(x) == len(y), lambda: "rows")
        return F.cross_entropy(m(x), y)

    assert_as_eager(net(8, 5, 3), rows(), loss)


def _likelihood(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(m(x), y[:, None].double(), m(x).exp())


def _sound(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(4).double()
    waves = torch.stft(m(x), 4, 1, window=window, return_complex=True)
    return waves.istft(4, 1, window=window).square().mean() + F.cross_entropy(m(x), y)


@pytest.mark.parametrize("loss", [_likelihood, _sound])
def test_losses_and_transforms_that_check_values(loss: Any) -> None:
    """Variances that are not negative, windows that leave no gap."""
    assert_as_eager(net(8, 5, 3), rows(), loss)


def _layers(kind: str) -> nn.Module:
    torch.manual_seed(0)
    of = getattr(nn, f"Transformer{kind}Layer")(8, 2, 16, dropout=0.0, batch_first=True)
    return getattr(nn, f"Transformer{kind}")(of, 2).double()


@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_masks_that_layers_of_transformers_look_at(kind: str, is_causal: bool) -> None:
    """Whether a mask is causal is a hint which kernel to take; any mask is applied as given."""

    def loss(m: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = m(x, mask=mask) if kind == "Encoder" else m(x, x.flip(1), tgt_mask=mask)
        return made.square().mean() + made[..., 0].mean()

    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).double()
    batch = x, mask if is_causal else mask.t().contiguous()
    assert_as_eager(_layers(kind), batch, loss)


def test_shapes_are_still_checked_by_distributions() -> None:
    """Only values are unknown."""

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        base = distributions.MultivariateNormal(
            torch.zeros(3).double(),
            torch.eye(3).double(),
            validate_args=True,  # torch.compile switches the default off for the whole process
        )
        return -base.log_prob(m(x)[:, :2]).mean()

    model = net(8, 5, 3)
    with pytest.raises(dp.errors.CaptureError, match=r"fails eagerly, too.*event_shape"):
        dp.capture(model, rows(), loss, torch.optim.SGD(model.parameters(), lr=0.1))


def test_rejection_sampling_is_still_control_flow() -> None:
    """Not every truth value that torch.distributions reads is a check."""

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angle = distributions.VonMises(m(x), torch.ones(3).double()).sample()
        return (m(x) * angle).mean()

    model = net(8, 5, 3)
    with pytest.raises(dp.errors.CaptureError, match="Control flow must not depend"):
        dp.capture(model, rows(), loss, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("rate", "is_known"), [(0.0, True), (0, True), (1.0, True), (0.1, False), (1e-30, False)]
)
def test_a_layer_dropped_at_rate_0_is_never_dropped(rate: float, is_known: bool) -> None:
    """A uniform number is at least 0 and below 1; between, it decides and is refused."""

    def loss(m: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in m[:2]:
            if torch.rand([]) >= rate or not torch.rand(1) < rate:
                x = layer(x)
        return m[2](m[0](x) if rate == 1.0 else x).square().mean()

    model = net(8, 8, 3)
    if is_known:
        assert_as_eager(model, rows(), loss)
    else:
        with pytest.raises(dp.errors.CaptureError, match="Control flow must not depend"):
            dp.capture(model, rows(), loss, torch.optim.SGD(model.parameters(), lr=0.1))


# ---- kernels whose fake ones are stricter


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="a torch without grouped products")
def test_grouped_products_in_float32() -> None:
    """torch's fake kernel asks for bfloat16, its CPU kernel does not."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(4, 16, 16))})
    batch = torch.randn(8, 16), torch.tensor([2, 4, 6, 8], dtype=torch.int32)

    def loss(m: Any, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, m["w"], offs=ends).square().mean()

    assert_as_eager(model, batch, loss, tolerance=1e-6)


# ---- derivatives that the model takes


class Potential(nn.Module):
    """Energy, and its derivative by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(3, 16, 1)

    def forward(self, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = at if at.requires_grad else at.detach().requires_grad_(True)
        energy = self.net(at).sum()
        (found,) = torch.autograd.grad(energy, at, create_graph=self.training)
        return energy, -found


@pytest.mark.parametrize("requires", [False, True])
def test_derivatives_by_inputs_at_inference(requires: bool) -> None:
    """Gradients are on where the model asks for them, as in eager mode."""
    model, at = Potential().eval(), torch.randn(8, 3).double().requires_grad_(requires)
    graph = dp.capture(model, at)
    with dp.compile(graph, planned(graph)) as step:
        for got, want in zip(step(at), model(at), strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)


def test_derivatives_in_an_evaluation_of_the_loss() -> None:
    """The same without an optimizer."""

    def loss(m: Any, at: torch.Tensor) -> torch.Tensor:
        return m(at)[1].square().mean()

    model, at = Potential().eval(), torch.randn(8, 3).double()
    graph = dp.capture(model, at, loss)
    with dp.compile(graph, planned(graph)) as step:
        assert float(step(at)) == pytest.approx(float(loss(model, at)), rel=1e-12)


def test_an_input_that_requires_gradients_in_training() -> None:
    """The loss differentiates by it."""

    def loss(m: Any, at: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(m.net(at).sum(), at, create_graph=True)
        return F.mse_loss(found, wanted)

    torch.manual_seed(2)
    batch = torch.randn(8, 3).double().requires_grad_(), torch.randn(8, 3).double()
    assert_as_eager(Potential(), batch, loss)


def test_a_derivative_of_what_has_none_says_so() -> None:
    """In training, by an input that does not require gradients."""

    def loss(m: Any, at: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(m.net(at).sum(), at, create_graph=True)[0].square().mean()

    model = Potential()
    with pytest.raises(dp.errors.CaptureError, match=r"requires_grad_\(\) in forward") as caught:
        dp.capture(model, torch.randn(8, 3).double(), loss, torch.optim.SGD(model.parameters()))
    assert "test_right.py" in str(caught.value)


# ---- ops that write


@torch.library.custom_op("devplace_right::fill", mutates_args={"out"})
def fill(x: torch.Tensor, out: torch.Tensor) -> None:
    """Twice x."""
    out.copy_(x * 2)


@torch.library.custom_op("devplace_right::count", mutates_args={"total", "number"})
def count(
    x: torch.Tensor, total: torch.Tensor, number: torch.Tensor, *, scale: float = 2.0
) -> torch.Tensor:
    """Adds up, and gives a sum."""
    total.add_(x.mean(0) * scale)
    number.add_(1)
    return x * scale + total


@count.register_fake
def _(x: Any, total: Any, number: Any, *, scale: float = 2.0) -> Any:
    return torch.empty_like(x)


class Writes(nn.Module):
    """Uses both, on a view of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = net(8, 8)
        self.register_buffer("total", torch.zeros(2, 8).double())
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        fill(x, out)
        with torch.no_grad():
            more = count(out, self.total[1], self.number, scale=3.0)
        return self.layer(out + more) + self.total.sum()


def test_operators_that_write_their_arguments() -> None:
    """Buffers are carried, also through views; temporaries are new values."""
    assert_as_eager(Writes(), rows()[:1], lambda m, x: m(x).square().mean())


def test_operators_that_write_their_arguments_at_inference() -> None:
    """Without an optimizer, too."""
    model = Writes().eval()
    other, (x, _) = copy.deepcopy(model), rows()
    graph = dp.capture(model, x)
    with dp.compile(graph, planned(graph)) as step:
        for _ in range(2):
            torch.testing.assert_close(step(x), other(x).detach(), rtol=0, atol=0)
        step.sync()
    assert int(model.number) == 2
    assert torch.equal(model.total, other.total)


@torch.library.custom_op("devplace_right::spread", mutates_args={"outs"})
def spread(x: torch.Tensor, outs: list[torch.Tensor]) -> None:
    """x in each."""
    for out in outs:
        out.copy_(x)


def test_an_operator_that_writes_a_list_is_refused_by_name() -> None:
    """Its parts would be written in vain."""

    class Spreads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            spread(x, [out])
            return out

    with pytest.raises(
        dp.errors.CaptureError, match=r"devplace_right\.spread\.default at the model"
    ):
        dp.capture(Spreads(), torch.zeros(2))


def test_a_learned_value_put_where_a_mask_is_true() -> None:
    """Its gradient has no shape that depends on values."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.token = net(8, 8), nn.Parameter(torch.randn(8).double())
            self.row = nn.Parameter(torch.randn(1, 8).double())

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            other = h.clone()
            h = h * 2
            h[mask] = self.token
            h[~mask & (x[:, 0] > 0)] = self.row
            other[mask[:, None] & (x > 0)] = self.token[0]
            other[mask] = 0.5
            return (h + other).square().mean()

    x, _ = rows()
    assert_as_eager(Tokens(), (x, x[:, 1] > 0), lambda m, a, k: m(a, k))


def test_whole_numbers_drawn_in_place_from_a_range() -> None:
    """`random_(from, to)`, whose argument is a keyword of Python."""

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.empty(6, dtype=torch.long).random_(2, 3)
        many = torch.empty(500, dtype=torch.long).random_(-1, 2)
        return F.cross_entropy(m(x), drawn) + many.min() + many.max()

    assert_as_eager(net(8, 5, 3), rows()[:1], loss)


@pytest.mark.parametrize("write", ["pow_", "square_"])
def test_powers_in_place(write: str) -> None:
    """The functional overload has another name than the one that writes."""

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = m(x)
        return (out.pow_(3) if write == "pow_" else out.square_()).mean()

    assert_as_eager(net(8, 5, 3), rows()[:1], loss)


# ---- outputs


class Layer:
    """A layer of a cache."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.kind, self.more = keys, Layer, {"values": [keys * 2]}


class Cache:
    """An object that holds objects that hold tensors."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers, self.seen = layers, len(layers)

    def total(self) -> torch.Tensor:
        """Sum over its layers."""
        return sum(layer.keys.sum() for layer in self.layers)


def test_objects_that_hold_tensors_are_outputs() -> None:
    """As the caches of language models: of the same classes, with methods that work."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = net(8, 3)

        def forward(self, x: torch.Tensor) -> Any:
            h = self.layer(x)
            spread = distributions.Normal(h, torch.ones_like(h))
            return {"out": h, "cache": Cache([Layer(h), Layer(h + 1)]), "near": (spread,)}

    model, (x, _) = Cached().eval(), rows()
    graph = dp.capture(model, x)
    with dp.compile(graph, planned(graph)) as step:
        got, want = step(x), model(x)
    assert type(got["cache"]) is Cache
    assert got["cache"].seen == 2
    assert got["cache"].layers[0].kind is Layer
    torch.testing.assert_close(got["cache"].total(), want["cache"].total().detach())
    torch.testing.assert_close(got["near"][0].mean, want["near"][0].mean.detach())


def test_an_object_that_holds_itself_is_refused() -> None:
    """There is no tree of it."""

    class Round(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            found = SimpleNamespace(x=x + 1)
            found.itself = found
            return found

    with pytest.raises(dp.errors.CaptureError, match="holds tensors but is unknown"):
        dp.capture(Round(), torch.zeros(2))
