"""Arrows: every message from its send to where it was waited for, and on to the action that needed it.

A viewer ties an arrow's points to the slices around them, so each lies inside of its slice, half a microsecond from an
edge:

    send         ├·──────┤ ╲
    receive           ├─────·┤ ╲         s (start) at the send, t (step) at the receive, f (finish) at the forward
    forward                  ├·────┤

An arrow runs forward in time. Where the clocks of two workers disagree by more than a message took, or a send was noted
late, a point that would lie before an earlier one is left out, and the whole arrow where that leaves its send alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from assigner.export.traceevents.tracks import SlicePlace
    from assigner.schedule.program import Route
    from assigner.validation.spans import Span

_Message = tuple[int, int, "Route | None"]
_NEEDED_BY = {"activation": "forward", "gradient": "backward", "tie": "update"}


def arrows(drawn: Sequence[tuple[Span, SlicePlace]], first: int) -> Iterator[dict[str, Any]]:
    """The points of all arrows of one side.

    Args:
        drawn: Its spans, where they lie.
        first: The number of the first arrow.
    """
    sends: dict[_Message, tuple[Span, SlicePlace]] = {}
    computes: dict[tuple[str, int, str, int, int], SlicePlace] = {}
    for span, place in drawn:
        if span.message is None:
            computes[span.worker, span.step, span.kind, span.stage, span.micro_batch] = place
        elif span.kind == "send":
            sends[_message(span)] = span, place
    for span, place in drawn:
        if span.kind != "receive" or _message(span) not in sends:
            continue
        sent, start = sends[_message(span)]
        points = _points(start, place, _need(span, computes))
        if len(points) < 2:
            continue
        assert sent.message is not None
        for n, (at, on) in enumerate(points):
            last = n == len(points) - 1
            yield {
                "ph": "s" if n == 0 else "f" if last else "t", "id": first, "name": sent.message.payload,
                "cat": "message", "pid": on.pid, "tid": on.tid, "ts": at, **({"bp": "e"} if last else {}),
            }  # fmt: skip
        first += 1


def _message(span: Span) -> _Message:
    return span.step, span.micro_batch, span.route


def _need(span: Span, computes: Mapping[tuple[str, int, str, int, int], SlicePlace]) -> SlicePlace | None:
    """Where the action lies that a received message was for."""
    assert span.message is not None
    return computes.get((span.worker, span.step, _NEEDED_BY[span.message.payload], span.stage, span.micro_batch))


def _points(send: SlicePlace, receive: SlicePlace, need: SlicePlace | None) -> list[tuple[float, SlicePlace]]:
    points = [(send.start + 0.5, send)]
    for wanted, place in ((receive.end - 0.5, receive), *(((need.start + 0.5, need),) if need else ())):
        at = max(wanted, points[-1][0])
        if at < place.end:
            points.append((at, place))
    return points
