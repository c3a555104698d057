"""`torch.compile(mode="reduce-overhead")` on one device: loss with its backward, and the update.

The loss is compiled first and timed with the ordinary optimizer; then the optimizer's step is
compiled too, and the faster of the two is the row.

Run: `python -m experiments.gpu.compiled WORKLOAD --out FILE`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from experiments.gpu.timing import peaks, reset_peaks, time_steps
from experiments.gpu.training import Settings, bound_loss, build, prepare_torch, sgd

from experiments.gpu import rows

MODE = "reduce-overhead"


class PausedInductor(torch._TorchCompileInductorWrapper):  # type: ignore[misc]
    """Inductor that calls a function between compiling and the first run of what it compiled.

    A first call compiles for minutes and then runs on the GPU; only the run needs the GPU alone.
    """

    def __init__(self, mode: str, before_run: Callable[[], None]) -> None:
        super().__init__(mode, None, False)
        self._before_run: Callable[[], None] | None = before_run

    def __call__(self, model_: Any, inputs_: Any, **kwargs: Any) -> Callable[..., Any]:
        """Compile; the result waits once before it runs."""
        compiled = super().__call__(model_, inputs_, **kwargs)

        def run(*arguments: Any) -> Any:
            if self._before_run is not None:
                before_run, self._before_run = self._before_run, None
                before_run()
            return compiled(*arguments)

        return run


def compiled_with_pause(function: Any, mode: str, before_run: Callable[[], None]) -> Any:
    """`torch.compile(function, mode=mode)` that pauses before its first run."""
    return torch.compile(function, backend=PausedInductor(mode, before_run), dynamic=False)


def graph_facts() -> dict[str, Any]:
    """What the compiler made: graphs, breaks, and CUDA graphs it could not make."""
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": counters["inductor"].get("cudagraph_skips", 0),
    }


def measure(
    settings: Settings, progress: rows.Progress, options: argparse.Namespace
) -> dict[str, Any]:
    """Step time with a compiled loss, then with a compiled update too if that works."""
    prepare_torch(settings)
    workload = build(settings)
    optimizer = sgd(workload.model)
    devices = settings.devices()[:1]
    compile_s: list[float] = []
    begin = time.perf_counter()

    def ready() -> None:
        compile_s.append(round(time.perf_counter() - begin, 1))
        progress.acquire()

    eager_loss = bound_loss(settings, workload.model, workload.loss_fn, workload.inputs)
    loss = compiled_with_pause(eager_loss, MODE, ready)

    def timed(update: Callable[[], Any]) -> dict[str, Any]:
        def step() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            value = loss()
            value.backward()
            update()
            return value.detach()

        return time_steps(step, devices, settings.seconds, settings.steps)

    progress.phase("compile")
    reset_peaks(devices)
    row = timed(optimizer.step)
    progress.release()
    row |= {"compile_s": compile_s[0], "update": "eager", **graph_facts(), **peaks(devices)}
    progress.write(row | {"status": "ok"} | rows.provenance(settings.device_type))

    progress.phase("optimizer")
    begin = time.perf_counter()
    try:
        both = timed(compiled_with_pause(optimizer.step, MODE, ready))
    except Exception as error:
        return row | {"update_compiled": rows.first_line(error)}
    finally:
        progress.release()
    row["update_compiled_step_ms"] = both["step_ms"]
    row["update_compile_s"] = compile_s[-1]
    if both["step_ms"] < row["step_ms"]:
        row |= {"update": "compiled", "update_eager_step_ms": row["step_ms"]}
        row |= {name: both[name] for name in ("step_ms", "mean_ms", "steps")}
    return row


if __name__ == "__main__":
    rows.main("experiments.gpu.compiled", measure)
