"""Ordinary and unusual model code is captured right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import Runner, assert_same_training, batches, sgd, xent
from torch import nn
from torch.utils.checkpoint import checkpoint

from devplace.step_capture import capture


class Net(nn.Module):
    """Linear 8 to 8, something, linear 8 to 4."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 4)
        self.setup()

    def setup(self) -> None:
        """Further modules."""

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        """What happens between the layers."""
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.middle(self.a(x)))


class InPlaceOnViews(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        h[:, 0].mul_(2.0)
        h[:, 1:] += 1
        h[:, 2] = 0
        left = h[:, :4]
        left.tanh_()
        return torch.cat([left, h[:, 4:]], 1).add_(1.0).relu_()


class InPlaceKeepsDtype(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        low = h.float()
        low.add_(h / 3)  # float32, where low + h / 3 is float64
        mask = h.detach().clone()
        mask.gt_(0)  # float64, where mask > 0 is bool
        return low.double() + mask @ h.t() @ h


class NormTwice(Net):
    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(8)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu_(self.norm(h)))


class NormInEval(Net):
    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(8)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.norm.eval()
        return self.norm(h)


class BufferUpdates(Net):
    def setup(self) -> None:
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return h + self.average * self.table


class Frozen(Net):
    def setup(self) -> None:
        self.a.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 3)


class Constants(Net):
    def setup(self) -> None:
        self.scale = torch.linspace(1.0, 2.0, 8)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        doubled = torch.tensor([2.0, 1.0] * 4, dtype=h.dtype)
        doubled.mul_(2.0)
        return h * self.scale.to(h.dtype) * doubled * torch.tensor(0.5) + torch.arange(8)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnFunction(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return Square.apply(h)


class WeightNorm(Net):
    def setup(self) -> None:
        self.c = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return self.c(h)


class ClampedWeight(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.b.weight.data.clamp_(-0.1, 0.1)
        return h


class Recurrent(Net):
    def setup(self) -> None:
        self.lstm = nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 8, batch_first=True)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(h[:, None].expand(-1, 3, -1))[0])[0][:, -1]


class Attention(Net):
    def setup(self) -> None:
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(h[:, None].expand(-1, 3, -1))[:, 0]


class Convolution(Net):
    def setup(self) -> None:
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        image = h.view(-1, 1, 2, 4).to(memory_format=torch.channels_last)
        pooled = F.max_pool2d(self.norm(self.conv(image)).relu_(), 2)
        return h + pooled.flatten(1).repeat(1, 2)


class Checkpointed(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: torch.tanh(t) * t, h, use_reentrant=False)


class OtherNorms(Net):
    def setup(self) -> None:
        self.instance = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.group = nn.GroupNorm(2, 8)
        self.batch = nn.BatchNorm1d(8, track_running_stats=False)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return self.batch(self.group(self.instance(h.view(-1, 2, 4)).flatten(1)))


class SpectralNorm(Net):
    def setup(self) -> None:
        self.c = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return self.c(h)


class GradientInForward(Net):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        leaf = h.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(torch.tanh(self.a(leaf)).sum(), leaf, create_graph=True)
        return h + slope


class BackwardHook(Net):
    def setup(self) -> None:
        self.c = nn.Linear(8, 8)
        self.c.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        h.register_hook(lambda g: g * 2.0)
        return self.c(h)


class SharedList(Net):
    def setup(self) -> None:
        self.kept = [self.a.weight, self.b.bias]
        self.named = {"w": self.a.weight}

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return h @ self.kept[0] + self.named["w"].sum() * self.kept[1].sum()


ALL = [
    Checkpointed,
    OtherNorms,
    SpectralNorm,
    GradientInForward,
    BackwardHook,
    SharedList,
    InPlaceOnViews,
    InPlaceKeepsDtype,
    NormTwice,
    NormInEval,
    BufferUpdates,
    Frozen,
    Constants,
    OwnFunction,
    WeightNorm,
    ClampedWeight,
    Recurrent,
    Attention,
    Convolution,
]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_feature_equals_eager(kind: type[Net], optimizer: str) -> None:
    """Three steps give eager's loss, parameters and buffers."""
    torch.manual_seed(0)
    assert_same_training(
        kind().double(),
        batches(),
        xent,
        lambda m: getattr(torch.optim, optimizer)(m.parameters(), lr=0.02),
    )


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"scale_grad_by_freq": True}])
def test_embedding_options_equal_eager(options: dict[str, Any]) -> None:
    """Embedding options are kept in the captured backward."""
    model = nn.Sequential(nn.Embedding(8, 6, **options), nn.Flatten(), nn.Linear(12, 4)).double()
    data = [(torch.randint(0, 8, (5, 2)), torch.randint(0, 4, (5,))) for _ in range(3)]
    assert_same_training(model, data, xent, sgd)


