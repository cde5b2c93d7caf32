"""The launcher's own failures: what goes wrong before and between the ranks is one line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed import DistError, HashStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import assigner.launch.ranks as launching
from assigner.errors import WorkerError
from assigner.formats.document import encode
from assigner.launch.failurereport import FailureReport
from assigner.launch.ranks import Layout, RanksAgent, launch
from assigner.launch.shutdown import HostFailure, vouched
from assigner.launch.stopping import SignalledExit

COMMAND = [sys.executable, "-c", "pass"]


def test_a_run_leaves_the_handlers_of_signals_as_they_were():
    """Behind a run Ctrl-C is what it was before: torch's agent makes an error of its own of it."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    launch([sys.executable, "-c", ""], Layout(ranks=1), {})
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_launcher_ignores_stays_ignored(number):
    """As nohup has it, and a shell for what it starts in the background: by the launcher and by its ranks."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        code = f"import os, time; [os.kill(each, {number:d}) for each in (os.getppid(), os.getpid())]; time.sleep(0.3)"
        launch([sys.executable, "-c", code], Layout(ranks=1), {})
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("given", "seen"), [(None, "0"), ("random", "0"), ("", "0"), ("7", "7")])
def test_ranks_have_one_hash_seed(monkeypatch, given, seen):
    """Sets of texts have one order on all of them; the user's own seed stays."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    launch([sys.executable, "-c", f"import os; assert os.environ['PYTHONHASHSEED'] == '{seen}'"], Layout(ranks=1), {})
    assert os.environ.get("PYTHONHASHSEED") == given


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


@pytest.mark.parametrize(
    ("running", "words"), [([1], "worker:1/cpu: its process is stuck"), ([], "worker:1 was killed by SIGKILL")]
)
def test_a_rank_that_its_launcher_has_ended_was_not_killed_by_others(tmp_path, running, words):
    """What the other ranks have said of one that was stopped is the cause."""
    handlers = {
        n: SimpleNamespace(proc=SimpleNamespace(pid="none", poll=lambda n=n: None if n in running else -9))
        for n in (0, 1)
    }
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=n, local_rank=n) for n in (0, 1)])
    agent = SimpleNamespace(ended=set())
    closed = []
    context = SimpleNamespace(subprocess_handlers=handlers)
    RanksAgent._end(agent, group, context, closed.append, "SIGTERM")
    assert closed == ["SIGTERM"]
    report = FailureReport("worker:1/cpu", "its process is stuck", hint="its host may say why", is_own=False)
    (tmp_path / "0.json").write_text(json.dumps(encode(report)))
    failures = {n: ProcessFailure(n, 10 + n, code, "") for n, code in ((0, 7), (1, -9))}
    error = launching._rank_failed(ChildFailedError("a rank", failures), tmp_path, set(), agent.ended)
    assert error.message == words


def test_a_rank_that_is_stopped_is_ended_at_once():
    """It cannot take a SIGTERM, for which torch waits half a minute; one that runs gets it."""
    with subprocess.Popen(["sleep", "60"]) as runs, subprocess.Popen(["sleep", "60"]) as stops:
        stops.send_signal(signal.SIGSTOP)
        os.waitpid(stops.pid, os.WUNTRACED)
        handlers = {n: SimpleNamespace(proc=each) for n, each in enumerate((runs, stops))}
        group = SimpleNamespace(workers=[SimpleNamespace(global_rank=n, local_rank=n) for n in handlers])
        agent, context = SimpleNamespace(ended=set()), SimpleNamespace(subprocess_handlers=handlers)
        RanksAgent._end(agent, group, context, runs.terminate)
        assert [runs.wait(), stops.wait(), agent.ended] == [-signal.SIGTERM, -signal.SIGKILL, {0, 1}]


def test_a_launcher_tells_which_ranks_are_not_stopped():
    """Again and again, while they run; to one that is stopped it says nothing more."""
    with subprocess.Popen(["sleep", "60"]) as runs, subprocess.Popen(["sleep", "60"]) as stops:
        handlers = {n: SimpleNamespace(proc=each) for n, each in enumerate((runs, stops))}
        group = SimpleNamespace(workers=[SimpleNamespace(global_rank=n + 2, local_rank=n) for n in handlers])
        agent = SimpleNamespace(
            _run_store=HashStore(), _pcontext=SimpleNamespace(subprocess_handlers=handlers), _vouched=0, _vouches_at=0.0
        )
        RanksAgent._vouch(agent, group)
        RanksAgent._vouch(agent, group)  # not so soon again
        assert [vouched(agent._run_store, rank) for rank in (1, 2, 3)] == [0, 1, 1]
        stops.send_signal(signal.SIGSTOP)
        os.waitpid(stops.pid, os.WUNTRACED)
        agent._vouches_at = 0.0
        RanksAgent._vouch(agent, group)
        assert [vouched(agent._run_store, rank) for rank in (2, 3)] == [2, 1]
        for each in (runs, stops):
            each.kill()


@pytest.mark.parametrize(("process", "words"), [(11, "it did not answer"), (12, "worker:1 was killed by SIGKILL")])
def test_a_rank_that_others_have_lost_and_that_knows_of_it_is_not_gone(tmp_path, process, words):
    """As one whose host was cut off: it has handed over what the others say of it, and ends by that."""
    report = FailureReport("worker:1", "it did not answer for 5 s: its host is cut off", is_own=False)
    (tmp_path / f"{process}.json").write_text(json.dumps(encode(report)))
    failures = {1: ProcessFailure(1, 11, -9, "")}
    error = launching._rank_failed(ChildFailedError("a rank", failures), tmp_path, set())
    assert words in error.message


