"""Plans measured in a process that may die."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import devplace as dp
from devplace.cost.graph_transport import pack, unpack
from devplace.errors import InputError
from devplace.run.executors import make_executor
from devplace.schedule import make_schedule
from devplace.step_capture import capture
from devplace.tune import step_timing
from devplace.tune.measure import Measurer, Trial, measure
from devplace.tune.step_sources import Source, step_sources
from devplace.tune.step_timing import batch_of, fill, time_executor, time_plan, time_steps
from tests.tune.steps import LONG_S, captured, hostile, placed, trials

SHORT = 0.05


def test_a_step_survives_the_way_to_another_process() -> None:
    """The same nodes under the same names with the same arguments give the same schedule."""
    graph, model, optimizer, batch = captured()
    sources = step_sources(graph, model, optimizer, batch)
    again, found = unpack(pack(graph, sources))
    pairs = zip(graph.program.module.graph.nodes, again.program.module.graph.nodes, strict=True)
    for old, new in pairs:
        assert (old.op, old.name, old.target) == (new.op, new.name, new.target)
        assert str(old.args) == str(new.args)
        assert str(old.kwargs) == str(new.kwargs)
    plan = placed(graph).plan
    schedules = [
        make_schedule(each, plan.placement, plan.order, plan.device_names)
        for each in (graph, again)
    ]
    assert schedules[0].transfers == schedules[1].transfers
    assert str(schedules[0].instructions) == str(schedules[1].instructions)
    assert found.keys() == sources.keys()


def test_integers_travel_and_weights_are_made_up() -> None:
    """Indices keep their values; parameters keep shape, dtype and strides, but are not sent."""
    graph, model, optimizer, batch = captured()
    sources = step_sources(graph, model, optimizer, batch)
    by_kind: dict[str, list[Source]] = {}
    for source in sources.values():
        by_kind.setdefault(source.kind, []).append(source)
    words = [source.value for source in by_kind["input"]]
    assert [value.tolist() for value in words] == [tensor.tolist() for tensor in batch]
    assert all(source.value is None for source in by_kind["parameter"])
    shapes = sorted(tuple(parameter.shape) for parameter in model.parameters())
    assert sorted(tuple(s.make("cpu").shape) for s in by_kind["parameter"]) == shapes
    assert all(not source.make("cpu").any() for source in by_kind["state"])


class Scaled(torch.nn.Module):
    """Makes an index of the values of a buffer and of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 4)
        self.register_buffer("scale", torch.tensor(0.01))
        self.register_buffer("large", torch.ones(200, 100))

    def forward(self, x: Any) -> Any:
        return self.table((x * self.scale).long()) + self.large.mean()


@pytest.mark.slow
def test_small_tensors_keep_their_values_as_indices_may_be_made_of_them() -> None:
    """With made-up values every plan would fail; a part of a larger tensor travels alone."""
    model, batch = Scaled(), torch.full((1000, 8), 150.0)[:6]
    graph = capture(model, batch)
    sources = step_sources(graph, model, None, batch)
    kept = {graph.ops[op].name: source.value for op, source in sources.items()}
    assert kept["scale"] == model.scale
    assert kept["large"] is None
    assert kept["table.weight"] is None
    assert len(pack(graph, sources)) < 20_000
    plan = placed(graph).plan
    (found,) = measure([Trial("plan", plan, graph, sources)], seconds=SHORT, time_limit_s=LONG_S)
    assert found.error == ""


def test_channels_last_weights_stay_channels_last() -> None:
    """Strides decide which kernel runs, so made-up values have those of the real ones."""
    source = Source("parameter", (4, 3, 2, 2), (12, 1, 6, 3), "float32")
    assert source.make("cpu").is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("in_child", [True, False])
@pytest.mark.slow
def test_plans_are_measured_in_either_process(in_child: bool) -> None:
    """Both ways give a time, the spread over rounds and how the step ran."""
    (found,) = measure(trials(["plan"]), seconds=SHORT, time_limit_s=LONG_S, in_child=in_child)
    assert found.error == ""
    timing = found.timing
    assert timing is not None
    assert min(timing.round_ns) <= timing.step_ns <= max(timing.round_ns)
    assert timing.step_ns > 0
    assert timing.mode == "threads"


@pytest.mark.slow
def test_what_a_plan_does_costs_only_its_own_measurement(tmp_path: Path) -> None:
    """Kill, exit, out of memory, illegal access are named; the plans between are measured."""
    actions = ["kill", "ok", "exit", "memory", "noise", "illegal", "ok"]
    command = hostile(actions, tmp_path)
    found = measure(trials(actions), seconds=SHORT, time_limit_s=LONG_S, command=command)
    kinds = [each.kind for each in found]
    assert kinds == ["killed", "", "ended", "out of memory", "", "DeviceLostError", ""]
    assert "SIGKILL" in found[0].error
    assert "exit code 7: last words" in found[2].error
    assert "illegal memory access" in found[5].error
    assert all((each.step_ns is None) == bool(each.kind) for each in found)


@pytest.mark.slow
def test_a_plan_that_hangs_is_ended(tmp_path: Path) -> None:
    """After the time limit its process is killed, and the next plan runs in a new one."""
    actions = ["ok", "hang", "ok"]
    with Measurer(SHORT, time_limit_s=LONG_S, command=hostile(actions, tmp_path)) as measurer:
        found = []
        for trial in trials(actions):
            limit = 3.0 if trial.name == "hang" else LONG_S
            found.append(measurer.measure(trial, time.monotonic() + limit))
    assert [each.kind for each in found] == ["", "time limit", ""]
    assert re.search(r"did not end within (3|2\.\d+) s", found[1].error)


