"""What the user hands over, and what is found in it.

workload                      the model, its batches, loss and optimizer, as a training script declares them
deferred                      a model without memory, whose weights are made where they are needed
plainvalues                   plain Python values as JSON, in checkpoints and between ranks
members                       the parameters and buffers of a module, whatever it calls them itself
singleprocess                 the user's code without the run's process group
marking                       marks, and the graph of the partitions that they make
"""
