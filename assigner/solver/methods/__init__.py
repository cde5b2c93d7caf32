"""What several searches use: methods, and what the candidates of one search have in common.

candidate           the clock, the solver, the best plan of all; one schedule and micro-batch count, how far it has come
dynamic_program     pipelines from the last stage to the first, for every schedule and objective
local_search        from a plan to better neighbours
"""
