"""Slices: what an action is called, its colour, its track, and what is said of it when it is clicked.

Colours are names that chrome://tracing knows; Perfetto makes its own from the slice's name without its numbers. So the
same kind of action has the same colour everywhere in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.schedule.orders import TOGETHER
from assigner.validation.observed import traced_route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.formats.plan import Plan
    from assigner.formats.trace import TracedMessage
    from assigner.validation.spans import Span

COLOURS = {
    "forward": "rail_response",
    "backward": "rail_load",
    "backward_input": "rail_load",
    "backward_weight": "good",
    "recomputing backward": "thread_state_running",
    "update": "detailed_memory_dump",
    "send": "thread_state_iowait",
    "receive": "grey",
    "reduce": "rail_animation",
    "gather": "rail_idle",
}
"""By kind: blue, green, green, dark green, light green, violet, orange, grey, olive, light blue."""

Key = tuple[str, str, int, int, int, str, str, int]
"""What makes an action the same one on both sides: worker, kind, step, stage, micro-batch, payload, output."""


def key(span: Span) -> Key:
    """The key of an action."""
    what = (span.message.payload, span.message.partition, span.message.output) if span.message else ("", "", 0)
    peer = f" {span.message.peer}" if span.message else ""
    return span.worker, span.kind + peer, span.step, span.stage, span.micro_batch, *what


def slice_name(span: Span, plan: Plan) -> str:
    """`forward 3`, `backward 3 (+remat)`, `send 3: activation block.2 -> worker:1`, `update`."""
    number = f" {span.micro_batch}" if span.micro_batch >= 0 else ""
    if span.message is not None:
        to = "->" if span.kind == "send" else "<-"
        return f"{span.kind}{number}: {span.message.payload} {output_name(span.message)} {to} {rank(span.message.peer)}"
    several = span.stage >= 0 and (len(plan.held[span.worker]) > 1 or span.kind in TOGETHER)
    where = f" of stage {span.stage}" if several else ""
    return f"{span.kind}{number}{where}{' (+remat)' if span.recomputes else ''}"


def output_name(message: TracedMessage) -> str:
    """The partition that makes the value, with the output's number where it is not the first."""
    return f"{message.partition}:{message.output}" if message.output else message.partition


def rank(worker: str) -> str:
    """`worker:1` of `worker:1/cpu`."""
    return worker.partition("/")[0]


def category(span: Span, side: str) -> str:
    """What the slice can be filtered by: its kind or payload, and its side."""
    return f"{span.message.payload if span.message else span.kind},{side}"


def colour(span: Span) -> str:
    """The name of its colour."""
    return COLOURS["recomputing backward" if span.recomputes else span.kind]


def track(span: Span) -> tuple[str, int]:
    """The name of its track, and where the track stands: compute above waiting above reductions above each link."""
    if span.kind in TOGETHER:
        return "adds up gradients" if span.kind == "reduce" else "hands out parameters", 2
    if span.message is None:
        return "compute", 0
    if span.kind == "receive":
        return "waits for messages", 1
    return f"sends -> {rank(span.message.peer)}", 3


def details(span: Span, plan: Plan, other_s: Mapping[Key, float], other: str) -> dict[str, Any]:
    """What is said of an action when it is clicked.

    Args:
        span: The action.
        plan: What was run.
        other_s: Seconds of the same actions on the other side, by key; of a reduction, of all its buckets.
        other: The other side's name.
    """
    found: dict[str, Any] = {"seconds": _exact(span.seconds)}
    seconds = other_s.get(key(span))
    if seconds is not None:
        found[f"{other}_seconds"] = _exact(seconds)
    if span.micro_batch >= 0:
        found["micro_batch"] = span.micro_batch
    if span.stage >= 0:
        found["stage"] = span.stage
    if span.message is None:
        found |= _computed(span, plan)
    else:
        found |= _moved(span, span.message)
    return found


def _computed(span: Span, plan: Plan) -> dict[str, Any]:
    if span.stage < 0:
        names = [name for n in plan.held[span.worker] for name in plan.stages[n].partitions]
        return {"partitions": fmt.ranges(names)}
    stage = plan.stages[span.stage]
    again = {"rematerialised": fmt.ranges(stage.rematerialise)} if span.recomputes else {}
    return {"partitions": fmt.ranges(stage.partitions), **again}


def _moved(span: Span, message: TracedMessage) -> dict[str, Any]:
    route = traced_route(message, span.worker, sent=span.kind == "send")
    found = {
        "payload": message.payload, "output": f"{message.partition}:{message.output}", "bytes": message.bytes,
        "from": route.source, "to": route.target,
    }  # fmt: skip
    return found | ({"queued_seconds": _exact(span.queued_s)} if span.kind == "send" else {})


def _exact(seconds: float) -> float:
    """Without the digits that float arithmetic leaves behind."""
    return float(f"{seconds:.9g}")
