"""The executor for CUDA devices: one CUDA graph per device, flags between them."""

from devplace.run.cuda.executor import CudaExecutor

__all__ = ["CudaExecutor"]
