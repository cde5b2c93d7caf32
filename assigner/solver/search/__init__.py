"""The search of a solve, candidate by candidate, and what is done with what it found.

search        which candidates there are, and the steps of each
preference    of plans that are as good, the simplest
relief        plans with divided state that are faster than the best without, where memory binds
budget        money against step time
"""