@pytest.mark.parametrize(
    ("worker", "words", "failure"),
    [
        ("worker:2/cpu", "OSError: no file", HostFailure("worker:2/cpu", "ended with exit code 1", "OSError: no file")),
        ("worker:2", "worker:3: no room", HostFailure("worker:3", "was killed by SIGTERM", "no room")),
        ("worker:2", "worker:7: no room", HostFailure("worker:7", "failed", "no room")),
        ("another worker", "it is gone", HostFailure("another worker", "failed", "it is gone")),
    ],
)
def test_the_rank_that_other_hosts_hear_of_is_the_one_whose_words_they_hear(tmp_path, worker, words, failure):
    """Not the first that has ended, nor one that only repeats what another one has refused."""
    report = FailureReport(worker, words, hint="look there")
    (tmp_path / "0.json").write_text(json.dumps(encode(report)))
    failures = {3: ProcessFailure(3, 13, -15, ""), 2: ProcessFailure(2, 12, 1, "")}
    error = launching._rank_failed(ChildFailedError("a rank", failures), tmp_path, set())
    assert error.failure == failure
    assert error.message == f"{failure.worker}: {failure.said}"


def test_what_a_rank_has_left_in_peace_is_told_of_as_that(tmp_path):
    """One that ended with exit code 0 is blamed on other hosts, too, and not the one that has lost it."""
    report = FailureReport("worker:0/cpu", "its process is gone", is_own=False)
    (tmp_path / "0.json").write_text(json.dumps(encode(report)))
    error = launching._rank_failed(ChildFailedError("a rank", {1: ProcessFailure(1, 11, 7, "")}), tmp_path, {0})
    assert error.failure.worker == "worker:0"
    assert "exit code 0" in error.failure.how


def test_a_folder_that_is_removed_during_a_run_is_told(tmp_path, monkeypatch):
    """As by a cleaner of temporary files: what ranks hand over is lost, and that is no word about their script."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os, shutil, sys; shutil.rmtree(os.environ['ASSIGNER_CAUSES'].partition(' ')[2]); sys.exit(CODE)"
    unused = []
    launch([sys.executable, "-c", code.replace("CODE", "0")], Layout(1), {}, on_unused=lambda: unused.append(True))
    assert unused == []
    with pytest.raises(WorkerError, match="worker:0 ended with exit code 3") as caught:
        launch([sys.executable, "-c", code.replace("CODE", "3")], Layout(1), {})
    assert re.search("assigner-.* was removed while they ran", caught.value.hint or "")


def test_what_ranks_have_handed_over_looks_new(tmp_path):
    """To a cleaner of old files, now and then."""
    told = tmp_path / "0.stop"
    told.touch()
    agent = SimpleNamespace(_causes=tmp_path, _touches_at=0.0)
    for since, looks_new in ((1.0, True), (2.0, False)):  # not so soon again
        for path in (tmp_path, told):
            os.utime(path, (since, since))
        RanksAgent._touch(agent)
        assert [path.stat().st_mtime > since for path in (tmp_path, told)] == [looks_new] * 2


@pytest.mark.parametrize(("hint", "told"), [(None, None), ("do this", "do this")])
def test_what_a_rank_has_said_needs_no_guess(tmp_path, hint, told):
    """A cause without a hint has none: it is not that the script handed over no error."""
    report = FailureReport("worker:1/cpu", "it has waited for 30 s", hint=hint, is_own=True)
    (tmp_path / "0.json").write_text(json.dumps(encode(report)))
    error = launching._rank_failed(ChildFailedError("a rank", {1: ProcessFailure(1, 11, 7, "")}), tmp_path, set())
    assert (error.message, error.hint) == ("worker:1/cpu: it has waited for 30 s", told)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGKILL, "out of memory"), (-signal.SIGTERM, "a scheduler at a limit"), (-signal.SIGHUP, "nohup"),
        (-signal.SIGSEGV, "has crashed: PYTHONFAULTHANDLER=1"), (-signal.SIGXCPU, "ulimit"),
        (-signal.SIGUSR1, "something outside ended it"), (-(signal.SIGRTMIN + 3), "something outside ended it"),
        (3, "it handed over no error: its script called sys.exit"),
    ],
)  # fmt: skip
def test_the_hint_goes_by_how_the_process_ended(tmp_path, code, words):
    """A signal that schedulers send is no sign of too little memory, and a crash is none of anything outside."""
    error = launching._rank_failed(ChildFailedError("a rank", {1: ProcessFailure(1, 11, code, "")}), tmp_path, set())
    assert words in error.hint
    assert ("memory" in error.hint) is (code == -signal.SIGKILL)


def test_a_signal_that_ends_the_ranks_is_an_exit_of_its_own():
    """With the code of a shell, and its name."""
    error = launching._ended_by_signal(
        SignalException("", sigval=signal.SIGTERM), SimpleNamespace(failure=None), SimpleNamespace(overdue=None)
    )
    assert isinstance(error, SignalledExit)
    assert (error.code, error.name) == (143, "SIGTERM")


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
