"""Ops timed in a process that may die of them, with the integers of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tests.cost import hostile_ops as hostile
from torch import nn
from torch.nn import functional as F

from devplace.cost import op_timing, remote, sustained
from devplace.cost.op_signature import op_calls
from devplace.cost.profiled import Profiled
from devplace.cost.table import CostTable
from devplace.cost.worker_process import WorkerProcess
from devplace.graph import OpGraph
from devplace.machine import detect
from devplace.step_capture import capture


class Around(nn.Module):
    """A custom op between two layers."""

    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.op = op
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.second(self.op(self.first(x)).tanh())


def priced(model: nn.Module, *batch: Any, **settings: Any) -> tuple[OpGraph, CostTable]:
    graph = capture(model, batch)
    return graph, Profiled(seconds=900, cache=None, **settings)(graph, detect(cpu_devices=2))


def unmeasured(table: CostTable) -> list[str]:
    """The notes, each of which must be one line."""
    assert all("\n" not in note for note in table.notes)
    return list(table.notes)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (hostile.aborts, "killed by SIGABRT"),
        (torch.ops.devplace_hostile.aborts_by_library, "killed by SIGABRT"),
        (hostile.raises, "no such kernel"),
    ],
)
@pytest.mark.slow
def test_a_kernel_that_fails_costs_only_its_own_measurement(op: Any, reason: str) -> None:
    """The process of the user lives, one line names the op and why, and all others are timed."""
    graph, table = priced(Around(op), torch.randn(4, 8))
    (note,) = unmeasured(table)
    assert "devplace_hostile" in note
    assert reason in note
    assert table.origin == "profiled"
    works = [i for i, each in enumerate(graph.ops) if not each.is_source and not each.is_view]
    assert (table.compute_ns[works] > 0).all()


@pytest.mark.slow
def test_a_kernel_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time limit its process is killed; the others are timed in a new one."""
    ask = remote.RemoteTimer._ask

    def hurried(self: Any, function: str, request: tuple[Any, ...], limit_s: float) -> Any:
        hangs = function == "time_call" and "hangs" in request[0]
        return ask(self, function, request, 1.0 if hangs else 600.0)

    monkeypatch.setattr(remote.RemoteTimer, "_ask", hurried)
    _, table = priced(Around(hostile.hangs), torch.randn(4, 8))
    (note,) = unmeasured(table)
    assert "devplace_hostile.hangs" in note
    assert "within 1 s" in note


@pytest.mark.slow
def test_after_some_deaths_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is estimated, which is said."""
    monkeypatch.setattr(remote, "MAX_DEATHS", 1)
    _, table = priced(Around(hostile.aborts), torch.randn(4, 8))
    first, second = sorted(unmeasured(table))
    assert "aborts" in first
    assert "1 measuring processes have died" in second


@pytest.mark.slow
def test_an_op_that_only_this_process_knows_is_estimated() -> None:
    """One line says so, and how to have it measured."""

    @torch.library.custom_op("devplace_here::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    _, table = priced(Around(twice), torch.randn(4, 8))
    (note,) = unmeasured(table)
    assert "devplace_here.twice" in note
    assert "a module that can be imported" in note


@pytest.mark.slow
def test_an_op_that_writes_its_argument_is_timed() -> None:
    """In its functional form, which the process makes for itself."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        hostile.doubles(y)
        return y

    graph, table = priced(Around(doubled), torch.randn(4, 8))
    assert any("doubles" in op.target for op in graph.ops)
    assert unmeasured(table) == []


class Picking(nn.Module):
    """Rows that are computed from the batch by ops on integers."""

    def __init__(self, op: Any = hostile.picks) -> None:
        super().__init__()
        self.op = op
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, ids: Any) -> Any:
        return self.op(self.table, ids.flip(0) * 2).sum(0)


@pytest.mark.slow
def test_integers_computed_from_the_batch_are_real() -> None:
    """A kernel that takes no others is timed."""
    _, table = priced(Picking(), torch.arange(10))
    assert unmeasured(table) == []


@pytest.mark.slow
def test_integers_of_buffers_and_constants_are_real() -> None:
    """Indices may lie in the model, and be made of small floats."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 8))
            self.register_buffer("rows", torch.arange(0, 20, 2))
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: Any) -> Any:
            own = hostile.picks(self.table, self.rows + torch.tensor([2] * 10))
            return own + hostile.picks(self.table, (x.round() * self.scale).long())

    _, table = priced(Model(), torch.arange(10.0))
    assert unmeasured(table) == []


@pytest.mark.slow
def test_an_op_whose_integers_others_read_costs_only_its_own_measurement() -> None:
    """It dies when the others' integers are computed: they get made-up ones, and it is named."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 256)

        def forward(self, ids: Any) -> Any:
            return self.table(hostile.aborts_on_integers(ids))

    graph, table = priced(Model(), torch.arange(500))
    (note,) = unmeasured(table)
    assert "aborts_on_integers" in note
    assert [op.target for op in graph.ops].count("aten.embedding.default") == 1


