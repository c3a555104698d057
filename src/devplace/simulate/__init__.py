"""How long a placed step takes and how much memory it needs, in simulated time."""

from devplace.simulate.kernel import SimulatorKernel, make_kernel, native_module
from devplace.simulate.reference import CoreTimeline
from devplace.simulate.timeline import Timeline, Transfer, simulate

__all__ = [
    "CoreTimeline",
    "SimulatorKernel",
    "Timeline",
    "Transfer",
    "make_kernel",
    "native_module",
    "simulate",
]
