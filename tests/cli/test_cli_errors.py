"""Errors whatever the use: tracebacks, bugs, interrupts, variables. The table of wrong uses is another file."""

import errno
import os
import tempfile

import pytest


def test_verbose_shows_where(assigner):
    """-v adds the traceback, in front of the command or behind it."""
    for line in ("-v show nowhere.json", "show nowhere.json -v"):
        result = assigner(*line.split())
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert result.stdout == ""


def test_bug_is_one_line_and_a_hint(assigner, monkeypatch):
    """An exception that nobody expected is called a bug: exit code 1, no traceback without -v."""

    def explode(_):
        raise RuntimeError("boom")

    monkeypatch.setattr("assigner.formats.plan.load_plan", explode)
    result = assigner("show", "solved.json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "error: a bug in assigner: RuntimeError: boom"
    assert len(result.stderr.splitlines()) == 2


def test_interrupt_is_130(assigner, monkeypatch):
    """Ctrl-C ends with exit code 130 and a line."""

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("assigner.formats.plan.load_plan", interrupt)
    result = assigner("show", "solved.json")
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted\n"


@pytest.mark.parametrize(("number", "begin"), [(errno.ENOSPC, "make room, or "), (errno.EROFS, "")])
def test_room_helps_a_full_disk_alone(assigner, monkeypatch, number, begin):
    """The hint of what cannot be written goes by the reason."""

    def unwritable(_):
        raise OSError(number, os.strerror(number), "there.json")

    monkeypatch.setattr("assigner.formats.plan.load_plan", unwritable)
    result = assigner("show", "solved.json")
    assert (result.exit_code, result.stderr.splitlines()[1]) == (2, f"hint: {begin}write to another place")


def test_no_room_for_temporary_files_is_no_bug(assigner, monkeypatch):
    """A full disk below all of the system's folders for them: they are named, and what helps."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setattr("assigner.formats.plan.load_plan", lambda _: tempfile.mkdtemp())
    result = assigner("show", "solved.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: No usable temporary directory found in ['/nowhere']\nhint: make room")


def test_bad_environment_variable_is_a_usage_error(assigner, monkeypatch):
    """An ASSIGNER_ variable is checked as its flag is, and the message names it."""
    monkeypatch.setenv("ASSIGNER_GAP", "wide")
    result = assigner("solve", "profile.json", "-o", "x.json")
    assert result.exit_code == 2
    assert "'wide'" in result.stderr
