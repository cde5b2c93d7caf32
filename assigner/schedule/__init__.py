"""From a plan to its step, without torch: the same program is priced here and executed by the runtime.

replication                   which of a stage's workers takes which micro-batch; who updates what of it, and what
                              that takes
orders                        what every worker computes in which order: one function for each schedule
deadlock                      whether listed orders would wait for each other for ever
program                       the same with messages and the update
cost, rings                   seconds and bytes of one action, and of an all-reduce; only here are measurements
                              interpolated
queues, timing, simulate      when each action starts and ends; what a step takes, and the peak of memory
objective                     what a plan is worth under each objective
occupancy                     memory over time
criticalpath, bottleneck      what makes the step as long as it is
"""
