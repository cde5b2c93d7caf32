"""What a worker is: its device, its share of the host, and the memory that it may use."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.workload import Workload

_CGROUP = "sys/fs/cgroup"
_UNLIMITED = 1 << 60  # cgroup v1 writes a number of this size where there is no limit
_SIOCGIFADDR = 0x8915
_HEAP_SHARE = 0.18


@dataclass(frozen=True)
class HostFacts:
    """This rank's worker, as far as it can be read off the machine.

    Args:
        host: The host's name.
        node: The launcher's number of the host.
        device: `cpu` or `cuda:N`.
        kind: The device's model, with the CPU share where a cgroup limits it.
        memory_bytes: What is free for this rank.
        threads: Compute threads.
        interface: The network interface that messages leave by; empty: not known.
    """

    host: str
    node: int
    device: str
    kind: str
    memory_bytes: int
    threads: int
    interface: str = ""


def host_facts(device: torch.device) -> HostFacts:
    """Read this rank's worker off the machine.

    A host's free memory is shared out evenly among the ranks that run on it.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_kind()
    return HostFacts(
        host=os.environ.get("ASSIGNER_HOST") or socket.gethostname(),
        node=int(os.environ.get("GROUP_RANK", "0")),
        device=str(device),
        kind=kind,
        memory_bytes=free_bytes(device),
        threads=torch.get_num_threads(),
        interface=_interface(),
    )


def allocator_share(device: str) -> float:
    """What a device's allocator takes beyond the tensors in it, as a share of them.

    A CPU's is the C library's heap, whose holes are not known before training: the share is what was seen of glibc
    2.36 in training runs (benchmarks/prediction); `assigner simulate --calibrate` puts right what it was too little.
    A GPU's capacity and what tensors take there are figures of one allocator.
    """
    return _HEAP_SHARE if device == "cpu" else 0.0


def free_bytes(device: torch.device) -> int:
    """Memory that this rank can still take on its device: on a GPU all that is free, on a CPU its share of the host."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    return _free_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank_device(devices: Sequence[str] = ()) -> torch.device:
    """The device of this rank.

    Args:
        devices: The devices of this host's ranks, in their order; empty: a GPU of its own where the host has one for
            this rank, else the CPU.

    Raises:
        UsageError: there are more or fewer devices than ranks, or this host has no such device.
    """
    local, ranks_here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        return torch.device("cuda", local) if local < gpus else torch.device("cpu")
    if len(devices) != ranks_here:
        raise UsageError(
            f"--devices names {len(devices)} devices, and this host has {ranks_here} ranks", hint="name one for each"
        )
    try:
        device = torch.device(devices[local])
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise UsageError(
            f"--devices: {devices[local]!r} is no device of this host, which has the CPU and {gpus} CUDA devices",
            hint="write cpu or cuda:N",
        )
    return device


def start_up(workload: Workload, device: torch.device) -> None:
    """Load what any training loads before its first step, so that it is not counted as free memory.

    A forward, a backward and an update of one number: kernels, autograd's threads and the optimizer's modules.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    number = nn.Parameter(torch.ones(1, 1, device=device))
    torch.mm(number, number).sum().backward()  # type: ignore[no-untyped-call]
    workload.optimizer([number]).step()


def _interface() -> str:
    """The interface that gloo takes: the one it was told, or the one with the address of the host's name."""
    told = os.environ.get("GLOO_SOCKET_IFNAME")
    if told:
        return told
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def _cgroup_folders(controller: str) -> list[Path]:
    """This process's cgroup folders of a controller, innermost first, in the v1 or the v2 layout."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    tree = _cgroup_tree()
    if tree is None:
        return []
    found = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if controller in names.split(",") or names == "":
            root = tree / controller if names else tree
            if root.is_dir():
                here = root / path.lstrip("/")
                found += [here, *[parent for parent in here.parents if parent == root or root in parent.parents]]
    return found


def _cgroup_tree() -> Path | None:
    """Where the cgroup file systems are mounted.

    A network namespace made by `ip netns` has a /sys of its own without them; the process that made it, further up,
    still sees them.
    """
    process = "self"
    while process != "0":
        tree = Path("/proc") / process / "root" / _CGROUP
        try:
            if any(tree.iterdir()):
                return tree
            process = (Path("/proc") / process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return None
    return None


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.lstrip("-").isdigit() else None


def _free_memory() -> int:
    """Bytes that this host can still give: its free memory, or what its cgroup allows."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for folder in _cgroup_folders("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
            if limit is not None and limit < _UNLIMITED:
                cached = _cached_bytes(folder)
                free = min(free, limit - max(0, (used or 0) - cached))
    return max(0, free)


def _cached_bytes(folder: Path) -> int:
    """Page cache that a cgroup counts as used and gives up when memory is asked for."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    words = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(words.get("total_cache", words.get("file", "0")))


def _cpu_kind() -> str:
    """The CPU's model name, and how much of it a cgroup leaves."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = model or "CPU"
    share = _cpu_share()
    return model if share is None else f"{model} ({share:.2f} cores)"


def _cpu_share() -> float | None:
    """Cores that the tightest cgroup quota allows; None: no quota."""
    shares = []
    for folder in _cgroup_folders("cpu"):
        quota, period = _read_number(folder / "cpu.cfs_quota_us"), _read_number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            shares.append(quota / period)
        both = folder / "cpu.max"
        if both.is_file():
            words = both.read_text().split()
            if words[0] != "max":
                shares.append(int(words[0]) / int(words[1]))
    return min(shares) if shares else None