def test_frozen_and_foreign_parameters_are_not_results() -> None:
    """Frozen, unused and foreign parameters stay sources without a new value."""
    model = Frozen().double()
    optimizer = torch.optim.Adam([*model.a.parameters(), *model.unused.parameters()], lr=0.1)
    graph = capture(model, batches()[0], xent, optimizer)
    assert {r.name for r in graph.results} == {
        "loss",
        "a.bias",
        "exp_avg[a.bias]",
        "exp_avg_sq[a.bias]",
    }
    assert "unused.weight" in graph.op_index
    assert "exp_avg[unused.weight]" not in graph.op_index


def test_buffers_that_do_not_change_have_no_result() -> None:
    """A non-persistent table is a buffer source, not a result; the counter is one."""
    graph = capture(BufferUpdates().double(), batches()[0], xent)
    assert graph.ops[graph.op_index["table"]].role == "buffer"
    assert [r.name for r in graph.results] == ["loss", "count", "average"]


def test_constants_made_in_forward_are_sources() -> None:
    """Tensors from outside or made from numbers are constants with their value."""
    model = Constants().double()
    graph = capture(model, batches()[0], xent)
    values = [b.value for b in graph.program.bindings if b.kind == "constant"]
    assert any(torch.equal(v, model.scale) for v in values)
    assert any(v.ndim == 0 and v.item() == 0.5 for v in values)


def test_equal_work_is_merged_only_within_stage_and_micro_batch() -> None:
    """The transposed weight is computed once per stage and chunk."""
    graph = assert_same_training(Net().double(), batches(), xent, sgd, micro_batches=2)
    turned = [op for op in graph.ops if op.target == "aten.t.default" and op.module == "b"]
    of_weight = [op for op in turned if op.inputs[0] == graph.op_index["b.weight"]]
    keys = [(op.stage, op.micro_batch) for op in of_weight]
    assert len(keys) == len(set(keys))


def test_no_op_nodes_are_gone() -> None:
    """No detach, alias or copy of a fresh constant is left."""
    graph = capture(Constants().double(), batches()[0], xent, None)
    targets = {op.target for op in graph.ops}
    assert not targets & {
        "aten.detach.default",
        "aten.alias.default",
        "aten.lift_fresh_copy.default",
    }


def test_memory_format_of_the_real_tensors_is_kept() -> None:
    """A channels-last weight is channels-last in the trace, so its gradient is too."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    graph = capture(model, x, lambda m, x: m(x).square().mean(), sgd(model))
    values = {n.name: n.meta["val"] for n in graph.program.module.graph.nodes if "val" in n.meta}
    (output,) = [n for n in values if n.startswith("convolution") and "backward" not in n]
    assert values[output].is_contiguous(memory_format=torch.channels_last)


def test_meta_model_gives_the_graph_of_the_real_one() -> None:
    """Without weights the graph is the same, and it is meant for the CPU."""
    real = Attention()
    with torch.device("meta"):
        hollow = Attention()
        x, y = torch.empty(6, 8), torch.empty(6, dtype=torch.int64)
        graph = capture(hollow, (x, y), xent, sgd(hollow))
    x, y = batches()[0]
    other = capture(real, (x.float(), y), xent, sgd(real))
    assert graph.meta["device"] == "cpu"
    assert (graph.ops, graph.tensors, graph.results) == (other.ops, other.tensors, other.results)


@pytest.mark.slow
def test_capture_is_deterministic() -> None:
    """Two captures of one model give equal graphs."""
    model = Recurrent().double()
    one, two = (capture(model, batches()[0], xent, sgd(model)) for _ in range(2))
    assert one == two


def test_new_batch_runs_on_the_same_graph() -> None:
    """The example batch's values are not in the graph."""
    model = NormTwice().double()
    graph = capture(model, batches()[0], xent)
    x, y = batches(3)[2]
    got = Runner(graph, model).step(1, (x, y))[0]
    torch.testing.assert_close(got, xent(copy.deepcopy(model), x, y).detach())


def test_parameters_in_disjoint_parts_of_one_storage_are_separate() -> None:
    """Flattened weights, as cuDNN keeps those of an LSTM, are ordinary parameters."""
    model = Net().double()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    graph = assert_same_training(model, batches(), xent, sgd)
    assert sum(r.role == "parameter" for r in graph.results) == 4


@pytest.mark.slow
def test_plain_tensor_attributes_on_meta_are_constants() -> None:
    """A hollow model may keep tables in plain attributes; they are sources without a value."""
    with torch.device("meta"):
        model = Constants()
        x, y = torch.empty(6, 8), torch.empty(6, dtype=torch.int64)
    graph = capture(model, (x, y), xent, sgd(model))
    assert graph.ops[graph.op_index["constant[scale]"]].role == "constant"
    assert model.scale.device.type == "meta"
