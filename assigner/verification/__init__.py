"""Does a model that is cut into partitions compute what it computes as it is? Asked before anything is measured.

checking                      the check
exercise                      what both sides get: batches, comparable random draws
plain, partitions, pieces     the sides: an ordinary loop; partitions on workers; one partition in memory at a time
workers                       workers without processes: messages as copies, one thread at a time
comparing, locating           what is compared, whether it differs, what is said then; in which module that begins
"""
