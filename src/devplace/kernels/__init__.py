"""What is called for an op of a captured step: PyTorch's kernels, or compiled ones for groups."""

from devplace.kernels.kernel_choice import kernel_of

__all__ = ["kernel_of"]
