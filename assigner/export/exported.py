"""What an export is: a text for another tool, what that does otherwise; and devices and modules as it sees them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.formatting import plural

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile


@dataclass(frozen=True)
class Exported:
    """One plan in another tool's form.

    Args:
        text: What goes into the file.
        data: The same as a JSON value; of a format that is not JSON, the text.
        notes: What the format cannot say, or the tool does otherwise; each a sentence.
    """

    text: str
    data: Any
    notes: tuple[str, ...] = ()


def as_json(data: Any, notes: tuple[str, ...]) -> Exported:
    """An export whose text is JSON: lists of lists and objects with one entry a line."""
    return Exported(_lines(data) + "\n", data, notes)


def _lines(data: Any) -> str:
    if isinstance(data, dict):
        rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items()]
        return "{\n" + ",\n".join(f"  {row}" for row in rows) + "\n}"
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in data) + "\n]"


def local_devices(plan: Plan, profile: Profile, *, tool: str) -> dict[str, str]:
    """The device of each worker of the plan as one process sees it, `cuda:0` or `cpu`, by the worker's name.

    The profile says on which host each is; `tool` is what wants them, for the message.

    Raises:
        UsageError: the workers are on several hosts, or several of them have one GPU.
    """
    hosts: dict[str, list[str]] = defaultdict(list)
    for worker in plan.workers:
        hosts[profile.worker[worker].host].append(worker)
    if len(hosts) > 1:
        largest = max(hosts.values(), key=len)
        raise UsageError(
            f"{tool} is for the devices of one host, and the plan's workers are on {len(hosts)}:"
            f" {', '.join(list(hosts)[:4])}{', ...' if len(hosts) > 4 else ''}",
            hint=f"solve for one host: assigner solve PROFILE -o PLAN --only {profile.worker[largest[0]].host}",
        )
    sharing: dict[str, list[str]] = defaultdict(list)
    for worker in plan.workers:
        sharing[profile.worker[worker].device].append(worker)
    for device, workers in sharing.items():
        if device != "cpu" and len(workers) > 1:
            raise UsageError(
                f"{' and '.join(workers)} are all {device} here: one process cannot tell them apart",
                hint="profile with all GPUs visible to every rank: --devices cuda:0,cuda:1",
            )
    return {worker: profile.worker[worker].device for worker in plan.workers}


def shared_cpu(devices: dict[str, str], *, tool: str) -> Iterator[str]:
    """A note where several workers are one device of a process."""
    count = sum(device == "cpu" for device in devices.values())
    if count > 1:
        cpus = plural(count, "CPU worker")
        yield f"the plan has {cpus}, which are processes of their own; {tool} has one device, cpu"


@dataclass(frozen=True)
class PartitionContent:
    """What a partition holds, by its names in the model.

    Args:
        modules: Those whose forward it runs, its own and unmarked ones beside it.
        tensors: Parameters and buffers that it reads itself, which belong to a module around it.
        meetings: Partitions whose values it puts together in one operation outside of all modules (`x + y`); "" stands
            for the model's inputs.
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    meetings: tuple[frozenset[str], ...] = ()


ModelContent = Mapping[str, PartitionContent]
"""What each partition holds, by its name; under "" what no partition uses."""
