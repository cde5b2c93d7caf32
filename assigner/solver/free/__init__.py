"""Placements of any shape: branches of a graph on different workers, several stages a worker.

Problem ── SetPrices ── SetMemory (what is rematerialised) ─┬─ Exhaustive ── StageOrders   small: proven optimum
                                                            ├─ starts ── Annealing         larger: good plans
                                                            └─ Bounds, PlacementModel      larger: a lower bound

The first two ask a Pricing: StepPricing times a placement as the simulator would (StepTiming), SteadyPricing has the
slowest worker or link of the steady state.
"""
