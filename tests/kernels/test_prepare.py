"""Compiling the kernels of a step beforehand."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tests.kernels.groups import Compiler, in_a_new_process
from tests.run.models import mean_square
from tests.run.placed import adam
from tests.run.tracing import place_by_module
from torch import nn

from devplace.graph import OpGraph
from devplace.kernels import compilers
from devplace.kernels import prepare as preparing
from devplace.kernels.compilers import Compilers
from devplace.kernels.fused import failures
from devplace.kernels.prepare import any_compiled, prepare
from devplace.run.unplaced import run_unplaced
from devplace.schedule import make_schedule
from devplace.schedule.write_back import write_backs
from devplace.step_capture import capture

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _empty(monkeypatch: Patch, tmp_path: Path, no_kernels_yet: None) -> None:
    """Nothing is compiled yet; there are three cores, so two processes beside this one."""
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path))
    monkeypatch.setattr(compilers, "num_cores", lambda: 3)
    monkeypatch.setattr(compilers, "JOB_LIMIT_S", 1200.0)  # a slow computer's first job may take it


@pytest.fixture
def _only_others(monkeypatch: Patch) -> None:
    """This process compiles nothing."""
    monkeypatch.setattr(Compilers, "_compile_one", lambda self: 0)


def chain(products: int) -> OpGraph:
    """So many tiny groups, each another one, with products between them."""
    layers: list[nn.Module] = [nn.Linear(4, 4, bias=False)]
    for k in range(products):
        layers += [nn.Tanh() for _ in range(k + 2)]
        layers.append(nn.Linear(4, 4, bias=False))
    model = nn.Sequential(*layers)
    return capture(model, torch.randn(3, 4), fuse=True)


def sources(graph: OpGraph) -> dict[int, torch.Tensor]:
    """Ones for all."""
    shapes = [
        (b.op, graph.tensors[graph.ops[b.op].outputs[0]].shape) for b in graph.program.bindings
    ]
    return {op: torch.ones(shape) for op, shape in shapes}


@pytest.mark.usefixtures("_only_others")
@pytest.mark.slow
def test_worker_processes_compile_what_a_step_needs(monkeypatch: Patch) -> None:
    """Four kernels by another process; the step then compiles nothing, nor does a second one."""
    graph, told = chain(4), []
    assert not any_compiled("cpu")
    done = prepare(graph, ["cpu"], told.append)
    assert done[:3] == (4, 4, 0)
    assert any_compiled("cpu")
    assert list(dict.fromkeys(told)) == [f"compiling kernels ({k} of 4)" for k in (1, 2, 3, 4)]
    assert done.notes[0].startswith("4 kernels were compiled in ")
    compiler = Compiler(monkeypatch)
    (output,) = run_unplaced(graph, sources(graph), 0, 1)
    assert (compiler.calls, failures()) == ([], {})
    monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    in_a_new_process(monkeypatch)
    torch.testing.assert_close(output, run_unplaced(graph, sources(graph), 0, 1)[0])
    monkeypatch.delenv("DEVPLACE_COMPILE")
    assert prepare(graph, ["cpu"])[:3] == (4, 0, 0)


FAKE = """
    import os, sys
    from devplace.kernels import compile_worker
    from devplace.kernels.kernel_signature import place_of
    from devplace.kernels.store import KernelStore

    def make(call, signature):
        if call.name == sys.argv[1]:
            os._exit(1)
        KernelStore(place_of(signature.device)).write(signature.key, "call = tuple")

    compile_worker.make = make
    compile_worker.main()
