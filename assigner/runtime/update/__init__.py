"""The optimizer, as one over all ranks.

optimizer           what a script holds: torch's names, and those of the user's optimizer
namedstate          its state on a rank, which has not that of what others update, and by the model's names
rankoptimizer       what the runtime calls: the same param groups on each rank, with the parameters that are its own
paramgroups         its groups: which of the builder's there are, on all ranks alike, and what they tell
building            the user's, made of all parameters and left with some; what trials tell of it under a plan
separability        whether each parameter is treated by itself
scaling             one scale of float16 losses on all ranks
rankfactor          whether a script has changed weights or gradients by a number of one rank's own
rankchanges         by which numbers it has changed those of this rank
sparsemomentum      SGD's momentum of sparse gradients: sparse where these are, dense on its way
optimizermemory     what an optimizer keeps beside the state of its parameters; plain values of it go along in a move
"""
