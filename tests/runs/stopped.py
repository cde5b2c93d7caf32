"""A script that is asked to stop, as by Ctrl-C, when it has said a line.

torchrun --nproc-per-node 2 tests/runs/stopped.py LINE SCRIPT ARGUMENT...
"""

from __future__ import annotations

import builtins
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


def main(start: str, script: str) -> None:
    say = print

    def saying(*words: Any, **settings: Any) -> None:
        say(*words, **settings)
        if words and str(words[0]).startswith(start):
            signal.raise_signal(signal.SIGINT)

    builtins.print = saying
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _, line, path, *rest = sys.argv
    sys.argv = [path, *rest]
    main(line, path)
