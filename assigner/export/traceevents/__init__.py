"""A step as a file of the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Source of the format: Nat Duca, Dan Sinclair, Trace Event Format (Google, 2016), and how Perfetto's importer reads it.
"""
