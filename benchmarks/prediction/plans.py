"""The plans of a case: solved ones and bad ones, every schedule, shared stages, with and without recomputing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import AssignerError
from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import overfull, prediction_of
from assigner.solver import SolveOptions, solve, solve_baseline

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from assigner.formats.profile import Profile


def make_plans(profile: Profile, wanted: Collection[str] = ()) -> dict[str, Plan]:
    """The plans by name, each priced with the profile; those that do not fit its memory, or are there, are left out.

    Args:
        profile: Of the case.
        wanted: The plans' names; empty: all.
    """
    found: dict[str, Plan] = {}
    for name, plan in _made(profile):
        same = next((other for other, each in found.items() if _steps(each) == _steps(plan)), None)
        if same is None and (name in wanted or not wanted):
            found[name] = plan
        elif same is not None:
            print(f"plan {name!r} is plan {same!r}")
    return found


def _steps(plan: Plan) -> tuple[object, ...]:
    """What a plan does."""
    return plan.schedule, plan.micro_batch_size, plan.stages, plan.orders


def _made(profile: Profile) -> Iterator[tuple[str, Plan]]:
    asked = {
        "solved": SolveOptions(),
        "remat all": SolveOptions(schedule="gpipe", remat="always", max_replicas=1),
        "remat none, M=4": SolveOptions(schedule="gpipe", remat="never", micro_batches=4, max_replicas=1),
        "1f1b, M=16": SolveOptions(schedule="1f1b", remat="never", micro_batches=16, max_replicas=1),
        "one worker a stage": SolveOptions(schedule="one-stage", max_replicas=1),
        "interleaved": SolveOptions(schedule="interleaved", max_replicas=1),
        "listed": SolveOptions(schedule="listed", max_replicas=1),
    }
    for name, options in asked.items():
        try:
            yield name, solve(profile, options).plan
        except AssignerError as error:
            print(f"no plan {name!r}: {error.message}")
    for name, baseline in (("equal", "equal"), ("data parallel", "data-parallel-by-speed")):
        try:
            yield name, solve_baseline(profile, baseline)
        except AssignerError as error:
            print(f"no plan {name!r}: {error.message}")
    plan = _skewed(profile)
    if plan is not None:
        yield "skewed", plan


def _skewed(profile: Profile) -> Plan | None:
    """Every worker in the profile's order, the slowest with twice an equal share, eight micro-batches under GPipe."""
    cost = CostModel(profile)
    size = max(1, profile.workload.batch_size // 8)
    speed = {
        worker: sum(cost.partition(name, worker, size).forward_s for name in profile.order) for worker in profile.worker
    }
    slowest = max(speed, key=lambda worker: speed[worker])
    share = {worker: 2 if worker == slowest else 1 for worker in profile.worker}
    total, bounds, reached = sum(share.values()), [], 0
    for worker in profile.worker:
        reached += share[worker]
        bounds.append(round(len(profile.order) * reached / total))
    stages = [
        Stage(worker, profile.order[low:high], threads=profile.worker[worker].threads)
        for worker, low, high in zip(profile.worker, [0, *bounds], bounds, strict=False)
    ]
    plan = Plan(
        workload=profile.workload,
        micro_batches=-(-profile.workload.batch_size // size),
        micro_batch_size=size,
        stages=tuple(stage for stage in stages if stage.partitions),
    )
    predicted = prediction_of(plan, cost)
    if overfull(predicted):
        print("no plan 'skewed': it does not fit")
        return None
    return replace(plan, predicted=predicted)
