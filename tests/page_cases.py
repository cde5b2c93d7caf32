"""Plans for the tests of the HTML report: small ones, a hostile one, a large one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from builders import make_plan, make_profile
from made_runs import run_in, slower_worker

from assigner.formats.plan import ProfileReference
from assigner.formats.solverreport import Baseline, Candidate, SolverReport, WhatIf
from assigner.report.page.shown import Shown, shown
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import predict, priced, simulated
from assigner.validation.observed import rehearsed

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.formats.trace import WorkerTrace

NASTY = "</script><img src=x onerror='window.hacked=1'><b>&amp;\u2028"


def page_profile() -> Profile:
    """Three unlike workers whose messages keep them busy."""
    return make_profile(work=[2e-3, 3e-3, 1e-3, 4e-3, 2e-3, 2e-3], slowness=[1.0, 2.0, 1.5], batch=16, busy=0.2)


def page_plan(profile: Profile) -> Plan:
    """Three stages under 1f1b, one partition rematerialised."""
    made = make_plan(profile, [(0, ["p0", "p1", "p2"]), (1, ["p3"]), (2, ["p4", "p5"])])
    stages = (replace(made.stages[0], rematerialise=("p1",)), *made.stages[1:])
    return replace(made, schedule="1f1b", stages=stages)


def searched(plan: Plan, profile: Profile, **changes) -> Plan:
    """The plan as a search leaves it: priced, nearly proven, with all that it found beside."""
    step = predict(plan, profile).step_s
    return replace(
        priced(plan, profile), profile=ProfileReference("mine.json", "aa"),
        baselines=(Baseline("equal split", 2 * step),),
        solver=SolverReport("HiGHS", "1", "optimal", step, 0.99 * step, 0.01, 1.0),
        candidates=(Candidate("1f1b", 4, 4, step, 0.99 * step, "chosen"),),
        what_if=(WhatIf("link", "a wider link", step / 2, step / 2),), **changes,
    )  # fmt: skip


def read_back(data: dict) -> list[tuple]:
    """(worker, kind, stage, micro-batch, start, end) of every action and message, from the page's tables."""
    line = data["timeline"]
    found = []
    for job, m, start in line["events"]:
        worker, kind, stage, seconds, *_ = line["jobs"][job]
        found.append((line["workers"][worker], kind, stage, m, start, start + seconds))
    for route, m, start in line["messages"]:
        payload, _, _, source, _, _, seconds = line["routes"][route]
        found.append((line["workers"][source], payload, None, m, start, start + seconds))
    return found


def make_pages() -> list[Shown]:
    """Two plans of a model with a hostile partition name, the second one beside a run that was 10 % slower."""
    profile = make_profile(work=[2e-3, 3e-3, 1e-3, 4e-3], slowness=[1.0, 1.5, 1.2], batch=16, busy=0.1)
    names = {"p1": NASTY}
    profile = replace(
        profile,
        partitions=tuple(replace(each, name=names.get(each.name, each.name)) for each in profile.partitions),
        edges=tuple(
            replace(each, source=names.get(each.source, each.source), target=names.get(each.target, each.target))
            for each in profile.edges
        ),
        measurements=tuple(
            replace(each, partition=names.get(each.partition, each.partition)) for each in profile.measurements
        ),
        warnings=(NASTY,),
    )
    equal = make_plan(profile, [(0, ["p0", NASTY]), (1, ["p2"]), (2, ["p3"])])
    plan = make_plan(profile, [(0, ["p0", NASTY]), (2, ["p2", "p3"])], micro_batches=8)
    stages = (replace(plan.stages[0], rematerialise=(NASTY,)), plan.stages[1])
    plan = replace(
        priced(replace(plan, schedule="1f1b", stages=stages), profile), baselines=(Baseline(NASTY, 0.3),),
        solver=SolverReport("HiGHS", "1.0", "optimal", 0.2, 0.19, 0.05, 0.5, {"note": NASTY}),
        candidates=(Candidate("1f1b", 8, 2, 0.2, 0.19, "chosen"), Candidate("gpipe", 4, 4, None, 0.25, NASTY)),
    )  # fmt: skip
    slower = profile
    for rank in range(3):
        slower = slower_worker(slower, rank, forward=1.1, backward=1.1)
    everything = replace(plan, stages=tuple(replace(each, rematerialise=each.partitions) for each in plan.stages))
    always = replace(run_in(profile, everything), stages=plan.stages, remat="always")
    runs = [("run.json", run_in(slower, plan, steps=2)), ("always.json", always)]
    return [shown("equal.json", equal, profile), shown(NASTY, plan, profile, runs)]


def big_page() -> Shown:
    """16 workers x 32 micro-batches."""
    rng = random.Random(1)
    work = [rng.uniform(1e-3, 5e-3) for _ in range(32)]
    profile = make_profile(work=work, slowness=[rng.choice([1.0, 1.7]) for _ in range(16)], batch=64)
    plan = make_plan(profile, [(w, [f"p{2 * w}", f"p{2 * w + 1}"]) for w in range(16)], micro_batches=32)
    plan = replace(plan, schedule="1f1b")
    cost = CostModel(profile)
    trace = rehearsed(simulated(plan, cost), cost, steps=3)

    def disturbed(worker: WorkerTrace) -> WorkerTrace:
        """No two times alike, and memory read after each action."""
        actions = (
            replace(each, end_s=each.end_s + rng.uniform(0, 1e-4), memory_bytes=rng.uniform(1e8, 9e8))
            for each in worker.actions
        )
        return replace(worker, actions=tuple(actions))

    trace = replace(trace, workers=tuple(map(disturbed, trace.workers)))
    return shown("big.json", plan, profile, [("run.json", trace)])
