"""What a worker is: its device, its share of the host, and the memory that it may use."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from assigner.errors import UsageError
from assigner.location import Location
from assigner.machine.cgroup import core_limit
from assigner.machine.kernel import processor_model
from assigner.machine.launchedrank import launched
from assigner.profiler.update import optimizer_share
from assigner.runtime.messages.nccl import use_many_queues
from assigner.runtime.ranks.process import start_computing
from assigner.runtime.recording.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload

_SIOCGIFADDR = 0x8915
_HEAP_SHARE = 0.12


@dataclass(frozen=True)
class HostFacts:
    """This rank's worker, as far as it can be read off the machine."""

    host: str
    node: int  # the launcher's number of the host
    device: str  # `cpu` or `cuda:N`
    kind: str  # the device's model, with the CPU share where a cgroup limits it
    memory_bytes: int  # what is free for this rank
    threads: int  # compute threads
    interface: str = ""  # the network interface that messages leave by; empty: not known
    slower: float = 1.0  # what `slower_together` gives; of a GPU 1


def host_facts(device: torch.device, *, sharing: int = 1, slower: float = 1.0) -> HostFacts:
    """Read this rank's worker off the machine.

    A host's free memory is shared out evenly among its ranks on the CPU, a GPU's among the ranks `sharing` it.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_kind()
    return HostFacts(
        host=_host(),
        node=_node(),
        device=str(device),
        kind=kind,
        memory_bytes=free_bytes(device, sharing=sharing),
        threads=torch.get_num_threads(),
        interface=_interface(),
        slower=slower,
    )


def worker_names(fleet: Sequence[HostFacts]) -> list[str]:
    """The workers' names, by rank: `worker:1/cuda:0`."""
    return [str(Location(rank, facts.device)) for rank, facts in enumerate(fleet)]


def allocator_share(device: str) -> float:
    """What a device's allocator takes beyond the tensors in it, as a share of them.

    A CPU's is the C library's heap, whose holes are not known before training: the share is what was seen of glibc
    2.36 in training runs (benchmarks/prediction); `assigner simulate --calibrate` puts right what it was too little.
    A GPU's capacity and what tensors take there are figures of one allocator.
    """
    return _HEAP_SHARE if device == "cpu" else 0.0


@dataclass(frozen=True)
class VisibleGpus:
    """What a rank sees before any of them takes a device: its host, as the launcher counts them, and its GPUs.

    Of these, by their index here, what tells each from all others.
    """

    host: str
    gpus: tuple[str, ...]


def visible_gpus() -> VisibleGpus:
    """What this rank sees; CUDA has not been started before."""
    use_many_queues()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    uuids = tuple(str(torch.cuda.get_device_properties(n).uuid) for n in range(count))
    return VisibleGpus(f"{_node()} {_host()}", uuids)


def own_gpu(seen: Sequence[Sequence[str]], local: int) -> int | None:
    """The GPU of one of a host's ranks where each takes the first that is left; None: none is left for it.

    Launchers show all ranks of a host the same GPUs, or each its own (`srun --gpus-per-task`): `seen` has what each
    rank sees, in their order, and the index is that of the rank `local`.
    """
    taken: set[str] = set()
    for gpus in seen[:local]:
        taken.update([each for each in gpus if each not in taken][:1])
    return next((n for n, each in enumerate(seen[local]) if each not in taken), None)


def device_place(device: torch.device, mine: VisibleGpus) -> str:
    """The same for ranks that have one device: the GPU itself, or their host."""
    return mine.gpus[device.index or 0] if device.type == "cuda" else mine.host


def rank_device(devices: Sequence[str], seen: Sequence[VisibleGpus], rank: int) -> torch.device:
    """The device of a rank, by what each rank of the run sees.

    `devices` are those of its host's ranks, in their order; empty: a GPU of its own where one is left for this rank,
    else the CPU.

    Raises:
        UsageError: there are more or fewer devices than ranks, or this host has no such device.
    """
    here = [n for n, each in enumerate(seen) if each.host == seen[rank].host]
    local, ranks_here, gpus = here.index(rank), len(here), len(seen[rank].gpus)
    if not devices:
        index = own_gpu([seen[n].gpus for n in here], local)
        return torch.device("cpu") if index is None else torch.device("cuda", index)
    if len(devices) != ranks_here:
        raise UsageError(
            f"--devices names {len(devices)} devices, and this host has {ranks_here} ranks", hint="name one for each"
        )
    device = _device(devices[local])
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise UsageError(
            f"--devices: {devices[local]!r} is no device of this host, which has the CPU and {gpus} CUDA devices",
            hint="write cpu or cuda:N",
        )
    return device


def _host() -> str:
    return os.environ.get("ASSIGNER_HOST") or socket.gethostname()


def _node() -> int:
    place = launched()
    return place.node if place else 0


def _device(word: str) -> torch.device:
    """A device by the one name that workers have it by; `meta` for a word that is none."""
    try:
        device = torch.device(word)
    except RuntimeError:
        return torch.device("meta")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device(device.type)


def start_up(workload: Workload, graph: PartitionGraph, device: torch.device) -> float:
    """Load what any training loads before its first step, so that it is not counted as free memory.

    A forward and a backward of one number, and an update of small parameters: kernels, autograd's threads and the
    optimizer's modules. That update tells what is returned: bytes of optimizer state for a byte of parameters.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    start_computing(device)
    return optimizer_share(workload, graph, device)


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


def _cpu_kind() -> str:
    """The CPU's model name, and how much of it a cgroup leaves."""
    share, model = core_limit(), processor_model()
    return model if share is None else f"{model} ({share:.2f} cores)"
