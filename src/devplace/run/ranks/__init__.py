"""One step over several processes: who has what, and how tensors get from one to another."""
