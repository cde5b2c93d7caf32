"""The files that commands hand to each other. One declaration decodes, checks, encodes and describes.

profile, plan, trace          the three of them, as frozen dataclasses; the profile behind a plan
prediction, solverreport      of a plan: what it is predicted to cost; how it was found and what is proven of it
stage                         of a plan: its partitions, and the workers that run them
orders                        of a plan that lists them: the steps of each worker, when they are sound, and in files
document                      how such a dataclass is read and written
profilechecks                 what makes a profile's parts fit together
profilewarnings               what a profile's own figures say against it
merging                       profiles put together or renewed in part
graph                         the order of partitions
terms                         words and limits that the formats, the flags and the solver share
fineness                      into how many micro-batches a batch may be cut
screen                        a profile, plan or solution that prints itself
"""
