"""devplace: plan, explain and run one PyTorch training step over several devices."""

__version__ = "0.1.0"