"""


@pytest.mark.usefixtures("_only_others")
@pytest.mark.slow
def test_a_worker_that_crashes_costs_its_kernel_only(monkeypatch: Patch) -> None:
    """The other worker goes on with the rest; processes may be started before."""
    graph = chain(5)
    jobs = list(preparing._jobs(graph, ["cpu"]))
    bad = jobs[2].call.name
    monkeypatch.setattr(compilers, "COMMAND", (sys.executable, "-c", textwrap.dedent(FAKE), bad))
    with Compilers() as workers:
        done = prepare(graph, ["cpu"], compilers=workers)
    assert done[:3] == (5, 5, 1)
    assert "1 of 5 groups of ops could not be compiled" in done.notes[1]
    for job in jobs:
        store, key = compilers.store_of(job), job.signature.key
        assert (store.read(key) is None) == (job.call.name == bad)
        assert (store.read_failure(key) is not None) == (job.call.name == bad)
    assert prepare(graph, ["cpu"])[:3] == (5, 0, 1)


def test_workers_that_do_not_start_cost_nothing(monkeypatch: Patch) -> None:
    """This process compiles all."""
    graph = chain(5)
    monkeypatch.setattr(compilers, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    compiler = Compiler(monkeypatch)
    assert prepare(graph, ["cpu"])[:3] == (5, 5, 0)
    assert len(compiler.calls) == 5


@pytest.mark.usefixtures("_only_others")
def test_what_dead_workers_leave_is_compiled_when_it_is_met(monkeypatch: Patch) -> None:
    """Preparing ends when no process is left."""
    graph = chain(5)
    monkeypatch.setattr(compilers, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    assert prepare(graph, ["cpu"])[:3] == (5, 5, 0)
    compiler = Compiler(monkeypatch, refuses=True)
    run_unplaced(graph, sources(graph), 0, 1)
    assert len(compiler.calls) == len(failures()) == 5


def test_few_kernels_are_compiled_in_this_process(monkeypatch: Patch) -> None:
    """Two; what is refused is counted, and not tried again."""
    compiler = Compiler(monkeypatch, refuses=True)
    monkeypatch.setattr(compilers, "COMMAND", ("no-such-program",))
    graph, told = chain(2), []
    assert prepare(graph, ["cpu"], told.append)[:3] == (2, 2, 2)
    assert len(compiler.calls) == len(set(told)) == 2
    assert prepare(graph, ["cpu"])[:3] == (2, 0, 2)
    assert len(compiler.calls) == 2


def test_nothing_is_prepared_where_nothing_is_compiled(monkeypatch: Patch) -> None:
    """Switched off, no program, no groups."""
    graph = chain(3)
    compiler = Compiler(monkeypatch)
    assert graph.plain is not None
    assert prepare(graph.plain, ["cpu"])[:3] == (0, 0, 0)
    monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    assert prepare(graph, ["cpu"])[:3] == (0, 0, 0)
    assert compiler.calls == []


def test_kernels_that_write_are_those_of_the_step() -> None:
    """On a GPU a group writes over all that a step in the order of the trace may write over, and
    has no other kernel; on a CPU nothing is written over."""
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2, bias=False)]
    model = nn.Sequential(*layers)
    optimizer = adam(list(model.parameters()))
    graph = capture(model, (torch.randn(6, 8),), mean_square, optimizer, fuse=True)
    jobs = [job.signature for job in preparing._jobs(graph, ["cpu", "cuda:0", "cuda:1"])]
    schedule = make_schedule(graph, *place_by_module(graph, lambda op: 0, 1), ("cpu:0",))
    (writes,) = write_backs(schedule)
    found = set()
    for index, over in writes.fused.items():
        node = graph.program.calls[schedule.instructions[0][index].what].node
        found.add((node.target.name, tuple((one.output, one.input) for one in over)))
    assert max(len(over) for _, over in found) > 2
    for device in ("cuda:0", "cuda:1"):
        there = {(job.call, job.writes) for job in jobs if job.device == device}
        assert {one for one in there if one[1]} == found
        assert len({call for call, _ in there}) == len(there)
    assert not any(job.writes for job in jobs if job.device == "cpu")
    assert len(set(jobs)) == len(jobs)
