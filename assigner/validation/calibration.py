"""A profile corrected by a trace: what was measured alone is brought to what it took in a run.

    profile ──solve──▶ plan ──run──▶ trace ──calibrate──▶ profile ──solve──▶ ...

Times keep their course over micro-batch and message sizes, which a trace of one plan cannot tell, and are scaled:

    a traced worker's partitions          by their stage's ratio of measured to predicted, forward and backward apart
    its other partitions                  by its own ratio over all its stages
    like workers that were not traced     by the middle ratio of the traced ones of their kind and thread count
    links                                 as links.py says
    collectives                           as their rings, by the links' correction

What a worker loses between two actions above the busy shares of its messages counts as part of the action.

Memory is only ever corrected upwards; like workers that were not traced get the most of what others held:

    measured = (1 + allocator's share) * (tensors + excess)

What a CPU worker holds beyond its tensors are the holes of its heap, and those grow with all that is held: its share is
raised, so that it holds for other partitions there too. A GPU's allocator leaves hardly any: what was held above the
prediction is workspace that was not profiled. So is on a CPU what no heap's holes explain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.formats.profilewarnings import other_warnings, with_warnings
from assigner.schedule.cost import CostModel, collectives_over
from assigner.schedule.orders import TOGETHER, ActionKind, counted
from assigner.schedule.simulate import simulated
from assigner.schedule.timing import compute_s
from assigner.validation.links import (
    SeenFlights,
    SeenReductions,
    corrected_collectives,
    corrected_links,
    factors,
    flights_seen,
    reductions_seen,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Measurement, Profile, Worker
    from assigner.machine.reference import ReferenceTimes
    from assigner.schedule.timing import Compute
    from assigner.validation.comparison import Agreement, WorkerAgreement


_Alike = tuple[str, int]
"""What workers share measurements by, as `Worker.alike`."""
_Memory = tuple[float, float]
"""An allocator's share and an excess, as in `Correction`."""

