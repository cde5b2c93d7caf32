"""The profiler: measures a workload's partitions on every worker, links between workers, and all-reduces.

It stands above the runtime: what it times is the runtime's own forward and backward of a partition, on the runtime's
own backend, so that a plan's prices are those of the program that will run.

    options, session, rank, tasks what is asked for, and what `--only` names; one run, and what it puts back; one
                                  rank's part of it; who measures what
    rankprogress                  what ranks tell each other while they measure, and how long it will still take
    walk, partitionbench, stagegroups
                                  real inputs of each kind; partitions ready to run; those that are measured together
    computetimes, sampling, update, memory
                                  forwards, backwards and updates, repeated until they are steady; their bytes
    links, lane, pairs, contention, busy
                                  messages: which pairs and when, shared wires, what they cost the computing
    collectives                   all-reduces: in pairs, and of all workers
    host                          what a worker is
    journal, assembly             what is kept for a resumed run; the reports put together into one profile
"""
