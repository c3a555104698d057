"""What the processes of a test do: `python -m tests.run.ranks.programs NAME ARGUMENTS`."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint

import devplace as dp
from devplace import placers, workloads
from devplace.errors import RankError
from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.ranks import group
from devplace.run.ranks.group import Group
from devplace.run.state import ModelState
from devplace.run.unplaced import run_unplaced
from tests.run import gpus
from tests.run.models import Normed, Residual, mean_square

PLACERS = {"random": placers.Random, "even": placers.Even, "search": placers.Search}
STEPS = 5
LONG_S = 300.0
"""A time limit that a slow computer keeps, s."""
GONE = ("die", "freeze", "hang", "raise", "absent")
"""What a process does that will not hear of others."""


def workload_step(name: str) -> tuple[Any, Any]:
    """A small workload, captured with Adam, and its batch; `normed` has batch norm and dropout."""
    if name == "normed":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, batch, loss_fn = Normed(0.3), (torch.rand(4, 2, 6, 6),), mean_square
    else:
        made = workloads.build(name, size="small", device="cpu", seed=0)
        model, batch, loss_fn = made.model, made.inputs, made.loss_fn
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return dp.capture(model, batch, loss_fn, optimizer, name=name), batch


def make_plan(graph: Any, num_devices: int, placer: str) -> Any:
    """The same plan in every process: what a placer finds within some evaluations."""
    machine = dp.load_machine(f"cpux{num_devices}")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
    return dp.place(problem, PLACERS[placer](), budget="30ev", seed=1).plan


def unplaced(
    graph: Any, batch: Any, steps: int, seed: int = 0, device: str = "cpu"
) -> tuple[list[Any], dict[str, Any]]:
    """Losses and state of the step without placement, run by the reference."""
    groups = graph.optimizer.param_groups
    sources = {
        op: t.detach().clone()
        for op, t in ModelState(graph, graph.model, graph.optimizer).read().items()
    }
    losses = []
    for number in range(1, steps + 1):
        sources |= bind_inputs(graph, batch, {}) | bind_scalars(graph, number, groups)
        sources = {op: value.to(device) for op, value in sources.items()}
        values = run_unplaced(graph, sources, seed, number, device)
        for result, value in zip(graph.results, values, strict=True):
            if result.replaces >= 0:
                sources[result.replaces] = value.clone()
            elif result.role == "loss":
                losses.append(value.clone())
    named = {
        (b.key, str(b.slot)): sources[b.op]
        for b in graph.program.bindings
        if b.kind in ("parameter", "buffer", "state")
    }
    return losses, named


def state_of(graph: Any) -> dict[Any, Any]:
    """The same names, from the user's objects."""
    state = ModelState(graph, graph.model, graph.optimizer)
    keys = {
        b.op: (b.key, str(b.slot))
        for b in graph.program.bindings
        if b.kind in ("parameter", "buffer", "state")
    }
    return {keys[op]: t.detach().clone() for op, t in state.read().items() if op in keys}


def train(names: list[str], placers: list[str], devices: int, batch: str = "whole") -> Any:
    """Train each workload under each placer; gives losses, state after `sync`, and what is held."""
    rank, size, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {}
    for name in names:
        graph, inputs = workload_step(name)
        if batch == "sharded":
            inputs = tuple(each.chunk(size)[rank] for each in inputs)
        start = copy.deepcopy((graph.model.state_dict(), graph.optimizer.state_dict()))
        for placer in placers:
            graph.model.load_state_dict(start[0])
            graph.optimizer.load_state_dict(copy.deepcopy(start[1]))
            step = dp.compile(
                graph, make_plan(graph, devices, placer), batch=batch, timeout_s=LONG_S
            )
            losses = [step(*inputs) for _ in range(STEPS)]
            held = len(step.executor.schedule.holders)
            step.sync()
            step.close()
            state = state_of(graph) if rank == 0 else {}
            found[name, placer] = {"losses": losses, "state": state, "held": held}
    return found


