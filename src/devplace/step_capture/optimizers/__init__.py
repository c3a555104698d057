"""Updates of parameters as ops of the step."""
