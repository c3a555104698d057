"""Step times on one or several devices, under a lock that keeps measurements apart."""

from __future__ import annotations

import fcntl
import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from experiments.gpu.turns import Turn

WARM_UP = 4
WARM_UP_S = 1.0
"""A GPU at its power limit lowers its clock within that time."""
MIN_STEPS = 5
ROUNDS = 5


class GpuLock:
    """The right to use the GPUs alone, among all processes given the same file.

    The file is named by the environment variable GPU_LOCK; without it nothing is locked. The
    system releases the lock when its holder ends, however it ends. Where GPU_TURN names a file,
    turns are given by another process instead, see `turns`. Each GPU is fed by a thread of
    its own, so where GPU_CORES lists cores (`24,25,26`) that nothing else uses, the holder's thread
    and those it starts run there.
    """

    def __init__(self) -> None:
        self._path = os.environ.get("GPU_LOCK")
        turn = os.environ.get("GPU_TURN")
        self._turn = Turn(turn) if turn else None
        self._cores = {int(core) for core in os.environ.get("GPU_CORES", "").split(",") if core}
        self._own: set[int] = set()
        self._file: Any = None
        self._has_turn = False

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._file is not None or self._has_turn

    def acquire(self, is_ready: bool = True) -> None:
        """Wait until no other process measures; does nothing if the lock is held already.

        Args:
            is_ready: Whether it is to measure; otherwise it still gets ready and is soon through.
        """
        if self._turn is not None:
            if not self._has_turn:
                self._turn.take(is_ready)
                self._has_turn = True
        elif self._path is not None and self._file is None:
            self._file = open(self._path, "a")  # noqa: SIM115 (open as long as the lock is held)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if self._cores:
                self._own = os.sched_getaffinity(0)
                os.sched_setaffinity(0, self._cores)

    def release(self) -> None:
        """Let others measure."""
        if self._turn is not None and self._has_turn:
            self._turn.end()
            self._has_turn = False
        if self._file is not None:
            if self._own:
                os.sched_setaffinity(0, self._own)
            self._file.close()
            self._file = None


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait for all work on the devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Marks:
    """Points in time on the first device's stream; on the CPU, of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self._ends: set[int] = set()

    def add(self) -> None:
        """Mark now."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter() * 1e3)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def end_round(self) -> None:
        """The gap after the last mark does not count."""
        self._ends.add(len(self._marks) - 1)

    def gaps_ms(self) -> list[float]:
        """Time between neighbouring marks, ms; all of them must have been reached."""
        pairs = [
            (first, second)
            for number, (first, second) in enumerate(pairwise(self._marks))
            if number not in self._ends
        ]
        if self._device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [second - first for first, second in pairs]


def time_steps(
    step: Callable[[], Any],
    devices: Sequence[torch.device],
    seconds: float,
    max_steps: int,
    fixed: bool = False,
) -> dict[str, Any]:
    """Time of one step, in rounds of many issued one after another without waiting in between.

    Args:
        step: One training step; returns the loss.
        devices: All devices it uses; the first one's stream carries the marks.
        seconds: Rough limit for warm-up and measured steps together.
        max_steps: Measured steps at most.
        fixed: Exactly `max_steps` steps, as all processes of a group must do the same.

    Returns:
        `step_ms` (median of the gaps between steps), `mean_ms` (whole time by the host's clock over
        the number of steps), `rounds_ms` (the same for each round), `first_step_ms`, `steps`,
        `first_loss`, `last_loss`.
    """
    synchronize(devices)
    begin = time.perf_counter()
    first_loss = float(step())
    synchronize(devices)
    first_ms = (time.perf_counter() - begin) * 1e3
    warm_ms = _warm_up(step, devices, seconds, max_steps if fixed else 0)
    fitting = int((seconds * 1e3 - first_ms) / max(warm_ms, 1e-3))
    num_steps = max_steps if fixed else min(max_steps, max(MIN_STEPS, fitting))
    marks = Marks(devices[0])
    sizes = [len(part) for k in range(ROUNDS) if (part := range(k, num_steps, ROUNDS))]
    rounds_ms: list[float] = []
    for size in sizes:
        synchronize(devices)
        begin = time.perf_counter()
        marks.add()
        for _ in range(size):
            loss = step()
            marks.add()
        synchronize(devices)
        rounds_ms.append((time.perf_counter() - begin) * 1e3 / size)
        marks.end_round()
    whole_ms = sum(each * size for each, size in zip(rounds_ms, sizes, strict=True))
    return {
        "step_ms": round(statistics.median(marks.gaps_ms()), 4),
        "mean_ms": round(whole_ms / num_steps, 4),
        "rounds_ms": [round(each, 4) for each in rounds_ms],
        "first_step_ms": round(first_ms, 1),
        "steps": num_steps,
        "first_loss": first_loss,
        "last_loss": float(loss),
    }


def _warm_up(
    step: Callable[[], Any], devices: Sequence[torch.device], seconds: float, fixed: int
) -> float:
    """WARM_UP steps, fewer if they are slow; on GPUs then `fixed` steps, or as many as WARM_UP_S
    takes; time of the last one, ms."""
    spent = last = 0.0
    done = 0
    on_gpu = devices[0].type == "cuda"
    least_s = WARM_UP_S if on_gpu and not fixed else 0.0
    least = WARM_UP + (fixed if on_gpu else 0)
    while done < least or spent < least_s:
        begin = time.perf_counter()
        step()
        synchronize(devices)
        last = time.perf_counter() - begin
        spent += last
        done += 1
        if not fixed and spent > seconds / 2:
            break
    return last * 1e3


def reset_peaks(devices: Sequence[torch.device]) -> None:
    """Forget earlier peaks of memory."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peaks(devices: Sequence[torch.device]) -> dict[str, list[int]]:
    """Peak bytes per device: of tensors, and with what the allocator kept."""
    cuda = [device for device in devices if device.type == "cuda"]
    return {
        "peak_bytes": [torch.cuda.max_memory_allocated(device) for device in cuda],
        "reserved_bytes": [torch.cuda.max_memory_reserved(device) for device in cuda],
    }
