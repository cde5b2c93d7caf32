"""One end for all ranks, and words for it: what failed first, or in what the ranks differ.

callrecord      what a rank has called, where, and with what
questions       what the others have called, and who waits for whom, asked for through the run's store
cause           what failed first, and the error of it that other ranks raise
blame           whom a rank blames that misses another one, by what it has seen and what others tell
failure         one failure, told to every rank, also while they make their process group
"""
