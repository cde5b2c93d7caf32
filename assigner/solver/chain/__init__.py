"""GPipe with one stage a worker, by intervals of one order: a beam, local search, the segment ILP and its bounds."""
