"""Mini machines of the user threads: m2, m4, m8, m2slow, m21, m2skew, mcpu, muni.

Devices do 1 FLOP and 1 byte per ns unless said otherwise; `memory` is in bytes.
"""

from __future__ import annotations

from devplace.machine import Machine
from devplace.testing import hand_machine


def equal(count: int, memory: int, bytes_per_ns: float = 100.0) -> Machine:
    """m2, m4, m8: equal devices with fast links."""
    names = [f"cuda:{k}" for k in range(count)]
    return hand_machine(dict.fromkeys(names, memory), bytes_per_ns=bytes_per_ns)


def m2slow(memory: int) -> Machine:
    """Two equal devices, a very slow link."""
    return equal(2, memory, bytes_per_ns=0.001)


def m21(memory: int) -> Machine:
    """Two devices of the same speed, the first with twice the memory."""
    return hand_machine({"cuda:0": 2 * memory, "cuda:1": memory}, bytes_per_ns=100)


def m2skew(small: int, large: int) -> Machine:
    """A small device that is 4 times faster than a large one."""
    return hand_machine({"cuda:0": small, "cuda:1": large}, speed={"cuda:0": 4}, bytes_per_ns=100)


def mcpu(memory: int, host: int = 10**9) -> Machine:
    """A small accelerator beside a large CPU that is 20 times slower; a copy is on its way as long
    as a small op takes on the CPU."""
    return hand_machine(
        {"cuda:0": memory, "cpu:0": host}, speed={"cuda:0": 20}, bytes_per_ns=5, latency_ns=2000
    )


def muni(memory: int) -> Machine:
    """Accelerator and CPU in one memory pool, each told the whole of it."""
    return hand_machine(
        {"cuda:0": memory, "cpu:0": memory},
        speed={"cuda:0": 20},
        pools={"ram": (memory, ("cuda:0", "cpu:0"))},
    )