def failing(how: str, timeout_s: float, odd: int = 1, poll_s: float = 0.5) -> list[Any]:
    """Three steps of `normed`, in the second of which rank `odd` does something else than the rest,
    which look at the others every `poll_s` seconds. All begin to compile at once."""
    is_odd = os.environ["RANK"] == str(odd)
    _be_patient(odd if how in GONE else -1)
    if not is_odd:
        group.POLL_S = poll_s
    if is_odd and how == "absent":
        time.sleep(1000)
    if is_odd and how == "torch":
        torch.__version__ = "2.0.0"
    has_tokens = how == "op" or (is_odd and how == "model")
    graph, batch = workload_step("rnnlm" if has_tokens else "normed")
    plan = make_plan(graph, 3, "even" if is_odd and how == "plan" else "random")
    _meet({odd} if how == "absent" else set())
    step = dp.compile(graph, plan, timeout_s=timeout_s)
    losses = []
    for number in range(3):
        if is_odd and number == 1:
            Path(os.environ["OUT"]).with_suffix(".odd").write_text(str(time.time()))
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "hang":
                time.sleep(1000)
            elif how == "raise":
                raise ValueError("no more data")
            elif how == "shape":
                batch = (batch[0][:1],)
        if how == "op" and number == 1:
            batch = (torch.full_like(batch[0], 10**6), *batch[1:])
        losses.append(step(*batch))
    step.close()
    return losses


def _be_patient(gone: int) -> None:
    """Let a slow computer take its time where a process finds out who is to blame, and where the
    first one stays until the others know why; process `gone` never will."""
    failed = Group._failed

    def tell(self: Group, told: str) -> RankError:
        error = failed(self, told)
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(f"knows/{gone}", "")
        return error

    group._FRESH_S, group._LAST_S = 5.0, 60.0
    if gone >= 0:
        Group._failed = tell  # type: ignore[method-assign]


def _meet(absent: Set[int]) -> None:
    """Wait until all processes but those are here."""
    out = Path(os.environ["OUT"])
    out.with_suffix(".ready").touch()
    size, until = int(os.environ["WORLD_SIZE"]), time.monotonic() + LONG_S
    missing = [f"rank{rank}.ready" for rank in range(size) if rank not in absent]
    while missing := [name for name in missing if not out.with_name(name).exists()]:
        assert time.monotonic() < until, missing
        time.sleep(0.01)


def crosswise(in_order: bool) -> list[Any]:
    """A step whose processes first receive all there is, then send; or in the one order."""
    from devplace.run.ranks import processes

    def receives_first(schedule: Any, rank_of: Any) -> tuple[int, ...]:
        rank = int(os.environ["RANK"])
        order = meeting_order(schedule, rank_of)
        return tuple(sorted(order, key=lambda t: rank_of[schedule.transfers[t].dst] != rank))

    meeting_order = processes.meeting_order
    if not in_order:
        processes.meeting_order = receives_first
    graph, batch = workload_step("normed")
    step = dp.compile(graph, make_plan(graph, 2, "random"), timeout_s=1000)
    ways = {step._processes.ends(transfer) for transfer in step._processes.order}
    assert ways == {(0, 1), (1, 0)}
    Path(os.environ["OUT"]).with_suffix(".odd").write_text(str(time.time()))
    return [step(*batch)]


