"""A step of a rank, action by action.

executor                    the rank's part of the program, with tensors
partition                   one partition at work: forward, recompute and backward of a micro-batch
graphs                      what is kept of a forward for its backward, the backward, and what both may not change
joined                      partitions that keep one graph, at work
stepmessages                what a step holds between its actions, sends and receives
batchnorm                   running statistics as of the whole batch, though micro-batches leave theirs aside
loss, lossgradients, outputs, results
                            what is made of the model's output, and what the script gets of it
gradients                   those of a rank's parameters, and what all ranks do with theirs together
"""
