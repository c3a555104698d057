"""The measuring process: `python -m devplace.auto.child`. It may crash, hang or be killed.

Messages are pickles behind their length, eight bytes, on stdin and stdout. Whatever else is
printed goes to stderr.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from typing import IO, Any

OUT_OF_MEMORY = "out of memory"
MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")
LENGTH = struct.Struct("<Q")


def write_message(stream: IO[bytes], message: Any) -> None:
    """Send one message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """The next message.

    Raises:
        EOFError: The other side has ended.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    """Serve the parent until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, channel)


def serve(incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Answer messages.

    `("settings", values)` are torch's, `("step", key, bytes)` is kept, `("measure", key, ...)` is
    answered with what came of it and whether this process can go on.
    """
    steps: dict[int, Any] = {}
    while True:
        try:
            kind, *rest = read_message(incoming)
        except EOFError:
            return
        if kind == "settings":
            from devplace.auto.settings import apply_settings

            apply_settings(*rest)
        elif kind == "step":
            steps[rest[0]] = rest[1]
        else:
            answer, is_healthy = attempt(steps, *rest)
            write_message(outgoing, (answer, is_healthy))
            if not is_healthy:
                return


def attempt(steps: dict[int, Any], key: int, *request: Any) -> tuple[Any, bool]:
    """Measure one plan: the answer, and whether this process can go on."""
    try:
        if isinstance(steps[key], bytes):
            from devplace.auto.wire import unpack

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
    from devplace.auto.timing import time_plan

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had too little memory."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in MEMORY_WORDS)


def keep_out_of_collections() -> None:
    """Take what is there out of garbage collections: a step's graph is large, and it stays."""
    import gc

    gc.collect()
    gc.freeze()


def free_memory() -> None:
    """Let go of what a plan held, before the next one."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
