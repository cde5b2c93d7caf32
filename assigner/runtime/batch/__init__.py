"""A batch, until a step begins: how it is cut, who needs what of it, and whether all ranks mean the same.

microbatch, division        a batch in micro-batches; a tree of values cut along the rows
needs, outline, callcomparison
                            what each rank needs, and what it is told of the rest; whether all make the same call
variants, headers           the graphs that batches run through; shapes that depend on data, sent ahead
staterows, recurrence       state that goes from batch to batch, and its rows
"""
