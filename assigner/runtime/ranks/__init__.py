"""This process among the ranks of its run.

membership      its rank and worker, the messages to the others, and one end for all
process         process group, device, compute threads
workergroups    workers that share a stage, as process groups of their own
packedvalues    values that one rank hands to the others
"""
