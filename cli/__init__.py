"""The command line of assigner: a thin shell over the library that parses, calls and prints."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; the process ends with the command's exit code."""
    try:
        from .app import app

        app(prog_name="assigner")
    except KeyboardInterrupt:  # while the program was still loading
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: the interpreter's end changes nothing
