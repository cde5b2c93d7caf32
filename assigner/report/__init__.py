"""Reports: pure functions from profiles, plans and solutions to something printable, or to plain data for JSON."""