def test_no_plan_is_begun_after_the_deadline() -> None:
    """A plan that was not tried says so; no process is started for it."""
    (found,) = measure(trials(["late"]), deadline=time.monotonic() - 1)
    assert (found.kind, found.step_ns) == ("not tried", None)


@pytest.mark.slow
def test_an_op_of_the_users_is_measured_here() -> None:
    """A custom op is unknown in a fresh process, so the step runs in this one."""

    @torch.library.custom_op("devplace_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Doubling(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return twice(x) + 1

    from devplace.step_capture import capture

    batch = (torch.randn(3),)
    graph = capture(Doubling(), batch)
    trial = Trial("custom", placed(graph).plan, graph, step_sources(graph, Doubling(), None, batch))
    (found,) = measure([trial], seconds=SHORT, time_limit_s=LONG_S)
    assert found.error == ""
    unknown = pack(graph, trial.sources).replace(b"devplace_test::twice", b"devplace_test::thric")
    with pytest.raises(InputError, match="not known in a fresh process"):
        unpack(unknown)


def test_rounds_are_longer_for_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up steps come first, then a step is timed, then rounds of many."""
    calls: list[str] = []
    clock = SimpleNamespace(
        perf_counter_ns=lambda: 1000 * calls.count("run"), monotonic=lambda: 0.0
    )
    monkeypatch.setattr(step_timing, "time", clock)
    rounds = time_steps(lambda: calls.append("run"), lambda: calls.append("wait"), 0.01)
    assert calls[:4] == ["run", "wait", "run", "wait"]
    assert len(rounds) == 7
    assert calls.count("run") > 50


def test_slow_steps_are_not_waited_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the time allows: five of 30 ms a round in two seconds, two in half a second."""
    for seconds, steps in ((2.0, 5), (0.5, 2), (0.05, 1)):
        calls: list[str] = []
        clock = SimpleNamespace(
            perf_counter_ns=lambda calls=calls: 30_000_000 * calls.count("run"),
            monotonic=lambda: 0.0,
        )
        monkeypatch.setattr(step_timing, "time", clock)
        time_steps(lambda calls=calls: calls.append("run"), lambda: None, seconds)
        rounds = 7 if seconds > 0.1 else 1
        assert calls.count("run") == 2 + (rounds * steps if seconds > 0.1 else 1)


def test_every_timed_step_brings_in_the_batch() -> None:
    """As a training loop does; weights stay where they are."""
    graph, model, optimizer, batch = captured()
    sources = step_sources(graph, model, optimizer, batch)
    plan = placed(graph).plan
    schedule = make_schedule(graph, plan.placement, plan.order, plan.device_names)
    executor = make_executor(schedule)
    try:
        fill(executor, sources)
        before = dict(executor.put_count)
        assert time_executor(executor, 0.001, 0.0, batch_of(graph, sources))
        for op, source in sources.items():
            puts = executor.put_count[op] - before[op]
            assert puts >= 3 if source.kind == "input" else puts == 0
    finally:
        executor.close()


def test_a_measured_timeline_begins_with_the_batch() -> None:
    """Ops begin when it is there, and it counts as part of the step."""
    graph, _, _, batch = captured()
    plan = placed(graph).plan
    with dp.compile(graph, plan) as step:
        step.is_timed = True
        step(*batch)
        timeline = step.timeline
    assert timeline is not None
    ran = timeline.start_ns >= 0
    assert ran.any()
    assert timeline.start_ns[ran].min() > 0
    later = timeline.after(1000)
    assert (later.start_ns[ran] == timeline.start_ns[ran] + 1000).all()
    assert (later.start_ns[~ran] == timeline.start_ns[~ran]).all()
    assert later.makespan_ns == timeline.makespan_ns + 1000


def test_slow_steps_are_run_three_times() -> None:
    """One step to warm up and two to time, however long they take."""
    calls: list[str] = []

    def run() -> None:
        calls.append("run")
        time.sleep(0.01)

    assert len(time_steps(run, lambda: None, 0.001)) == 2
    assert len(calls) == 3


def test_without_processes_plans_are_measured_here() -> None:
    """Where no process can be started, the plan is measured in this one."""
    (found,) = measure(trials(["plan"]), seconds=SHORT, command=["/no/such/python"])
    assert found.error == ""
    assert found.step_ns


def test_a_failing_step_leaves_no_threads() -> None:
    """An executor that cannot finish is closed by the one who times it."""
    import threading

    graph, model, optimizer, batch = captured()
    sources = step_sources(graph, model, optimizer, batch)
    plan = placed(graph).plan
    broken = dict(sources)
    word = next(op for op, source in sources.items() if source.kind == "input")
    broken[word] = Source("input", (12,), (1,), "int64", torch.full((12,), 99))
    before = threading.active_count()
    with pytest.raises(Exception, match="index out of range"):
        time_plan(graph, plan.placement, plan.order, plan.device_names, broken, SHORT)
    for _ in range(3000):
        if threading.active_count() <= before:
            break
        time.sleep(0.02)
    assert threading.active_count() <= before
