"""What a plan is worth under each objective, priced by the simulator.

step         seconds of one step
throughput   seconds of a batch in the steady state: M times what the slowest worker, link or wire has of a
             micro-batch, among batches without end and with warm-ups that keep it at work
latency      seconds of one forward of one micro-batch
cost         money per sample, in the unit of the workers' `cost_per_hour`
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.schedule.orders import counted
from assigner.schedule.program import Payload, build_forward_program, build_program
from assigner.schedule.replication import MicroBatchLane, lanes
from assigner.schedule.simulate import run_program
from assigner.schedule.timing import route_bytes, stage_s, step_s

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.terms import Objective
    from assigner.schedule.cost import CostModel

HOUR_S = 3600.0
_MANY = 4


def objective_value(plan: Plan, objective: Objective, cost: CostModel, *, step_s: float) -> float:
    """The value of a plan whose simulated step takes `step_s`; the module says in which unit.

    Raises:
        FormatError: the profile cannot price the plan.
    """
    if objective == "throughput":
        return plan.micro_batches * steady_s(plan, cost)
    if objective == "latency":
        return latency_s(plan, cost)
    if objective == "cost":
        return money_per_sample(plan, cost, step_s=step_s)
    return step_s


def compared_value(plan: Plan, objective: Objective, cost: CostModel, *, step_s: float) -> float:
    """What searches compare, the less the better: as `objective_value`.

    Inf: the steady state of a plan with fewer micro-batches than workers, which never works on all of them at once.
    """
    if objective == "throughput" and plan.micro_batches < len(plan.workers):
        return math.inf
    return objective_value(plan, objective, cost, step_s=step_s)


def steady_s(plan: Plan, cost: CostModel) -> float:
    """Seconds per micro-batch when the pipeline is full: the largest load of a worker, a link or a wire.

    A worker's load is its forwards, backwards and recomputing, and what messages keep it busy; of a stage with several
    workers each has its share. Ties, reductions and updates, once a step, play no part. Inf: two workers that must talk
    have no link.
    """
    program = build_program(plan, cost.profile.edges, cost.profile.ties)
    load: dict[str | tuple[str, str] | int, float] = defaultdict(float)
    for n, stage in enumerate(plan.stages):
        for worker in stage.workers:
            work = (count * stage_s(cost, plan, n, worker, kind) for kind, count in counted(plan, n, worker).items())
            load[worker] += sum(work) / plan.micro_batches
    for route in program.routes:
        if route.payload is not Payload.TIE:
            message = cost.message(route.source, route.target, route_bytes(cost, route, plan.micro_batch_size))
            share = program.sent[route] / plan.micro_batches
            seconds = share * message.seconds
            load[route.source, route.target] += seconds
            if (route.source, route.target) in cost.wires:
                wire, part = cost.wires[route.source, route.target]
                load[wire] += part * seconds
            load[route.source] += share * message.sender_s
            load[route.target] += share * message.receiver_s
    return max(load.values())


def sustained_s(plan: Plan, cost: CostModel) -> float:
    """Simulated seconds of one more micro-batch in a step of many, as the plan's own schedule runs it.

    At least `steady_s`, and more where its warm-ups are too short to keep the slowest worker at work while messages
    are under way, or where its forwards and backwards have other slowest workers and each come together (GPipe).

    Raises:
        UsageError: the plan lists its orders, which are those of its own number of micro-batches.
    """
    size, found = plan.micro_batch_size, []
    for many in (_MANY, 2 * _MANY):
        count = many * max(plan.micro_batches, len(plan.workers))  # each replica has as large a part as in the plan
        found.append((count, step_s(plan.cut(count, size, batch_size=count * size), cost)))
    (less, first_s), (more, second_s) = found
    return (second_s - first_s) / (more - less)


def latency_s(plan: Plan, cost: CostModel) -> float:
    """Seconds from the start of one micro-batch's forward to its end, nothing else under way.

    Where stages have several workers: on those of a step's micro-batches that are slowest.
    """
    return max(_lane_s(plan, lane, cost) for lane in lanes(plan))


def _lane_s(plan: Plan, lane: MicroBatchLane, cost: CostModel) -> float:
    """Seconds of one forward on the workers of a lane."""
    on = zip(plan.stages, lane.workers, strict=True)
    stages = tuple(replace(stage, sole_worker=worker, replicas=()) for stage, worker in on)
    alone = replace(plan, stages=stages, schedule="gpipe", orders={}).cut(
        1, plan.micro_batch_size, batch_size=plan.micro_batch_size
    )
    return run_program(build_forward_program(alone, cost.profile.edges), cost).step_s


def money_per_sample(plan: Plan, cost: CostModel, *, step_s: float) -> float:
    """Money per sample: what the plan's workers cost in the time of a step, over the samples in it.

    Raises:
        FormatError: the profile does not know what one of them costs.
    """
    prices = {name: cost.profile.worker[name].cost_per_hour for name in plan.workers}
    unknown = [name for name, price in prices.items() if price is None]
    if unknown:
        raise FormatError(f"the profile has no cost_per_hour for {unknown[0]}", hint="write it into the profile")
    hourly = sum(price for price in prices.values() if price is not None)
    return hourly * step_s / HOUR_S / plan.workload.batch_size
