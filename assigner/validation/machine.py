"""Has the machine changed since it was profiled? Reference times of then and of the run, and what they make of a step.

    predicted ─ the machine as it was in the run ─▶ predicted for that ─ the model's own error ─▶ measured

A worker's forwards, backwards and updates are taken to slow down as its reference work does, computing and copying in
equal parts; messages inside a host as its reference message. Of messages between hosts the reference says nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.formats.profilewarnings import busy_text, starved_text
from assigner.location import Location, rank_of
from assigner.machine.reference import ReferenceTimes
from assigner.schedule.orders import TOGETHER, computes_of
from assigner.schedule.timing import Instead, compute_s, route_bytes, step_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.formats.trace import Trace
    from assigner.schedule.cost import CostModel
    from assigner.schedule.program import Route


@dataclass(frozen=True)
class MachineAgreement:
    """One worker's machine in the run, against what it was when it was profiled: its reference times."""

    worker: str
    profiled: ReferenceTimes
    traced: ReferenceTimes

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as long as then computing, copying and messages take; 1.09: 9 % longer."""
        then, now = self.profiled, self.traced
        return {
            "compute": now.compute_s / then.compute_s, "memory": now.memory_s / then.memory_s,
            "messages": now.message_s / then.message_s,
        }  # fmt: skip

    @property
    def pace(self) -> float:
        """How many times as long its forwards, backwards and updates are taken to last."""
        return (self.ratios["compute"] + self.ratios["memory"]) / 2


def machines(profile: Profile, trace: Trace) -> tuple[MachineAgreement, ...]:
    """The workers of a trace whose reference times are known of both; none where one of them lacks any."""
    found = []
    for each in trace.workers:
        then, now = profile.worker[each.worker].reference, each.reference
        if then is None or now is None or min(then.compute_s, then.memory_s, then.message_s) <= 0:
            return ()
        found.append(MachineAgreement(each.worker, then, now))
    return tuple(found)


def paced_step_s(
    plan: Plan, cost: CostModel, routes: Iterable[Route], changed: Sequence[MachineAgreement]
) -> float | None:
    """The predicted step on the machines as they were in the run, in seconds; None: nobody looked at them."""
    if not changed:
        return None
    pace = {each.worker: each for each in changed}
    keys = [key for key in computes_of(plan) if key[0] not in TOGETHER]
    host = {name: worker.host for name, worker in cost.profile.worker.items()}
    flights = {
        route: cost.transfer_s(route.source, route.target, route_bytes(cost, route, plan.micro_batch_size))
        * max(pace[end].ratios["messages"] for end in (route.source, route.target))
        for route in routes
        if host[route.source] == host[route.target]
    }
    return step_s(
        plan, cost,
        instead=Instead(seconds={key: compute_s(cost, plan, key) * pace[key[2]].pace for key in keys}, flights=flights),
    )  # fmt: skip


def disturbances(profile: Profile, trace: Trace) -> tuple[str, ...]:
    """What other programs did to the profile and to the run, and other settings to their pace, a sentence each."""
    busy = busy_text(profile)
    told = _other_precision(profile, trace), busy and f"the profile was {busy}", busy_run(trace)
    return tuple(filter(None, told))


def _other_precision(profile: Profile, trace: Trace) -> str | None:
    """Where the run computed float32 in another precision than was profiled, on devices that it had."""
    texts = [found.environment.get("float32") for found in (profile, trace)]
    if not all(isinstance(each, str) for each in texts):
        return None  # an older file
    devices = {Location.parse(worker.worker).device.partition(":")[0] for worker in trace.workers}
    begin = tuple("cpu" if each == "cpu" else "cud" for each in devices)
    then, now = (", ".join(part for part in str(each).split(", ") if part.startswith(begin)) for each in texts)
    return None if then == now else f"float32 was computed as {then} in the profile, and as {now} in the run"


def busy_run(*traces: Trace) -> str | None:
    """Where and how much other programs disturbed runs; None: nowhere by much."""
    starved: dict[int, float] = defaultdict(float)
    for each in (worker for trace in traces for worker in trace.workers):
        starved[rank_of(each.worker)] = max(each.starved, starved[rank_of(each.worker)])
    told = starved_text(starved)
    return None if told is None else f"the run was on a busy machine: {told}"
