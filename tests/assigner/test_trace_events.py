"""What is written for Perfetto keeps the format's rules, and says what the simulator and the trace say."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_plan, make_profile, random_chain
from made_runs import run_in, slower_worker
from trace_event_rules import Read, read_trace_events

from assigner.errors import UsageError
from assigner.export.traceevents import save_trace_events, trace_events
from assigner.formats.plan import Plan
from assigner.formats.profile import Profile, Tie
from assigner.formats.trace import Trace, load_trace
from assigner.schedule.cost import CostModel
from assigner.schedule.occupancy import memory_over_time
from assigner.schedule.program import ActionKind
from assigner.schedule.simulate import simulated, summary
from assigner.validation.spans import Spans, measured_spans, predicted_spans

MIB = 2**20
PROFILE = make_profile(work=[2e-3] * 6, slowness=[1.0, 1.5, 1.0], bandwidth=2e8, edge_bytes=2e5)
PLAN = make_plan(PROFILE, [(0, ["p0", "p1"]), (1, ["p2"]), (2, ["p3", "p4", "p5"])], micro_batches=8)
RECORDED = Path(__file__).parents[1] / "recorded" / "unet_two_ranks.json"


def written(*sides: Spans, **more) -> Read:
    return read_trace_events(json.dumps(trace_events(sides, **more)))


def predicted(profile: Profile = PROFILE, plan: Plan = PLAN) -> Spans:
    cost = CostModel(profile)
    return predicted_spans(simulated(plan, cost), cost)


def remat(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(each, rematerialise=each.partitions[:1]) for each in plan.stages))


SKIPS = make_profile(work=[2e-3] * 4, slowness=[1.0] * 3, edges=[(0, 1), (1, 2), (2, 3), (0, 2), (0, 3), (1, 3)])
TIED = replace(PROFILE, ties=(Tie("wte", ("p0", "p5"), 8e5), Tie("wpe", ("p0", "p2", "p5"), 1e5)))
SLOW_LINK = make_profile(work=[2e-3] * 6, slowness=[1.0, 1.5, 1.0], bandwidth=3e6, edge_bytes=2e5)
NO_TIME = make_profile(work=[1e-9] * 6, slowness=[1.0, 1.5, 1.0], bandwidth=1e15, latency=0.0)
TWICE = replace(
    make_plan(PROFILE, [(0, ["p0"]), (1, ["p1"]), (0, ["p2", "p3"]), (1, ["p4", "p5"])]), schedule="interleaved"
)
CASES = {
    "gpipe": (PROFILE, PLAN),
    "1f1b": (PROFILE, replace(PLAN, schedule="1f1b")),
    "remat": (PROFILE, remat(PLAN)),
    "two stages a worker": (PROFILE, TWICE),
    "edges that skip stages": (SKIPS, make_plan(SKIPS, [(0, ["p0"]), (1, ["p1", "p2"]), (2, ["p3"])])),
    "shared parameters": (TIED, replace(PLAN, schedule="1f1b")),
    "a link that is slower than its workers": (SLOW_LINK, PLAN),
    "actions shorter than the grid": (NO_TIME, PLAN),
    "one worker": (PROFILE, make_plan(PROFILE, [(0, [f"p{n}" for n in range(6)])])),
    "a random chain": (
        random_chain(3, partitions=7, workers=4, busy=0.3),
        make_plan(
            random_chain(3, partitions=7, workers=4), [(3, ["p0", "p1"]), (1, ["p2", "p3", "p4"]), (0, ["p5", "p6"])]
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_formats_rules_are_kept(case: str) -> None:
    """Any schedule, any graph: slices of a track do not cross, arrows run forward from slice to slice."""
    profile, plan = CASES[case]
    cost = CostModel(profile)
    timeline = simulated(plan, cost)
    program, said = timeline.program, summary(timeline, cost)
    measured = measured_spans(run_in(slower_worker(profile, 0, forward=1.3), plan), plan, step=1)
    seen = written(predicted_spans(timeline, cost), measured, memory=memory_over_time(timeline, cost))
    actions = [action for mine in program.actions.values() for action in mine]
    messages = sum(action.kind is ActionKind.SEND for action in actions)
    assert len(seen.arrows) == 2 * messages
    for side in ("predicted", "measured"):
        slices = {key: found for key, found in seen.slices.items() if key[0].endswith(side)}
        assert sum(len(found) for (_, track), found in slices.items() if "sends" in track) == messages
        assert sum(len(found) for (_, track), found in slices.items() if "waits" in track) == messages
    for worker in said.workers:
        found = seen.slices[f"{worker.worker} predicted", "compute"]
        assert sum(each["args"]["seconds"] for each in found) == pytest.approx(worker.compute_s, rel=1e-6)
        assert len(found) == sum(
            each.kind in ("forward", "backward", "update") for each in program.actions[worker.worker]
        )
        drawn = 1e-6 * sum(each["dur"] for each in found)
        assert drawn == pytest.approx(worker.compute_s, abs=1e-6 * len(found))


def test_slices_lie_on_whole_microseconds() -> None:
    """No viewer rounds those; what they leave out stands in the arguments."""
    profile = random_chain(5, partitions=4, workers=2)
    seen = written(predicted(profile, make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2", "p3"])])))
    for each in (each for slices in seen.slices.values() for each in slices):
        assert (type(each["ts"]), type(each["dur"])) == (int, int)
        assert each["dur"] == pytest.approx(1e6 * each["args"]["seconds"], abs=1.01)


def test_predicted_stands_above_measured_worker_by_worker() -> None:
    """Compute above waiting above each link, and the whole steps on top."""
    seen = written(predicted(), measured_spans(run_in(PROFILE, PLAN), PLAN, step=2))
    assert seen.order == [
        "steps",
        *(f"{worker} {side}" for worker in PLAN.workers for side in ("predicted", "measured")),
    ]
    assert seen.threads["steps"] == ["predicted", "measured"]
    assert seen.threads["worker:1/cpu predicted"] == [
        "compute", "waits for messages", "sends -> worker:0", "sends -> worker:2",
    ]  # fmt: skip
    names = [each["name"] for side in ("predicted", "measured") for each in seen.slices["steps", side]]
    assert names == ["step: 170 ms predicted", "step 2: 170 ms measured"]


def test_slices_say_what_they_are() -> None:
    """Names with the micro-batch, the stage where a worker has several, remat, the value and the worker it goes to."""
    plan = remat(PLAN)
    slices = written(predicted(plan=plan)).slices
    names = [each["name"] for each in slices["worker:1/cpu predicted", "compute"]]
    assert names[0] == "forward 0"
    assert names[-2:] == ["backward 0 (+remat)", "update"]
    sends = slices["worker:1/cpu predicted", "sends -> worker:2"]
    assert sends[3]["name"] == "send 3: activation p2 -> worker:2"
    assert sends[3]["args"] == {
        "seconds": pytest.approx(1.17e-3, rel=0.01), "micro_batch": 3, "stage": 1, "payload": "activation",
        "output": "p2:0", "bytes": 2e5, "from": "worker:1/cpu", "to": "worker:2/cpu", "queued_seconds": 0.0,
    }  # fmt: skip
    backward = slices["worker:2/cpu predicted", "compute"][-2]["args"]
    assert backward["partitions"] == "p3-5 (3)"
    assert backward["rematerialised"] == "p3"
    twice = written(predicted(plan=TWICE)).slices["worker:1/cpu predicted", "compute"]
    assert twice[-2]["name"] == "backward 0 of stage 1"


def test_like_actions_have_like_colours() -> None:
    """One colour for each kind, on both sides, and none for two kinds."""
    seen = written(predicted(plan=remat(PLAN)), measured_spans(run_in(PROFILE, PLAN), PLAN, step=0))
    colours: dict[str, set[str]] = {}
    for (process, _), slices in seen.slices.items():
        for each in slices if process != "steps" else ():
            colours.setdefault(each["name"].split()[0] + ("+" if "+remat" in each["name"] else ""), set()).add(
                each["cname"]
            )
    assert sorted(colours) == ["backward", "backward+", "forward", "receive", "send", "update"]
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(colours)


def test_arrows_lead_to_the_action_that_needed_the_message() -> None:
    """From send to receive, then an activation to its forward, a gradient to its backward, a tie to the update."""
    arrows = written(predicted(TIED)).arrows
    needed = {"activation": "forward", "gradient": "backward"}
    for sent, received, used in arrows:
        payload = sent["args"]["payload"]
        assert sent["name"].startswith("send")
        assert received["name"].startswith("receive")
        for key in ("payload", "output", "from", "to", "bytes"):
            assert sent["args"][key] == received["args"][key]
        if payload == "tie":
            assert used["name"] == "update"
        else:
            assert used["name"] == f"{needed[payload]} {sent['args']['micro_batch']}"
            assert used["args"]["stage"] == received["args"]["stage"]
        assert used["ts"] >= received["ts"] - 20  # where several come at once each takes a microsecond at least
    assert {sent["args"]["payload"] for sent, *_ in arrows} == {"activation", "gradient", "tie"}


def test_each_side_says_what_the_other_took() -> None:
    """A slice of a slow worker's forward has both times."""
    measured = measured_spans(run_in(slower_worker(PROFILE, 1, forward=1.5), PLAN), PLAN, step=0)
    seen = written(predicted(), measured)
    said = seen.slices["worker:1/cpu predicted", "compute"][0]["args"]
    took = seen.slices["worker:1/cpu measured", "compute"][0]["args"]
    assert said["measured_seconds"] == took["seconds"] == pytest.approx(1.5 * said["seconds"])
    assert took["predicted_seconds"] == said["seconds"]
    assert "measured_seconds" not in written(predicted()).slices["worker:1/cpu predicted", "compute"][0]["args"]


