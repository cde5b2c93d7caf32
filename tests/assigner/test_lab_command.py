"""The command as hosts get it."""

from __future__ import annotations

import sys

import pytest

from assigner.errors import UsageError
from assigner.lab.cluster import Cluster, Host
from assigner.lab.running import host_command, places

FLAGS = [
    "--nnodes", "3", "--node-rank", "1", "--nproc-per-node", "2", "--master-addr", "10.77.0.1", "--master-port", "29531"
]  # fmt: skip
PYTHON = sys.executable


@pytest.fixture
def place():
    return places(Cluster((Host("a"), Host("b", nproc=2), Host("c"))), port=29531)[1]


def test_placeholders_are_filled_and_other_braces_stay(place):
    """Every placeholder has its value, also inside a word, and anything else in braces is the command's own."""
    command = ["{host}:{nnodes}/{node_rank}/{nproc}", "{master_addr}:{master_port}", "{x}", "${host}", "{}"]
    assert place.fill(command) == ["b:3/1/2", "10.77.0.1:29531", "{x}", "$b", "{}"]


def test_environment_has_the_place_and_keeps_the_rest(place):
    """The place, the interface and the name are set, one thread unless asked for otherwise."""
    found = place.environment({"HOME": "/h", "PATH": "/usr/bin", "MASTER_PORT": "1"})
    wanted = {
        "HOME": "/h", "NNODES": "3", "NODE_RANK": "1", "NPROC": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29531",
        "LAB_HOST": "b", "ASSIGNER_HOST": "b", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }  # fmt: skip
    assert wanted.items() <= found.items()
    assert found["PATH"].endswith(":/usr/bin")
    assert place.environment({"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_profile_and_scripts_are_started_once_per_rank(place, tmp_path):
    """No flags of torchrun need to be written for these."""
    ranks = [PYTHON, "-m", "assigner_cli.ranks", *FLAGS, "--", PYTHON]
    profile = ["assigner", "-v", "profile", "w.py:f", "-o", "p.json"]
    assert place.fill(host_command(profile)) == [*ranks, "-m", "assigner_cli", *profile[1:]]
    script = tmp_path / "s.py"
    script.touch()
    assert place.fill(host_command([str(script), "--x"])) == [*ranks, "-u", str(script), "--x"]


def test_run_and_torchrun_get_their_own_flags(place):
    """`assigner run` reads where it is from its flags, torchrun from its own."""
    run = place.fill(host_command(["assigner", "run", "plan.json", "--", "train.py", "--nnodes", "9"]))
    assert run[:4] == [PYTHON, "-m", "assigner_cli", "run"]
    assert run[4:14] == [word.replace("--nproc-per-node", "--ranks") for word in FLAGS]
    assert run[14:] == ["plan.json", "--", "train.py", "--nnodes", "9"]
    found = place.fill(host_command(["/opt/bin/torchrun", "s.py"]))
    assert found == [PYTHON, "-m", "torch.distributed.run", *FLAGS, "s.py"]


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nnodes=2", "s.py"],
        ["torchrun", "--max-restarts", "1", "--nnodes", "2", "s.py"],
        ["assigner", "run", "p", "--node-rank", "0", "--", "s"],
    ],
)
def test_who_says_where_it_is_keeps_its_flags(command):
    """A command with flags of its own gets none added."""
    assert host_command(command)[3:] == command[1:]


@pytest.mark.parametrize(
    "words",
    [["s.py", "--nnodes", "3"], ["--max-restarts", "1", "s.py", "--nnodes=3"], ["-m", "train", "--node-rank", "0"]],
)
def test_flags_of_torchruns_script_are_the_scripts(words):
    """Only what stands before the script says where the host is."""
    assert host_command(["torchrun", *words])[3 : 3 + len(FLAGS)] == host_command(["torchrun", "s.py"])[3:-1]


def test_other_commands_stay_as_they_are():
    """Any program may run on the hosts."""
    assert host_command(["sh", "-c", "echo {host}"]) == ["sh", "-c", "echo {host}"]
    assert host_command(["assigner", "doctor"]) == [PYTHON, "-m", "assigner_cli", "doctor"]


@pytest.mark.parametrize(
    ("command", "message"),
    [([], "no command"), (["no-such-program"], "no such program"), (["none/train.py"], "no such file")],
)
def test_what_cannot_start_is_refused_before_any_host_is_made(command, message):
    """One error here instead of one from every host."""
    with pytest.raises(UsageError, match=message):
        host_command(command)
