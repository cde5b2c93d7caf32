"""The optimizer, as one over all ranks.

optimizer           the same param groups on each, and in them the parameters that are its own
handle              what a script sets and reads on it
building            the user's, made of all parameters and left with some
separability        whether each parameter is treated by itself
scaling             one scale of float16 losses on all ranks
rankfactor          whether a script has clipped gradients by one rank's norm
optimizermemory     what an optimizer keeps beside the state of its parameters
"""
