"""What decides that a step computes the same in every call, or says by name what does not."""
