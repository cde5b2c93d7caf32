"""Programs that compute the model's output and nothing else."""

from __future__ import annotations

import pytest
from workloads import graph_of, make_plan, skips

from assigner.errors import FormatError
from assigner.schedule.program import ActionKind, Payload, build_forward_program

STAGES = [(0, ["parts.0"]), (1, ["parts.1"]), (0, ["parts.2"]), (2, ["last"])]


def test_forwards_stage_by_stage():
    """Every worker takes all micro-batches through one stage after another, receives first, sends behind."""
    made = skips()
    program = build_forward_program(make_plan(made, STAGES, micro_batches=2), graph_of(made).edges)
    computed = [(a.stage, a.micro_batch) for a in program.actions["worker:0/cpu"] if a.kind is ActionKind.FORWARD]
    assert computed == [(0, 0), (0, 1), (2, 0), (2, 1)]
    kinds = [a.kind for a in program.actions["worker:1/cpu"]]
    assert kinds == [ActionKind.RECEIVE, ActionKind.FORWARD, ActionKind.SEND] * 2
    assert {a.kind for actions in program.actions.values() for a in actions} == {
        ActionKind.RECEIVE,
        ActionKind.FORWARD,
        ActionKind.SEND,
    }


def test_only_activations_travel():
    """There is no way back, and each value goes once to each worker that reads it."""
    made = skips()
    program = build_forward_program(make_plan(made, STAGES), graph_of(made).edges)
    assert {route.payload for route in program.routes} == {Payload.ACTIVATION}
    sends = [a for actions in program.actions.values() for a in actions if a.kind is ActionKind.SEND]
    receives = [a for actions in program.actions.values() for a in actions if a.kind is ActionKind.RECEIVE]
    assert len({(a.route, a.micro_batch) for a in sends}) == len(sends) == 4 * len(program.routes)
    assert {(a.route, a.micro_batch) for a in sends} == {(a.route, a.micro_batch) for a in receives}


def test_any_schedule_has_it():
    """1F1B and interleaved plans run their forwards in the same order; a plan against the edges is refused."""
    made = skips()
    stages = [(0, ["parts.0"]), (1, ["parts.1", "parts.2"]), (2, ["last"])]
    edges = graph_of(made).edges
    plans = [make_plan(made, stages, schedule=name) for name in ("gpipe", "1f1b", "interleaved")]
    assert len({str(build_forward_program(plan, edges).actions) for plan in plans}) == 1
    with pytest.raises(FormatError, match="which runs later"):
        build_forward_program(make_plan(made, stages[::-1]), edges)