def test_memory_counters_reach_the_simulated_peak() -> None:
    """The parts add up to the whole at every moment, and the highest is the worker's peak."""
    cost = CostModel(PROFILE)
    timeline = simulated(PLAN, cost)
    held = memory_over_time(timeline, cost)
    seen = written(predicted_spans(timeline, cost), memory=held, capacity={"worker:0/cpu": 3 * 2**30})
    for each in held:
        parts = seen.counters[f"{each.worker} predicted", "memory by use MiB"]
        whole = seen.counters[f"{each.worker} predicted", "memory MiB"]
        assert [event["ts"] for event in parts] == [event["ts"] for event in whole]
        for part, total in zip(parts, whole, strict=True):
            assert sum(part["args"].values()) == pytest.approx(total["args"]["held"], abs=0.01)
        assert max(event["args"]["held"] for event in whole) == pytest.approx(each.peak.total / MIB, abs=1e-3)
        assert list(parts[0]["args"]) == ["state", "activations", "workspace", "messages"]


def test_measured_memory_stands_where_it_was_read() -> None:
    """At the ends of the actions that have a reading."""
    trace = run_in(PROFILE, PLAN, steps=1)
    first = trace.workers[0]
    read = tuple(replace(each, memory_bytes=5 * MIB) if each.kind == "forward" else each for each in first.actions)
    trace = replace(trace, workers=(replace(first, actions=read), *trace.workers[1:]))
    seen = written(measured_spans(trace, PLAN, step=0))
    found = seen.counters["worker:0/cpu measured", "memory MiB"]
    ends = [each["ts"] + each["dur"] for each in seen.slices["worker:0/cpu measured", "compute"][:8]]
    assert [event["ts"] for event in found] == ends
    assert {event["args"]["held"] for event in found} == {5.0}
    assert set(seen.counters) == {("worker:0/cpu measured", "memory MiB")}


