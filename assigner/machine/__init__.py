"""This process on its machine.

launchedrank                  which rank of a run it is, as its launcher says
kernel                        what the kernel says of the machine and of processes
cgroup                        cores and memory that control groups leave to it
starvation                    whether other programs take the processor's time
heap                          what becomes of memory that it frees
reference                     how fast the machine does fixed pieces of work
generators                    what Python's and NumPy's random generators hold
"""
