"""What a step sends over each link, the busiest link first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.report.sheet import Column, Line, Report, Sheet
from assigner.schedule.program import Payload

if TYPE_CHECKING:
    from assigner.formats.plan import Prediction, TransferPrediction
    from assigner.schedule.program import Program


def transfers(now: Prediction, program: Program | None = None, *, most: int | None = None) -> Report:
    """A row for each link that is used; nothing where nothing is sent.

    Args:
        now: What the simulator says.
        program: Of the same plan: what the messages are, and how many.
        most: Links that are shown, the busiest; None: all.
    """
    if not now.transfers:
        return ()
    time = fmt.time_unit(*(each.seconds for each in now.transfers))
    size = fmt.byte_unit(*(each.bytes for each in now.transfers))
    rows = tuple(
        (
            each.source, each.target, *(_messages(each, program) if program else ()), size.show(each.bytes),
            time.show(each.seconds), fmt.points(fmt.against(each.seconds, now.step_s)),
        )
        for each in sorted(now.transfers, key=lambda each: -each.seconds)[:most]
    )  # fmt: skip
    columns = (
        Column("from", "name"), Column("to", "name"),
        *((Column("what", "text"), Column("messages")) if program else ()),
        Column(size.name), Column(f"on the link {time.name}"), Column("of the step %"),
    )  # fmt: skip
    left_out = len(now.transfers) - len(rows)
    more = (Line(f"and {fmt.plural(left_out, 'link')} that are less busy"),) if left_out else ()
    return (Sheet("messages of a step, by link", columns, rows), *more)


def _messages(link: TransferPrediction, program: Program) -> tuple[str, str]:
    """Payloads and partitions of a link's messages, and how many a step has."""
    mine = [route for route in program.routes if (route.source, route.target) == (link.source, link.target)]
    what = ", ".join(dict.fromkeys(f"{route.payload} of {route.partition}" for route in mine))
    count = sum(1 if route.payload is Payload.TIE else program.plan.micro_batches for route in mine)
    return what, fmt.count(count)