def shifted(trace: Trace, worker: int, by_s: float) -> Trace:
    """The trace with one worker's clock off."""
    mine = trace.workers[worker]
    moved = tuple(replace(each, start_s=each.start_s + by_s, end_s=each.end_s + by_s) for each in mine.actions)
    workers = (*trace.workers[:worker], replace(mine, actions=moved), *trace.workers[worker + 1 :])
    return replace(trace, workers=workers)


@pytest.mark.parametrize("by_s", [-5e-2, -1e-3, 1e-3])
def test_clocks_that_disagree_turn_no_arrow_round(by_s: float) -> None:
    """A worker whose clock is early begins below 0: everything moves, and what would run backwards is left out."""
    seen = written(predicted(), measured_spans(shifted(run_in(PROFILE, PLAN), 1, by_s), PLAN, step=1))
    complete = sum(len(slices) for (process, track), slices in seen.slices.items() if "sends" in track)
    assert len(seen.arrows) == complete if by_s > 0 else len(seen.arrows) <= complete
    (start,) = (each["ts"] for each in seen.slices["steps", "predicted"])
    (same,) = (each["ts"] for each in seen.slices["steps", "measured"])
    assert start == same


def test_actions_that_overlap_get_a_track_of_their_own() -> None:
    """As a device that still computes when its next action has begun."""
    trace = run_in(PROFILE, PLAN, steps=1)
    longer = tuple(
        replace(each, end_s=each.end_s + 2e-3) if each.kind == "forward" and each.micro_batch == 0 else each
        for each in trace.workers[0].actions
    )
    trace = replace(trace, workers=(replace(trace.workers[0], actions=longer), *trace.workers[1:]))
    seen = written(measured_spans(trace, PLAN, step=0))
    assert [each["name"] for each in seen.slices["worker:0/cpu measured", "compute (2)"]] == ["forward 1"]


