"""devplace: plan, explain and run one PyTorch training step over several devices."""
