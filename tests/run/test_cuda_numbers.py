"""Placed steps on several GPUs give the numbers of the unplaced step on one, twenty steps long."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from devplace import workloads
from devplace.graph import OpGraph
from devplace.run.check import CheckReport, check_step
from devplace.run.compile import Step, compile_step
from devplace.step_capture import capture
from tests.run import gpus
from tests.run.models import Clipped, Containers, Normed, Tied, Unrolled, mean_square, next_token
from tests.run.placed import largest_difference

pytestmark = gpus.MARKS

STEPS = 20
# Largest error allowed in float32, as a share of a tensor's largest magnitude, where a kernel
# without a deterministic form, or another kernel for a tensor that a transfer has made dense,
# rounds in another order. Everything else must be equal in every bit.
ROUNDING = 1e-5
NOT_BIT_EQUAL: dict[str, str] = {}

MakeOptimizer = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    """Deterministic kernels, the same weights and batches in every run."""
    torch.manual_seed(0)
    with gpus.deterministic():
        yield


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=1e-3)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def amsgrad(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.01, amsgrad=True)


@dataclass(frozen=True)
class Training:
    """A captured training step with what is needed to run it."""

    graph: OpGraph
    model: Any
    optimizer: Any
    batch: tuple[Any, ...]

    def check(self, placed: Any, count: int) -> CheckReport:
        names = gpus.names(count)
        return check_step(
            self.graph, self.model, self.optimizer, self.batch, *placed, names, steps=STEPS
        )


def capture_workload(name: str, **config: Any) -> Training:
    workload = workloads.build(name, size="small", device=gpus.HOME, **config)
    is_transformer = name.startswith(("bert", "gpt", "moe"))
    optimizer = (adamw if is_transformer else momentum)(workload.model.parameters())
    graph = capture(workload.model, workload.inputs, workload.loss_fn, optimizer, name=name)
    return Training(graph, workload.model, optimizer, workload.inputs)


def assert_same(
    training: Training, count: int, how: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placed and unplaced step agree over all steps, and the placed one ran as CUDA graphs."""
    gpus.skip_on_one(training.graph)
    placed = gpus.PLACEMENTS[how](training.graph, count)
    with gpus.seen_executors(monkeypatch) as executors:
        report = training.check(placed, count)
    assert report.steps == STEPS
    assert report.num_transfers > 0
    worst = report.worst
    if name in NOT_BIT_EQUAL:
        assert worst.error <= ROUNDING, worst
    else:
        assert report.is_bit_equal, worst
    assert gpus.ON_CPU or executors[0].mode == "graph", executors[0].reason


@pytest.fixture(scope="module", params=workloads.NAMES)
def workload(request: pytest.FixtureRequest) -> tuple[str, Training]:
    """A built-in workload, captured."""
    return request.param, capture_workload(request.param)


# The trivial split is tried with one workload of a kind.
SPLIT = ("resnet-50", "nmt-2", "gnmt-4", "bert-base", "moe")


