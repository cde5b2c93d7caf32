"""What limits a plan, in one sentence: the worker or the link, and memory where it costs time.

It says what the plan's own prediction says, so every command that shows a plan has it, with or without a profile. A
worker is occupied while it computes and while messages keep it from computing. What is compared depends on what the
plan was made for:

    step, cost      a worker's or a link's share of the critical path, where a profile is at hand to find it; else of
                    the step: what is busiest is often, not always, what the others wait for
    throughput      seconds for one micro-batch when the pipeline is full: updates, once a step, play no part
    latency         seconds of one forward
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.schedule.replication import taken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Prediction, TransferPrediction, WorkerPrediction
    from assigner.schedule.criticalpath import Where

_BUSY = 0.9
"""A worker that is occupied for this share of the step waits for nothing worth a word."""

_LITTLE = 0.01
"""A smaller share of the step than this is not worth a word."""

_SAME = 1e-6
"""Two values that differ by less, as a share, are the same one."""


def limiting(plan: Plan, prediction: Prediction, path: Mapping[Where, float] | None = None) -> str:
    """The sentence for a plan by a prediction, whatever its own is, and by `path_shares` where they are known."""
    if plan.objective == "throughput":
        sentence = _steady(plan, prediction)
    elif plan.objective == "latency" and all(each.forward_s is not None for each in prediction.workers):
        sentence = _forward(plan, prediction)
    else:
        sentence = _step(plan, prediction, path or {})
    again = sum(len(each.rematerialise) for each in plan.stages)
    if again:
        sentence += f"; {again} of {len(plan.partitions)} partitions run forward twice (rematerialised)"
    return sentence


def _step(plan: Plan, prediction: Prediction, path: Mapping[Where, float]) -> str:
    """By shares of the critical path where it is known, and else of the step."""
    step = prediction.step_s or 1.0
    busiest, *others = sorted(prediction.workers, key=lambda each: -each.occupied_s)
    link = max(prediction.transfers, key=lambda each: each.seconds, default=None)
    busy_link = link is not None and link.seconds > busiest.occupied_s
    most = (link.source, link.target) if link is not None and busy_link else (busiest.worker,)
    where = max(path, key=lambda each: path[each], default=most)
    verb = _verb(step, busiest)
    if where != most and path[where] - path.get(most, 0.0) >= _LITTLE:
        name = where[0] if len(where) == 1 else f"the link from {where[0]} to {where[1]}"
        sentence = f"{name} limits the plan: the critical path is on it for {_share(path[where], 1.0)} of the step"
        rival = f"; the busiest, {busiest.worker}, {verb} for {_share(busiest.occupied_s, step)} of it"
        return sentence + (rival if where != (busiest.worker,) else "")
    if link is not None and busy_link:
        return (
            f"{_name(link)} limits the plan: messages are on it for {_share(link.seconds, step)} of the step, and the"
            f" busiest worker, {busiest.worker}, {verb} for {_share(busiest.occupied_s, step)}"
        )
    sentence = (
        f"{busiest.worker} limits the plan: it computes for {_share(busiest.compute_s, step)} of the step"
        f" ({_each(busiest.compute_s, _taken(plan, busiest.worker))}){_besides(busiest, step)}"
    )
    if others:
        verb = _verb(step, busiest, others[0])
        is_ = "" if verb == "computes" else f"{verb} "
        sentence += f"; the next, {others[0].worker}, {is_}for {_share(others[0].occupied_s, step)}"
    return sentence


def _steady(plan: Plan, prediction: Prediction) -> str:
    """By what each worker and each link has to do for one batch, in the steady state."""
    loads = [(each.worker, each.occupied_s - (each.update_s or 0.0)) for each in prediction.workers]
    loads += [(_name(each), each.seconds) for each in prediction.transfers]
    loads.sort(key=lambda load: -load[1])
    if plan.solver is not None:  # messages of tied parameters, once a step, are in the loads and not in the objective
        period = plan.solver.objective_s
        loads.sort(key=lambda load: abs(load[1] - period) > _SAME * period)
    (slowest, load), *others = loads
    sentence = (
        f"{slowest} limits the plan: once the pipeline is full it is never idle, {fmt.seconds(load)} for each batch"
    )
    if others:
        sentence += f"; the next, {others[0][0]}, is occupied for {_share(min(others[0][1], load), load)} of that"
    return sentence


def _forward(plan: Plan, prediction: Prediction) -> str:
    """By what one forward spends where: on a worker, or on a link that carries values towards the pipeline's end."""
    count, place = plan.micro_batches, {name: n for n, name in enumerate(plan.workers)}
    loads = [(each.worker, (each.forward_s or 0.0) / _taken(plan, each.worker)) for each in prediction.workers]
    loads += [
        (_name(each), each.seconds / count)
        for each in prediction.transfers if place.get(each.source, 0) < place.get(each.target, 0)
    ]  # fmt: skip
    (where, load), *others = sorted(loads, key=lambda load: -load[1])
    if not others:
        return f"{where} limits the plan: it runs the whole forward, {fmt.seconds(load)} a micro-batch"
    return (
        f"{where} limits the plan: {fmt.seconds(load)} of one forward are spent on it; next come"
        f" {fmt.seconds(others[0][1])} on {others[0][0]}"
    )


def _name(link: TransferPrediction) -> str:
    return f"the link from {link.source} to {link.target}"


def _taken(plan: Plan, worker: str) -> int:
    """How many micro-batches a worker runs, of the stage of which it runs most."""
    return max(len(taken(plan, n, worker)) for n in plan.held[worker])


def _share(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.0f} %"


def _each(seconds: float, count: int) -> str:
    """What a micro-batch takes of a worker's time, its part of the update included."""
    once = fmt.seconds(seconds / count)
    return f"{once} for its micro-batch" if count == 1 else f"{once} for each of {count} micro-batches"


def _verb(step: float, *workers: WorkerPrediction) -> str:
    """What workers do in the time in which they are occupied."""
    return "is occupied" if any((each.busy_s or 0.0) >= _LITTLE * step for each in workers) else "computes"


def _besides(worker: WorkerPrediction, step: float) -> str:
    """What even the busiest worker does besides computing: handle messages, and stand idle, if it does."""
    busy, found = worker.busy_s or 0.0, []
    if busy >= _LITTLE * step:
        found.append(f"is kept busy by messages for {_share(busy, step)}")
    if worker.occupied_s < _BUSY * step:
        idle = f"stands idle for {_share(step - worker.occupied_s, step)}"
        if not found and worker.transfer_s >= _LITTLE * step:
            idle += f", {_share(worker.transfer_s, step)} of the step while messages are on their way"
        found.append(idle)
    return "".join((", " if part is not found[-1] else " and ") + part for part in found)
