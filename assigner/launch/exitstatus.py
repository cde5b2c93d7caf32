"""How a process ended, in words."""

from __future__ import annotations

import signal

LEFT = "ended with exit code 0 while others waited for it"
LEFT_HINT = "every rank joins the run and makes all of its calls; sys.exit, os._exit or its script's end came too soon"


def how_it_ended(code: int) -> str:
    """An exit code as the second half of a sentence; negative: the number of the signal that killed the process."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal between the first and the last has no name
        return f"was killed by signal {-code}"
