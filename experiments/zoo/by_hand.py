"""Models written here: mixtures of experts, graphs, physics, state spaces, GANs, policies."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import distributions, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F

from zoo.case import Case, floats, ints

CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Add a case under its function's name."""
    CASES[make.__name__] = make
    return make


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the output."""
    return F.cross_entropy(model(x), y)


class DenseMoe(nn.Module):
    """Every expert computes all tokens; gates weigh the two best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(mlp(16, 24, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, index = self.gate(x).softmax(-1).topk(2, -1)
        gates = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, index, best)
        return torch.stack([e(x) for e in self.experts], -2).mul(gates[..., None]).sum(-2)


@case
def moe_dense() -> Case:
    return Case(DenseMoe().double(), (floats(2, 5, 16),), lambda m, x: m(x).square().mean())


class GroupedMoe(nn.Module):
    """Tokens sorted by expert, and one grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.w = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        best, index = scores.max(-1)
        order = index.argsort(stable=True)
        ends = F.one_hot(index, 4).sum(0).cumsum(0).to(torch.int32)
        out = F.grouped_mm(x[order], self.w, offs=ends)
        return torch.zeros_like(x).index_add(0, order, out) * best[:, None]


@case
def moe_grouped_float32() -> Case:
    return Case(
        GroupedMoe(), (torch.randn(8, 16),), lambda m, x: m(x).square().mean(), dtype=torch.float32
    )


class Gcn(nn.Module):
    """Messages along edges, added up by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16).double(), nn.Linear(16, 3).double()

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            h = layer(x)
            x = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]).tanh()
        return x


@case
def gcn() -> Case:
    return Case(
        Gcn(),
        (floats(10, 8), ints(10, 2, 30), ints(3, 10)),
        lambda m, x, e, y: F.cross_entropy(m(x, e), y),
    )


@case
def gat() -> Case:
    class Gat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.score = nn.Linear(8, 3).double(), nn.Linear(16, 1).double()

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            source, sink = edges
            score = F.leaky_relu(self.score(torch.cat([x[source], x[sink]], -1)))[:, 0].exp()
            total = torch.zeros(len(x), dtype=x.dtype).index_add(0, sink, score)
            weight = (score / total[sink])[:, None]
            return torch.zeros(len(x), 3, dtype=x.dtype).index_add(
                0, sink, weight * self.value(x)[source]
            )

    return Case(
        Gat(),
        (floats(10, 8), ints(10, 2, 30), ints(3, 10)),
        lambda m, x, e, y: F.cross_entropy(m(x, e), y),
    )


