"""A profile corrected by a trace: what was measured alone is brought to what it took in a run.

    profile ──solve──▶ plan ──run──▶ trace ──calibrate──▶ profile ──solve──▶ ...

Times keep their course over micro-batch and message sizes, which a trace of one plan cannot tell, and are scaled:

    a traced worker's partitions          by their stage's ratio of measured to predicted, forward and backward apart
    its other partitions                  by its own ratio over all its stages
    like workers that were not traced     by the middle ratio of the traced ones of their kind and thread count
    links                                 by their messages
    collectives                           as their rings, by the links' correction, and by their reductions

What a worker loses between two actions above the busy shares of its messages counts as part of the action.

Memory is only ever corrected upwards; like workers that were not traced get the most of what others held:

    measured = (1 + allocator's share) * (tensors + excess)

What a CPU worker holds beyond its tensors are the holes of its heap, and those grow with all that is held: its share is
raised, so that it holds for other partitions there too. A GPU's allocator leaves hardly any: what was held above the
prediction is workspace that was not profiled. So is on a CPU what no heap's holes explain.

A link whose messages were waited for takes as long as it took them: at the sizes that were seen it says what was
measured, its other points are scaled as the sizes nearest to them. Beyond all of them it goes on as it was profiled,
scaled: a line through two sizes that lie close together would be noise. Its busy shares are such that its workers lose
after their actions what they were seen to lose: scaled, or where the profile has none, in proportion to the messages.

What a reduction took, from when all of its workers had begun it, beside what the profile says of it: an all-reduce
among these workers takes so many times as long. One that nobody has measured is added, as the profile prices it with
that factor, so that the price of other workers' reductions stays.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.formats.profile import Collective, LinkPoint
from assigner.formats.profilewarnings import other_warnings, with_warnings
from assigner.samples import Samples
from assigner.schedule.cost import CostModel, collectives_over, message_s
from assigner.schedule.orders import TOGETHER, ActionKind, counted
from assigner.schedule.program import wire
from assigner.schedule.rings import BUCKET_BYTES, factor_at
from assigner.schedule.simulate import simulated
from assigner.schedule.timing import compute_s, route_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Link, Measurement, Profile, Worker
    from assigner.machine.reference import ReferenceTimes
    from assigner.schedule.timing import Compute
    from assigner.validation.comparison import Agreement, WorkerAgreement


_Memory = tuple[float, float]
"""An allocator's share and an excess, as in `Correction`."""

_SAME = 0.01
"""A ratio nearer to 1 than this is not worth a warning."""
MOST_SHARE = 1.0
"""Holes of a heap may become as large as the tensors; more is something that does not grow with them."""
_ROUNDING = 1e-9
_BEYOND = 2.0
"""How far beyond the largest size that was seen a point says how a link goes on: any factor gives the same line."""

_SeenFlights = dict[tuple[str, str], dict[float, Samples]]
"""Of each link, by message size in bytes, the flights that were seen."""
_SIZES = (BUCKET_BYTES / 16, BUCKET_BYTES)
"""Bytes of an all-reduce that is added: of a whole bucket, and of less."""

_SeenReductions = dict[frozenset[str], float]
"""By the workers of shared stages, how many times as long as predicted their reductions took."""
_TIMED = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT
_Ends = tuple[str, str]


@dataclass(frozen=True)
class Correction:
    """What one worker's measurements are multiplied by, what is added to their workspace, and its allocator's share."""

    forward: float  # all its partitions; 1.2: it took 20 % longer than profiled
    backward: float  # the same of backwards, without what they recompute
    update: float  # the same of updates
    allocator_share: float  # at least this; 0: as it was
    excess_bytes: float  # of tensors that it held above its prediction, the allocator's share of them not counted
    forwards: Mapping[str, float]  # single partitions, by name
    backwards: Mapping[str, float]  # the same of backwards

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
    """The profile, corrected by what a run of a plan took, as `agree` has put it beside the profile's prices.

    `trace` is what to call the run's trace in the profile's warnings.
    """
    seen = _flights_seen(agreement)
    links = _corrected_links(profile, agreement, seen)
    over = replace(profile, links=links, collectives=collectives_over(profile, links))
    reduced = _reductions_seen(over, agreement)
    corrections = _corrections(over, agreement)
    of_all = _for_all(profile, corrections)
    references = {each.worker: each.traced for each in agreement.machines}
    earlier = profile.environment.get("calibrated")
    done = [*(earlier if isinstance(earlier, list) else ()), _record(agreement, trace, corrections, seen)]
    new = replace(
        profile,
        workers=tuple(_worker(each, of_all.get(each.name), references) for each in profile.workers),
        links=links,
        collectives=_corrected_collectives(over, reduced),
        measurements=tuple(_measurements(profile, corrections, of_all)),
        environment={**profile.environment, "calibrated": done},
    )
    said = _warnings(profile, agreement, trace, corrections, seen, reduced=reduced)
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


