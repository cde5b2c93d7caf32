"""Which rank of a run this process is, as the launcher that started it says: torchrun, mpirun or srun.

    launcher                  rank                   ranks                 on this host
    torchrun                  RANK                   WORLD_SIZE            LOCAL_RANK        LOCAL_WORLD_SIZE
    Open MPI                  OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE  .._LOCAL_RANK     .._LOCAL_SIZE
    MVAPICH                   MV2_COMM_WORLD_RANK    MV2_COMM_WORLD_SIZE   .._LOCAL_RANK     .._LOCAL_SIZE
    MPICH, Intel MPI (Hydra)  PMI_RANK               PMI_SIZE              MPI_LOCALRANKID   MPI_LOCALNRANKS
    srun                      SLURM_PROCID           SLURM_STEP_NUM_TASKS  SLURM_LOCALID     SLURM_STEP_TASKS_PER_NODE

The first that is there counts: mpirun starts its ranks through srun where it can, and torchrun may run under both.
srun's own PMI (--mpi=pmi2) sets PMI_RANK without MPI_LOCALRANKID: then Slurm is asked first. An mpirun inside a rank of
torchrun would hand that rank's RANK to all of its own: unset it there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.errors import UsageError
from assigner.machine.kernel import ancestors

if TYPE_CHECKING:
    from collections.abc import Mapping

_TABLE = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip
_PMIX = "PMIX_RANK"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # from here on they are a job's batch script, its interactive shell and the like
_BY_HAND = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on each of them"


@dataclass(frozen=True)
class Launched:
    """One rank.

    Args:
        variable: Where its rank stands.
        local_ranks: How many its host has; None: the launcher does not say.
        node: Its host's number, where the launcher says it.
        job: Names the job, the same on all of its ranks; empty: the launcher has no name for it.

    Raises:
        UsageError: there is no such rank among them.
    """

    launcher: str
    variable: str
    rank: int
    ranks: int
    local_rank: int = 0
    local_ranks: int | None = None
    node: int = 0
    job: str = ""

    def __post_init__(self) -> None:
        if self.rank >= self.ranks:
            raise UsageError(
                f"{self.variable} is {self.rank}, and the run has {self.ranks} ranks", hint="ranks count from 0"
            )

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_ranks == self.ranks


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """This process's place in a run; None: nobody started it as a rank.

    A plain `python` in a job's shell or batch script is no rank, though Slurm has set its variables there.

    Raises:
        UsageError: the variables contradict each other, or say only half of it.
    """
    for launcher, rank, ranks, local_rank, local_ranks in _TABLE:
        if rank == "PMI_RANK" and _is_slurms_own(environment):
            continue
        if rank in environment:
            return Launched(
                launcher,
                rank,
                _number(environment, rank),
                _number(environment, ranks),
                _number(environment, local_rank, 0),
                _number(environment, local_ranks, 0) or None,
                _number(environment, "GROUP_RANK" if launcher == "torchrun" else "SLURM_NODEID", 0),
                _job(environment),
            )
    found = _slurm_task(environment)
    if found is None and _PMIX in environment and "SLURM_PROCID" not in environment:
        raise UsageError(
            f"{_PMIX} is {environment[_PMIX]}, and no variable says how many ranks there are",
            hint=f"start them with mpirun, srun or torchrun, or {_BY_HAND}",
        )
    return found


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, `worker:N` in a plan; None: nobody started it as one. For messages: it never raises."""
    try:
        place = launched(environment)
    except UsageError:
        return None
    return place.rank if place else None


def launcher_process(variable: str) -> int:
    """The id of the process that started this host's ranks: the nearest one above that has no rank itself.

    A script may stand between the two.
    """
    process = 0
    for process in ancestors():
        try:
            if f"{variable}=".encode() not in Path(f"/proc/{process}/environ").read_bytes():
                break
        except OSError:  # another user's process, or no such folder on this system
            break
    return process


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: `rack[01-02,07]n3,gpu1` begins with `rack01n3`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _is_slurms_own(environment: Mapping[str, str]) -> bool:
    """Whether srun has set PMI_RANK: as many ranks as the step has tasks, and no place on the host among Hydra's."""
    return (
        {"SLURM_PROCID", "SLURM_STEP_ID", "PMI_SIZE"} <= set(environment)
        and "MPI_LOCALRANKID" not in environment
        and environment["PMI_SIZE"] == environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    )


def _slurm_task(environment: Mapping[str, str]) -> Launched | None:
    """A task of a step that srun has started with several."""
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(environment):
        return None
    ranks = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    if ranks == 1 or _number(environment, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    node = _number(environment, "SLURM_NODEID", 0)
    return Launched(
        "srun",
        "SLURM_PROCID",
        _number(environment, "SLURM_PROCID"),
        ranks,
        _number(environment, "SLURM_LOCALID", 0),
        _tasks_on(environment.get("SLURM_STEP_TASKS_PER_NODE", ""), node),
        node,
        _job(environment),
    )


def _tasks_on(words: str, node: int) -> int | None:
    """How many tasks host `node` has: Slurm writes 2, 2, 2, 1 as `2(x3),1`."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", words):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else None


def _job(environment: Mapping[str, str]) -> str:
    """What all ranks of a job have in common, and no other job of the cluster."""
    for names in (("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",), ("SLURM_JOB_ID", "SLURM_STEP_ID")):
        if set(names) <= set(environment):
            return " ".join(environment[name] for name in names)
    return ""


def _number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environment.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.strip().isdigit():
        raise UsageError(
            f"{name} is {'not set' if text is None else repr(text)}; expected a whole number",
            hint=f"a launcher sets it for each of its ranks; by hand, {_BY_HAND}",
        )
    return int(text)
