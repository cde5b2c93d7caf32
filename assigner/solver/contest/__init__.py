"""What the settings of one search have in common.

contest     the clock, the solver, and the best plan of all settings
setting     one schedule and micro-batch count: its bound, its best plan, its integer program
"""
