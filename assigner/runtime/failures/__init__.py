"""One end for all ranks, and words for it: what failed first, or in what the ranks differ.

callrecord      what a rank has called, where, and with what
inquiry         what the others have called, asked for through the run's store
waiting         who waits for whom
cause           what failed first, and the error of it that other ranks raise
failure         one failure, told to every rank
joining         a run watched from its start, and while it makes its process group
"""
