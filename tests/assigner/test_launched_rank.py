"""Which rank a process is, from the variables that launchers set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from assigner.errors import UsageError
from assigner.machine.launchedrank import first_host, launched, launched_rank

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-vm-667@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_PROCID": "4", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip


def seen(environment: dict[str, str]) -> tuple[object, ...]:
    place = launched(environment)
    assert place is not None
    return place.launcher, place.rank, place.ranks, place.local_rank, place.local_ranks, place.node


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", 3, 4, 1, 2, 1)),
        (OPEN_MPI, ("Open MPI", 1, 2, 1, 2, 0)),
        (HYDRA, ("MPI", 0, 3, 0, 3, 0)),
        (SRUN, ("srun", 4, 5, 0, 1, 2)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, ("MVAPICH", 1, 2, 0, None, 0)),
    ],
)
def test_every_launcher_is_read(environment: dict[str, str], expected: tuple[object, ...]) -> None:
    """Rank, number of ranks, the place on the host and the host's number come from the launcher's own variables."""
    assert seen(environment) == expected
    assert launched_rank(environment) == expected[1]


def test_the_inner_launcher_counts() -> None:
    """torchrun under mpirun, and mpirun that starts its ranks through srun: the ranks are those of the inner one."""
    assert seen({**SRUN, **OPEN_MPI, **TORCHRUN})[:2] == ("torchrun", 3)
    assert seen({**SRUN, **OPEN_MPI})[:2] == ("Open MPI", 1)
    assert seen({**SRUN, **HYDRA})[:2] == ("MPI", 0)
    assert seen({**SRUN, "PMIX_RANK": "4"})[:2] == ("srun", 4)


def test_sruns_own_pmi() -> None:
    """With --mpi=pmi2 srun sets PMI_RANK but no place on the host: Slurm's own variables say that."""
    second = {**SRUN, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    assert seen({**second, "PMI_RANK": "3", "PMI_SIZE": "5"}) == ("srun", 3, 5, 1, 2, 1)
    one = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert launched({**one, "PMI_RANK": "0", "PMI_SIZE": "1"}) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": None},  # salloc's shell and sbatch's script: the job's variables, no step
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "5"},  # the interactive step
        {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "5"},  # the batch script's step
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"},  # the same with pmix
        {"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": None, "SLURM_PROCID": "0"},
    ],
)
def test_a_shell_in_a_job_is_no_rank(changed: dict[str, str | None]) -> None:
    """A plain python there runs alone, though Slurm has told it a rank."""
    environment = {name: value for name, value in {**SRUN, **changed}.items() if value is not None}
    assert launched(environment) is None
    assert launched_rank(environment) is None


def test_nobody_started_it() -> None:
    """Without a launcher there is no rank."""
    assert launched({"HOME": "/root"}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; expected a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, and the run has 2 ranks"),
        ({"PMIX_RANK": "0"}, "no variable says how many ranks"),
        ({**SRUN, "SLURM_PROCID": "5"}, "SLURM_PROCID is 5, and the run has 5 ranks"),
    ],
)
def test_half_a_launcher_is_an_error(environment: dict[str, str], message: str) -> None:
    """The error names the variable and its value; a message about something else is not lost over it."""
    with pytest.raises(UsageError, match=message) as raised:
        launched(environment)
    assert raised.value.hint
    assert launched_rank(environment) is None


def test_jobs_have_names() -> None:
    """All ranks of a job have the same one, and two steps of a Slurm job have two."""
    names = {
        launched(each).job  # type: ignore[union-attr]
        for each in (OPEN_MPI, {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}, SRUN, {**SRUN, "SLURM_STEP_ID": "3"})
    }
    assert names == {"prterun-vm-667@1", "77 2", "77 3"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("node[001-003,007]", "node001"),
        ("node[7,9-12],other", "node7"),
        ("rack[01-02,07]n[3-4]-ib,gpu1", "rack01n3-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    """Brackets hold numbers and ranges, with their leading zeros; several brackets may stand in one name."""
    assert first_host(nodes) == first


def test_the_launcher_is_found_above_a_script() -> None:
    """Ranks that each sit below a shell of their own find the same process: the one that started the shells."""
    code = "from assigner.machine.launchedrank import launcher_process; print(launcher_process('SOME_RANK'))"
    command = f'{sys.executable} -c "{code}"; {sys.executable} -c "{code}"'
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, check=True, env={**os.environ, "SOME_RANK": "1"}
    )
    assert done.stdout.split() == [str(os.getpid())] * 2
