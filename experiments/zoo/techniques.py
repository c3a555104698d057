"""Models written here for how they are trained: their losses, weights and derivatives."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributions, nn
from torch.func import functional_call, grad, hessian, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from zoo.by_hand import classify, mlp
from zoo.case import Case, floats, ints

CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Add a case under its function's name."""
    CASES[make.__name__] = make
    return make


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Six rows with classes."""
    return floats(6, 8), ints(3, 6)


# ---- audio and sequences


@case
def wavenet() -> Case:
    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 10, 1)
            self.dilated = nn.ModuleList(
                parametrizations.weight_norm(nn.Conv1d(8, 16, 2, dilation=2**k)) for k in range(3)
            )
            self.out = nn.ModuleList(nn.Conv1d(8, 16, 1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, skips = self.first(x), 0
            for k, (dilated, out) in enumerate(zip(self.dilated, self.out, strict=True)):
                value, gate = dilated(F.pad(x, (2**k, 0))).chunk(2, 1)
                rest, skip = out(value.tanh() * gate.sigmoid()).chunk(2, 1)
                x, skips = x + rest, skips + skip
            return self.last(F.relu(skips))

    return Case(WaveNet().double(), (floats(2, 1, 12), ints(10, 2, 12)), classify)


@case
def transducer() -> Case:
    class Transducer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.listen = nn.LSTM(4, 8, batch_first=True)
            self.embed, self.predict = nn.Embedding(6, 8), nn.GRU(8, 8, batch_first=True)
            self.joint = nn.Linear(8, 6)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            heard = self.listen(x)[0][:, :, None]
            said = self.predict(F.pad(self.embed(y), (0, 0, 1, 0)))[0][:, None]
            scores = self.joint((heard + said).tanh()).log_softmax(-1)
            blank, index = scores[..., 0], y[:, None, :, None].expand(-1, x.shape[1], -1, 1)
            emit = scores[:, :, :-1].gather(-1, index)[..., 0]
            paths: dict[tuple[int, int], torch.Tensor] = {(0, 0): torch.zeros_like(blank[:, 0, 0])}
            for t in range(x.shape[1]):
                for u in range(y.shape[1] + 1):
                    ways = [paths[t - 1, u] + blank[:, t - 1, u]] if t else []
                    ways += [paths[t, u - 1] + emit[:, t, u - 1]] if u else []
                    if ways:
                        paths[t, u] = torch.stack(ways).logsumexp(0)
            return -(paths[t, u] + blank[:, -1, -1]).mean()

    return Case(
        Transducer().double(), (floats(2, 4, 4), ints(5, 2, 3) + 1), lambda m, x, y: m(x, y)
    )


@case
def speech_ctc_padded() -> Case:
    model = nn.LSTM(4, 8, batch_first=True).double()
    lengths = torch.tensor([9, 8]), torch.tensor([3, 2])

    def loss(m: nn.Module, x: Any, y: Any, times: Any, words: Any) -> torch.Tensor:
        scores = m(x)[0].log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, times, words, zero_infinity=True)

    return Case(model, (floats(2, 9, 4), ints(7, 2, 3) + 1, *lengths), loss)


@case
def random_field() -> Case:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.score = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5)
            self.step = nn.Parameter(floats(5, 5))

        def forward(self, x: torch.Tensor, y: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
            scores = self.score(self.read(x)[0])
            paths, path = scores[:, 0], scores[:, 0].gather(1, y[:, :1])[:, 0]
            for k in range(1, x.shape[1]):
                further = (paths[:, :, None] + self.step + scores[:, None, k]).logsumexp(1)
                paths = torch.where(there[:, k, None], further, paths)
                mine = self.step[y[:, k - 1], y[:, k]] + scores[:, k].gather(1, y[:, k, None])[:, 0]
                path = path + there[:, k] * mine
            return (paths.logsumexp(1) - path).mean()

    there = torch.arange(5) < torch.tensor([[5], [3]])
    inputs = (floats(2, 5, 4), ints(5, 2, 5), there)
    return Case(Field().double(), inputs, lambda m, *given: m(*given))


@case
def memory() -> Case:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.register_buffer("before", torch.zeros(2, 3, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read = torch.cat([self.before, x], 1)
            out = self.attend(x, read, read, need_weights=False)[0]
            self.before = x.detach()[:, -3:]
            return out

    return Case(Memory().double(), (floats(2, 4, 8),), lambda m, x: m(x).square().mean())


@case
def encoder_with_mask() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m(x, mask=mask).square().mean()

    return Case(nn.TransformerEncoder(layer, 2).double(), (floats(2, 5, 8),), loss)


@case
def vocoder() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        size, angle = m(x).chunk(2, -1)
        waves = torch.polar(size.exp(), angle).transpose(1, 2)
        return F.l1_loss(torch.istft(waves, 16, 8, window=torch.hann_window(16).double()), y)

    return Case(mlp(6, 12, 18), (floats(2, 9, 6), floats(2, 64)), loss)


# ---- weights


@case
def weight_norm_by_hooks() -> Case:
    layers = [nn.utils.weight_norm(nn.Linear(8, 12)), nn.Tanh(), nn.Linear(12, 3)]
    return Case(nn.Sequential(*layers).double(), batch(), classify)


@case
def spectral_norm_by_hooks() -> Case:
    layers = [nn.utils.spectral_norm(nn.Linear(8, 12)), nn.Tanh(), nn.Linear(12, 3)]
    return Case(nn.Sequential(*layers).double(), batch(), classify)


@case
def orthogonal() -> Case:
    first = parametrizations.orthogonal(nn.Linear(8, 8).double())
    return Case(nn.Sequential(first, nn.Linear(8, 3).double()), batch(), classify)


@case
def pruned() -> Case:
    model = mlp(8, 12, 3)
    prune.l1_unstructured(model[0], "weight", 0.5)
    return Case(model, batch(), classify)


@case
def unet_averaged() -> Case:
    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2)
            self.out = nn.Conv2d(5, 1, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([x, self.up(self.down(x).relu())], 1))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Unet().double()
            self.average = copy.deepcopy(self.net).requires_grad_(False)

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(m.average.parameters(), m.net.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
        return F.mse_loss(m.net(x), y)

    return Case(Both(), (floats(2, 1, 8, 8), floats(2, 1, 8, 8)), loss)


@case
def averaged_model() -> Case:
    """Rightly refused: torch's average decides by a count whether it copies or averages."""
    average = torch.optim.swa_utils.AveragedModel(model := mlp(8, 12, 3))
    both = nn.ModuleDict({"net": model, "average": average.requires_grad_(False)})

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        m["average"].update_parameters(m["net"])
        return F.cross_entropy(m["net"](x), y)

    return Case(both, batch(), loss)


