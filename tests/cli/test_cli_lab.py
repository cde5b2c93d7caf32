"""`assigner lab`: what it refuses, what it says, and the cluster files that it writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import make_profile

from assigner import lab
from assigner.errors import WorkerError
from assigner.formats.profile import save_profile
from assigner.lab import Lack, Machine, load_cluster

NETEM = Lack("the queue netem for latency", "modprobe sch_netem", "latency")
CPU = Lack("the cgroup controller cpu: shares of the processor", "docker run --privileged", "cpu")


@pytest.fixture
def cluster(folder):
    """A cluster of two hosts as a file."""
    path = folder / "c.toml"
    path.write_text('[[host]]\nname = "a"\ncpu = 0.5\n[[host]]\nname = "b"\ncpu = 0.2\n')
    return path


@pytest.fixture
def runs(monkeypatch):
    """What would have been run on hosts."""
    calls = []
    monkeypatch.setattr(lab, "run_on_hosts", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(lab, "require", lambda _: None)
    monkeypatch.setattr(Machine, "here", lambda: Machine(2.0, 8e9, "test"))
    return calls


@pytest.fixture
def like_kind0(monkeypatch):
    """A machine that has the processor of the test profile's first worker."""
    monkeypatch.setattr(Machine, "here", lambda: Machine(4.0, 64e9, "kind0"))
    monkeypatch.setattr(lab, "lacks", lambda *_: (NETEM,))


def test_the_command_behind_the_dashes_is_handed_on(assigner, cluster, runs):
    """Its flags are its own, ours stand before the dashes; nothing is said on success."""
    result = assigner(
        "lab", "c.toml", "--timeout", "9", "--master-port", "1234", "--", "sh", "-c", "x", "-o", "y", "-q"
    )
    assert (result.exit_code, result.output) == (0, "")
    ((found, command), options) = runs[0]
    assert [host.name for host in found.host] == ["a", "b"]
    assert command == ["sh", "-c", "x", "-o", "y", "-q"]
    assert (options["timeout_s"], options["port"]) == (9.0, 1234)