_SAME = 0.01
"""A ratio nearer to 1 than this is not worth a warning."""
MOST_SHARE = 1.0
"""Holes of a heap may become as large as the tensors; more is something that does not grow with them."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Correction:
    """What one worker's measurements are multiplied by, what is added to their workspace, and its allocator's share.

    Args:
        forward: All its partitions; 1.2: it took 20 % longer than profiled.
        backward: The same of backwards, without what they recompute.
        update: The same of updates.
        allocator_share: At least this; 0: as it was.
        excess_bytes: Of tensors that it held above its prediction, the allocator's share of them not counted.
        forwards: Single partitions, by name.
        backwards: The same of backwards.
    """

    forward: float
    backward: float
    update: float
    allocator_share: float
    excess_bytes: float
    forwards: Mapping[str, float]
    backwards: Mapping[str, float]

    def of(self, point: Measurement, partition: str, worker: str) -> Measurement:
        """A measurement, corrected, as that of a pair."""
        forward = self.forwards.get(partition, self.forward)
        return replace(
            point.with_backwards(self.backwards.get(partition, self.backward)),
            partition=partition,
            worker=worker,
            forward_s=point.forward_s * forward,
            recompute_s=None if point.recompute_s is None else point.recompute_s * forward,
            update_s=point.update_s * self.update,
            workspace_bytes=point.workspace_bytes + (0 if point.infeasible else self.excess_bytes),
        )


def calibrated(profile: Profile, agreement: Agreement, *, trace: str) -> Profile:
    """The profile, corrected by what a run of a plan took.

    Args:
        profile: What the plan was priced with.
        agreement: The plan and the trace of its run, as `agree` put them side by side.
        trace: What to call the trace in the profile's warnings.
    """
    seen = flights_seen(agreement)
    links = corrected_links(profile, agreement, seen)
    over = replace(profile, links=links, collectives=collectives_over(profile, links))
    reduced = reductions_seen(over, agreement)
    corrections = _corrections(over, agreement)
    kinds = {kind: _middle([corrections[w] for w in workers]) for kind, workers in _kinds(profile, corrections).items()}
    references = {each.worker: each.traced for each in agreement.machines}
    earlier = profile.environment.get("calibrated")
    done = [*(earlier if isinstance(earlier, list) else ()), _record(agreement, trace, corrections, seen)]
    new = replace(
        profile,
        workers=tuple(_worker(each, corrections, kinds, references) for each in profile.workers),
        links=links,
        collectives=corrected_collectives(over, reduced),
        measurements=tuple(_measurements(profile, corrections, kinds)),
        environment={**profile.environment, "calibrated": done},
    )
    said = (*_warnings(profile, agreement, trace, corrections, seen), *_of_reductions(reduced))
    return with_warnings(new, (*other_warnings(profile), *said))


def _corrections(profile: Profile, agreement: Agreement) -> dict[str, Correction]:
    """Of the traced workers, against a profile whose links are corrected."""
    plan, cost = agreement.plan, CostModel(profile)
    taken = _taken(cost, agreement)
    memory = {each.worker: held_beyond(profile.worker[each.worker], each) for each in agreement.workers}
    return {worker: _correction(plan, cost, worker, taken, memory[worker]) for worker in plan.workers}


def _taken(cost: CostModel, agreement: Agreement) -> dict[Compute, float]:
    """Seconds of each forward, backward and update, with what its worker lost around it above its busy shares."""
    plan, seen = agreement.plan, agreement.observed
    timeline = simulated(plan, cost)
    busy: dict[Compute, float] = {}
    for event in timeline.events:
        if event.action.route is None:
            busy.setdefault((event.action.kind, event.action.stage, event.worker), event.busy_s)
    taken = {}
    for key, samples in seen.compute.items():
        if key[0] in TOGETHER:  # beside what its workers compute
            continue
        lost = seen.before[key].median_s + (seen.behind[key].median_s if key in seen.behind else 0.0)
        taken[key] = samples.median_s + max(0.0, lost - busy.get(key, 0.0))
    return taken


def _correction(
    plan: Plan, cost: CostModel, worker: str, taken: Mapping[Compute, float], memory: _Memory
) -> Correction:
    """One worker's: each stage's forward first, since its backward may run it again."""
    said_s: dict[str, float] = defaultdict(float)
    took_s: dict[str, float] = defaultdict(float)
    forwards: dict[str, float] = {}
    backwards: dict[str, float] = {}
    for n, stage in enumerate(plan.stages):
        if worker not in stage.workers:
            continue
        kinds = [kind for kind in counted(plan, n, worker) if kind is not ActionKind.FORWARD]
        forward = compute_s(cost, plan, (ActionKind.FORWARD, n, worker))
        recomputing = sum(compute_s(cost, plan, (kind, n, worker)) for kind in kinds)
        backward = sum(_backward_s(cost, plan, name, worker, kinds) for name in stage.partitions)
        took = taken.get((ActionKind.FORWARD, n, worker), forward)
        factor = _ratio(took, forward)
        again = factor * (recomputing - backward)
        whole = again + backward
        if all((kind, n, worker) in taken for kind in kinds):
            whole = sum(taken[kind, n, worker] for kind in kinds)
        back = _ratio(whole - again, backward) if whole > again else _ratio(whole, recomputing)
        forwards.update(dict.fromkeys(stage.partitions, factor))
        backwards.update(dict.fromkeys(stage.partitions, back))
        for what, said, measured in (("F", forward, took), ("B", backward, back * backward)):
            said_s[what] += said
            took_s[what] += measured
    update = compute_s(cost, plan, (ActionKind.UPDATE, -1, worker))
    return Correction(
        forward=_ratio(took_s["F"], said_s["F"]),
        backward=_ratio(took_s["B"], said_s["B"]),
        update=_ratio(taken.get((ActionKind.UPDATE, -1, worker), update), update),
        allocator_share=memory[0],
        excess_bytes=memory[1],
        forwards=forwards,
        backwards=backwards,
    )


def _backward_s(cost: CostModel, plan: Plan, name: str, worker: str, kinds: Sequence[ActionKind]) -> float:
    """One partition's backward, as a whole or in parts, or one of each where the order has both; no recompute."""
    whole = cost.partition(name, worker, plan.micro_batch_size).backward_s if ActionKind.BACKWARD in kinds else 0.0
    if ActionKind.BACKWARD_INPUT not in kinds:
        return whole
    return whole + sum(cost.parts(name, worker, plan.micro_batch_size)[:2])


def held_beyond(worker: Worker, seen: WorkerAgreement) -> _Memory:
    """What a worker's peak above its prediction says.

    Args:
        worker: As profiled.
        seen: Its predicted and its measured peak.

    Returns:
        The allocator's share, 0 where it need not be raised, and the bytes of tensors that the workspace lacks.
    """
    if seen.measured_bytes <= seen.predicted_bytes * (1 + _ROUNDING):
        return 0.0, 0.0
    tensors = seen.predicted_bytes / (1 + worker.allocator_share)
    if not worker.device.startswith("cpu") or tensors <= 0:
        return 0.0, seen.measured_bytes / (1 + worker.allocator_share) - tensors
    share = seen.measured_bytes / tensors - 1
    if share <= MOST_SHARE:
        return share, 0.0
    most = max(MOST_SHARE, worker.allocator_share)
    return most, seen.measured_bytes / (1 + most) - tensors


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 else 1.0


def _kinds(profile: Profile, corrections: Mapping[str, Correction]) -> dict[_Alike, list[str]]:
    """The traced workers of each kind and thread count."""
    found: dict[_Alike, list[str]] = defaultdict(list)
    for worker in corrections:
        found[profile.worker[worker].alike].append(worker)
    return found


