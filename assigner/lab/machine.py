"""What this machine has to share out: cores, memory, which processor it is; and what a cluster asks beyond that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.machine.cgroup import allowed_cores, free_memory
from assigner.machine.kernel import processor_model

if TYPE_CHECKING:
    from assigner.lab.cluster import Cluster

_MIB = 1 << 20
_SHARE = re.compile(r"(?P<model>.*) \((?P<cores>\d+\.\d+) cores\)")


@dataclass(frozen=True)
class Machine:
    """This machine, as far as this process may use it.

    Args:
        cores: Cores, or the share of them that a control group leaves.
        memory_bytes: Memory that is free, or that a control group leaves.
        processor: The processor's model.
    """

    cores: float
    memory_bytes: float
    processor: str

    @classmethod
    def here(cls) -> Machine:
        """The machine that this process runs on."""
        return cls(allowed_cores(), free_memory(), processor_model())


def split_share(kind: str) -> tuple[str, float | None]:
    """A worker's kind, as `AMD EPYC (0.40 cores)`: the processor's model, and the cores of a quota; None: no quota."""
    match = _SHARE.fullmatch(kind)
    return (match["model"], float(match["cores"])) if match else (kind, None)


def strains(cluster: Cluster, machine: Machine) -> list[str]:
    """A sentence for each thing of which the hosts together want more than there is.

    Hosts that slow each other down tell nothing about plans.
    """
    found = []
    wanted = sum(host.nproc if host.cpu is None else host.cpu for host in cluster.host)
    if wanted > machine.cores:
        found.append(
            f"the hosts want {wanted:.2f} cores together and this machine has {machine.cores:.2f}:"
            " they will slow each other down, and no figure holds"
        )
    limits = sum((host.memory_mib or 0.0) * _MIB for host in cluster.host)
    if limits > machine.memory_bytes:
        found.append(
            f"the hosts' memory limits are {fmt.size(limits)} together and this machine has"
            f" {fmt.size(machine.memory_bytes)} free: it may run out before a host does"
        )
    return found
