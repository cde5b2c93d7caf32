"""The partitions that a rank holds, and stages that it shares with others.

localpartitions         modules with their weights, under the model's names; and what no partition holds
replicas, copies        what a shared stage cannot have; whether copies of a weight are treated alike
reduction               gradients of shared stages, added up in buckets while the step goes on
updaters, gathering     who updates which parameter, and hands it to the others
"""