@case
def quantization_aware() -> Case:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.layer.weight
            scale = w.detach().abs().max() / 7
            low = (w / scale).round().clamp(-8, 7) * scale
            return F.linear(x, w + (low - w).detach(), self.layer.bias)

    return Case(Quantized().double(), batch(), classify)


@case
def layer_cast_inside() -> Case:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer = self.layer.to(x.dtype)
            return self.layer(x)

    return Case(Router().double(), batch(), classify)


@case
def hyper_network() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = m(z).mean(0)
        return F.cross_entropy(F.linear(x, weights[:24].view(3, 8), weights[24:]), y)

    return Case(mlp(4, 12, 27), (floats(6, 8), floats(6, 4), ints(3, 6)), loss)


@case
def embedding_of_largest_norm() -> Case:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(10, 8, max_norm=1.0), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(x).mean(1))

    return Case(Words().double(), (ints(10, 6, 4), ints(3, 6)), classify)


# ---- losses between examples


@case
def siamese() -> Case:
    def loss(m: nn.Module, *three: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_loss(*(m(each) for each in three))

    return Case(mlp(8, 12, 4), (floats(5, 8), floats(5, 8), floats(5, 8)), loss)


@case
def clip_with_temperature() -> Case:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = mlp(8, 12, 4), mlp(6, 12, 4)
            self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)).double())

        def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            self.scale.data.clamp_(0, math.log(100))
            image, text = F.normalize(self.image(x), dim=-1), F.normalize(self.text(z), dim=-1)
            scores, right = image @ text.t() * self.scale.exp(), torch.arange(len(x))
            return (F.cross_entropy(scores, right) + F.cross_entropy(scores.t(), right)) / 2

    return Case(Clip(), (floats(5, 8), floats(5, 6)), lambda m, x, z: m(x, z))


