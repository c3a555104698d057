"""`torch.compile` on one device: loss with its backward, and the update.

The loss is compiled first and timed with the ordinary optimizer, torch's default and its fused
one; then the optimizer's step is compiled too, and the fastest of the three is the row.

Run: `python -m experiments.gpu.compiled WORKLOAD --out FILE [--mode max-autotune]`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from experiments.gpu.kernels import kernel_times
from experiments.gpu.timing import peaks, reset_peaks, time_steps
from experiments.gpu.training import Settings, bound_loss, build, make_optimizer, prepare_torch

from experiments.gpu import rows

MODES = ("reduce-overhead", "max-autotune", "default")


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


def choose_alone(progress: rows.Progress) -> None:
    """Let the compiler time kernels only while no other process measures."""
    from torch._inductor.runtime.benchmarking import benchmarker

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with progress.alone():
                return function(*arguments, **options)

        return run

    benchmarker.benchmark_gpu = alone(benchmarker.benchmark_gpu)  # type: ignore[method-assign]


class Row:
    """The step of one row, its loss compiled, with one update or another.

    Attributes:
        compile_s: Seconds that each compiled function took before its first run.
        shows_kernels: Whether `timed` gives the time of each kernel, too.
    """

    def __init__(
        self, settings: Settings, progress: rows.Progress, mode: str, shows_kernels: bool
    ) -> None:
        prepare_torch(settings)
        self.settings = settings
        self.shows_kernels = shows_kernels
        self.devices = settings.devices()[:1]
        self.compile_s: list[float] = []
        self._progress = progress
        self._mode = mode
        workload = build(settings)
        self._model = workload.model
        eager_loss = bound_loss(settings, workload.model, workload.loss_fn, workload.inputs)
        self._loss = self._compiled(eager_loss)

    def _compiled(self, function: Any) -> Any:
        begin: list[float] = [time.perf_counter()]

        def ready() -> None:
            self.compile_s.append(round(time.perf_counter() - begin[0], 1))
            self._progress.acquire()

        return compiled_with_pause(function, self._mode, ready)

    def optimizer(self, **options: Any) -> torch.optim.Optimizer:
        """A new optimizer of all parameters."""
        return make_optimizer(self.settings, self._model.parameters(), **options)

    def compiled_update(self) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
        """A new optimizer, its state made, and its step, compiled while others have the GPUs.
        There must be gradients."""
        optimizer = self.optimizer(capturable=self.devices[0].type == "cuda")
        optimizer.step()
        update = self._compiled(optimizer.step)
        self._progress.release()
        update()
        return optimizer, update

    def timed(self, optimizer: torch.optim.Optimizer, update: Callable[[], Any]) -> dict[str, Any]:
        """Times of the whole step, and the most memory it took."""

        def step() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            value = self._loss()
            value.backward()
            update()
            return value.detach()

        reset_peaks(self.devices)
        times = time_steps(step, self.devices, self.settings.seconds, self.settings.steps)
        most = peaks(self.devices)
        return times | most | (kernel_times(step, self.devices) if self.shows_kernels else {})


def measure(
    settings: Settings, progress: rows.Progress, options: argparse.Namespace
) -> dict[str, Any]:
    """Step time with a compiled loss and each update that works; memory is the first's."""
    choose_alone(progress)
    progress.phase("compile")
    row = Row(settings, progress, options.mode, options.kernels)
    optimizer = row.optimizer()
    first = row.timed(optimizer, optimizer.step)
    found = {"mode": options.mode, "update": "eager", "compile_s": row.compile_s[0]}
    found |= first | graph_facts()
    updates: dict[str, Any] = {"eager": median(first["rounds_ms"])}

    def keep(name: str, times: dict[str, Any]) -> None:
        updates[name] = median(times["rounds_ms"])
        if updates[name] < median(found["rounds_ms"]):
            kept = ("step_ms", "mean_ms", "rounds_ms", "steps", "us_by_kind", "kernels")
            found.update({"update": name} | {key: times[key] for key in kept if key in times})

    def write() -> dict[str, Any]:
        done = found | {"updates_ms": updates}
        progress.write(done | {"status": "ok"} | rows.provenance(settings.device_type))
        return done

    write()
    del optimizer
    for name in ("fused", "compiled"):
        gc.collect()
        progress.phase("optimizer")
        try:
            if name == "fused":
                fused = row.optimizer(fused=True)
                keep(name, row.timed(fused, fused.step))
                del fused
            else:
                keep(name, row.timed(*row.compiled_update()))
                found["update_compile_s"] = row.compile_s[-1]
        except Exception as error:
            updates[name] = rows.first_line(error)
        write()
    return write()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The compiler's mode, and what else is wanted."""
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--kernels", action="store_true", help="time every kernel, too")


if __name__ == "__main__":
    rows.main("experiments.gpu.compiled", measure, add_options)
