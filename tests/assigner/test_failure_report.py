"""The first cause of a run: handed over by ranks, read by their launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from assigner.errors import UsageError
from assigner.launch.failurereport import (
    VARIABLE,
    FailureReport,
    first_report,
    hand_over,
    listening,
    place_in,
    report_of,
    take_back,
    tell,
)
from assigner.runtime.failures.cause import Failure


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """The folder of a launcher that listens; this process is rank 2."""
    monkeypatch.setenv(VARIABLE, f"{os.getppid()} {tmp_path}")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    return tmp_path


def test_without_a_launcher_a_rank_speaks_for_itself(monkeypatch, tmp_path, capsys):
    """Under torchrun the error goes to stderr with its rank; a folder that is gone counts as none."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for folder in (None, tmp_path / "gone"):
        monkeypatch.delenv(VARIABLE, raising=False)
        if folder is not None:
            monkeypatch.setenv(VARIABLE, f"{os.getppid()} {folder}")
        assert not hand_over(FailureReport("worker:1", "lost"))
        assert tell(UsageError("no data", hint="get some")) == 2
        assert capsys.readouterr().err == "worker:1: error: no data\nworker:1: hint: get some\n"


def test_with_a_launcher_it_is_silent_and_the_first_word_counts(launcher, capsys):
    """What a process says later is a consequence."""
    assert tell(UsageError("no data", hint="get some")) == 2
    assert hand_over(FailureReport("worker:2", "and then"))
    assert capsys.readouterr() == ("", "")
    found = first_report(launcher)
    assert found is not None
    assert (found.worker, found.message, found.hint, found.exit_code) == ("worker:2", "no data", "get some", 2)


def test_what_the_script_has_caught_before_it_joined_again_is_no_cause(launcher):
    """The next word of the process is its first one then."""
    take_back()
    hand_over(FailureReport("worker:2", "an hour ago"))
    take_back()
    assert first_report(launcher) is None
    hand_over(FailureReport("worker:2", "now"))
    assert str(first_report(launcher)) == "worker:2: now"


def test_what_a_rank_says_of_itself_comes_before_what_others_noticed(tmp_path, monkeypatch):
    """However late it was written; among equals the earlier one counts, and a half-written file not at all."""
    monkeypatch.setenv(VARIABLE, f"{os.getppid()} {tmp_path}")
    for pid, cause in enumerate(
        (
            FailureReport("worker:1", "its process is gone", is_own=False, at=1.0),
            FailureReport("worker:1", "boom", at=3.0),
            FailureReport("worker:3", "boom, too", at=2.0),
        )
    ):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        hand_over(cause)
    (tmp_path / "9.json").write_text('{"worker": "wor')
    found = first_report(tmp_path)
    assert found is not None
    assert str(found) == "worker:3: boom, too"
    assert first_report(tmp_path / "nothing") is None


def test_the_users_line_is_named_once():
    """The innermost frame outside of packages; an error of ours says its place itself."""
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 3, in main\n'
        '  File "/home/u/model.py", line 12, in forward\n'
        '  File "/usr/lib/python3.12/site-packages/torch/nn/functional.py", line 9, in layer_norm\n'
        '  File "<eval_with_key>.8", line 5, in forward\n'
    )
    assert place_in(trace) == "model.py:12"
    assert place_in("") == ""
    with pytest.raises(UsageError) as ours:
        raise UsageError("no", hint="yes")
    assert report_of(ours.value).place == ""
    with pytest.raises(RuntimeError) as theirs:
        raise RuntimeError("boom\nbang")
    assert "RuntimeError: boom bang (test_failure_report.py:" in str(report_of(theirs.value))


def test_what_others_have_refused_is_told_under_their_names(launcher):
    """The rank that raises it here has no part in it; and an error without words is its type."""
    assert str(report_of(UsageError("worker:0: no room"))) == "worker:0: no room"
    error = Failure("worker:2/cpu", "the training script", "", "KeyboardInterrupt", "builtins")
    assert error.hand_over(to_tell_of="worker:2/cpu")
    assert str(first_report(launcher)) == "worker:2/cpu: KeyboardInterrupt, in the training script"


def test_an_error_that_nobody_catches_is_handed_over(launcher, monkeypatch):
    """A script that imports the package ends without a traceback of its own, and with exit code 1."""
    monkeypatch.setenv(VARIABLE, listening(launcher))
    code = "import assigner\ndef main():\n    raise ValueError('no such data')\nmain()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    found = first_report(launcher)
    assert found is not None
    assert "worker:2: ValueError: no such data" in str(found)
    assert "in main" in found.trace


def test_an_error_without_words_is_handed_over_all_the_same(launcher):
    """What a class of the user's own makes of itself may fail, or be as long as a tensor."""

    class OddError(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    assert report_of(OddError()).message == "OddError: (no text: its __str__ raised KeyError)"
    assert len(report_of(ValueError("x" * 10**6)).message) < 200_000


def test_what_a_rank_starts_speaks_for_itself(launcher):
    """A grandchild of the launcher inherits its variable, and is not heard: its error is not the run's."""
    done = subprocess.run(
        [sys.executable, "-c", "import assigner\nraise ValueError('mine')"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "ValueError: mine"
    assert first_report(launcher) is None


def test_what_a_rank_says_cannot_change_a_terminal(launcher):
    """The launcher prints it; what has no form of a cause is none."""
    (launcher / "1.json").write_text('{"worker": 1, "message": []}')
    assert first_report(launcher) is None
    hand_over(FailureReport("worker:2", "\x1b]0;mine\x07 no\ndata"))
    assert str(first_report(launcher)) == "worker:2: \ufffd]0;mine\ufffd no data"


def test_an_interrupt_while_a_rank_imports_is_no_traceback(launcher):
    """Its launcher says that the run was interrupted."""
    code = (
        "import sys\nclass Interrupted:\n    def find_spec(self, name, *_):\n"
        "        if name == 'assigner.launch.failurereport':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\nimport assigner\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
