"""What is given, and what everything costs: no search is here.

options, hints      what is asked for; names resolved, contradictions said
problem             the profile with what the hints rule out
prices              the one price table: partitions and messages, by worker; placements of any shape
interval_prices     the same of intervals of the order, by groups of like workers: what pipelines are made of
stage_options       the stages that can be placed, priced by these
memory              what fits, and what is rematerialised for it
stage_remat         likewise where workers share a stage, and where they divide the optimizer's state
replica_options     stages that several workers share: who may, with how many micro-batches each
set_memory          what fits where a worker has any sets of partitions
objectives          how each objective adds up
perfect_split       the bound that all searches share
answer              what is given back
arrays              the kinds of arrays, for annotations
"""