def test_what_the_machine_cannot_hold_is_warned_of(assigner, cluster, runs, monkeypatch):
    """Shares above the cores: a warning on stderr, silent with -q, and the run goes on."""
    monkeypatch.setattr(Machine, "here", lambda: Machine(0.5, 8e9, "test"))
    assert "warning: the hosts want 0.70 cores" in assigner("lab", "c.toml", "--", "true").stderr
    assert assigner("-q", "lab", "c.toml", "--", "true").stderr == ""
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lab"], "no cluster file"),
        (["lab", "none.toml", "--", "true"], "none.toml: No such file"),
        (["lab", "c.toml", "assigner", "profile", "w.py", "-o", "p.json"], "-o and --here belong to --from"),
        (["lab", "c.toml", "--from", "profile.json"], "--from writes a cluster file"),
        (["lab", "--from", "profile.json", "-o", "c.toml"], "c.toml exists"),
        (["lab", "--from", "none.json"], "none.json: No such file"),
    ],
)
def test_wrong_uses_are_usage_errors(assigner, cluster, words, message):
    """Exit code 2, one error with a hint."""
    result = assigner(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "hint: " in result.stderr


def test_a_broken_cluster_file_is_named(assigner, cluster):
    """Exit code 5, with file, place and the nearest field."""
    cluster.write_text("[[host]]\nmemory = 3\n")
    result = assigner("lab", "c.toml", "--", "true")
    assert result.exit_code == 5
    assert "c.toml: host[0].memory: unknown" in result.stderr
    assert "did you mean memory_mib?" in result.stderr


def test_a_failed_host_is_exit_code_7(assigner, cluster, runs, monkeypatch):
    """The library's error is the command's."""

    def fail(*_, **__):
        raise WorkerError("host b was out of memory: limit 80 MiB", hint="a larger memory_mib")

    monkeypatch.setattr(lab, "run_on_hosts", fail)
    result = assigner("lab", "c.toml", "--", "true")
    assert result.exit_code == 7
    assert result.stderr.startswith("error: host b was out of memory: limit 80 MiB\nhint: ")


def test_check_says_what_is_missing_and_how_to_get_it(assigner, cluster, monkeypatch):
    """Ready, ready but for latency, and not ready: 0, 0 and 2."""
    monkeypatch.setattr(lab, "lacks", lambda *_: ())
    assert assigner("lab", "--check").stdout == "ready\n"
    assert assigner("lab", "c.toml", "--check").stdout == "ready for this cluster\n"
    monkeypatch.setattr(lab, "lacks", lambda *_: (NETEM,))
    said = assigner("lab", "--check")
    assert said.exit_code == 0
    assert said.stdout == f"missing: {NETEM.what}\n  {NETEM.remedy}\nready, for clusters without latency_ms\n"
    assert assigner("lab", "c.toml", "--check").exit_code == 2
    monkeypatch.setattr(lab, "lacks", lambda *_: (CPU, NETEM))
    said = assigner("lab", "--check")
    assert said.exit_code == 2
    assert "ready" not in said.stdout


def test_check_as_json_is_one_object(assigner, cluster, monkeypatch):
    """Ready or not, and what is missing with its remedy; the exit code is that of the tables."""
    monkeypatch.setattr(lab, "lacks", lambda *_: (NETEM,))
    said = assigner("lab", "--check", "--json")
    assert said.exit_code == 0
    missing = [{"what": NETEM.what, "remedy": NETEM.remedy, "feature": "latency"}]
    assert json.loads(said.stdout) == {"kind": "lab", "ready": True, "missing": missing}
    said = assigner("lab", "c.toml", "--check", "--json")
    assert said.exit_code == 2
    assert json.loads(said.stdout)["ready"] is False
    assert assigner("lab", "c.toml", "--json", "--", "true").exit_code == 2


def test_a_cluster_like_a_profile(assigner, folder, like_kind0):
    """--from writes a file that loads, with the command that made it, and says the scale and what is next."""
    result = assigner("lab", "--from", "profile.json", "-o", "like.toml")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "2 hosts written to like.toml; 1 s of the profile is 1.18 s on them" in result.stderr
    assert "next: assigner lab like.toml -- COMMAND" in result.stderr
    assert [host.cpu for host in load_cluster(folder / "like.toml").host] == pytest.approx([0.85, 0.283])
    assert assigner("lab", "--from", "profile.json", "-o", "like.toml", "--force").exit_code == 0


def test_without_output_the_file_goes_to_stdout(assigner, folder, like_kind0):
    """Nothing else is on stdout."""
    result = assigner("lab", "--from", "profile.json")
    (folder / "said.toml").write_text(result.stdout)
    assert len(load_cluster(folder / "said.toml").host) == 2
    assert result.stdout.startswith("# Made by: ")


def test_a_profile_whose_hosts_cannot_be_hosts_is_refused(assigner, folder, profile, like_kind0):
    """No file is written that would not load: exit code 5, with the name and a way out."""
    workers = tuple(replace(worker, host=f"my host {n}") for n, worker in enumerate(profile.workers))
    save_profile(replace(profile, workers=workers), folder / "spaced.json")
    result = assigner("lab", "--from", "spaced.json", "-o", "like.toml")
    assert result.exit_code == 5
    assert "spaced.json: no cluster file can be made of it: host[0].name: 'my host 0' is not allowed" in result.stderr
    assert "ASSIGNER_HOST" in result.stderr
    assert not (folder / "like.toml").exists()


def test_here_measures_this_machine(assigner, folder, monkeypatch):
    """Workers of another processor need --here; its profile is read as any other."""
    monkeypatch.setattr(Machine, "here", lambda: Machine(4.0, 64e9, "another"))
    monkeypatch.setattr(lab, "lacks", lambda *_: ())
    assert "nothing tells how fast this machine" in assigner("lab", "--from", "profile.json").stderr
    here = make_profile(work=[2e-3] * 6, slowness=[2.0], batch=8)
    here = replace(here, workers=(replace(here.workers[0], kind="another"),))
    save_profile(here, folder / "here.json")
    result = assigner("lab", "--from", "profile.json", "--here", "here.json", "-o", "like.toml")
    assert "1 s of the profile is 2.35 s on them" in result.stderr


def test_a_machine_that_cannot_is_told_before_anything_is_made(assigner, cluster, monkeypatch):
    """All that is missing in one error, with the ways to get it: exit code 2."""
    monkeypatch.setattr("assigner.lab.missing.lacks", lambda *_: (CPU, NETEM))
    result = assigner("lab", "c.toml", "--", "true")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: this machine lacks the cgroup controller cpu: shares of the processor, the queue netem for latency\n"
        "hint: docker run --privileged; modprobe sch_netem\n"
    )


def test_no_command_is_refused(assigner, cluster, monkeypatch):
    """A cluster file alone does nothing."""
    monkeypatch.setattr(lab, "require", lambda _: None)
    result = assigner("lab", "c.toml")
    assert result.exit_code == 2
    assert "no command to run on the hosts" in result.stderr
