"""One stage a worker: a dynamic program over suffixes of pipelines whose price adds up stage by stage.

A candidate takes the search's steps; its `plans` say what its pipelines take. Where workers share stages both are of
another class (shared.py).

ranking.py       the candidate: the dynamic program's pipelines, simulated in the order of their prices; the ILP that
                 names the rest
simulated.py     its plans: what pipelines take at the warm-up depths that were tried, and better ones near them;
                 depth_search.py has the best depths, by branch and bound
gpipe.py         GPipe's step time, by kinds of workers (fleet/) where the dynamic program is not sharp; ranking.py asks
                 fleet/ for the rest's first plans and bounds where that program takes seconds
shared.py        stages that several workers share; share_search.py has every plan of one pipeline
"""
