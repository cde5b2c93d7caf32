"""One end for all ranks, and words for it: what failed first, or in what the ranks differ.

callrecord      what a rank has called, where, and with what
inquiry         what the others have called, asked for through the run's store
waiting         who waits for whom
failure         one failure, told to every rank
remoteerrors    another rank's error, raised on this one
"""
