"""Starting ranks, watching them, and saying how they ended.

ranks                         a command on the ranks of a run, by torchrun's launcher and its agent for one host
stopping                      signals that ask a run to stop: noted by ranks, passed on by their launcher
failurereport                 what ranks hand to their launcher; the first cause, said once; how a process ended
launcherwatch                 ranks end with their launcher
shutdown                      hosts meet, also where nobody knows the name, and leave together
sockets, limitedstore, seal   connections that have fallen silent, and stores; what of a store may be believed
steptimes                     how long the steps took, told to the launcher
"""
