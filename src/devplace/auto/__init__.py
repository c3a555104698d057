"""Plans confirmed by running them; `parallelize`, from a model to a step for a training loop."""
