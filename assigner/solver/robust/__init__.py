"""How a plan holds up when its measurements were off.

robustness      its step time then, and how far behind the best it falls of the plans that it is held against
spreads         the same profile at other points of its measurements' spreads
"""
