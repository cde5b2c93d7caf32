"""`assigner profile` as far as it starts no ranks: merging, and what it refuses."""

import signal
from dataclasses import replace

import assigner_cli.profile as profile_module
import pytest
from builders import make_profile

from assigner.formats.profile import load_profile, save_profile


@pytest.fixture
def other(folder):
    """other.json: one more worker for the workload of profile.json."""
    profile = make_profile(work=[2e-3] * 6, slowness=[2.0], batch=8)
    save_profile(profile, folder / "other.json")
    return profile


@pytest.mark.long
@pytest.mark.usefixtures("other")
def test_two_profiles_become_one(assigner, folder):
    """Without a workload nothing is measured; the file and stderr say which links are missing."""
    result = assigner("profile", "--merge", "profile.json", "--merge", "other.json", "-o", "all.json")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "warning: no links between worker:0, worker:1 and worker:2" in result.stderr
    assert "profile written to all.json: 3 workers" in result.stderr
    whole = load_profile(folder / "all.json")
    assert [worker.name for worker in whole.workers] == [f"worker:{rank}/cpu" for rank in range(3)]
    assert "no links between" in assigner("show", "all.json").stdout
    assert assigner("solve", "all.json", "-o", "plan.json").exit_code == 0


@pytest.mark.usefixtures("other")
def test_an_existing_file_is_kept(assigner, folder):
    """As everywhere, --force replaces it, unless it is one of those that are read."""
    flags = ("profile", "--merge", "profile.json", "--merge", "other.json", "-o")
    before = (folder / "profile.json").read_text()
    (folder / "all.json").write_text("of old")
    assert assigner(*flags, "profile.json", "--force").exit_code == 2
    assert (folder / "profile.json").read_text() == before
    assert assigner(*flags, "all.json").exit_code == 2
    assert (folder / "all.json").read_text() == "of old"
    assert assigner(*flags, "all.json", "--force").exit_code == 0
    assert len(load_profile(folder / "all.json").workers) == 3


def test_a_profile_of_another_workload_is_refused(assigner, folder, other):
    """Exit code 5, with the two files and what differs."""
    save_profile(
        replace(other, workload=replace(other.workload, fingerprint="sha256:11")), folder / "other.json", force=True
    )
    result = assigner("profile", "--merge", "profile.json", "--merge", "other.json", "-o", "all.json")
    assert result.exit_code == 5
    assert "other.json was measured of another workload than profile.json: its fingerprint" in result.stderr
    assert not (folder / "all.json").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "no WORKLOAD"),
        (("--merge", "profile.json"), "no WORKLOAD"),
        (("--resume",), "no WORKLOAD"),
        (("model.py:workload", "--only", "links", "--merge", "profile.json"), "one at a time"),
        (("model.py:workload", "--only", "links"), "all.json: No such file"),
        (("model.py:workload", "--only", "links", "--reserve", "0.1"), "the reserve that PROFILE has"),
        (("model.py:workload", "--merge", "nowhere.json"), "nowhere.json: No such file"),
        (("model.py:workload", "--micro-batches", "4,x"), "expected whole numbers"),
        (("model.py:workload", "--backend", "mpi"), "starts ranks that are none of MPI's"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(assigner, folder, in_this_process, flags, said):
    """Exit code 2 before anything is measured, and nothing is written."""
    result = assigner("profile", *flags, "-o", "all.json")
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (folder / "all.json").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_that_it_is_done_whoever_started_it(assigner, folder, monkeypatch, profile, rank):
    """Under a launcher, too: the file, and the next step; the other ranks have no profile, and are silent."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("assigner.model.workload.load_workload", lambda _: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr("assigner.profiler.session.profile_workload", lambda *_, **__: profile if rank == 0 else None)
    result = assigner("profile", "w.py:workload", "-o", "new.json", "--no-check")
    assert result.exit_code == 0, result.output
    done = "profile written to new.json\nnext: assigner solve new.json -o plan.json\n"
    assert result.stderr == (done if rank == 0 else "")


@pytest.mark.parametrize(
    ("kept", "words"), [(True, "--resume goes on from there"), (False, "nothing was measured yet")]
)
def test_a_signal_that_ends_it_is_told(assigner, folder, monkeypatch, kept, words):
    """With what to do then, as after Ctrl-C, and the exit code of a shell."""
    from assigner.launch import ranks as launch
    from assigner.launch.stopping import SignalledExit
    from assigner.profiler.journal import journal_path

    def ended(*_):
        raise SignalledExit(signal.SIGTERM)

    if kept:
        journal_path(folder / "new.json", 0).write_text("")
    monkeypatch.setattr(launch, "launch", ended)
    monkeypatch.setattr(profile_module, "_apart", lambda *_, **__: None)
    result = assigner("profile", "w.py:workload", "-o", str(folder / "new.json"))
    assert result.exit_code == 143
    told, error = result.stderr.splitlines()
    assert words in told
    assert error == "error: ended by SIGTERM, and what it had started with it"


@pytest.mark.long
def test_a_lost_measurement_names_both_ways_on(assigner, folder, monkeypatch, capfd):
    """--resume goes on, and the traceback that was kept is named: a file that nobody knows of would be left behind."""
    from assigner.launch import ranks as launch
    from assigner.launch.shutdown import HostFailure
    from assigner.profiler.journal import journal_path

    def lost(*_):
        journal_path(folder / "new.json", 0).write_text("")
        hint = "/x/worker-0.txt has the traceback; -v shows it"
        raise launch.RankFailedError(HostFailure("worker:0", "ended with exit code 1", "boom"), 1, hint=hint)

    monkeypatch.setattr(launch, "launch", lost)
    (folder / "w.py").write_text(
        "import torch, assigner\nfrom torch import nn\nprint('import')\n"
        "def workload():\n    print('built')\n"
        "    return assigner.Workload(lambda: nn.Sequential(nn.Linear(2, 2)), batch, nn.functional.mse_loss,"
        " lambda p: torch.optim.SGD(p), 4)\n"
        "def batch(rows, generator):\n    return torch.zeros(rows, 2), torch.zeros(rows, 2)\n"
    )
    result = assigner("profile", "w.py:workload", "-o", str(folder / "new.json"))
    assert result.exit_code == 6
    assert "hint: what was measured is kept: --resume goes on from there; /x/worker-0.txt has" in result.stderr
    assert result.stdout == ""
    assert {"import", "built"} <= set(capfd.readouterr().err.split())  # by a process of its own
