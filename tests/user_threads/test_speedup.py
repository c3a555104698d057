"""Themes V and F: no speed-up from more devices, trivial plans, fragmented placement."""

from __future__ import annotations

import pytest
import torch
from tests.user_threads.helpers import captured, chain, mlp, priced, sgd, where
from tests.user_threads.machines import equal, m2slow, mcpu
from torch import nn

from devplace.placers import Cpu, Even, Search, Single, place
from devplace.report.limits import find_limits, limits_text
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_placement, hand_problem


def test_s21_a_chain_gains_nothing_and_says_so() -> None:
    """A chain that fits one device stays there; its critical path is the whole chain, and the
    report says that more devices bring nothing."""
    problem = hand_problem(chain([10] * 6), equal(2, 1000))
    result = place(problem, Search(), "1000ev")
    assert len(set(where(result).values())) == 1
    path = [problem.graph.ops[op].name for op in result.timeline.critical_path()]
    assert [name for name in path if name[0] == "y"] == [f"y{k}" for k in range(6)]
    assert result.gap == 0
    limits = find_limits(result.timeline)
    assert limits.limited_by == "chain"
    assert "No gain from 2 devices" in limits_text(result.timeline, limits)


def test_s22_one_device_is_always_a_candidate() -> None:
    """A small network on a slow link stays on one device; three times too large, it is split."""
    model = mlp(16, 6)
    problem = captured(model, (torch.zeros(8, 16),), m2slow(10**9), sgd(model))
    result = place(problem, Search(), "1000ev")
    assert len(set(result.placement.devices.tolist())) == 1
    peak = int(result.timeline.peak_bytes.max())
    small = hand_machine({f"cuda:{k}": int(peak * 0.4) for k in range(4)}, bytes_per_ns=0.001)
    split = place(priced(problem.graph, small), Search(), "3000ev")
    assert len(set(split.placement.devices.tolist())) > 1
    assert split.is_feasible


def test_s25_a_model_that_fits_the_gpu_stays_on_the_gpu() -> None:
    """Beside a slow CPU a model that fits the accelerator uses nothing else."""
    model = mlp(16, 4)
    problem = captured(model, (torch.zeros(8, 16),), mcpu(10**9), sgd(model))
    result = place(problem, Search(), "1000ev")
    assert set(where(result).values()) == {"cuda:0"}
    assert result.step_ns == place(problem, Single(), "9ev").step_ns


class Branches(nn.Module):
    """Four equal branches and their sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(mlp(width, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of all branches."""
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


def test_s24_independent_branches_overlap_in_the_plan() -> None:
    """Four heavy equal branches on four devices take less than half the time of one device."""
    model = Branches(32)
    problem = captured(model, (torch.zeros(32, 32),), equal(4, 10**9), sgd(model))
    found, alone = place(problem, Search(), "3000ev"), place(problem, Single(), "9ev")
    assert found.step_ns < alone.step_ns / 2


def test_s26_weights_rest_where_they_are_used() -> None:
    """Plans that keep modules together move no parameter; a search may move one where that saves
    time, and says how many bytes cross in all."""
    model = Branches(32)
    problem = captured(model, (torch.zeros(32, 32),), equal(2, 10**9), sgd(model))
    producer, ops = problem.graph.producer, problem.graph.ops
    even = place(problem, Even(), "9ev")
    assert len(set(even.placement.devices.tolist())) == 2
    assert not {"parameter", "state"} & {
        ops[producer[t.tensor]].role for t in even.timeline.transfers
    }
    found = place(problem, Search(), "2000ev")
    assert found.step_ns <= even.step_ns
    crossed = sum(problem.graph.tensors[t.tensor].num_bytes for t in found.timeline.transfers)
    assert found.plan.predicted.transfer_bytes == crossed
    assert not {"state"} & {ops[producer[t.tensor]].role for t in found.timeline.transfers}


@pytest.mark.parametrize("every", [2, 3])
def test_s83_the_cpu_alone_is_a_candidate(every: int) -> None:
    """With every second op CPU-only, cheap ops and a slow link, all ops go to the CPU."""
    lines = ["x = input bytes=100"]
    for k in range(12):
        read = f"y{k - 1}" if k else "x"
        kind = "only_cpu" if k % every == 0 else "any"
        lines.append(f"y{k} = {kind}({read}) bytes=100 ns=5,10")
    machine = hand_machine(
        {"cuda:0": 10**6, "cpu:0": 10**6},
        bytes_per_ns=1,
        latency_ns=20,
        unsupported={"cuda:0": ("only_cpu",)},
    )
    problem = hand_problem("\n".join(lines), machine)
    result = place(problem, Search(), "2000ev")
    assert {result.timeline.devices[k] for k in range(1, 13)} == {1}
    assert result.step_ns == place(problem, Cpu(), "9ev").step_ns == 120
    single = place(problem, Single(), "9ev")
    assert single.step_ns == 120


def test_s81_pieces_are_chosen_by_total_time() -> None:
    """Seven accelerator-capable pieces between CPU-only ops: the best of all 2^7 choices, not the
    largest pieces."""
    lines = ["y0 = only_cpu bytes=10 ns=1,10"]
    gains = (30, 5, 80, 12, 40, 3, 25)
    for k, gain in enumerate(gains):
        lines.append(f"p{k} = any(y{k}) bytes={10 + 7 * (k % 3)} ns={5},{5 + gain}")
        lines.append(f"y{k + 1} = only_cpu(p{k}) bytes={4 + 11 * (k % 2)} ns=1,10")
    machine = hand_machine(
        {"cuda:0": 10**6, "cpu:0": 10**6}, latency_ns=3, unsupported={"cuda:0": ("only_cpu",)}
    )
    problem = hand_problem("\n".join(lines), machine)
    best = min(
        simulate(
            problem,
            hand_placement(
                problem,
                {f"y{k}": "cpu:0" for k in range(8)}
                | {f"p{k}": "cpu:0" for k in range(7) if not choice >> k & 1},
            ),
        ).makespan_ns
        for choice in range(2**7)
    )
    assert place(problem, Search(), "2000ev").step_ns == best
