"""Methods that several searches use.

dynamic_program     pipelines from the last stage to the first, for every schedule and objective
local_search        from a plan to better neighbours
"""
