"""What a partition's forward and backward do besides the model's own, on one worker.

remat                   which forwards run again before their backward
randomness              draws that do not depend on the placement
compiling               `torch.compile`, one graph for each partition
nodes, splitbackward    torch's graphs; a backward in two parts: of what was read, and of the weights
heldtensors             tensors as they were at one time
state                   its parameters and buffers, and which of them forwards write
pythonvalues            what its forwards can find beside tensors; whether they run the user's code
attributes              Python attributes that a forward changes
lossvalues              plain values that a loss can read, and whether it keeps something
"""
