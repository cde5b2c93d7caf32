"""Why sharing stages among workers pays, or does not: what adding up their gradients costs a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.sheet import Line, Report
from assigner.schedule.cost import CostModel
from assigner.schedule.program import ActionKind
from assigner.schedule.rings import BUCKET_BYTES, ways
from assigner.schedule.simulate import check_fit, stage_s
from assigner.schedule.timing import compute_s, reduced_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile


def sharing(plan: Plan, profile: Profile | None) -> Report:
    """A sentence for each stage that several workers share, or else what data parallelism would have to add up.

    Args:
        plan: A plan with a prediction, for a short step; nothing is said of others.
        profile: What it was solved from; None: nothing is said.
    """
    if profile is None or plan.predicted is None or plan.objective != "step" or len(profile.workers) == 1:
        return ()
    check_fit(plan, profile)
    cost, step = CostModel(profile), plan.predicted.step_s
    if plan.is_replicated:
        return tuple(Line(_pays(plan, n, cost, step)) for n, stage in enumerate(plan.stages) if stage.replicas)
    return (Line(_would_cost(cost, step)),)


def _pays(plan: Plan, n: int, cost: CostModel, step: float) -> str:
    """What the workers of a stage spend on its gradients, and what one of them would compute alone."""
    workers, count = plan.stages[n].workers, plan.micro_batches
    reduce_s = compute_s(cost, plan, (ActionKind.REDUCE, n, workers[0]))
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    alone = min(sum(stage_s(cost, plan, n, worker, kind) for kind in kinds) for worker in workers) * count
    told = _reduce(workers, reduced_bytes(cost, plan, n), reduce_s, cost)
    return (
        f"stage {n} is shared by {len(workers)} workers: {told} a step, {fmt.percent(reduce_s / step)} of it; the"
        f" fastest of them alone would compute for {fmt.seconds(alone)}"
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
        f"data parallelism over all {len(workers)} workers: {_reduce(workers, size, reduce_s, cost)} a step,"
        f" {fmt.percent(reduce_s / step)} of this plan's"
    )


def _reduce(workers: Sequence[str], size: float, reduce_s: float, cost: CostModel) -> str:
    """`adding up 148 MiB of gradients, over the link from A to B at 48 MiB/s, takes 1.03 s`."""
    message = min(size, BUCKET_BYTES) / len(workers)
    source, target = max(
        ways(cost.rings.ring(frozenset(workers))), key=lambda way: cost.transfer_s(*way, message)
    )  # fmt: skip
    seconds = cost.transfer_s(source, target, message)
    rate = f" at {fmt.size(message / seconds)}/s" if seconds else ""
    return (
        f"adding up {fmt.size(size)} of gradients, over the link from {source} to {target}{rate}, takes"
        f" {fmt.seconds(reduce_s)}"
    )
