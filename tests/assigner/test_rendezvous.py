"""Where ranks meet, and ranks that mpirun and srun start: processes with those launchers' variables alone."""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from listening import listening
from single_rank import be_only_rank
from torch.distributed import HashStore
from workloads import make_plan, skips

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.launch.failurereport import LEFT, LEFT_HINT
from assigner.launch.shutdown import OtherHosts, tell_done
from assigner.machine.launchedrank import Launched
from assigner.runtime.messages import rendezvous
from assigner.runtime.messages.rendezvous import join_group, leave_group, meeting_point

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks


def test_a_port_for_each_job() -> None:
    """Ranks of a job agree on one, another job on the host has another, and neither is one that systems hand out."""
    ports = [
        meeting_point(Launched("srun", "SLURM_PROCID", rank, 2, local_ranks=2, job=f"{job} 0"), {})[1]
        for job in (77, 78)
        for rank in (0, 1)
    ]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert all(10_000 <= port < 30_000 for port in ports)


def test_the_launchers_process_names_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launcher has no name for the job, its process on the one host is that."""
    place = Launched("MPI", "PMI_RANK", 0, 2, local_ranks=2)
    monkeypatch.setattr(rendezvous, "launcher_process", lambda _: 12)
    first = meeting_point(place, {})
    monkeypatch.setattr(rendezvous, "launcher_process", lambda _: 13)
    assert first[0] == "127.0.0.1"
    assert meeting_point(place, {}) != first
    apart = Launched("MPI", "PMI_RANK", 0, 4, local_ranks=2)
    assert meeting_point(apart, {"MASTER_ADDR": "first"}) == ("first", 29500)


def test_why_a_rank_will_not_come_is_its_launchers_word() -> None:
    """It has ended too soon, or a signal has ended its launcher: nobody waits for it until the time is over."""
    store = HashStore()
    assert rendezvous._gone(store, [0, 1, 2]) is None
    tell_done(store, 2)
    assert rendezvous._gone(store, [0, 1, 2]) == ("worker:2", LEFT, LEFT_HINT)
    OtherHosts(store, 1).tell_signal("SIGTERM", [1])
    worker, how, hint = rendezvous._gone(store, [0, 1, 2]) or ("", "", "")
    assert (worker, how.startswith("was ended with its launcher, on "), how[-7:]) == ("worker:1", True, "SIGTERM")
    assert "a scheduler" in hint


def test_what_is_set_counts() -> None:
    """MASTER_ADDR and MASTER_PORT go before what is derived."""
    place = Launched("srun", "SLURM_PROCID", 0, 4, local_ranks=2, job="1 0")
    nodes = {"SLURM_JOB_NODELIST": "a[3-9]", "SLURM_STEP_NODELIST": "a[5-6]"}
    assert meeting_point(place, nodes)[0] == "a5"
    assert meeting_point(place, {**nodes, "MASTER_ADDR": "b", "MASTER_PORT": "99"}) == ("b", 99)


@pytest.mark.parametrize(
    ("place", "environment", "message"),
    [
        (Launched("Open MPI", "OMPI_COMM_WORLD_RANK", 0, 4, local_ranks=2), {}, "on which host rank 0 is"),
        (Launched("torchrun", "RANK", 1, 2), {"MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (Launched("torchrun", "RANK", 1, 2), {"MASTER_ADDR": "a", "MASTER_PORT": "many"}, "MASTER_PORT is 'many'"),
    ],
)
def test_nothing_says_where(place: Launched, environment: dict[str, str], message: str) -> None:
    """The error names the variable that is missing or wrong."""
    with pytest.raises(UsageError, match=message) as raised:
        meeting_point(place, environment)
    assert raised.value.hint


def test_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 says which port it is, and what to set."""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UsageError, match=f"port {port} of this host is taken"):
            join_group(Launched("MPI", "PMI_RANK", 0, 1, local_ranks=1), 5.0)


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are looked at in /proc")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_store_for_one_host_listens_to_it_alone(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Rank 0 keeps it where no launcher does."""
    be_only_rank(monkeypatch)
    monkeypatch.setenv("MASTER_ADDR", address)
    join_group(Launched("MPI", "PMI_RANK", 0, 1, local_ranks=1), 20.0)
    assert listening(int(os.environ["MASTER_PORT"])) == ["127.0.0.1"]
    leave_group()


def test_backends_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown one, and NCCL where this torch has none, are told before any rank waits for another."""
    made = skips()
    with pytest.raises(UsageError, match="backend 'rdma' is unknown"):
        Pipeline(made, make_plan(made), backend="rdma")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match="backend 'nccl': this torch was built without NCCL"):
        Pipeline(made, make_plan(made), backend="nccl")


def check_ranks(forked: ForkedRanks, variables: list[dict[str, str]]) -> None:
    """Run rejoining.py once for each set of variables, without a launcher; all end well and quietly."""
    ends = forked.ended("rejoining.py", variables=variables)
    assert [end.code for end in ends] == [0] * len(variables), ends
    lines = [line for end in ends for line in end.errors.splitlines()]
    assert [line for line in lines if not re.match(r"\[W.*socket\.cpp", line)] == []  # torch's own, of a retry


@pytest.mark.distributed
def test_ranks_of_mpirun(forked: ForkedRanks) -> None:
    """Two processes with Open MPI's variables alone are a run: pipelines one after another, and rank 0 leaves first."""
    names = {"SIZE": 2, "LOCAL_SIZE": 2}
    common = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
    check_ranks(
        forked,
        [
            {**common, **{f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")},
             "PMIX_NAMESPACE": f"test-{os.getpid()}"}
            for rank in range(2)
        ],
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.distributed
def test_ranks_of_srun(forked: ForkedRanks) -> None:
    """Two processes with Slurm's variables alone are a run on the first host of the step's list."""
    check_ranks(
        forked,
        [
            {
                "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
                "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_STEP_NODELIST": "local[host,guest]",
            }
            for rank in range(2)
        ],
    )  # fmt: skip
