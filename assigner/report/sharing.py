"""Why sharing stages among workers pays, or does not: what adding up their gradients costs a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.sheet import Line, Report
from assigner.schedule.cost import CostModel
from assigner.schedule.program import ActionKind
from assigner.schedule.rings import BUCKET_BYTES, ways
from assigner.schedule.timing import compute_s, reduced_bytes, stage_s
from assigner.solver.baselines import TITLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile


def sharing(plan: Plan, profile: Profile | None) -> Report:
    """A sentence for each stage that several workers share, or else what data parallelism would have to add up.

    And for each reason why some partitions are on one worker. Nothing is said of a plan without a prediction, of
    another objective than the step, or without its profile.
    """
    if profile is None or plan.predicted is None or plan.objective != "step" or len(profile.workers) == 1:
        return ()
    if not plan.predicted.step_s:
        return ()
    cost, step = CostModel(profile), plan.predicted.step_s
    if plan.is_replicated:
        shared = [n for n, stage in enumerate(plan.stages) if stage.replicas]
        return (*(Line(_pays(plan, n, cost, step)) for n in shared), *_kept(profile))
    if any(each.name == TITLES["data-parallel"] and each.step_s is None for each in plan.baselines):
        return _kept(profile)  # hints, marks or too few micro-batches forbid it
    return _kept(profile) or (Line(_would_cost(cost, step)),)


def _kept(profile: Profile) -> tuple[Line, ...]:
    """What several workers cannot share, and why."""
    names: dict[str, list[str]] = {}
    for each in profile.partitions:
        if each.one_worker is not None:
            names.setdefault(each.one_worker, []).append(each.name)
    return tuple(Line(f"not shared by several workers: {fmt.first_of(held)}: {why}") for why, held in names.items())


def _pays(plan: Plan, n: int, cost: CostModel, step: float) -> str:
    """What the workers of a stage spend on its gradients, and what one of them would compute alone."""
    workers, count = plan.stages[n].workers, plan.micro_batches
    reduce_s = compute_s(cost, plan, (ActionKind.REDUCE, n, workers[0]))
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    alone = min(sum(stage_s(cost, plan, n, worker, kind) for kind in kinds) for worker in workers) * count
    told = _reduce(workers, reduced_bytes(cost, plan, n), reduce_s, cost)
    return (
        f"stage {n} is shared by {len(workers)} workers: {told} a step, {fmt.percent(reduce_s / step)} of it; its"
        f" forwards and backwards would take the fastest of them alone {fmt.seconds(alone)}{_divides(plan, n, cost)}"
    )


def _divides(plan: Plan, n: int, cost: CostModel) -> str:
    """What dividing the optimizer's state spares its workers, and what it costs."""
    stage = plan.stages[n]
    if not stage.is_divided:
        return ""
    whole = cost.state(stage.partitions).optimizer
    most = max(cost.state(stage.updated_by(worker)).optimizer for worker in stage.workers)
    gather_s = compute_s(cost, plan, (ActionKind.GATHER, n, stage.workers[0]))
    return (
        f"; each updates a part for all: {fmt.size(most)} of optimizer state at most instead of {fmt.size(whole)}, and"
        f" handing out what was updated takes {fmt.seconds(gather_s)} a step"
    )


def _would_cost(cost: CostModel, step: float) -> str:
    """What adding up all gradients among all workers takes, beside the step of a plan that does not."""
    workers = tuple(each.name for each in cost.profile.workers)
    size = cost.state(cost.profile.order).gradients
    obstacle = cost.rings.obstacle(workers)
    if obstacle is not None:
        return f"data parallelism over all workers is not possible: {obstacle}"
    reduce_s = cost.reduce_s(workers, size)
    return (
        f"data parallelism over all {len(workers)} workers, which this plan does not use:"
        f" {_reduce(workers, size, reduce_s, cost)} a step, {fmt.percent(reduce_s / step)} of this plan's"
    )


def _reduce(workers: Sequence[str], size: float, reduce_s: float, cost: CostModel) -> str:
    """`adding up 148 MiB of gradients, over the link from A to B at 48 MiB/s, takes 1.03 s`."""
    message = min(size, BUCKET_BYTES) / len(workers)
    source, target = max(
        ways(cost.rings.ring(frozenset(workers))), key=lambda way: cost.transfer_s(*way, message)
    )  # fmt: skip
    seconds = cost.transfer_s(source, target, message)
    rate = f" at {fmt.size(message / seconds)}/s" if seconds else ""
    measured = "" if cost.profile.collectives else " (links alone: no all-reduce was measured)"
    return (
        f"adding up {fmt.size(size)} of gradients, over the link from {source} to {target}{rate}{measured}, takes"
        f" {fmt.seconds(reduce_s)}"
    )
