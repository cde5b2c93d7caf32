"""The state of a run and of a model that is nowhere whole, in files and as plain PyTorch has it.

checkpoint, saving          every rank's part of it: read, and put into the run; written
optimizerstate              an optimizer's state by the model's names
wholestate                  the whole model's, gathered or handed out
shards, swapping            tensors in a folder, as safetensors; a folder that takes its name at once
"""
