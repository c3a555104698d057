"""The part of the measuring process that runs plans."""

from __future__ import annotations

from typing import Any

from devplace.cost.graph_transport import unpack
from devplace.cost.measuring_worker import (
    free_memory,
    is_out_of_memory,
    keep_out_of_collections,
    main,
)

OUT_OF_MEMORY = "out of memory"


def attempt(steps: dict[int, Any], key: int, *request: Any) -> tuple[Any, bool]:
    """Measure one plan: the answer, and whether this process can go on."""
    try:
        if isinstance(steps[key], bytes):
            steps[key] = unpack(steps[key])
            keep_out_of_collections()
    except Exception as error:
        return ("unreadable", str(error)), True
    try:
        timing = measure(steps[key], *request)
        free_memory()
        return ("measured", timing), True
    except Exception as error:
        answer, is_healthy = explain(error)
        del error
    if is_healthy:
        free_memory()
    return answer, is_healthy


def measure(step: Any, plan: Any, seconds: float, seed: int, lock: str | None) -> Any:
    """Time one plan of a step."""
    from devplace.tune.step_timing import time_plan

    graph, sources = step
    placement, order, device_names = plan
    return time_plan(graph, placement, order, device_names, sources, seconds, seed, lock)


def explain(error: BaseException) -> tuple[Any, bool]:
    """The answer that tells of an error, and whether the process is still good for others.

    Its kind is `out of memory` or the name of the error; one after which CUDA fails for good is a
    `DeviceLostError`, wherever it was met.
    """
    from devplace.errors import DeviceLostError, DevplaceError
    from devplace.run.cuda.failures import is_lasting, lost_device_error

    if is_lasting(error) and not isinstance(error, DeviceLostError):
        error = lost_device_error("Measuring the plan", error)
    if isinstance(error, DeviceLostError):
        return ("failed", type(error).__name__, str(error)), False
    chain, seen = [error], error
    while (cause := seen.__cause__) is not None and cause not in chain:
        chain.append(cause)
        seen = cause
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    is_memory = any(is_out_of_memory(each) for each in chain)
    kind = OUT_OF_MEMORY if is_memory else type(error).__name__
    is_cuda = any("CUDA" in str(each) for each in chain)
    is_known = isinstance(error, DevplaceError) or is_memory
    return ("failed", kind, line), is_known and (is_memory or not is_cuda)


if __name__ == "__main__":
    main()