@case
def momentum_queue() -> Case:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = mlp(8, 12, 6)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", F.normalize(floats(12, 6), dim=1))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def loss(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        query = F.normalize(m.query(a), dim=1)
        with torch.no_grad():
            key = F.normalize(m.key(b), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ m.queue.clone().t()], 1)
        m.queue[(m.place + torch.arange(6)) % 12] = key
        m.place.copy_((m.place + 6) % 12)
        return F.cross_entropy(scores / 0.1, torch.zeros(6, dtype=torch.long))

    return Case(Queue(), (floats(6, 8), floats(6, 8)), loss)


@case
def sinkhorn() -> Case:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.kinds = mlp(8, 12, 6), nn.Linear(6, 5, bias=False).double()

    def loss(m: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.kinds.weight.copy_(F.normalize(m.kinds.weight.data.clone(), dim=1))
        one, other = (m.kinds(F.normalize(m.net(each), dim=1)) for each in (a, b))
        with torch.no_grad():
            share = (one / 0.5).exp().t()
            for _ in range(3):
                share /= share.sum(1, keepdim=True) * 5
                share /= share.sum(0, keepdim=True) * 6
        return -(6 * share.t() * (other / 0.1).log_softmax(1)).sum(1).mean()

    return Case(Prototypes(), (floats(6, 8), floats(6, 8)), loss)


@case
def distillation() -> Case:
    teacher = mlp(8, 16, 3).requires_grad_(False).eval()

    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            soft = (teacher(x) / 2).log_softmax(-1)
        mine = m(x)
        apart = F.kl_div((mine / 2).log_softmax(-1), soft, reduction="batchmean", log_target=True)
        return F.cross_entropy(mine, y) + 4 * apart

    return Case(mlp(8, 12, 3), batch(), loss)


@case
def mixture_density() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        share, mean, scale = m(x).unflatten(-1, (3, 4)).unbind(1)
        parts = distributions.Normal(mean, scale.exp())
        return (
            -distributions.MixtureSameFamily(distributions.Categorical(logits=share), parts)
            .log_prob(y)
            .mean()
        )

    return Case(mlp(8, 12, 12), (floats(6, 8), floats(6)), loss)


@case
def learned_variance() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, variance = m(x).chunk(2, -1)
        return F.gaussian_nll_loss(mean, y, variance.exp())

    return Case(mlp(8, 12, 6), (floats(6, 8), floats(6, 3)), loss)


@case
def adaptive_softmax() -> Case:
    """Rightly refused: each cluster of words computes as many rows as there are of it."""
    model = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]).double()
    return Case(model, (floats(6, 8), ints(20, 6)), lambda m, x, y: m(x, y).loss)


# ---- derivatives


