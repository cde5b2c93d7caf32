"""Signals that come while a command loads or starts what it needs: each ends it, once and in words."""

import importlib
import multiprocessing
import os
import signal
import threading
import time

import pytest
from assigner_cli import profile, signals
from assigner_cli.signals import raised

from assigner.launch.stopping import SignalledExit


@pytest.mark.parametrize(
    ("name", "kind", "is_long"),
    [("SIGINT", KeyboardInterrupt, False), ("SIGINT", KeyboardInterrupt, True), ("SIGTERM", SignalledExit, False)],
)
def test_a_signal_within_an_import_comes_after_it(tmp_path, monkeypatch, name, kind, is_long):
    """Modules may swallow any exception while they are imported: one that takes long is interrupted again."""
    lines = (
        "import os, signal",
        "try:",
        f"    os.kill(os.getpid(), signal.{name})",
        "except BaseException:",
        "    lost = 1",
    )
    module = f"swallows_{name}_{is_long}"
    (tmp_path / f"{module}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    if is_long:
        monkeypatch.setattr(signals, "_IMPORT_S", -1.0)
        monkeypatch.setattr(signals, "_LATER_S", 0.1)
    before = signal.getsignal(getattr(signal, name))

    def load():
        assert hasattr(importlib.import_module(module), "lost") == is_long
        time.sleep(60)

    with pytest.raises(kind), raised((name,)):
        load()
    assert signal.getsignal(getattr(signal, name)) is before


def test_a_command_that_waits_for_processes_tells_of_sigterm(assigner, monkeypatch):
    """Before there are ranks, too: the exit code is that of a shell."""

    def killed(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("assigner_cli.bench.load_named", killed)
    result = assigner("bench", "solved.json")
    assert (result.exit_code, result.stderr) == (143, "error: ended by SIGTERM, and what it had started with it\n")


@pytest.mark.slow
def test_ctrl_c_ends_the_process_that_looks_at_the_model(capfd):
    """It gets none of the terminal's, from its first instruction on, and the one that waits for it ends it."""
    began = {each.pid for each in multiprocessing.active_children()}

    def press():
        while not (new := {each.pid for each in multiprocessing.active_children()} - began):
            time.sleep(0.01)
        os.kill(new.pop(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt), raised(("SIGINT",)):
        profile._apart(time.sleep, 600)
    assert {each.pid for each in multiprocessing.active_children()} == began
    assert capfd.readouterr().err == ""
