"""The progress of a measurement."""

import io
import sys

import pytest
from assigner_cli import console
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
    with MeasuringProgress(wanted=wanted, workers=2) as progress:
        for kind in ("", "walk", "point", "update", "point", "links", "links"):
            progress.update(RankProgress("worker:1/cpu", "partition 'head' at micro-batch 4", 0.25, 130.0, kind=kind))
    return stream.getvalue()


def test_a_terminal_shows_worker_partition_and_time_left(monkeypatch):
    """The slowest worker, what it measures, the share done and the time left."""
    monkeypatch.setenv("COLUMNS", "120")
    said = shown(monkeypatch, Terminal())
    for word in ("worker:1/cpu", "partition 'head' at micro-batch 4", "25%", "2 min left"):
        assert word in said


def test_a_pipe_is_told_what_begins(monkeypatch):
    """One line for each kind of work; minutes without any would look like a run that hangs."""
    said = ["tracing the model on 2 workers", "measuring partitions on 2 workers", "measuring links on 2 workers"]
    assert shown(monkeypatch, io.StringIO()).splitlines() == said


def test_a_pipe_is_told_now_and_then_how_far_it_is(monkeypatch):
    """No line for half a minute, then the share done and the time left, where that is known."""
    now = [1000.0]
    monkeypatch.setattr("assigner_cli.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with MeasuringProgress(wanted=True, workers=2) as progress:
        for seconds, left in ((0, None), (29, 130.0), (2, 130.0), (29, 99.0), (2, None)):
            now[0] += seconds
            progress.update(RankProgress("worker:1/cpu", "partition 'head'", 0.25, left, kind="point"))
    said = "measuring partitions on 2 workers"
    assert stream.getvalue().splitlines() == [said, f"{said}: 25 %, 2 min left", f"{said}: 25 %"]


def test_other_ranks_and_quiet_ones_are_silent(monkeypatch):
    """Rank 0 speaks for all; -q leaves nothing on a pipe, and no bar."""
    for stream in (Terminal, io.StringIO):
        assert shown(monkeypatch, stream(), wanted=False) == ""
    console.configure(console.Settings(quiet=True))
    for stream in (Terminal, io.StringIO):
        assert shown(monkeypatch, stream()) == ""


def test_a_narrow_terminal_gets_one_line(monkeypatch):
    """What does not fit ends in an ellipsis; nothing wraps, and the time left stays."""
    monkeypatch.setenv("COLUMNS", "50")
    said = shown(monkeypatch, Terminal())
    assert "2 min left" in said
    assert "…" in said
    assert "micro-batch 4" not in said
