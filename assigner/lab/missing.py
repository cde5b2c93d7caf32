"""What this machine lacks for a lab, and how to get each: asked of the kernel by trying, since no file says it all."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.errors import UsageError
from assigner.lab.cgroups import Mounts
from assigner.lab.hosts import lab_name
from assigner.lab.network import call, tool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.lab.cluster import Cluster

_CONTAINER = "in a container: docker run --privileged; elsewhere: a kernel with {} (CONFIG_{})"
_NETEM = (
    "modprobe sch_netem, or a kernel with it"
    " (CONFIG_NET_SCH_NETEM; packages linux-modules-extra, kernel-modules-extra); or leave latency_ms out"
)


@dataclass(frozen=True)
class Lack:
    """One thing that is not here, with why it is wanted, and how to get it.

    The feature is what cannot be done without it: `all`, `cpu`, `memory`, `bandwidth` or `latency`.
    """

    what: str
    remedy: str
    feature: str = "all"


def lacks(cluster: Cluster | None = None) -> tuple[Lack, ...]:
    """What this machine lacks: for a cluster, or for everything that a lab can do."""
    found = tuple(_basics())
    if not found:
        found = (*_groups(), *_network())
    wanted = _features(cluster)
    return tuple(lack for lack in found if lack.feature in wanted)


def require(cluster: Cluster) -> None:
    """Raise UsageError if the cluster cannot be made here: all that is missing, and how to get it."""
    found = lacks(cluster)
    if found:
        raise UsageError(
            f"this machine lacks {', '.join(lack.what for lack in found)}",
            hint="; ".join(dict.fromkeys(lack.remedy for lack in found)),
        )


def _features(cluster: Cluster | None) -> set[str]:
    if cluster is None:
        return {"all", "cpu", "memory", "bandwidth", "latency"}
    rates = [*(host.bandwidth_mbit for host in cluster.host), cluster.rack_link.bandwidth_mbit]
    wanted = {
        "all": True,
        "cpu": any(host.cpu is not None for host in cluster.host),
        "memory": any(host.memory_mib is not None for host in cluster.host),
        "bandwidth": any(rate is not None for rate in rates),
        "latency": cluster.has_latency,
    }
    return {feature for feature, is_wanted in wanted.items() if is_wanted}


def _basics() -> Iterator[Lack]:
    """Without these nothing more can be asked."""
    if sys.platform != "linux":
        yield Lack("Linux: hosts are its namespaces and control groups", "use a Linux machine or a virtual one")
        return
    if os.geteuid():
        yield Lack("root: it makes network namespaces and control groups", 'sudo env "PATH=$PATH" assigner lab ...')
    programs = [name for name in ("ip", "tc") if tool(name) is None]
    if programs:
        yield Lack(
            f"{' and '.join(programs)} of iproute2",
            "apt-get install iproute2 (Debian, Ubuntu), dnf install iproute iproute-tc (Fedora)",
        )


def _groups() -> Iterator[Lack]:
    mounts = Mounts.here()
    for controller, use in (("cpu", "shares of the processor"), ("memory", "memory limits")):
        mount = mounts.mount(controller)
        if mount is None:
            yield Lack(
                f"the cgroup controller {controller}: {use}",
                "in a container: docker run --privileged; elsewhere mount it"
                f" (mount -t cgroup2 none /sys/fs/cgroup), or boot with cgroup_enable={controller}",
                controller,
            )
            continue
        obstacle = mount.obstacle(controller)
        if obstacle is not None:
            yield Lack(f"a cgroup tree to work in ({obstacle[0]})", obstacle[1], controller)


def _network() -> Iterator[Lack]:
    """Try each thing once, in namespaces that are gone afterwards."""
    here = f"{lab_name()}.probe"
    attempts = {
        ("network namespaces", "NET_NS", "all"): ("ip", "netns", "add", here),
        ("virtual wires (veth)", "VETH", "all"):
            ("ip", "-n", here, "link", "add", "left", "type", "veth", "peer", "name", "right"),
        ("switches (bridge)", "BRIDGE", "all"): ("ip", "-n", here, "link", "add", "br0", "type", "bridge"),
        ("the queue tbf", "NET_SCH_TBF", "bandwidth"):
            ("tc", "-n", here, "qdisc", "add", "dev", "lo", "root", "tbf",
             "rate", "1mbit", "burst", "64kb", "latency", "400ms"),
        ("the queue netem", "NET_SCH_NETEM", "latency"):
            ("tc", "-n", here, "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "1ms"),
    }  # fmt: skip
    try:
        for (what, option, feature), command in attempts.items():
            try:
                call(*command)
            except UsageError:
                remedy = _NETEM if option == "NET_SCH_NETEM" else _CONTAINER.format(what, option)
                yield Lack(f"{what} for {feature}" if feature != "all" else what, remedy, feature)
                if option == "NET_NS":
                    return
    finally:
        with suppress(UsageError):  # it was never made
            call("ip", "netns", "del", here)
