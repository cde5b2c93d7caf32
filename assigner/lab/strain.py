"""What a cluster asks of this machine beyond what it has: hosts that slow each other down tell nothing about plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt

if TYPE_CHECKING:
    from assigner.lab.cluster import Cluster
    from assigner.lab.machine import Machine

_MIB = 1 << 20


def strains(cluster: Cluster, machine: Machine) -> list[str]:
    """A sentence for each thing of which the hosts together want more than there is."""
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
