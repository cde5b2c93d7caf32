"""What a search may spend, and where it ends.

tuning    the constants of every search, and from where on values count as one
clock     when a search has to end
"""