class Recommender(nn.Module):
    """DLRM-like: bags of categories with offsets, products of all pairs."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50 + k, 8, mode=mode) for k in range(2))
        self.dense, self.top = nn.Linear(4, 8), nn.Linear(3, 1)

    def forward(self, x: Any, ids: Any, offsets: Any, clicks: Any) -> Any:
        found = [
            bag(*each) for bag, each in zip(self.bags, zip(ids, offsets, strict=True), strict=True)
        ]
        parts = torch.stack([self.dense(x), *found], 1)
        pairs = parts @ parts.transpose(1, 2)
        score = self.top(pairs[:, [0, 0, 1], [1, 2, 2]])
        return F.binary_cross_entropy_with_logits(score[:, 0], clicks)


def recommender(mode: str) -> tuple[Any, Any]:
    """Model and batch, bags of unequal size, one of them empty."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 7, 12, 13])
    ids = [torch.randint(0, 50, (17,)) for _ in range(2)]
    batch = (torch.randn(6, 4), ids, [offsets, offsets], torch.rand(6).round())
    return Recommender(mode), batch


class Messages(nn.Module):
    """GNN-like: messages along edges, added up by the node they go to, pooled by graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any, edges: Any, graph_of: Any, labels: Any) -> Any:
        start, end = edges
        degree = x.new_zeros(len(x)).scatter_add(0, end, x.new_ones(end.shape[0]))
        sent = self.layer(x)[start] / degree[end].clamp(min=1)[:, None]
        hidden = torch.zeros_like(x).index_add(0, end, sent).relu()
        count = F.one_hot(graph_of, 3).sum(0)
        at = graph_of[:, None].expand(-1, 8)
        pooled = x.new_zeros(3, 8).scatter_add(0, at, hidden) / count[:, None]
        kept = pooled.index_put((labels.argsort(),), x.new_ones(3, 8))
        return F.cross_entropy(self.head(kept + pooled.gather(0, at[:3])), labels)


def messages() -> tuple[Any, Any]:
    """Model and batch of three graphs."""
    torch.manual_seed(0)
    edges = torch.randint(0, 12, (2, 40))
    graph_of = torch.arange(12) // 4
    return Messages(), (torch.randn(12, 8), edges, graph_of, torch.tensor([2, 0, 1]))


CASES = [*(lambda mode=mode: recommender(mode) for mode in ("sum", "mean", "max")), messages]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.slow
def test_indices_of_all_kinds_are_timed(
    case: Any, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bags with offsets, gathers, scatters and counts: every op of a training step is timed."""
    monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    model, batch = case()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(model, batch, None, optimizer, fuse=fuse)
    assert graph.is_fused == fuse
    table = Profiled(seconds=900, cache=None)(graph, detect(cpu_devices=2))
    assert unmeasured(table) == []


class Here(WorkerProcess):
    """This process in place of another."""

    kept: ClassVar[dict[Any, Any]] = {}
    is_there = True

    def ask(self, function: str, key: int, step: bytes, request: Any, limit_s: float) -> Any:
        self.kept.setdefault(key, step)
        return getattr(remote, function.partition(":")[2])(self.kept, key, *request)[0]


def test_loading_kernels_is_no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of an op may load libraries for seconds: all ops are measured all the same,
    until loading itself takes too long."""
    graph = capture(Picking(), (torch.arange(10),))
    calls = list(op_calls(graph).values())

    def slow(call: Any, threads: int, real: Any) -> op_timing.Timing:
        return op_timing.Timing(7, loading_s=50.0)

    monkeypatch.setattr(op_timing, "time_on_cpu", slow)
    timer = remote.RemoteTimer(graph, remote.Spot("cpu"), Here())
    assert timer(calls[0]).ns == 7
    assert timer.clock() < 5
    timer(calls[0])
    assert 40 < timer.clock() < 45


def test_a_step_without_a_pause_gets_real_integers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls arrive in their order, equal ones as one, each with its integers."""
    graph = capture(Picking(), (torch.arange(10),))
    calls = [call for _, call in sorted(op_calls(graph).items())]
    seen: list[Any] = []

    def slow_down(given: Any, device: str, step_ns: int, real: Any) -> float:
        seen.append([(str(call.target), real[call.key]) for call in given])
        return 1.25

    monkeypatch.setattr(sustained, "slow_down", slow_down)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    timer = remote.RemoteTimer(graph, remote.Spot("cpu"), Here())
    assert timer.slow_down([*calls, *calls], 1000) == 1.25
    ((*rows,),) = seen
    assert [name for name, _ in rows] == [str(call.target) for call in calls] * 2
    picks = [real for name, real in rows if "picks" in name]
    assert [real[1].tolist() for real in picks] == [list(range(18, -1, -2))] * 2
