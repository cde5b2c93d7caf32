"""The integer linear programs, in PuLP: one schedule, one number of micro-batches M, one worker a stage; the step time.

Shared stages, listed orders and the other objectives are not stated here.

    linear.py        rows, what every model is made of; and HiGHS or CBC, which run one: only what is proven is said
    pipelines.py     one stage a worker along one order: a path of stage options through the positions; GPipe's step
                     time, or a lower bound of 1F1B's
    placements.py    any stages on any workers: who holds what, and nothing about order; a lower bound

Sets and rows of `pipelines.py`, and what its two objectives share:

Sets         positions i = 0 .. n - 1: the partitions in order; groups k of `count[k]` workers that measure alike;
             columns j: the stage options, (first, last, k, what is rematerialised)
Variables    x[j] in {0, 1}: stage option j is used;  y[i, k, k'] in [0, 1]: boundary i lies between workers of k and k'
Cover        sum of x starting at 0 = 1;  sum of x ending at i-1 on k = sum over k' of y[i,k,k'];
             sum of x starting at i on k' = sum over k of y[i,k,k']: where a column ends the next one starts
Workers      sum of x on k <= count[k];  sum of x <= the most workers that the plan may use
Memory       a column exists only if it fits its worker with what it rematerialises and keeps in flight
Links        y exists only where two workers can talk; its price is in the objective
Hints        pins and what is forbidden take columns away, partitions kept together take away columns that part them,
             partitions kept apart those that hold both, an order of the workers takes away boundaries
Linearised   the maximum over stages: exactly one column covers a position, so that a row for each position states it
             with no row to switch off
Cuts         of what the objective leaves out (a turn of GPipe's before the last stage; under 1F1B much of the waiting):
             a pipeline that the model names is priced by the simulator, and a row says what it takes: no-good cuts, the
             simplest of logic-based Benders decomposition (Hooker and Ottosson, Mathematical Programming 96, 2003)

`placements.py` has x[i, k]: position i is on a worker of k, and states memory as a row of each group.
"""
