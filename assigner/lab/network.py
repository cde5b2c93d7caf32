"""The wires: a network namespace for each host, a switch for each rack, and shaped links between them.

    host 0  eth0 ── p0 ┐                               ┌ p2 ── eth0  host 2
                       ├ switch 0 ─ up ── switch ── up ─ switch 1 ┤
    host 1  eth0 ── p1 ┘           (with several racks)           └ p3 ── eth0  host 3

Every namespace is cut off from this machine's own network, so addresses and ports are the lab's alone. A wire is shaped
where it is entered, at both ends: `tbf` holds the rate, `netem` the latency (only where there is one: not every kernel
has it). A burst of up to `BURST_S` at the wire's rate passes unshaped, so small messages look faster than the wire.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.errors import UsageError

if TYPE_CHECKING:
    from assigner.lab.cluster import Cluster, RackLink

INTERFACE = "eth0"
NAMESPACES = Path("/run/netns")
BURST_S = 0.001
"""With less, timers cost a wire of 2 Gbit/s a fifth of its rate; the usual 4 ms let messages of 64 KiB pass at once."""
_LEAST_BURST = 16 * 1024
_QUEUE_S = 0.4  # what waits for a wire, at the wire's rate
_LEAST_QUEUE = 256 * 1024  # some packets of 64 KiB, which is what TCP hands over (GSO)
_MOST_QUEUE = 1 << 30  # the kernel counts it in 32 bits
_MOST_PACKETS = 100_000
_PACKET = 1500
_SEARCH = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


def tool(name: str) -> str | None:
    """Where `ip` or `tc` is; also where the path of an ordinary user does not look."""
    return shutil.which(name, path=_SEARCH)


def call(name: str, *arguments: str) -> str:
    """Run `ip` or `tc`, and return what it prints.

    Raises:
        UsageError: it is not here, or it fails; the message has its own words.
    """
    program = tool(name)
    if program is None:
        raise UsageError(f"the program {name} is not here", hint="assigner lab --check says how to get it")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)  # noqa: S603 - ip and tc
    if done.returncode:
        raise UsageError(
            f"{name} {' '.join(arguments)}: {done.stderr.strip() or f'exit code {done.returncode}'}",
            hint="assigner lab --check says what this machine lacks",
        )
    return done.stdout


def address(host: int) -> str:
    """The address of a host, by its number."""
    return f"10.77.0.{host + 1}"


def namespace(lab: str, host: int) -> str:
    """The namespace of a lab's host, by its number."""
    return f"{lab}.{host}"


def build_network(cluster: Cluster, lab: str) -> None:
    """Make the namespaces and wires of one lab, whose names start with the lab's.

    Raises:
        UsageError: the kernel or a tool refuses.
    """
    switches = {rack: f"{lab}.switch{n}" for n, rack in enumerate(cluster.racks)}
    for switch in switches.values():
        _add_switch(switch)
    if len(switches) > 1:
        _join(list(switches.values()), f"{lab}.core", cluster.rack_link)
    for n, host in enumerate(cluster.host):
        inside, switch = namespace(lab, n), switches[host.rack]
        _add_namespace(inside)
        _connect((inside, INTERFACE), (switch, f"p{n}"))
        call("ip", "-n", inside, "addr", "add", f"{address(n)}/24", "dev", INTERFACE)
        call("ip", "-n", inside, "link", "set", INTERFACE, "up")
        call("ip", "-n", switch, "link", "set", "dev", f"p{n}", "master", "br0", "up")
        _shape(inside, INTERFACE, host.bandwidth_mbit, host.latency_ms)
        _shape(switch, f"p{n}", host.bandwidth_mbit, 0.0)


def _join(switches: list[str], core: str, wire: RackLink) -> None:
    """Hang the racks' switches on one more switch, each on a wire of its own."""
    _add_switch(core)
    for n, switch in enumerate(switches):
        _connect((switch, "uplink"), (core, f"down{n}"))
        for end, port in ((switch, "uplink"), (core, f"down{n}")):
            call("ip", "-n", end, "link", "set", "dev", port, "master", "br0", "up")
        _shape(switch, "uplink", wire.bandwidth_mbit, wire.latency_ms)
        _shape(core, f"down{n}", wire.bandwidth_mbit, 0.0)


def _add_namespace(name: str) -> None:
    call("ip", "netns", "add", name)
    call("ip", "-n", name, "link", "set", "lo", "up")


def _add_switch(name: str) -> None:
    _add_namespace(name)
    call("ip", "-n", name, "link", "add", "br0", "type", "bridge")
    call("ip", "-n", name, "link", "set", "br0", "up")


def _connect(left: tuple[str, str], right: tuple[str, str]) -> None:
    """A wire between two namespaces, each end given as (namespace, device)."""
    (here, device), (there, peer) = left, right
    call("ip", "link", "add", device, "netns", here, "type", "veth", "peer", "name", peer, "netns", there)


def _shape(namespace: str, device: str, mbit: float | None, latency_ms: float) -> None:
    """Hold back what leaves a device: the rate outside, the latency within it.

    `tbf` splits long packets (GSO), and older kernels (before 6.12.6, 6.6.67, 6.1.121, ...: CVE-2024-56770) then count
    them twice in a netem around it, until that one is full for good. So netem is the inner queue, which replaces the
    one that tbf has by itself.
    """
    add = ("-n", namespace, "qdisc", "add", "dev", device)
    place, packets = ["root", "handle", "1:"], _MOST_PACKETS
    if mbit is not None:
        rate = mbit * 1e6 / 8
        burst = max(_LEAST_BURST, int(rate * BURST_S))
        queue = max(_LEAST_QUEUE, min(_MOST_QUEUE, burst + int(rate * _QUEUE_S)))
        call("tc", *add, *place, "tbf", "rate", f"{round(mbit * 1e6)}bit", "burst", str(burst), "limit", str(queue))
        place = ["parent", "1:1", "handle", "10:"]
        packets = min(_MOST_PACKETS, ceil((queue + rate * latency_ms / 1e3) / _PACKET))
    if latency_ms:
        call("tc", *add, *place, "netem", "delay", f"{latency_ms:g}ms", "limit", str(packets))


def labs_with_namespaces(prefix: str) -> set[str]:
    """The names of labs that have namespaces here, their own or left behind."""
    return {each.name.partition(".")[0] for each in NAMESPACES.glob(f"{prefix}*")}


def network_members(lab: str) -> set[int]:
    """The processes in a lab's namespaces, whatever became of their parents."""
    found: set[int] = set()
    for each in NAMESPACES.glob(f"{lab}.*"):
        found.update(map(int, _unless_gone(each, "pids").split()))
    return found


def remove_network(lab: str) -> None:
    """Remove a lab's namespaces, all that can be; their devices go with them.

    Raises:
        UsageError: the kernel refuses.
    """
    failed = []
    for each in sorted(NAMESPACES.glob(f"{lab}.*")):
        try:
            _unless_gone(each, "del")
        except UsageError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _unless_gone(namespace: Path, verb: str) -> str:
    """`ip netns VERB`; nothing where another lab has just removed the namespace, which was left behind."""
    try:
        return call("ip", "netns", verb, namespace.name)
    except UsageError:
        if namespace.exists():
            raise
        return ""
