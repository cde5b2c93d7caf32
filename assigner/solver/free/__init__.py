"""Placements of any shape: branches of a graph on different workers, several stages a worker.

Problem ── PriceTable ── SetMemory (what is rematerialised) ─┬─ Exhaustive ── StageOrders   small: proven optimum
                                                             ├─ starts ── Annealing         larger: good plans
                                                             └─ Bounds, PlacementModel      larger: a lower bound

The first two ask a Pricing: StepPricing times a placement as the simulator would (RowTiming), SteadyPricing has the
slowest worker or link of the steady state.

    candidate       stages of any shape; branched: 1F1B and latency of a graph with branches, one stage a worker
    pricing         a placement, stages in a topological order, and what it is worth; row_timing: its step time
    starts          where the search starts; annealing goes on from there
    exhaustive      every placement of a small instance, with all rows of stages for each
    bounds          of all rows that put partitions on given workers
"""