def _for_all(profile: Profile, traced: Mapping[str, Correction]) -> dict[str, Correction]:
    """By worker its own, or else what holds for its kind and thread count; without those of which none was traced."""
    alike: dict[tuple[str, int], list[Correction]] = defaultdict(list)
    for worker, correction in traced.items():
        alike[profile.worker[worker].alike].append(correction)
    kinds = {kind: _middle(some) for kind, some in alike.items()}
    return {each.name: traced.get(each.name) or kinds[each.alike] for each in profile.workers if each.alike in kinds}


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


def _worker(worker: Worker, found: Correction | None, references: Mapping[str, ReferenceTimes]) -> Worker:
    """A worker with the allocator's share that it or its kind was seen to have, and the machine of its new figures."""
    if found is None:
        return worker
    share = max(worker.allocator_share, found.allocator_share)
    return replace(worker, allocator_share=share, reference=references.get(worker.name))


def _measurements(
    profile: Profile, traced: Mapping[str, Correction], of_all: Mapping[str, Correction]
) -> Iterator[Measurement]:
    """All measurements, corrected.

    Workers of one kind share measurements, and a traced one no longer does: it gets all of its own. So that the others
    share what holds for the kind, the first of them that was not measured itself stands before all.
    """
    cost = CostModel(profile)
    own = {point.worker for point in profile.measurements}
    stands_for: dict[tuple[str, int], str] = {}
    for each in profile.workers:
        if each.name in of_all and each.name not in traced and each.name not in own:
            stands_for.setdefault(each.alike, each.name)
    for worker in (*stands_for.values(), *traced):
        for partition in profile.partition:
            for point in cost.measurements(partition, worker):
                yield of_all[worker].of(point, partition, worker)
    for point in profile.measurements:
        if point.worker not in traced:
            found = of_all.get(point.worker)
            yield point if found is None else found.of(point, point.partition, point.worker)


def _warnings(
    profile: Profile, agreement: Agreement, trace: str, corrections: Mapping[str, Correction], seen: _SeenFlights,
    *, reduced: _SeenReductions,
) -> Iterator[str]:  # fmt: skip
    """What was corrected by which ratios; what stayed within 1 % is only counted, but for reductions."""
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
        found = _factors(link, seen.get((link.source, link.target), {}))
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
    for workers, factor in reduced.items():
        if abs(factor - 1) >= _SAME:
            yield f"calibrated: all-reduce of {', '.join(sorted(workers))}: {factor:.3f}x"


def _record(
    agreement: Agreement, trace: str, corrections: Mapping[str, Correction], seen: _SeenFlights
) -> dict[str, Any]:
    return {
        "trace": trace,
        "steps": agreement.steps,
        "step_predicted_s": agreement.step.predicted_s,
        "step_measured_s": agreement.step.measured_s,
        "workers": {worker: encode(each) for worker, each in corrections.items()},
        "links": [f"{source} -> {target}" for source, target in seen],
    }


def _corrected_links(profile: Profile, agreement: Agreement, seen: _SeenFlights) -> tuple[Link, ...]:
    """The profile's links, as a run found them."""
    timed = tuple(corrected_link(link, seen.get((link.source, link.target), {})) for link in profile.links)
    found = _losses(replace(profile, links=timed), agreement)
    return tuple(replace(link, **found.get((link.source, link.target), {})) for link in timed)


def _flights_seen(agreement: Agreement) -> _SeenFlights:
    """The flights on each link by message size; those that the clocks cannot tell from nothing are left out."""
    found: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in agreement.routes:
        flights = agreement.observed.flights.get(each.route)
        if flights is not None and flights.median_s > 2 * agreement.clock_error_s:
            found[each.route.source, each.route.target][each.bytes] += flights.seconds
    return {
        link: {size: Samples(tuple(seconds)) for size, seconds in sorted(sizes.items())}
        for link, sizes in found.items()
    }


