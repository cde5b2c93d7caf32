"""Hugging Face `device_map`: module name -> device, as accelerate's `dispatch_model` and `from_pretrained` take it.

A map covers every parameter of the model, those outside the partitions too. What each partition holds beside its own
module is known only from the model; without it the entry "" (everything else) stands for the rest.

accelerate runs a model in one process. Where a map has an entry for a module around others, it moves all of that to
the entry's device before it moves the inner ones on (`AlignDevicesHook`, `place_submodules`), so that much has to fit
there. What it keeps on the CPU it computes on a GPU, its `main_device`, which also has the entry "" and the inputs;
left to itself it takes any GPU of the map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import UsageError
from assigner.export.exported import Exported, PartitionContent, as_json, local_devices, shared_cpu
from assigner.formats.plan import refuse_replicas
from assigner.schedule.simulate import check_fit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from assigner.export.exported import ModelContent
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

TOOL = "a device map"
_ALONE = "accelerate moves what goes into a module, torch refuses the rest"


def device_map(plan: Plan, profile: Profile, held: ModelContent | None = None) -> Exported:
    """The plan as a device map.

    Args:
        plan: What to export.
        profile: What it was solved from; it says on which host each worker is.
        held: What each partition holds; None: the partitions' names are those of modules, and the rest of the model
            goes to the first stage's device, or to the first GPU.

    Raises:
        UsageError: a stage of the plan has several workers, its workers are on several hosts, or what accelerate
            would put on one device at first does not fit there.
        FormatError: the profile is of another workload.
    """
    refuse_replicas(plan, "device maps")
    check_fit(plan, profile)
    devices = local_devices(plan, profile, tool=TOOL)
    where = {partition: devices[stage.worker] for stage in plan.stages for partition in stage.partitions}
    main = next((device for device in where.values() if device != "cpu"), "cpu")
    known = {name: PartitionContent((name,)) for name in where} if held is None else held
    found: dict[str, str] = {}
    for partition, device in where.items():
        for name in known[partition].modules:
            found.setdefault(name, device)
    first = next(iter(where.values()))
    rest = {"": first} if held is None else _owners(held, where, first)
    for name, device in rest.items():
        around = any(_is_in(other, name) for other in (*found, *rest))
        found.setdefault(name, main if around and device == "cpu" else device)  # what is around others is not offloaded
    notes = [*_rest(plan, held, found), *_at_first(profile, known, found, devices, exact=held is not None)]
    main = found.get("", main)  # where it has the inputs, and computes what it keeps on the CPU
    computed = {name: main if device == "cpu" else device for name, device in {"": main, **where}.items()}
    notes += [*_meetings(profile, held, computed), *_apart(profile, where), *_differences(devices)]
    return as_json(found, tuple(notes))


def _owners(held: ModelContent, where: Mapping[str, str], first: str) -> dict[str, str]:
    """The modules that lone tensors belong to: accelerate knows modules alone. A map's inner entries count for more."""
    owners: dict[str, str] = {}
    for partition, device in {**where, "": first}.items():
        for tensor in held[partition].tensors:
            owners.setdefault(tensor.rpartition(".")[0], device)
    return owners


def _is_in(inner: str, outer: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _rest(plan: Plan, held: ModelContent | None, found: Mapping[str, str]) -> Iterator[str]:
    if held is None:
        where = "--workload FILE.py:FUNCTION finds where the plan has it"
        yield f'what lies outside the partitions goes to {found[""]}, by the entry ""; {where}'
        return
    lone = list(dict.fromkeys(tensor for name in plan.partitions for tensor in held[name].tensors))
    if lone:
        yield f"{fmt.ranges(lone)}: of no module that is called; on the device of the module around it"


def _at_first(
    profile: Profile, known: ModelContent, found: Mapping[str, str], devices: Mapping[str, str], *, exact: bool
) -> Iterator[str]:
    """What accelerate puts on one device before it goes to several; a UsageError where it does not fit."""
    for name, device in found.items():
        inner = [other for other in found if _is_in(other, name)]
        if {found[other] for other in inner} <= {device}:
            continue
        size = _bytes(profile, [part for part, each in known.items() if any(_is_in(one, name) for one in each.modules)])
        what = f"all of {name}" if name else "the whole model"
        said = f'accelerate puts {what} on {device} at first, for the entry "{name}": {fmt.size(size)}'
        room = max(profile.worker[worker].capacity_bytes for worker, each in devices.items() if each == device)
        if size > room:
            lone = "put the tensors that lie in it beside its modules into a module of their own"
            raise UsageError(
                f"{said}, and {device} holds {fmt.size(room)}",
                hint=lone if exact else "--workload FILE.py:FUNCTION names what lies outside the partitions instead",
            )
        chosen = sum(each != "cpu" for each in {*found.values()}) > 1 and not name
        yield f'{said}; dispatch_model(..., main_device="{device}") makes it that one' if chosen else said


def _bytes(profile: Profile, partitions: list[str]) -> float:
    """Parameters and buffers of partitions, shared ones once."""
    held = [profile.partition[name] for name in partitions if name in profile.partition]
    again = sum(tie.bytes * max(0, len({*tie.partitions} & {*partitions}) - 1) for tie in profile.ties)
    return sum(each.parameter_bytes + each.buffer_bytes for each in held) - again


def _meetings(profile: Profile, held: ModelContent | None, computed: Mapping[str, str]) -> Iterator[str]:
    """Partitions where values of several devices come together, by the device where each partition's are `computed`.

    Where nobody knows which are `held`, so which meet outside of modules, any may.
    """
    if held is None:
        met = {
            name: [frozenset(edge.source for edge in profile.edges if edge.target == name)] for name in profile.order
        }
    else:
        met = {name: [*each.meetings] for name, each in held.items()}
    places = {
        name: {computed[each] for group in groups for each in group}
        for name, groups in met.items()
        if any(len({computed[each] for each in group}) > 1 for group in groups)
    }
    if not places:
        return
    names, on = fmt.ranges(list(places)), " and ".join(sorted(set().union(*places.values())))
    if held is None:
        yield f"{names}: values from {on} come together; where the forward itself joins them (x + y), {_ALONE}"
    else:
        yield f"{names}: the forward itself joins values from {on} (x + y); {_ALONE}: join them in a module"


def _apart(profile: Profile, device: Mapping[str, str]) -> Iterator[str]:
    """Shared parameters whose holders are on several devices."""
    for tie in profile.ties:
        if len({device[name] for name in tie.partitions}) > 1:
            holders = " and ".join(tie.partitions)
            yield f"{tie.parameter} is shared by {holders}, which are not on one device, as accelerate asks"


def _differences(devices: dict[str, str]) -> Iterator[str]:
    """What accelerate does otherwise than the plan: it runs a model in one process, one stage after another."""
    yield from shared_cpu(devices, tool=TOOL)
    gpus = [device for device in devices.values() if device != "cpu"]
    if gpus and "cpu" in devices.values():
        how = f"computed on {gpus[0]} by accelerate, which brings the weights over at each call"
        yield f"what is on cpu is kept there and {how}; in the plan the CPU computes it"
