"""Tensors between workers, by every way there is.

transport                   who sends what to whom, with receives posted ahead
ordering                    the order in which messages without tags pass
sending                     memory of sends, kept until they have left
rendezvous                  where ranks meet, and tell each other facts
carriers, mpi               through the host: gloo, MPI
nccl, handshake             from GPU to GPU: only what both ends have announced is launched
hostmemory, staging         through memory that ranks of one host share; through pinned memory
"""
