"""The runtime: executes a plan's program with tensors.

    pipeline                              what a training script calls
    installation, relocation              all that executes one plan on a rank; and to another plan during a run
    membership, process, rendezvous       this process in its run
    failure, carried, sameness, room      one end for all: the first cause, on every rank; what is refused beforehand
    share, programs, training, inference, variants
                                          this rank's partitions and programs; steps and forwards through the graphs
                                          that a batch needs
    executor, partition, microbatch, lookahead, headers, outputs, absent
                                          a step of a rank, action by action; its batch, its values and their messages
    transport, ordering, sending, staging, direct, hostmemory
                                          messages: gloo, NCCL, pinned and shared memory
    remat, batchnorm, randomness, compiling
                                          what a partition's forward does besides its own
    optimizer, gradients, scaling         the update, as one over all ranks
    checkpoint, plain                     the state of a run in files
    recorder, tracing, clock, ranges, memory
                                          what was done, when, and what it held

The training script sees the first of these alone.
"""