def parallel(batch: str = "whole") -> Any:
    """`dp.parallelize` by all processes."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)  # rank 0 has the weights
    model, (inputs,) = Residual(8), (torch.linspace(-1, 1, 96).reshape(12, 8),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    placer = placers.Random() if rank == 0 else None
    step = dp.parallelize(
        *(model, (inputs,), mean_square, optimizer),
        machine=f"cpux{size}",
        budget="8ev",
        placer=placer,
        confirm=False,
        batch=batch,
        timeout_s=LONG_S,
    )
    mine = inputs.chunk(size)[rank] if batch == "sharded" else inputs
    losses = [float(step(mine)) for _ in range(STEPS)]
    step.sync()
    step.close()
    return {
        "losses": losses,
        "placement": step.plan.placement,
        "prices": step.plan.problem.costs.compute_ns.tolist(),
        "weights": dict(model.state_dict()),
        "momentum": [s["momentum_buffer"] for s in optimizer.state.values()],
    }


def step_on_gpus(name: str, size: str) -> tuple[Any, Any, Any]:
    """A workload captured for a GPU in each process, its batch, and a plan: a random one if it is
    small, so that much crosses."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    made = workloads.build(name, size=size, device="cpu", seed=0)
    optimizer = torch.optim.Adam(made.model.parameters(), lr=1e-3)
    graph = dp.capture(made.model, made.inputs, made.loss_fn, optimizer, device="cuda")
    machine = dp.load_machine(f"h200x{os.environ['WORLD_SIZE']}")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine), exclude=["cpu:0"])
    placer = placers.Random() if size == "small" else placers.Search()
    return graph, made.inputs, dp.place(problem, placer, budget="100ev", seed=1).plan


def train_on_gpus(name: str, size: str = "small") -> Any:
    """Train a workload, a GPU for each process; rank 0 also gives the unplaced numbers."""
    rank = int(os.environ["RANK"])
    graph, inputs, plan = step_on_gpus(name, size)
    with gpus.deterministic():
        expected = unplaced(graph, inputs, STEPS, device="cuda:0") if rank == 0 else None
        step = dp.compile(graph, plan, timeout_s=LONG_S)
        losses = [step(*inputs).cpu() for _ in range(STEPS)]
        facts = {key: getattr(step.executor, key) for key in ("mode", "reason", "transport")}
        step.sync()
        step.close()
    state = state_of(graph) if rank == 0 else {}
    if expected is not None:
        expected = [x.cpu() for x in expected[0]], {k: x.cpu() for k, x in expected[1].items()}
    return {"losses": losses, "state": state, "expected": expected, **facts}


def end_on_gpus(timeout_s: float) -> Any:
    """Rank 1 dies between two steps; what the others are told, and that their GPUs are free."""
    graph, inputs, plan = step_on_gpus("nmt-2", "small")
    step = dp.compile(graph, plan, timeout_s=timeout_s)
    step(*inputs)
    step.executor.synchronize()
    if os.environ["RANK"] == "1":
        os._exit(3)
    told = ""
    while not told:
        try:
            step(*inputs)
        except RankError as error:
            told = str(error)
    torch.cuda.synchronize()
    step.close()
    return {"told": told}


def save_after(steps: int, where: str) -> None:
    """Train `normed` on two devices, and save what each process holds."""
    graph, batch = workload_step("normed")
    with dp.compile(graph, make_plan(graph, 2, "random"), timeout_s=LONG_S) as step:
        for _ in range(steps):
            step(*batch)
        checkpoint.save(step.state_dict(), checkpoint_id=where)


def go_on(steps: int, where: str) -> Any:
    """Go on from there on three devices, by another plan; gives losses and state."""
    graph, batch = workload_step("normed")
    step = dp.compile(graph, make_plan(graph, 3, "even"), timeout_s=LONG_S)
    state = step.state_dict()
    checkpoint.load(state, checkpoint_id=where)
    step.load_state_dict(state)
    losses = [step(*batch) for _ in range(steps)]
    step.sync(everywhere=True)
    step.close()
    return {"losses": losses, "state": state_of(graph)}


def main() -> None:
    """Run a program and leave what it gives, or raises, beside `OUT`."""
    out = Path(os.environ["OUT"])
    try:
        value = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
        torch.save(value, out.with_suffix(".pt"))
    except BaseException as error:
        out.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
