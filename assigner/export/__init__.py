"""Plans in the forms of other tools: one module a format. Pure functions from a plan and its profile to a text."""
