"""The first workload file of a new user: a model named, looked at without memory, and written down as Python.

inputs        what the model takes and gives, tried with fake tensors
modeldraft    what `package.module:Class` or `FILE.py:Class(width=64)` is, which of its submodules would be good
              partitions, and all of that: a `Draft`
text          what is known of a model; the file that says it, and of nobody's model in particular
"""
