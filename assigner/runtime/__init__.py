"""The runtime: executes a plan's program with tensors.

    pipeline, modelstate            what a training script calls: steps; the run and the state of its model
    installation, relocation        all that executes one plan on a rank; to another plan during a run, and what the
                                    script still holds of the earlier one
    outsidevalues, keptmodel        what partitions reach beside their own that cannot go to another rank; the builder's
                                    model beside them: what the script changes there, and what steps move here
    plangraph, passes               the partitions that a plan speaks of; batches through the graphs that they need, in
                                    training and without
    tracing                         a run's trace: all ranks', on one clock, in one file

Below them, from the top down; a package imports those below it alone:

    checkpoints     the state of a run in files, and of the whole model
    step            a step of a rank, action by action: executor, partitions, values, loss
    batch           how a batch is cut, who needs what of it, and whether all ranks mean the same
    update          the optimizer, as one over all ranks
    stages          a rank's partitions; stages on several workers, their sums and updates
    forward         what a forward does besides the model's own: remat, draws, compiling, state
    ranks           this process in its run
    messages        gloo, NCCL, MPI, pinned and shared memory
    failures        one end for all: the first cause, on every rank
    recording       what was done, when, and what it held

The training script sees the first line alone.
"""
