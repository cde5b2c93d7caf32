"""This process among the ranks of its run.

membership      a pipeline as a member: its rank and worker, the messages to the others, and one end for all
run             what pipelines of this process share: the process group, its watch, and one call at a time
process         process group, device, compute threads
workergroups    workers that share a stage, as process groups of their own
packedvalues    values that one rank hands to the others
"""
