"""How a process ended, in words."""

from __future__ import annotations

import pytest

from assigner.launch.failurereport import how_it_ended


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_codes_become_words(code, words):
    """Signals have their names, and those without one their number."""
    assert how_it_ended(code) == words
