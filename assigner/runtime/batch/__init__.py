"""A batch, until a step begins: how it is cut, who needs what of it, and whether all ranks mean the same.

microbatch                  a batch in micro-batches: a tree of values cut along the rows
needs, callcomparison       what each rank needs; whether all make the same call, and what they are told of the rest
variants                    the graphs that batches run through
recurrence                  state that goes from batch to batch, and its rows
"""