def test_a_recorded_run_keeps_the_rules() -> None:
    """A trace that two real ranks wrote, one step and all of it: every message has its arrow."""
    trace = load_trace(RECORDED)
    plan = Plan(
        workload=trace.workload, stages=trace.stages, schedule=trace.schedule, micro_batches=trace.micro_batches,
        micro_batch_size=trace.micro_batch_size,
    )  # fmt: skip
    for step, count in ((1, 1), (None, 2)):
        seen = written(measured_spans(trace, plan, step=step))
        assert len(seen.arrows) == count * 6 * 4
        assert len(seen.slices["steps", "measured"]) == count
        assert sum(len(found) for (_, track), found in seen.slices.items() if track == "compute") == count * 2 * 9
        assert len(seen.counters) == 2


def test_what_is_known_stands_beside_it() -> None:
    """Files, workload and step times."""
    document = trace_events([predicted()], about={"plan": "plan.json"})
    assert document["otherData"]["plan"] == "plan.json"
    assert document["otherData"]["made_by"].startswith("assigner ")
    assert document["otherData"]["predicted_step_seconds"] == [pytest.approx(0.17, abs=1e-3)]


@pytest.mark.long
def test_sixteen_workers_and_32_micro_batches_stay_small(tmp_path: Path) -> None:
    """Both sides with memory: below 4 MB, and below 300 kB packed."""
    profile = make_profile(work=[2e-3] * 16, slowness=[1 + 0.1 * n for n in range(16)], batch=64)
    plan = replace(make_plan(profile, [(n, [f"p{n}"]) for n in range(16)], micro_batches=32), schedule="1f1b")
    cost = CostModel(profile)
    timeline = simulated(plan, cost)
    sides = [predicted_spans(timeline, cost), measured_spans(run_in(profile, plan, steps=1), plan, step=0)]
    document = trace_events(sides, memory_over_time(timeline, cost))
    assert save_trace_events(document, tmp_path / "both.json") < 4e6
    assert save_trace_events(document, tmp_path / "both.json.gz") < 3e5
    text = gzip.decompress((tmp_path / "both.json.gz").read_bytes()).decode()
    assert text == (tmp_path / "both.json").read_text()
    assert len(read_trace_events(text).arrows) == 2 * 2 * 15 * 32


def test_a_file_is_replaced_by_force_alone(tmp_path: Path) -> None:
    """And the same document gives the same bytes, packed or not."""
    document = trace_events([predicted()])
    path = tmp_path / "step.json.gz"
    save_trace_events(document, path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        save_trace_events(document, path)
    save_trace_events(document, path, force=True)
    assert path.read_bytes() == before
