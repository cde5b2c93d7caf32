"""torchgpipe: the arguments of `torchgpipe.GPipe(nn.Sequential, balance, devices=..., chunks=..., checkpoint=...)`.

It cuts a Sequential into runs of children, `balance[i]` of them on `devices[i]`, under GPipe's schedule (Kim et al.,
torchgpipe, 2020, arXiv 2004.09910).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import UsageError
from assigner.export.exported import Exported, as_json, local_devices, shared_cpu
from assigner.formats.plan import refuse_replicas
from assigner.schedule.simulate import check_fit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

TOOL = "torchgpipe"


def balance(plan: Plan, profile: Profile) -> Exported:
    """The plan as keyword arguments of `GPipe`: balance, devices, chunks and checkpoint.

    Raises:
        UsageError: a stage of the plan has several workers or a worker several stages, the partitions are no chain, or
            the workers are not the devices of one host.
        FormatError: the profile is of another workload.
    """
    refuse_replicas(plan, "the export for torchgpipe")
    check_fit(plan, profile)
    _check_chain(profile)
    twice = next((worker for worker in plan.workers if sum(s.worker == worker for s in plan.stages) > 1), None)
    if twice is not None:
        raise UsageError(
            f"{twice} has several stages; torchgpipe gives each device one run of layers",
            hint="assigner solve --schedule gpipe --max-replicas 1 has one stage a worker and one worker a stage",
        )
    devices = local_devices(plan, profile, tool=TOOL)
    found = {
        "balance": [len(stage.partitions) for stage in plan.stages],
        "devices": [devices[stage.worker] for stage in plan.stages],
        "chunks": plan.micro_batches,
        "checkpoint": "always" if any(stage.rematerialise for stage in plan.stages) else "never",
    }
    return as_json(found, (_model(plan), *_differences(plan), *shared_cpu(devices, tool=TOOL)))


def _check_chain(profile: Profile) -> None:
    if profile.is_chain:
        return
    following = dict(zip(profile.order, profile.order[1:], strict=False))
    skip = next((edge for edge in profile.edges if following.get(edge.source) != edge.target), None)
    why = (
        f"{skip.target!r} reads a value of {skip.source!r}, which is not the one before it"
        if skip is not None
        else f"{' and '.join(profile.ties[0].partitions)} share {profile.ties[0].parameter!r}"
    )
    raise UsageError(
        f"the partitions are no chain: {why}; torchgpipe cuts an nn.Sequential",
        hint="--to pipelining-schedule or --to dot take any graph",
    )


def _model(plan: Plan) -> str:
    """What GPipe counts are children, which only the user's model can show."""
    children = "1 child" if len(plan.partitions) == 1 else f"{len(plan.partitions)} children"
    return f"the model must be an nn.Sequential with exactly {children}, in this order: {fmt.ranges(plan.partitions)}"


def _differences(plan: Plan) -> Iterator[str]:
    if plan.schedule != "gpipe":
        yield (
            f"the plan is for {plan.schedule}; torchgpipe runs GPipe's schedule, which keeps all"
            f" {fmt.plural(plan.micro_batches, 'micro-batch')} in flight: more memory than planned"
        )
    again = sum(len(stage.rematerialise) for stage in plan.stages)
    if 0 < again < len(plan.partitions):
        yield (
            f"the plan rematerialises {again} of {len(plan.partitions)} partitions; torchgpipe all or none:"
            ' checkpoint="always" fits the memory and computes more'
        )
