"""The progress of a measurement."""

import io
import sys

import pytest
from assigner_cli.progress import MeasuringProgress, left_text

from assigner.profiler.rankprogress import RankProgress


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, ""), (0.4, "0 s left"), (89, "89 s left"), (130, "2 min left"), (4800, "1 h 20 min left")],
)
def test_time_left_is_no_finer_than_it_is_known(seconds, said):
    """Seconds, then minutes, then hours."""
    assert left_text(seconds) == said


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        return True


def shown(monkeypatch, stream, *, wanted=True):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with MeasuringProgress(wanted=wanted) as progress:
        progress.update(RankProgress("worker:1/cpu", "partition 'head' at micro-batch 4", 0.25, 130.0))
    return stream.getvalue()


def test_a_terminal_shows_worker_partition_and_time_left(monkeypatch):
    """The slowest worker, what it measures, the share done and the time left."""
    monkeypatch.setenv("COLUMNS", "120")
    said = shown(monkeypatch, Terminal())
    for word in ("worker:1/cpu", "partition 'head' at micro-batch 4", "25%", "2 min left"):
        assert word in said


def test_a_pipe_and_other_ranks_are_silent(monkeypatch):
    """Nothing is written where nobody looks."""
    assert shown(monkeypatch, io.StringIO()) == ""
    assert shown(monkeypatch, Terminal(), wanted=False) == ""


def test_a_narrow_terminal_gets_one_line(monkeypatch):
    """What does not fit ends in an ellipsis; nothing wraps, and the time left stays."""
    monkeypatch.setenv("COLUMNS", "50")
    said = shown(monkeypatch, Terminal())
    assert "2 min left" in said
    assert "…" in said
    assert "micro-batch 4" not in said