@case
def deep_equilibrium() -> Case:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.read, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def once(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (0.5 * self.inner(z) + self.read(x)).tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(6):
                    z = self.once(z, x)
            z = self.once(z, x)
            here = z.detach().clone().requires_grad_()
            after = self.once(here, x)

            def solve(gradient: torch.Tensor) -> torch.Tensor:
                found = gradient
                for _ in range(6):
                    (pulled,) = torch.autograd.grad(after, here, found, retain_graph=True)
                    found = pulled + gradient
                return found

            z.register_hook(solve)
            return self.out(z)

    return Case(Equilibrium().double(), batch(), classify)


class Reversed(torch.autograd.Function):
    """The gradient with another sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.share * gradient, None


@case
def gradient_reversal() -> Case:
    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.kind, self.domain = mlp(8, 12, 6), mlp(6, 3), mlp(6, 2)

    def loss(m: Any, x: torch.Tensor, y: torch.Tensor, domain: torch.Tensor) -> torch.Tensor:
        h = m.net(x)
        return classify(m.kind, h, y) + classify(m.domain, Reversed.apply(h, 0.3), domain)

    return Case(Domains(), (*batch(), ints(2, 6)), loss)


@case
def curvature() -> Case:
    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return vmap(hessian(lambda one: m(one).sum()))(x).square().mean()

    return Case(mlp(3, 8, 1), (floats(4, 3),), loss)


@case
def sharpness_aware() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        params = dict(m.named_parameters())
        slope = grad(lambda p: F.cross_entropy(functional_call(m, p, (x,)), y))(params)
        size = torch.stack([each.square().sum() for each in slope.values()]).sum().sqrt()
        moved = {k: v + 0.05 * (slope[k] / size).detach() for k, v in params.items()}
        return F.cross_entropy(functional_call(m, moved, (x,)), y)

    return Case(mlp(8, 12, 3), batch(), loss)


@case
def adversarial() -> Case:
    def loss(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(classify(m, x, y), x)
        return classify(m, (x + 0.1 * slope.sign()).detach(), y)

    return Case(mlp(8, 12, 3), batch(), loss)


@case
def radiance_field() -> Case:
    def loss(m: nn.Module, eye: Any, way: Any, seen: Any) -> torch.Tensor:
        depth = torch.linspace(0.1, 2, 7, dtype=eye.dtype)
        points = eye[:, None] + way[:, None] * depth[:, None]
        waves = [wave(points * 2**k) for k in range(2) for wave in (torch.sin, torch.cos)]
        density, colour = m(torch.cat(waves, -1)).split([1, 3], -1)
        thick = torch.cat([depth.diff(), depth.new_tensor([1e3])])
        opaque = 1 - torch.exp(-density[..., 0].relu() * thick)
        through = torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque], -1).cumprod(-1)[:, :-1]
        return F.mse_loss(((opaque * through)[..., None] * colour.sigmoid()).sum(1), seen)

    return Case(mlp(12, 16, 4), (floats(4, 3), floats(4, 3), floats(4, 3)), loss)


@case
def equivariant_graph() -> Case:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge, self.move, self.node = mlp(9, 8, 6), mlp(6, 8, 1), mlp(10, 8, 4)

        def forward(self, h: torch.Tensor, x: torch.Tensor, edges: torch.Tensor) -> Any:
            sink, source = edges
            apart = x[sink] - x[source]
            told = self.edge(torch.cat([h[sink], h[source], apart.square().sum(-1, True)], -1))
            moved = torch.zeros_like(x).index_add(0, sink, apart * self.move(told))
            heard = h.new_zeros(len(h), 6).scatter_reduce(
                0, sink[:, None].expand(-1, 6), told, "mean", include_self=False
            )
            return h + self.node(torch.cat([h, heard], -1)), x + moved

    def loss(m: nn.Module, h: Any, x: Any, edges: Any, y: Any) -> torch.Tensor:
        h, x = m(h, x, edges)
        return F.mse_loss(x, y) + h.square().mean()

    return Case(Layer(), (floats(6, 4), floats(6, 3), ints(6, 2, 14), floats(6, 3)), loss)


@case
def capsules() -> Case:
    class Capsules(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.votes = nn.Parameter(0.3 * floats(4, 3, 5, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            votes = torch.einsum("bid,ijed->bije", x, self.votes)
            share = torch.zeros_like(votes[..., 0])
            for _ in range(3):
                out = (share.softmax(2)[..., None] * votes).sum(1)
                size = out.square().sum(-1, keepdim=True)
                out = out * size.sqrt() / (1 + size)
                share = share + (votes * out[:, None]).sum(-1)
            return out.norm(dim=-1)

    return Case(Capsules(), (floats(6, 4, 2), ints(3, 6)), classify)