@case
def forces() -> Case:
    model = mlp(3, 16, 1)

    def loss(m: nn.Module, x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return F.mse_loss(-g, f)

    return Case(model, (floats(8, 3).requires_grad_(), floats(8, 3)), loss)


@case
def heat_equation() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        u = m(torch.stack([x, t], -1))[:, 0]
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return (u_t - 0.1 * u_xx).square().mean()

    return Case(mlp(2, 16, 16, 1), (floats(12), floats(12)), loss)


@case
def jacobian() -> Case:
    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return vmap(jacrev(lambda one: m(one)))(x).square().mean()

    return Case(mlp(4, 8, 3), (floats(5, 4),), loss)


@case
def maml() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        params = dict(m.named_parameters())
        inner = grad(lambda p: F.cross_entropy(functional_call(m, p, (x,)), y))(params)
        adapted = {name: value - 0.1 * inner[name] for name, value in params.items()}
        return F.cross_entropy(functional_call(m, adapted, (x,)), y)

    return Case(mlp(8, 12, 3), (floats(6, 8), ints(3, 6)), loss)


@case
def private_gradients() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        params = dict(m.named_parameters())

        def one(p: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(functional_call(m, p, (a[None],)), b[None])

        per_sample = vmap(grad(one), (None, 0, 0))(params, x, y)
        norms = sum(g.flatten(1).square().sum(1) for g in per_sample.values()).sqrt()
        return (classify(m, x, y) + norms.mean()).mean()

    return Case(mlp(8, 12, 3), (floats(6, 8), ints(3, 6)), loss)


@case
def ensemble() -> Case:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(floats(4, 8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return vmap(lambda w: x @ w)(self.w).mean(0)

    return Case(Ensemble(), (floats(6, 8), ints(3, 6)), classify)


@case
def vae() -> Case:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = mlp(8, 12, 6), mlp(3, 12, 8)

        def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            mean, log_scale = self.encode(x).chunk(2, -1)
            posterior = distributions.Normal(mean, log_scale.exp())
            prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
            seen = distributions.Bernoulli(logits=self.decode(mean + posterior.scale * noise))
            fit = seen.log_prob((x > 0).double()).sum(-1)
            return (distributions.kl_divergence(posterior, prior).sum(-1) - fit).mean()

    return Case(Vae(), (floats(6, 8), floats(6, 3)), lambda m, x, n: m(x, n))


@case
def vae_draws() -> Case:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = mlp(8, 12, 6), mlp(3, 12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean, log_scale = self.encode(x).chunk(2, -1)
            hidden = distributions.Normal(mean, log_scale.exp()).rsample()
            return F.mse_loss(self.decode(hidden), x)

    return Case(Vae(), (floats(6, 8),), lambda m, x: m(x), draws=True)


@case
def normalizing_flow() -> Case:
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(mlp(2, 8, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(len(x), dtype=x.dtype)
            a, b = x.chunk(2, -1)
            for net in self.nets:
                scale, shift = net(a).tanh().chunk(2, -1)
                a, b = b * scale.exp() + shift, a
                total = total + scale.sum(-1)
            base = distributions.MultivariateNormal(torch.zeros(4).double(), torch.eye(4).double())
            return -(base.log_prob(torch.cat([a, b], -1)) + total).mean()

    return Case(Coupling(), (floats(6, 4),), lambda m, x: m(x))


@case
def diffusion() -> Case:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.net = nn.Embedding(10, 8).double(), mlp(16, 24, 8)
            self.register_buffer("alpha", torch.linspace(0.99, 0.1, 10).double())

        def forward(self, x: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            a = self.alpha[t][:, None]
            noisy = a.sqrt() * x + (1 - a).sqrt() * noise
            return F.mse_loss(self.net(torch.cat([noisy, self.embed(t)], -1)), noise)

    return Case(Denoiser(), (floats(6, 8), ints(10, 6), floats(6, 8)), lambda m, *args: m(*args))


class Gan(nn.Module):
    """Generator and discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = mlp(4, 12, 8), mlp(8, 12, 1)


@case
def gan_discriminator() -> Case:
    model = Gan()
    model.make.requires_grad_(False)

    def loss(m: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (F.softplus(-m.judge(x)) + F.softplus(m.judge(m.make(z).detach()))).mean()

    return Case(model, (floats(6, 8), floats(6, 4)), loss)


@case
def gan_penalty() -> Case:
    model = Gan()
    model.make.requires_grad_(False)

    def loss(m: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        real = m.judge(x)
        (g,) = torch.autograd.grad(real.sum(), x, create_graph=True)
        return (m.judge(m.make(z)) - real).mean() + (g.norm(dim=-1) - 1).square().mean()

    return Case(model, (floats(6, 8), floats(6, 4)), loss)


@case
def spectral_norm() -> Case:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 12).double())
    return Case(
        nn.Sequential(layer, nn.Linear(12, 3).double()), (floats(6, 8), ints(3, 6)), classify
    )


@case
def policy_gradient() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, a: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        policy = distributions.Categorical(logits=m(x))
        return -(policy.log_prob(a) * r + 0.01 * policy.entropy()).mean()

    return Case(mlp(8, 12, 3), (floats(6, 8), ints(3, 6), floats(6)), loss)


@case
def ppo() -> Case:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.value = mlp(8, 12, 2), mlp(8, 12, 1)
            self.log_scale = nn.Parameter(torch.zeros(2).double())

    def loss(m: Any, x: Any, a: Any, old: Any, gain: Any, ret: Any) -> torch.Tensor:
        policy = distributions.Independent(distributions.Normal(m.mean(x), m.log_scale.exp()), 1)
        ratio = (policy.log_prob(a) - old).exp()
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -clipped.mean() + F.mse_loss(m.value(x)[:, 0], ret) - 0.01 * policy.entropy().mean()

    return Case(Actor(), (floats(6, 8), floats(6, 2), floats(6), floats(6), floats(6)), loss)


@case
def deep_q() -> Case:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = mlp(8, 12, 3), mlp(8, 12, 3).requires_grad_(False)

    def loss(m: Any, x: Any, a: Any, r: Any, after: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = r + 0.9 * m.target(after).max(-1).values
            for slow, fast in zip(m.target.parameters(), m.online.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        return F.smooth_l1_loss(m.online(x).gather(-1, a[:, None])[:, 0], wanted)

    return Case(Twin(), (floats(6, 8), ints(3, 6), floats(6), floats(6, 8)), loss)


@case
def sac_draws() -> Case:
    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mean, log_scale = m(x).chunk(2, -1)
        base = distributions.Normal(mean, log_scale.clamp(-5, 2).exp())
        policy = distributions.TransformedDistribution(base, [distributions.TanhTransform()])
        action = policy.rsample()
        return policy.log_prob(action).mean() + action.square().mean()

    return Case(mlp(8, 12, 4), (floats(6, 8),), loss, draws=True)


@case
def state_space() -> Case:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay = nn.Parameter(floats(8))
            self.read, self.write = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, out = torch.zeros(len(x), 8, dtype=x.dtype), []
            for one in x.unbind(1):
                h = torch.sigmoid(self.decay) * h + self.read(one)
                out.append(self.write(h))
            return torch.stack(out, 1)

    return Case(Scan(), (floats(3, 7, 4),), lambda m, x: m(x).square().mean())


@case
def complex_state_space() -> Case:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate, self.c = nn.Parameter(floats(4, 2)), nn.Parameter(floats(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(x.shape[-1], dtype=x.dtype)
            powers = torch.exp(-torch.view_as_complex(self.rate).abs()[:, None] * steps)
            kernel = (torch.view_as_complex(self.c)[:, None] * powers).sum(0).real
            size = 2 * x.shape[-1]
            return torch.fft.irfft(torch.fft.rfft(x, size) * torch.fft.rfft(kernel, size), size)

    return Case(Kernel(), (floats(3, 8),), lambda m, x: m(x)[:, :8].square().mean())


@case
def fourier_operator() -> Case:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(floats(4, 4, 3, 2) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes = torch.fft.rfft(x)[..., :3]
            mixed = torch.einsum("bik,iok->bok", modes, torch.view_as_complex(self.w))
            return torch.fft.irfft(mixed, x.shape[-1])

    return Case(Spectral(), (floats(2, 4, 8),), lambda m, x: F.mse_loss(m(x), x))


@case
def neural_ode() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            k1 = m(x)
            k2 = m(x + 0.125 * k1)
            x = x + 0.25 * k2
        return F.mse_loss(x, y)

    return Case(mlp(4, 8, 4), (floats(6, 4), floats(6, 4)), loss)


@case
def hamiltonian() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        q, p = g.chunk(2, -1)
        return F.mse_loss(torch.cat([p, -q], -1), v)

    return Case(mlp(4, 16, 1), (floats(6, 4).requires_grad_(), floats(6, 4)), loss)


class Lora(nn.Module):
    """A frozen layer, and what is learned beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(floats(layer.in_features, 2))
        self.b = nn.Parameter(torch.zeros(2, layer.out_features).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.a @ self.b


@case
def lora() -> Case:
    model = nn.Sequential(
        Lora(nn.Linear(8, 12).double()), nn.Tanh(), Lora(nn.Linear(12, 3).double())
    )
    return Case(model, (floats(6, 8), ints(3, 6)), classify)


@case
def mask_token() -> Case:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(floats(8))
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = x.clone()
            hidden[mask] = self.token
            error = (self.layer(hidden) - x).square().mean(-1)
            return (error * mask).sum() / mask.sum()

    return Case(Masked(), (floats(3, 6, 8), torch.rand(3, 6) > 0.5), lambda m, x, k: m(x, k))


@case
def contrastive() -> Case:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = mlp(8, 12, 4), mlp(6, 12, 4)
            self.scale = nn.Parameter(torch.tensor(2.0).double())

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a, b = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
            scores = self.scale.exp() * a @ b.T
            return F.cross_entropy(scores, torch.arange(len(x))) + F.cross_entropy(
                scores.T, torch.arange(len(x))
            )

    return Case(Two(), (floats(6, 8), floats(6, 6)), lambda m, x, y: m(x, y))


@case
def byol() -> Case:
    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.slow = mlp(8, 12, 4), mlp(8, 12, 4).requires_grad_(False)

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = F.normalize(m.slow(y), dim=-1)
        value = 2 - 2 * (F.normalize(m.online(x), dim=-1) * goal).sum(-1).mean()
        with torch.no_grad():
            for slow, fast in zip(m.slow.parameters(), m.online.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
        return value

    return Case(Byol(), (floats(6, 8), floats(6, 8)), loss)


@case
def vector_quantized() -> Case:
    class Vq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = mlp(8, 12, 4), mlp(4, 12, 8)
            self.codes = nn.Embedding(6, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.encode(x)
            code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
            out = self.decode(z + (code - z).detach())
            return F.mse_loss(out, x) + F.mse_loss(code, z.detach()) + F.mse_loss(z, code.detach())

    return Case(Vq(), (floats(6, 8),), lambda m, x: m(x))


@case
def detection_dense() -> Case:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 9, 3, 2, 1))

    def loss(m: Any, x: torch.Tensor, box: torch.Tensor, hit: torch.Tensor) -> torch.Tensor:
        out = m.body(x).flatten(2).transpose(1, 2)
        found = F.binary_cross_entropy_with_logits(out[..., 0], hit)
        error = F.smooth_l1_loss(out[..., 1:5], box, reduction="none").mean(-1)
        return found + (error * hit).sum() / hit.sum().clamp(min=1)

    batch = (floats(2, 3, 16, 16), floats(2, 16, 4), (torch.rand(2, 16) > 0.5).double())
    return Case(Detector().double(), batch, loss)


@case
def unet() -> Case:
    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.mid = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
            self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(11, 2, 3, 1, 1)
            self.norm = nn.GroupNorm(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(F.silu(self.mid(F.silu(self.down(x)))))
            return self.out(torch.cat([self.up(h), x], 1))

    return Case(Unet().double(), (floats(2, 3, 8, 8), ints(2, 2, 8, 8)), classify)


@case
def speech_ctc() -> Case:
    model = nn.LSTM(4, 8, batch_first=True, bidirectional=True).double()

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = m(x)[0].log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), y.shape[1])
        return F.ctc_loss(scores, y, *lengths)

    return Case(model, (floats(2, 9, 4), ints(15, 2, 3) + 1), loss)


@case
def spectrogram() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(9, 12, 3)
            self.register_buffer("window", torch.hann_window(16).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            power = torch.stft(x, 16, 8, window=self.window, return_complex=True).abs().square()
            return self.net((power + 1e-6).log().transpose(1, 2)).mean(1)

    return Case(Net(), (floats(2, 128), ints(3, 2)), classify)


@case
def recommender() -> Case:
    class Dlrm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3))
            self.dense, self.top = mlp(5, 8, 4), mlp(10, 8, 1)

        def forward(
            self, x: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor
        ) -> torch.Tensor:
            parts = [self.dense(x), *(bag(index, offsets) for bag in self.bags)]
            crossed = torch.stack(parts, 1) @ torch.stack(parts, 2)
            rows, columns = torch.tril_indices(4, 4, -1)
            return self.top(torch.cat([parts[0], crossed[:, rows, columns]], 1))[:, 0]

    batch = (floats(3, 5), ints(20, 9), torch.tensor([0, 3, 6]), torch.rand(3).double())
    return Case(
        Dlrm().double(),
        batch,
        lambda m, x, i, o, y: F.binary_cross_entropy_with_logits(m(x, i, o), y),
    )


@case
def time_series() -> Case:
    model = nn.Sequential(nn.Conv1d(2, 8, 3, padding=2, dilation=2), nn.ReLU(), nn.Conv1d(8, 1, 1))
    return Case(
        model.double(), (floats(3, 2, 12), floats(3, 1, 12)), lambda m, x, y: F.mse_loss(m(x), y)
    )


@case
def layer_drop_zero() -> Case:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.rate = nn.ModuleList(mlp(8, 8) for _ in range(3)), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                chance = torch.rand([])
                if not self.training or chance >= self.rate:
                    x = layer(x)
            return x

    return Case(Dropped(), (floats(6, 8), ints(8, 6)), classify)


@case
def gaussian_process() -> Case:
    class Process(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(()).double())
            self.log_noise = nn.Parameter(torch.zeros(()).double())

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            kernel = torch.exp(-torch.cdist(x, x).square() / self.log_scale.exp())
            kernel = kernel + self.log_noise.exp() * torch.eye(len(x), dtype=x.dtype)
            lower = torch.linalg.cholesky(kernel)
            solved = torch.cholesky_solve(y[:, None], lower)[:, 0]
            return 0.5 * y @ solved + lower.diagonal().log().sum()

    return Case(Process(), (floats(6, 2), floats(6)), lambda m, x, y: m(x, y))


@case
def boolean_index() -> Case:
    """Rightly refused: the number of rows depends on values."""
    return Case(
        mlp(8, 12, 3),
        (floats(6, 8), ints(3, 6)),
        lambda m, x, y: F.cross_entropy(m(x[y > 0]), y[y > 0]),
    )


@case
def early_exit() -> Case:
    """Rightly refused: values decide which layers run."""

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = m[0](x)
        if h.norm() > math.pi:
            h = h.tanh()
        return F.cross_entropy(m[2](h), y)

    return Case(mlp(8, 12, 3), (floats(6, 8), ints(3, 6)), loss)
