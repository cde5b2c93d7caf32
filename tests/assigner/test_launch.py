"""The launcher's own failures: what goes wrong before and between the ranks is one line."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest
from torch.distributed import DistError

import assigner.launch.ranks as launching
from assigner.errors import WorkerError
from assigner.launch.ranks import Layout, launch

COMMAND = [sys.executable, "-c", "pass"]


def test_a_run_leaves_the_handlers_of_signals_as_they_were():
    """Behind a run Ctrl-C is what it was before: torch's agent makes an error of its own of it."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    launch([sys.executable, "-c", ""], Layout(ranks=1), {})
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_a_port_that_is_taken_is_named(monkeypatch):
    """Address, port and the system's reason are in the message, and the environment is as it was."""
    monkeypatch.delenv("LAUNCHED", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WorkerError, match=rf"cannot meet at 127\.0\.0\.1:{port}: .*in use") as caught:
            launch(COMMAND, Layout(1, nodes=2, node=0, address="127.0.0.1", port=port), {"LAUNCHED": "1"})
    assert caught.value.exit_code == 7
    assert "--master-port" in (caught.value.hint or "")
    assert "LAUNCHED" not in os.environ


def test_frames_of_the_store_are_left_out(monkeypatch):
    """The first line says what happened; what follows are addresses in a library."""

    def lost(**_):
        raise DistError("timed out after 300 s\nException raised from throwTimeoutError\nframe #0: c10")

    monkeypatch.setattr(launching, "leaving_together", lost)
    with pytest.raises(WorkerError) as caught:
        launch(COMMAND, Layout(1, nodes=2, node=1, address="10.77.0.1", port=29531), {})
    assert caught.value.message == "the hosts cannot meet at 10.77.0.1:29531: timed out after 300 s"


@pytest.mark.parametrize(("code", "left"), [("raise SystemExit(3)", 0), ("raise ValueError('boom')", 1)])
def test_a_failed_run_leaves_the_file_that_its_error_names_and_no_other(tmp_path, monkeypatch, code, left):
    """What the ranks handed over goes, but for the traceback in the hint."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", f"import assigner\n{code}"]
    with pytest.raises(WorkerError) as caught:
        launch(command, Layout(1), {})
    found = list(tmp_path.glob("assigner-*/*"))
    assert len(found) == len(list(tmp_path.glob("assigner-*"))) == left
    assert all(str(path) in (caught.value.hint or "") for path in found)
