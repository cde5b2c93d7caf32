"""Signals while a lab is up: an exception once, and then what they would have done without it."""

from __future__ import annotations

import os
import signal

import pytest

from assigner.lab.running import Interrupted, Interruption


@pytest.fixture
def handled():
    """SIGTERM has a handler that returns; what it was called with."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_a_handler_that_returns_does_not_make_a_success(handled):
    """The block was cut short: the exception goes on after the handler had its call."""
    went_on = []

    def block():
        with Interruption():
            os.kill(os.getpid(), signal.SIGTERM)
            went_on.append(True)

    with pytest.raises(Interrupted):
        block()
    assert handled == [signal.SIGTERM]
    assert went_on == []


def test_a_signal_while_things_are_put_away_comes_afterwards(handled):
    """The block is done by then, so that it ends well; the handler is called, once."""
    with Interruption() as interruption:
        interruption.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handled == []
    assert handled == [signal.SIGTERM]


def test_ctrl_c_is_what_it_is_everywhere():
    """With Python's own handler the exception is KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Interruption():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kept", [None, signal.SIG_IGN])
def test_handlers_that_are_not_ours_to_take_stay(handled, monkeypatch, kept):
    """One that was set outside Python could not be put back, and one that ignores is a wish."""
    real = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda _: kept)
        with Interruption():
            os.kill(os.getpid(), signal.SIGTERM)
    assert handled == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is real
