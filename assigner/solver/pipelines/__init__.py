"""One stage a worker: a dynamic program over suffixes of pipelines whose price adds up stage by stage.

simulated.py     pipelines as plans: what they take at the warm-up depths that were tried, and better ones near them;
                 depth_search.py has the best depths, by branch and bound
ranking.py       the dynamic program's pipelines, simulated in the order of their prices; the ILP that names the rest
gpipe.py         GPipe's step time, by kinds of workers (fleet/) where the dynamic program is not sharp; ranking.py asks
                 fleet/ for the rest's first plans and bounds where that program takes seconds
shared.py        stages that several workers share; share_search.py has every plan of one pipeline
"""
