"""How long a placed step takes and how much memory it needs, in simulated time."""

from devplace.simulator.kernel import SimulatorKernel, make_kernel, native_module
from devplace.simulator.reference import CoreTimeline
from devplace.simulator.simulate_placement import simulate
from devplace.simulator.timeline import Timeline, Transfer

__all__ = [
    "CoreTimeline",
    "SimulatorKernel",
    "Timeline",
    "Transfer",
    "make_kernel",
    "native_module",
    "simulate",
]
