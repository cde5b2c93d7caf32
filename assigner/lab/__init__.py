"""The lab: a small cluster of hosts that are not alike, made on one Linux machine.

In a program: `run_on_hosts(load_cluster("mixed3.toml"), ["assigner", "profile", "model.py:workload", "-o", "p.json"])`.

Modules:
    cluster      the cluster file: hosts, shares, limits, wires; one as text; what this machine has, and what hosts ask
                 beyond that
    derive       a cluster file whose hosts behave like a profile's workers, and the wires behind its links
    running      the command as each host gets it, on all at once: output, time-out, the first failure, a signal
    hosts        what exists while a lab is up, and what a killed one left behind
    network, cgroups    what these are made of
    missing      what this machine lacks, and how to get it
"""

from __future__ import annotations

from assigner.lab.cluster import Cluster, Host, Machine, RackLink, load_cluster, parse_cluster
from assigner.lab.missing import Lack, lacks, require
from assigner.lab.running import run_on_hosts

__all__ = [
    "Cluster", "Host", "Lack", "Machine", "RackLink", "lacks", "load_cluster", "parse_cluster", "require",
    "run_on_hosts",
]  # fmt: skip
