"""Actions in `torch.profiler`: each is a range with a name of its own, in the program's order; without one, nothing."""

from __future__ import annotations

import torch
from workloads import language, make_plan, pipeline_of

from assigner.runtime.recording import ranges
from assigner.runtime.recording.ranges import range_name
from assigner.schedule.program import Action, ActionKind, Payload, Route


def test_ranges_are_there_in_the_programs_order():
    """Forwards, backwards and the update of a step, as the program has them."""
    made = language()
    names = ["tokens", "blocks.0", "blocks.1", "blocks.2", "head"]
    plan = make_plan(made, [(0, names[:2]), (0, names[2:])], micro_batches=2, schedule="interleaved")
    with pipeline_of(made, plan) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            pipeline.step(made.make_batch(8, 1))
    found = [event for event in profiler.events() if event.name.startswith("assigner: ")]
    found.sort(key=lambda event: event.time_range.start)
    first, second = "(tokens, blocks.0)", "(blocks.1, blocks.2, head)"
    order = [
        ("forward", 0, 0), ("forward", 0, 1), ("forward", 1, 0), ("forward", 1, 1),
        ("backward", 1, 1), ("backward", 1, 0), ("backward", 0, 1), ("backward", 0, 0),
    ]  # fmt: skip
    expected = [f"assigner: {kind} {stage} micro-batch {m} {(first, second)[stage]}" for kind, stage, m in order]
    assert [event.name for event in found] == [*expected, "assigner: update"]


def test_no_profiler_no_range(monkeypatch):
    """Without a profiler nothing is named."""
    monkeypatch.setattr(ranges, "range_name", None)
    made = language()
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))


def test_names_of_messages():
    """A message's range says what it carries; that of a shared parameter's gradient has no micro-batch."""
    stages = make_plan(language()).stages
    there = Route(Payload.ACTIVATION, "blocks.1", 0, "worker:0/cpu", "worker:1/cpu")
    assert (
        range_name(Action(ActionKind.SEND, 0, 3, there), stages)
        == "assigner: send activation blocks.1[0] micro-batch 3"
    )
    tie = Route(Payload.TIE, "tokens", 2, "worker:0/cpu", "worker:1/cpu")
    assert range_name(Action(ActionKind.RECEIVE, -1, -1, tie), stages) == "assigner: receive tie tokens[2]"
