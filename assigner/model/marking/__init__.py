"""Marking: from a model's own forward to a graph of partitions.

What a training script hands over becomes pieces that a rank can build and run alone:

    marks                                 which modules are partitions
    capture, cut, cutter, glue, statereads, graph
                                          one forward as a graph, cut into partitions; who runs what lies between them,
                                          and reads there what modules change;
                                          the same for other inputs, and in the other mode
    blocks, roworder                      outputs that are not those of micro-batches behind each other; in which order
                                          an operation leaves rows, and whether their numbers
    opaque, modules, changedarguments     modules and Functions as one call of that graph; which modules, how their
                                          forward is called, where it has failed, and which look at a whole micro-batch;
                                          what a call changes of the containers that it is given
    exportable                            the model as torch.export can take it, and does not convert it
    collecting                            hidden states that transformers collects of its layers
    interception, checks, isolation, leftovers
                                          what the forward does that no graph holds, caught while it runs: hooks, checks
                                          of values, Python state
    repeats, tables                       what that leaves for its next call, which must do the same; tensors made of
                                          shapes among it, and whether other sizes leave the same
    functional, writing, nodes            a graph without writes, whose values each lie in one memory; what stands in it
                                          for them; what a node says, regions without gradient among the others
    unseen                                of the writes those that autograd does not see, into what backwards have saved
    fakeforward, observation, realforward what a module gives: on fake tensors, whichever way decisions on values go, or
                                          learnt from a few rows with values
    operations                            which operations it runs: for ranks to compare, and as a graph would have them
    domain, rows                          for which inputs a graph holds, its sizes; what of a batch carries its rows
    partitionmodule                       one partition as a module
    owncopies                             its modules, copied with the functions in them that lead to them
    gradients                             which values between partitions bear a gradient, and what may be made of which
    casting                               autocast: a model's own, and that of who calls
    silence                               what torch writes meanwhile, kept off the screen
"""

from __future__ import annotations

from assigner.model.marking.cut import partition_graph
from assigner.model.marking.graph import PartitionGraph, Piece, Value
from assigner.model.marking.marks import Mark, find_marks, partition
from assigner.model.marking.partitionmodule import PartitionModule

__all__ = ["Mark", "PartitionGraph", "PartitionModule", "Piece", "Value", "find_marks", "partition", "partition_graph"]
