"""What the candidates of one search have in common.

state         the clock, the solver, and the best plan of all candidates
candidate     one schedule and micro-batch count: its bound, its best plan, its integer program
"""
