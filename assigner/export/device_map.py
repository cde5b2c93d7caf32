"""Hugging Face `device_map`: module name -> device, as accelerate's `dispatch_model` and `from_pretrained` take it.

A map covers every parameter of the model, those outside the partitions too. What each partition holds beside its own
module is known only from the model; without it the entry "" (everything else) stands for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.export.devices import local_devices, shared_cpu
from assigner.export.exported import Exported, as_json
from assigner.holding import Holding
from assigner.simulate import check_fit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.holding import Held
    from assigner.plan import Plan
    from assigner.profile import Profile

TOOL = "a device map"


def device_map(plan: Plan, profile: Profile, held: Held | None = None) -> Exported:
    """The plan as a device map.

    Args:
        plan: What to export.
        profile: What it was solved from; it says on which host each worker is.
        held: What each partition holds; None: the partitions' names are those of modules, and the rest of the model
            goes to the first stage's device.

    Raises:
        FormatError: the profile is of another workload, or the plan's workers are not the devices of one host.
    """
    check_fit(plan, profile)
    devices = local_devices(plan, profile, tool=TOOL)
    first = devices[plan.stages[0].worker]
    found: dict[str, str] = {}
    owners: dict[str, str] = {}
    where = [(partition, devices[stage.worker]) for stage in plan.stages for partition in stage.partitions]
    for partition, device in where:
        holding = Holding((partition,)) if held is None else held[partition]
        for name in holding.modules:
            found.setdefault(name, device)
        for name in holding.tensors:
            owners.setdefault(_owner(name), device)
    if held is None:
        owners[""] = first
    else:
        for name in held[""].tensors:
            owners.setdefault(_owner(name), first)
    found |= {name: device for name, device in owners.items() if name not in found}
    return as_json(found, (*_rest(plan, held, first), *_apart(profile, dict(where)), *_differences(devices)))


def _owner(tensor: str) -> str:
    """The module that a tensor belongs to: accelerate knows modules alone. A map's inner entries count for more."""
    return tensor.rpartition(".")[0]


def _rest(plan: Plan, held: Held | None, first: str) -> tuple[str, ...]:
    if held is None:
        where = "--workload FILE.py:FUNCTION finds where the plan has it"
        return (f'what lies outside the partitions goes to {first}, by the entry ""; {where}',)
    lone = list(dict.fromkeys(tensor for name in plan.partitions for tensor in held[name].tensors))
    if not lone:
        return ()
    return (f"{fmt.ranges(lone)}: of no module that is called; on the device of the module around it",)


def _apart(profile: Profile, device: Mapping[str, str]) -> tuple[str, ...]:
    """Shared parameters whose holders are on several devices."""
    return tuple(
        f"{tie.parameter} is shared by {' and '.join(tie.partitions)}, which are not on one device, as accelerate asks"
        for tie in profile.ties
        if len({device[name] for name in tie.partitions}) > 1
    )


def _differences(devices: dict[str, str]) -> tuple[str, ...]:
    """What accelerate does otherwise than the plan: it runs a model in one process, one stage after another."""
    notes = shared_cpu(devices, tool=TOOL)
    gpus = [device for device in devices.values() if device != "cpu"]
    if gpus and "cpu" in devices.values():
        how = f"computed on {gpus[0]} by accelerate, which brings the weights over at each call"
        notes += (f"what is on cpu is kept there and {how}; in the plan the CPU computes it",)
    return notes
