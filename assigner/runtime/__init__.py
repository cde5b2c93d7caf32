"""The runtime: executes a plan's program with tensors.

    pipeline, modelstate                  what a training script calls: steps; the run and the state of its model
    installation, relocation              all that executes one plan on a rank; and to another plan during a run
    membership, process, rendezvous, allgather
                                          this process in its run; facts of all ranks, on every rank
    failure, remoteerrors, memorycheck    one end for all: the first cause, on every rank; what is refused beforehand
    callcomparison, callrecord, inquiry, needs, outline
                                          whether all ranks do the same, and in what they differ; what each needs of a
                                          batch, and is told of the rest
    localpartitions, graph, training, inference, variants
                                          this rank's partitions and programs; steps and forwards through the graphs
                                          that a batch needs
    executor, partition, stepvalues, stepmessages, microbatch, division, headers, outputs
                                          a step of a rank, action by action; its batch, its values and their messages
    loss, lossvalues, metrics, results    what is made of the model's output, and what a step gives to the script
    transport, carriers, ordering, sending, staging, nccl, handshake, directmessages, hostmemory, mpi
                                          messages: gloo, NCCL, MPI, pinned and shared memory
    recurrence, staterows                 state from batch to batch
    splitbackward, nodes                  a backward in two parts: of what was read, and of the weights; torch's graphs
    remat, batchnorm, randomness, compiling, attributes, outsidevalues
                                          what a partition's forward does besides its own, and what it leaves in Python
    optimizer, optimizerstate, optimizermemory, separability, gradients, scaling, rankfactor
                                          the update, as one over all ranks
    replicas, copies, workergroups, reduction, updaters, gathering
                                          a stage on several workers: what it cannot have, whether its copies are alike,
                                          their process group, the sums of its gradients; who updates what for whom
    checkpoint, savedstate, shards, swapping, plainvalues
                                          the state of a run in files
    wholestate, packedvalues              the state of the whole model for plain PyTorch; values between ranks
    recorder, tracing, clock, ranges, memory, reference
                                          what was done, when, and what it held

The training script sees the first of these alone.
"""
