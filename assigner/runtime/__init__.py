"""The runtime: executes a plan's program with tensors."""
