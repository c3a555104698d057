"""The GPUs that tests run on, and what makes kernels give the same numbers every time.

`DEVPLACE_GPU_TESTS=cpu` tries the tests that only need devices on logical CPU devices, four of
them: what is then left to fail on a GPU is what belongs to GPUs. `DEVPLACE_GPU_TESTS=one` takes one
GPU for four: what is then left to fail belongs to links between GPUs.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from devplace.graph import OpGraph
from tests.run.tracing import place_by_module, random_placement

ON_CPU = os.environ.get("DEVPLACE_GPU_TESTS") == "cpu"
ON_ONE = os.environ.get("DEVPLACE_GPU_TESTS") == "one"
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NUM_DEVICES = 4 if ON_CPU or (ON_ONE and NUM_GPUS) else NUM_GPUS
KIND = "cpu" if ON_CPU else "cuda"
HOME = "cpu" if ON_CPU else "cuda:0"

# cuBLAS is deterministic only with a workspace of fixed size; read when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def needs(count: int) -> Any:
    """Skip a test where there are fewer devices."""
    return pytest.mark.skipif(count > NUM_DEVICES, reason=f"needs {count} CUDA devices")


def needs_apart(count: int) -> Any:
    """Skip a test where there are fewer devices apart from each other: one GPU is no several."""
    there = NUM_DEVICES if ON_CPU else NUM_GPUS
    return pytest.mark.skipif(count > there, reason=f"needs {count} CUDA devices apart")


MARKS = [pytest.mark.gpu, needs(1)]
COUNTS = [pytest.param(count, marks=needs(count)) for count in (2, 4)]
real_gpu = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")
not_on_one = pytest.mark.skipif(ON_ONE, reason="needs CUDA devices apart")


MAX_DRAWS_ON_ONE = 30


def skip_on_one(graph: OpGraph) -> None:
    """Skip where one GPU stands for several and the step draws random numbers in many ops.

    With 37 or 73 of them, each with a generator that is seeded before a launch, tensors did not
    arrive in time on one H200; on GPUs apart the same steps run. What holds them up is not known.
    """
    if ON_ONE and len(graph.program.random_ops) > MAX_DRAWS_ON_ONE:
        pytest.skip("steps that draw in many ops do not end on one GPU")


def names(count: int) -> tuple[str, ...]:
    """The first `count` devices."""
    return tuple(f"{KIND}:{index}" for index in range(count))


def to_home(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """A batch on the first device."""
    return tuple(tensor.to(HOME) for tensor in batch)


def at_random(graph: OpGraph, count: int, seed: int = 0) -> Any:
    """Every op on a random device, in a random order."""
    return random_placement(graph, count, seed)


def in_layers(graph: OpGraph, count: int, seed: int = 0) -> Any:
    """Modules in the order of their first op, cut into equal runs: the trivial split."""
    modules = dict.fromkeys(op.module for op in graph.ops if not op.is_source)
    device_of = {module: k * count // len(modules) for k, module in enumerate(modules)}
    return place_by_module(graph, lambda op: device_of.get(op.module, 0), count)


PLACEMENTS = {"random": at_random, "layers": in_layers}


def modules_on(device_of: Mapping[str, int], default: int = 0) -> Any:
    """Ops of the modules named go where it says, with all below them; the others to `default`."""

    def device(op: Any) -> int:
        for path, index in device_of.items():
            if op.module == path or op.module.startswith(f"{path}."):
                return index
        return default

    return lambda graph, count, seed=0: place_by_module(graph, device, count)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits in every run, where torch has them, in full float32.

    Ops without such a kernel run all the same.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        matmul.allow_tf32 = cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fills
            matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def seen_executors(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[list[Any]]:
    """Collects the executors that `check_step` makes; on GPUs they get `options`."""
    module = sys.modules["devplace.run.check"]  # the package has a function of this name
    make, seen = module.make_executor, []

    def noting(schedule: Any, seed: int = 0, *rest: Any, **named: Any) -> Any:
        if options and not ON_CPU:
            from devplace.run.cuda import CudaExecutor

            seen.append(CudaExecutor(schedule, seed, **options))
        else:
            seen.append(make(schedule, seed, *rest, **named))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(module, "make_executor", noting)
        yield seen


@contextmanager
def capped(limits: Mapping[int, int]) -> Iterator[None]:
    """This process may take so many more bytes of each of these GPUs: a smaller GPU emulated."""
    gc.collect()
    torch.cuda.empty_cache()
    for index, limit in limits.items():
        total = torch.cuda.get_device_properties(index).total_memory
        may = torch.cuda.memory_reserved(index) + limit
        torch.cuda.set_per_process_memory_fraction(may / total, index)
    try:
        yield
    finally:
        for index in limits:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
