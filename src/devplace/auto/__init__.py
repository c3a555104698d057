"""Plans confirmed by running them, and `parallelize`: from a model to a step for a training loop."""
