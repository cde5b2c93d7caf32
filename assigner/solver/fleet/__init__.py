"""GPipe chains of any size: branch and bound over the slowest servers, workers by kind and host, then by name."""
