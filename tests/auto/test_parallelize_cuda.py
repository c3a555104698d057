"""From a model to a step for a training loop, on GPUs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import devplace as dp
from devplace import workloads
from devplace.auto.local_devices import capture_device, cpus
from devplace.cost.analytic import Analytic
from devplace.machine import detect
from devplace.report import deviations
from devplace.tune.measure import Measurer, Trial
from devplace.tune.step_sources import step_sources
from tests.cost import hostile_ops
from tests.cost.test_remote import CASES
from tests.tune.steps import captured, hostile, tagger

pytestmark = pytest.mark.gpu


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def test_parallelize_finds_the_gpus_and_leaves_the_cpu_out() -> None:
    """On a machine with GPUs a step is captured for CUDA and runs on GPUs only, in CUDA graphs."""
    model, batch, loss = tagger()
    with dp.parallelize(model, batch, loss, adam(model), budget="60ev,90s") as step:
        assert step.graph.meta["device"] == "cuda"
        assert all(name.startswith("cuda") for name in step.devices)
        assert step.mode == "graph"
        assert step.confirmation is not None
        assert all(row.measured_ns for row in step.confirmation.rows), str(step)
        timing = step.confirmation.best.measurement.timing
        assert timing is not None
        assert set(timing.peak_bytes) == set(step.devices)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_training_equals_eager_wherever_the_model_lies(device: str) -> None:
    """Losses and weights are those of the plain loop; the model stays where it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(device)
    twin = copy.deepcopy(model).cuda()
    optimizer, other = adam(model), adam(twin)
    x, y = torch.randn(6, 4, device=device).double(), torch.randint(0, 3, (6,), device=device)
    with dp.parallelize(
        model, (x, y), nn.functional.cross_entropy, optimizer, budget="40ev", confirm=False
    ) as step:
        for _ in range(4):
            other.zero_grad()
            expected = nn.functional.cross_entropy(twin(x.cuda()), y.cuda())
            expected.backward()
            other.step()
            assert float(step(x, y)) == pytest.approx(float(expected.detach()), abs=1e-9)
        step.sync()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.device.type == device
        assert torch.allclose(p.cuda(), q, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_embedding_bags_and_graph_nets_train_on_gpus(case: Any) -> None:
    """Ops that read integers are timed with those of the batch; losses are the plain loop's."""
    model, batch = case()
    twin = copy.deepcopy(model)
    optimizer, other = adam(model), adam(twin)
    with dp.parallelize(model, batch, None, optimizer, budget="40ev,60s") as step:
        assert "could not be measured" not in str(step)
        for _ in range(3):
            other.zero_grad()
            expected = twin(*batch)
            expected.backward()
            other.step()
            assert float(step(*batch)) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_a_kernel_that_asserts_costs_one_line() -> None:
    """On made-up numbers it ends the use of a GPU of the process that measures, not of this one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.second(hostile_ops.asserts(self.first(x).exp()))

    model, x = Model(), torch.randn(4, 8)
    with torch.no_grad(), dp.parallelize(model, (x,), budget="20ev,60s") as infer:
        assert torch.allclose(infer(x).cpu(), model(x), atol=1e-5)
        (line,) = [line for line in str(infer).splitlines() if "asserts" in line]
        assert "device-side assert" in line


def test_training_resumes_from_an_ordinary_checkpoint() -> None:
    """After loading state dicts, `load` goes on exactly where the checkpoint was made."""
    model, batch, loss = tagger()
    optimizer = adam(model)
    with dp.parallelize(model, batch, loss, optimizer, budget="40ev", confirm=False) as step:
        for _ in range(3):
            step(*batch)
        step.sync()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = [float(step(*batch)) for _ in range(3)]
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        step.load()
        assert [float(step(*batch)) for _ in range(3)] == expected


def test_inference_on_a_gpu() -> None:
    """Without loss and optimizer the step returns what the model returns."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    x = torch.randn(5, 4).double()
    with dp.parallelize(model, x, budget="40ev", confirm=False) as infer:
        assert torch.allclose(infer(x).cpu(), model(x))


def test_what_a_plan_does_costs_only_its_own_measurement(tmp_path: Path) -> None:
    """Out of memory and a poisoned context are named; plans after them run."""
    graph, model, optimizer, batch = captured("cuda")
    machine = detect()
    left_out = cpus(machine)
    problem = dp.Problem(graph, machine, Analytic()(graph, machine), exclude=left_out)
    plan = dp.place(problem, dp.placers.Single(), "5ev").plan
    sources = step_sources(graph, model, optimizer, batch)
    actions = ["memory", "ok", "assert", "ok"]
    with Measurer(0.1, time_limit_s=60, command=hostile(actions, tmp_path)) as measurer:
        found = [measurer.measure(Trial(action, plan, graph, sources)) for action in actions]
    kinds = [measurement.kind for measurement in found]
    assert kinds == ["out of memory", "", "DeviceLostError", ""]
    assert "device-side assert" in found[2].error


def test_a_timed_step_is_compared_with_its_plan() -> None:
    """Every planned op and transfer of a workload is found in the measured step."""
    workload = workloads.build("nmt-2", size="small", device="cuda:0")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    with dp.parallelize(
        workload.model,
        workload.inputs,
        workload.loss_fn,
        optimizer,
        budget="100ev",
        confirm=False,
    ) as step:
        step.is_timed = True
        step(*workload.inputs)
        assert step.timeline is not None
        found = deviations(step.plan.timeline(), step.timeline, step.transfers)
        assert found.missing == ()
        assert len(found.ops) == sum(map(len, step.plan.order))


def test_the_command_line_runs_on_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """plan --confirm measures here, and run says that it ran on the plan's GPUs."""
    assert capture_device(detect()) == "cuda"
    monkeypatch.chdir(tmp_path)

    def devplace(*arguments: str) -> str:
        from devplace.cli.commands import devplace

        devplace(arguments, standalone_mode=False)
        return capfd.readouterr().out

    planned = devplace(
        *("plan", "rnnlm", "--size", "small", "--budget", "60ev,8s", "--confirm", "-o", "plan.json")
    )
    assert "cuda:0 alone" in planned
    ran = devplace("run", "plan.json", "--deviations")
    assert "of this computer (CUDA graphs)" in ran
    assert "stood in" not in ran
    assert "planned and measured" in devplace("trace", "plan.json", "-o", "trace.json")
