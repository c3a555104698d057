"""The link probe on CUDA devices."""

from devplace.run.cuda.probe.bench import CudaBench

__all__ = ["CudaBench"]
