"""The first workload file of a new user: a model named, looked at without memory, and written down as Python.

inputs        what the model takes and gives, tried with fake tensors
proposal      which of its submodules would be good partitions
modeldraft    what `package.module:Class` or `FILE.py:Class(width=64)` is, and all of that: a `Draft`
draft, text   what is known of the model; the file that says it, and of nobody's model in particular
"""
