"""One stage a worker: a dynamic program over suffixes of pipelines whose price adds up stage by stage.

A candidate takes the search's steps; its `plans` say what its pipelines take. Where workers share stages both are of
another class (shared.py).

ranking.py       the candidate: the dynamic program's pipelines, simulated in the order of their prices; the ILP that
                 names the rest; where that program takes seconds, bound and first plans by kinds of workers (fleet/)
simulated.py     its plans: what pipelines take at the warm-up depths that were tried, and better ones near them;
                 depth_search.py has the best depths, by branch and bound
gpipe.py         GPipe's step time, by kinds of workers where the dynamic program is not sharp
shared.py        stages that several workers share; share_search.py has every plan of one pipeline
"""
