import io
import time

import pytest
from assigner_cli import console, progress
from assigner_cli.progress import SolveProgress
from rich.console import Console

from assigner.solver import Progress


@pytest.fixture
def stream(monkeypatch):
    """What stderr, as a terminal, receives; progress begins at once."""
    received = io.StringIO()
    terminal = Console(file=received, force_terminal=True, width=100, height=25, color_system=None, _environ={})
    monkeypatch.setattr(console, "stderr", lambda: terminal)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setattr(console, "settings", console.Settings)  # a command run before may have been quiet
    return received


def wait_for(stream, text):
    end = time.monotonic() + 600
    while text not in stream.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    return text in stream.getvalue()


def test_terminal_sees_the_incumbent(stream):
    """On a terminal the line follows what the search says, and is gone at the end."""
    with SolveProgress(time_limit=60) as shown:
        shown.update(Progress(1.0, "gpipe", 8, 0.1, 0.09, 1, 4))
        assert wait_for(stream, "best 100 ms · bound 90.0 ms · gap 10.0 %")
    assert stream.getvalue().rstrip().endswith("\x1b[2K")


def test_quiet_and_quick_searches_show_nothing(stream, monkeypatch):
    """A search that ends before the delay writes nothing, nor does any with -q."""
    monkeypatch.setattr(progress, "DELAY_S", 60.0)
    with SolveProgress(time_limit=60) as shown:
        shown.update(Progress(0.1, "gpipe", 8, 0.1, 0.09, 1, 4))
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setattr(console, "settings", lambda: console.Settings(quiet=True))
    with SolveProgress(time_limit=60):
        pass
    assert stream.getvalue() == ""
