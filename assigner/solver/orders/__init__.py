"""Orders that are solved: a placement's actions in whatever order on each worker, under schedule `listed`.

    search.py      the whole of it: placements, their orders by every rule and made better, which plan to answer with
    tasks.py       a placement's forwards and backwards: what each waits for, makes, and keeps in memory
    listing.py     list scheduling: what is ready goes by priority, never above a worker's memory
    exchanges.py   an order made better: actions on the critical path change places; of a tiny placement every order
    bounds.py      no order of a placement takes less

The simulator prices what comes of it, like any plan.
"""