@pytest.mark.parametrize("count", gpus.COUNTS)
def test_every_workload_gives_the_unplaced_numbers(
    workload: tuple[str, Training], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, parameters, buffers and optimizer state equal the unplaced step's in all 20 steps."""
    name, training = workload
    assert_same(training, count, "random", name, monkeypatch)
    if name in SPLIT:
        assert_same(training, count, "layers", name, monkeypatch)


SIZES: list[tuple[str, dict[str, Any]]] = [
    ("rnnlm", {"batch": 3, "seq": 5}),
    ("bert-base", {"batch": 5, "layers": 1}),
    ("resnet-50", {"batch": 7}),
    ("gpt-2", {"batch": 1, "dropout": 0.0}),
]


@pytest.mark.parametrize("count", gpus.COUNTS[:1])
@pytest.mark.parametrize(("name", "config"), SIZES)
def test_other_sizes_give_the_unplaced_numbers(
    name: str, config: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd batches and other depths change nothing about that."""
    assert_same(capture_workload(name, **config), count, "random", name, monkeypatch)


class Frozen(nn.Module):
    """A frozen batch norm and layer below a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.above = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.above(self.below(x).relu())


@dataclass(frozen=True)
class Feature:
    """Something a training step may have.

    Attributes:
        model: Makes the model.
        batch: Makes a batch.
        loss: Its loss.
        optimizer: Makes the optimizer.
        options: Of capture.
        is_followed: Whether plain torch code does the same, so that it can be compared.
    """

    model: Callable[[], Any]
    batch: Callable[[], Any]
    loss: Any = mean_square
    optimizer: MakeOptimizer = momentum
    options: dict[str, Any] = field(default_factory=dict)
    is_followed: bool = True


def normal(*shape: int) -> Callable[[], Any]:
    return lambda: (torch.randn(shape),)


def tokens() -> Any:
    return (torch.randint(0, 7, (3, 5)),)


FEATURES = {
    "batch norm": Feature(Normed, normal(4, 2, 8, 8)),
    "dropout": Feature(lambda: Normed(0.5), normal(4, 2, 8, 8), is_followed=False),
    "tied weights": Feature(Tied, tokens, next_token, adam),
    "frozen parameters": Feature(Frozen, normal(16, 4), optimizer=adamw),
    "layers used twice or never": Feature(Containers, normal(6, 4), optimizer=adam),
    "adamw": Feature(Clipped, normal(8, 4), optimizer=adamw),
    "amsgrad": Feature(Clipped, normal(8, 4), optimizer=amsgrad),
    "clipping": Feature(
        Clipped, lambda: (torch.randn(8, 4) * 100,), options={"clip_grad_norm": 0.5}
    ),
    "micro-batches": Feature(Clipped, normal(8, 4), options={"micro_batches": 3}),
    "stacked gradients": Feature(
        Unrolled, normal(2, 8, 8), optimizer=adam, options={"stack_gradients": True}
    ),
    "bfloat16": Feature(
        Tied, tokens, next_token, adamw, {"autocast": torch.bfloat16}, is_followed=False
    ),
}
FOLLOWED = [name for name, feature in FEATURES.items() if feature.is_followed]


def train_on(feature: Feature, model: Any, batch: Any) -> Training:
    optimizer = feature.optimizer(model.parameters())
    graph = capture(model, batch, feature.loss, optimizer, **feature.options)
    return Training(graph, model, optimizer, batch)


@pytest.mark.parametrize("count", gpus.COUNTS)
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_gives_the_unplaced_numbers(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training steps may have is bit-equal to the unplaced step, placed at random."""
    feature = FEATURES[name]
    model, batch = feature.model().to(gpus.HOME), gpus.to_home(feature.batch())
    assert_same(train_on(feature, model, batch), count, "random", name, monkeypatch)


@pytest.mark.parametrize("count", gpus.COUNTS)
@pytest.mark.parametrize("name", FOLLOWED)
def test_every_feature_follows_torch(name: str, count: int) -> None:
    """Twenty new batches under a learning rate schedule: losses, parameters, buffers and optimizer
    state equal those of an ordinary torch loop, within 1e-9 in float64."""
    feature = FEATURES[name]
    model = feature.model().double().to(gpus.HOME)
    batches = [gpus.to_home(tuple(map(widened, feature.batch()))) for _ in range(STEPS)]
    twin = copy.deepcopy(model)
    training = train_on(feature, model, batches[0])
    placed = gpus.at_random(training.graph, count, 1)
    step = compile_step(model, training.optimizer, training.graph, *placed, gpus.names(count))
    losses = []
    schedule = make_schedule(training.optimizer)
    for batch in batches:
        losses.append(float(step(*batch)))
        schedule.step()
    step.sync()
    step.close()
    other = feature.optimizer(twin.parameters())
    assert losses == pytest.approx(torch_loop(feature, twin, other, batches), rel=1e-9)
    assert largest_difference(model, twin) < 1e-9
    assert_same_state(training.optimizer, other, 1e-9)


def widened(tensor: Any) -> Any:
    return tensor.double() if tensor.is_floating_point() else tensor


def make_schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def torch_loop(feature: Feature, model: Any, optimizer: Any, batches: list[Any]) -> list[float]:
    losses = []
    schedule = make_schedule(optimizer)
    clip = feature.options.get("clip_grad_norm")
    for batch in batches:
        optimizer.zero_grad()
        loss = feature.loss(model, *batch)
        loss.backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def assert_same_state(first: Any, second: Any, tolerance: float) -> None:
    ours, theirs = first.state_dict()["state"], second.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for key, entry in theirs.items():
        assert ours[key].keys() == entry.keys()
        for slot, value in entry.items():
            torch.testing.assert_close(ours[key][slot], value, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def transformer() -> Training:
    """A small GPT with dropout, captured."""
    return capture_workload("gpt-2", dropout=0.2, layers=2)


def run(training: Training, count: int, seed: int, steps: int, placed: Any = None) -> list[float]:
    placed = placed or gpus.at_random(training.graph, count, count)
    step = compiled(training, count, placed, seed)
    losses = [float(step(*training.batch)) for _ in range(steps)]
    step.load()  # the model's values are wanted, not the step's
    step.close()
    return losses


def compiled(training: Training, count: int, placed: Any, seed: int = 0) -> Step:
    names = gpus.names(count)
    return compile_step(training.model, training.optimizer, training.graph, *placed, names, seed)


def test_dropout_depends_on_the_seed_alone(transformer: Training) -> None:
    """The same losses on one, two or four GPUs, however placed; others with another seed."""
    counts = [count for count in (1, 2, 4) if count <= gpus.NUM_DEVICES]
    first, *others = [run(transformer, count, 3, 5) for count in counts]
    others.append(run(transformer, 1, 3, 5, gpus.in_layers(transformer.graph, 1)))
    assert all(losses == first for losses in others)
    assert len(set(first)) == 5
    assert run(transformer, 1, 4, 5) != first


@pytest.mark.parametrize("count", gpus.COUNTS[:1])
def test_a_resumed_run_equals_one_without_a_break(transformer: Training, count: int) -> None:
    """Ten steps, sync, a checkpoint loaded into a new model and optimizer, ten steps under another
    plan: bit for bit the losses, weights and state of twenty steps."""
    model = copy.deepcopy(transformer.model)
    optimizer = adamw(model.parameters())
    whole = Training(transformer.graph, model, optimizer, transformer.batch)
    expected = train_and_sync(whole, count, gpus.in_layers(whole.graph, count), STEPS)

    broken = copy.deepcopy(transformer.model)
    first = Training(whole.graph, broken, adamw(broken.parameters()), whole.batch)
    losses = train_and_sync(first, count, gpus.at_random(whole.graph, count, 1), STEPS // 2)
    saved = copy.deepcopy((broken.state_dict(), first.optimizer.state_dict()))

    fresh = capture_workload("gpt-2", dropout=0.2, layers=2, seed=1)
    fresh.model.load_state_dict(saved[0])
    fresh.optimizer.load_state_dict(saved[1])
    second = replace(fresh, batch=whole.batch)
    losses += train_and_sync(second, count, gpus.at_random(whole.graph, count, 2), STEPS // 2)
    assert losses == expected
    assert largest_difference(second.model, model) == 0
    assert_same_state(second.optimizer, optimizer, 0)


def train_and_sync(training: Training, count: int, placed: Any, steps: int) -> list[float]:
    step = compiled(training, count, placed)
    losses = [float(step(*training.batch)) for _ in range(steps)]
    step.sync()
    step.close()
    return losses


@pytest.mark.parametrize("count", gpus.COUNTS[:1])
def test_bfloat16_transformer_gives_the_unplaced_numbers(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BERT under bfloat16 autocast with clipped gradients is bit-equal to the unplaced step."""
    workload = workloads.build("bert-base", size="small", device=gpus.HOME)
    optimizer = adamw(workload.model.parameters())
    graph = capture(
        workload.model,
        workload.inputs,
        workload.loss_fn,
        optimizer,
        clip_grad_norm=1.0,
        autocast=torch.bfloat16,
    )
    training = Training(graph, workload.model, optimizer, workload.inputs)
    assert_same(training, count, "layers", "bert-base in bfloat16", monkeypatch)
