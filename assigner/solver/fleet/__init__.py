"""Chains of any size, workers by kind and host, then by name: of GPipe, branch and bound over the slowest servers.

hierarchy       the whole of it: from kinds and hosts to workers, with a proven bound, by branch and bound over the two
                limits, the slowest server forward and backward
kind_sweeps     the same of 1F1B, for every objective, in one sweep or some; what a step takes of a stage
relaxation      workers taken by kind: small whatever the fleet
path_program    the pipelines of kinds within two limits, with the least sum: a dynamic program
option_arrays   what a stage takes, by kind of worker, start and length, and what a message does
assignment      which workers take the stages of a pipeline of kinds
"""