def _middle(corrections: Sequence[Correction]) -> Correction:
    """What holds for a kind: the middle ratios, and the largest share of the allocator and excess of memory."""
    return Correction(
        forward=median(each.forward for each in corrections),
        backward=median(each.backward for each in corrections),
        update=median(each.update for each in corrections),
        allocator_share=max(each.allocator_share for each in corrections),
        excess_bytes=max(each.excess_bytes for each in corrections),
        forwards={},
        backwards={},
    )


def _worker(
    worker: Worker, corrections: Mapping[str, Correction], kinds: Mapping[_Alike, Correction],
    references: Mapping[str, ReferenceTimes],
) -> Worker:  # fmt: skip
    """A worker with the allocator's share that it or its kind was seen to have, and the machine of its new figures."""
    found = corrections.get(worker.name) or kinds.get(worker.alike)
    share = 0.0 if found is None else found.allocator_share
    reference = references.get(worker.name) if found else worker.reference
    return replace(worker, allocator_share=max(worker.allocator_share, share), reference=reference)


def _measurements(
    profile: Profile, corrections: Mapping[str, Correction], kinds: Mapping[_Alike, Correction]
) -> Iterator[Measurement]:
    """All measurements, corrected.

    Workers of one kind share measurements, and a traced one no longer does: it gets all of its own. So that the others
    share what holds for the kind, the first of them that was not measured itself stands before all.
    """
    cost = CostModel(profile)
    own = {point.worker for point in profile.measurements}
    stands_for: dict[_Alike, str] = {}
    for each in profile.workers:
        if each.name not in corrections and each.name not in own and each.alike in kinds:
            stands_for.setdefault(each.alike, each.name)
    whole = {worker: kinds[kind] for kind, worker in stands_for.items()} | dict(corrections)
    for worker, correction in whole.items():
        for partition in profile.partition:
            for point in cost.measurements(partition, worker):
                yield correction.of(point, partition, worker)
    for point in profile.measurements:
        if point.worker not in corrections:
            kind = kinds.get(profile.worker[point.worker].alike)
            yield point if kind is None else kind.of(point, point.partition, point.worker)


def _warnings(
    profile: Profile, agreement: Agreement, trace: str, corrections: Mapping[str, Correction], seen: SeenFlights
) -> Iterator[str]:
    """What was corrected by which ratios; what stayed within 1 % is only counted."""
    step, same = agreement.step, 0
    said, took = fmt.seconds(step.predicted_s), fmt.seconds(step.measured_s)
    yield f"calibrated by {trace}: a step took {took}, and {said} was predicted"
    for worker, each in corrections.items():
        ratios = {"forward": each.forward, "backward": each.backward, "update": each.update}
        parts = [f"{what} {factor:.3f}x" for what, factor in ratios.items() if abs(factor - 1) >= _SAME]
        was = profile.worker[worker].allocator_share
        if each.allocator_share > was:
            parts.append(f"allocator's share {100 * was:.1f} -> {100 * each.allocator_share:.1f} %")
        parts += [f"workspace +{fmt.size(each.excess_bytes)}"] if each.excess_bytes else []
        same += not parts
        if parts:
            yield f"calibrated: {worker}: {', '.join(parts)}"
    for link in profile.links:
        found = factors(link, seen.get((link.source, link.target), {}))
        parts = [f"{factor:.3f}x at {fmt.size(size)}" for size, factor in found if abs(factor - 1) >= _SAME]
        same += bool(found) and not parts
        if parts:
            yield f"calibrated: link {link.source} to {link.target}: {', '.join(parts)}"
    if same:
        yield f"calibrated: {same} more workers and links by less than 1 %"
    used = {(each.route.source, each.route.target) for each in agreement.routes}
    unseen = [f"{source} to {target}" for source, target in sorted(used - set(seen))]
    if unseen:
        yield f"not calibrated, since nobody waited for a message there: link {', '.join(unseen)}"


def _of_reductions(seen: SeenReductions) -> Iterator[str]:
    """What was corrected of the reductions of shared stages."""
    for workers, factor in seen.items():
        if abs(factor - 1) >= _SAME:
            yield f"calibrated: all-reduce of {', '.join(sorted(workers))}: {factor:.3f}x"


def _record(
    agreement: Agreement, trace: str, corrections: Mapping[str, Correction], seen: SeenFlights
) -> dict[str, Any]:
    return {
        "trace": trace,
        "steps": agreement.steps,
        "step_predicted_s": agreement.step.predicted_s,
        "step_measured_s": agreement.step.measured_s,
        "workers": {worker: encode(each) for worker, each in corrections.items()},
        "links": [f"{source} -> {target}" for source, target in seen],
    }