def _factors(link: Link, seen: Mapping[float, Samples]) -> list[tuple[float, float]]:
    """By size, how many times as long as profiled a message took."""
    said = {size: message_s(link.points, size) for size in seen}
    return [(size, samples.median_s / said[size]) for size, samples in seen.items() if said[size] > 0]


def corrected_link(link: Link, seen: Mapping[float, Samples]) -> Link:
    """A link whose points are scaled as the sizes nearest to them, with a point at each size that was seen."""
    found = _factors(link, seen)
    if not found:
        return link
    points = {
        point.bytes: replace(point, seconds=point.seconds * factor_at(found, point.bytes)) for point in link.points
    }
    for size, samples in seen.items():
        points[size] = LinkPoint.of(size, samples)
    (largest, factor), last = found[-1], link.points[-1]
    if largest > last.bytes:
        beyond = _BEYOND * largest
        points[beyond] = replace(last, bytes=beyond, seconds=factor * message_s(link.points, beyond))
    return replace(link, points=tuple(points[size] for size in sorted(points)))


def _losses(profile: Profile, agreement: Agreement) -> dict[_Ends, dict[str, Any]]:
    """Of each link whose messages hang on a traced action the fields that say what its sender and receiver lose."""
    plan, cost = agreement.plan, CostModel(profile)
    wiring = wire(plan, profile.edges, profile.ties)
    found: dict[_Ends, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    actions = itertools.product(range(len(wiring.lanes)), range(len(plan.stages)), _TIMED)
    for lane, n, kind in actions:
        lost = agreement.observed.behind.get((kind, n, wiring.lanes[lane].workers[n]))
        before, behind = wiring.around(kind, lane, n)
        moved = [(route, "receiver", 1) for route in before]
        moved += [(route, "sender", 0) for route in behind]
        if lost is None or not moved:
            continue
        sizes = [(route.source, route.target, route_bytes(cost, route, plan.micro_batch_size)) for route, _, _ in moved]
        said = sum(cost.message(*size)[1 + end] for size, (_, _, end) in zip(sizes, moved, strict=True))
        whole = sum(cost.transfer_s(*size) for size in sizes)
        for route, end, _ in moved:
            link = profile.link[route.source, route.target]
            share, fixed = getattr(link, f"{end}_busy"), getattr(link, f"{end}_s")
            mine = found[route.source, route.target]
            if said > 0:
                mine[f"{end}_busy"].append(min(1.0, share * lost.median_s / said))
                mine[f"{end}_s"].append(fixed * lost.median_s / said)
            elif whole > 0:
                mine[f"{end}_busy"].append(min(1.0, lost.median_s / whole))
    return {ends: {name: median(values) for name, values in mine.items()} for ends, mine in found.items()}


def _reductions_seen(profile: Profile, agreement: Agreement) -> _SeenReductions:
    """What a run says of reductions beside a profile with corrected links; what it has not timed is left out."""
    plan, cost, found = agreement.plan, CostModel(profile), defaultdict[frozenset[str], list[float]](list)
    for n, stage in enumerate(plan.stages):
        for worker in stage.workers:
            key = (ActionKind.REDUCE, n, worker)
            samples = agreement.observed.compute.get(key) if stage.replicas else None
            said = compute_s(cost, plan, key) if samples is not None else 0.0
            if samples is not None and 0 < said < math.inf and samples.median_s > 2 * agreement.clock_error_s:
                found[frozenset(stage.workers)].append(samples.median_s / said)
    return {workers: median(ratios) for workers, ratios in found.items()}


def _corrected_collectives(profile: Profile, seen: _SeenReductions) -> tuple[Collective, ...]:
    """The profile's all-reduces, as a run found them: what `_reductions_seen` says of this profile."""
    known = tuple(_times(each, seen.get(frozenset(each.workers), 1.0)) for each in profile.collectives)
    measured, cost = {frozenset(each.workers) for each in known}, CostModel(profile)
    added = (_added(cost, workers, factor) for workers, factor in seen.items() if workers not in measured)
    return (*known, *added)


def _times(collective: Collective, factor: float) -> Collective:
    points = (replace(point, seconds=point.seconds * factor) for point in collective.points)
    return replace(collective, points=tuple(points))


def _added(cost: CostModel, workers: frozenset[str], factor: float) -> Collective:
    names = tuple(sorted(workers, key=lambda name: cost.profile.worker[name].rank))
    points = tuple(LinkPoint(size, factor * cost.rings.seconds(workers, size), 0) for size in _SIZES)
    return Collective(names, points, cost.rings.backend(workers), cost.rings.busy_share(workers))
