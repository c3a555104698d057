"""Models to place: the networks of the device-placement papers, and any model of the user's.

Names and descriptions are known without torch; `build` and `load` import it.
"""

from devplace.workloads.catalog import NAMES, build, describe, resolve
from devplace.workloads.user import load
from devplace.workloads.workload import SIZES, Workload

__all__ = ["NAMES", "SIZES", "Workload", "build", "describe", "load", "resolve"]
