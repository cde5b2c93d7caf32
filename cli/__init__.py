"""The command line of assigner: a thin shell over the library that parses, calls and prints."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the process ends with the command's exit code."""
    try:
        from .app import app

        app()
    except KeyboardInterrupt:  # while the program was still loading
        sys.exit(130)
