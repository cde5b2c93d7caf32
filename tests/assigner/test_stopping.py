"""Signals that a process notes: once asked for, put back at the end, and never in the way of those of others."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from workloads import make_plan, pipeline_of, skips

from assigner.errors import UsageError
from assigner.launch.stopping import SignalPassing, StopSignals

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    """A handler of the script's own in the block."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_pipeline_notes_signals_from_the_first_question_on() -> None:
    """Not before; a signal is then seen by the next question, stays seen, and the end puts everything back."""
    made = skips()
    with handling(signal.SIGINT, signal.default_int_handler), handling(signal.SIGUSR1, signal.SIG_DFL):
        with pipeline_of(made, make_plan(made)) as pipeline:
            pipeline.step(made.make_batch(8, 0))
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert not pipeline.stop_requested()
            os.kill(os.getpid(), signal.SIGINT)
            assert [pipeline.stop_requested(), pipeline.stop_requested()] == [True, True]
            pipeline.step(made.make_batch(8, 1))
            os.kill(os.getpid(), signal.SIGUSR1)  # another one is no second
            with pytest.raises(UsageError, match="was first called with"):
                pipeline.stop_requested(grace_s=5)
            assert pipeline.stop_requested()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_signals_are_as_before_behind_pipelines_that_noted_them() -> None:
    """Whichever is closed first; a signal between two closes is noted by the one that is open."""
    made = skips()
    with handling(signal.SIGUSR1, signal.default_int_handler):
        first, second = pipeline_of(made, make_plan(made)), pipeline_of(made, make_plan(made))
        for each in (first, second):
            assert not each.stop_requested(signals=["SIGUSR1"])
        first.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert second.stop_requested(signals=["SIGUSR1"])
        second.close()
        assert signal.getsignal(signal.SIGUSR1) is signal.default_int_handler


def test_the_same_signal_again_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once it is the same request, as a launcher and a terminal both send it; later it does what it always does."""
    now = [100.0]
    monkeypatch.setattr("assigner.launch.stopping.time.monotonic", lambda: now[0])
    with handling(signal.SIGINT, signal.default_int_handler):
        noted = StopSignals(["SIGINT"], 1.0)
        noted.install()
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 1.9
        os.kill(os.getpid(), signal.SIGINT)
        assert noted.requested
        now[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_script_has_made_of_a_signal_counts() -> None:
    """Its handler is called too, what it ignores stays ignored, and what it installs later is left to it."""
    seen: list[int] = []
    with handling(signal.SIGUSR1, lambda number, _: seen.append(number)), handling(signal.SIGUSR2, signal.SIG_IGN):
        noted = StopSignals(["SIGUSR1", "SIGUSR2", "SIGTERM"], 1.0)
        noted.install()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not noted.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert noted.requested
        assert seen == [signal.SIGUSR1]
        later = signal.default_int_handler
        signal.signal(signal.SIGTERM, later)
        noted.close()
        assert signal.getsignal(signal.SIGTERM) is later
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


def test_a_fork_ends_by_a_signal_as_ever() -> None:
    """A DataLoader's worker that is to be terminated does not note it; a terminal's Ctrl-C is left to its parent."""
    with handling(signal.SIGTERM, signal.SIG_DFL), handling(signal.SIGINT, signal.default_int_handler):
        noted = StopSignals(["SIGINT", "SIGTERM"], 1.0)
        noted.install()
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(3)
        _, status = os.waitpid(child, 0)
        noted.close()
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not noted.requested


@pytest.mark.parametrize("name", ["SIGKILL", "SIGNOTHING", "signal", "SIG_DFL", 2])
def test_what_is_no_signal_is_refused(name: Any) -> None:
    """In words, and with the names of those that are."""
    with pytest.raises(UsageError, match="is no signal that can be noted"):
        StopSignals([name], 1.0)
    for grace_s in ("nan", "inf", "0"):
        with pytest.raises(UsageError, match="expected a finite number of seconds above 0"):
            StopSignals(["SIGINT"], float(grace_s))


def test_another_thread_is_refused() -> None:
    """Python takes signals in the main thread alone."""
    told: list[str] = []

    def ask() -> None:
        try:
            StopSignals(["SIGINT"], 1.0).install()
        except UsageError as error:
            told.append(error.message)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert told == ["signals can be noted in the main thread alone"]


def test_a_launcher_whose_run_has_failed_elsewhere_passes_nothing_on(tmp_path: Any) -> None:
    """The signal then does what it did before; so it does where no rank notes it."""
    (tmp_path / f"{os.getpid()}.1.stop").write_text('{"signals": [12], "grace_s": 5.0}')
    said: list[str] = []
    seen: list[int] = []
    failing = [True]
    with handling(signal.SIGUSR2, lambda number, _: seen.append(number)):
        passing = SignalPassing(
            tmp_path, is_running=lambda process: process == 1, is_failing=lambda: failing[0], notice=said.append
        )
        with passing.kept_back():
            passing.begin()
            os.kill(os.getpid(), signal.SIGUSR2)
            failing[0] = False
            os.kill(os.getpid(), signal.SIGUSR2)  # the one that notes it does not run
        assert seen == [signal.SIGUSR2, signal.SIGUSR2]
        assert said == []
        assert passing.overdue is None
