"""The measured all-reduces of a profile: how long each took, and how far that is from what its links say of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.sheet import Column, Report, Sheet
from assigner.schedule.cost import CostModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import Collective, Profile

ROW_LIMIT = 16
"""Sets of workers that are listed."""


def collectives(profile: Profile, *, everything: bool = False) -> Report:
    """One row for each set of workers; of many those that are furthest from the formula, and of all workers.

    Args:
        profile: Its all-reduces, and the links that they are compared with.
        everything: A row for each, however many there are.
    """
    if not profile.collectives:
        return ()
    said = {each.workers: formula_s(profile, each) for each in profile.collectives}
    shown: Sequence[Collective] = sorted(profile.collectives, key=lambda each: len(each.workers))
    title = "all-reduces, by the bytes that each worker adds"
    if len(shown) > ROW_LIMIT and not everything:
        telling = sorted(shown, key=lambda each: (len(each.workers) > 2, _factor(each, said[each.workers]) or 0.0))
        shown = [each for each in shown if each in telling[-ROW_LIMIT:]]
        title += f"; {ROW_LIMIT} of {len(profile.collectives)} sets, -v lists all"
    sizes = sorted({point.bytes for each in shown for point in each.points})
    unit = fmt.time_unit(*(point.seconds for each in shown for point in each.points))
    times = [Column(f"{fmt.size(size)} {unit.name}", rank=0 if size == sizes[-1] else 2) for size in sizes]
    rows = []
    for each in shown:
        took = {point.bytes: point.seconds for point in each.points}
        rows.append(
            (
                (Column("among", "text"), fmt.ranges(each.workers)),
                (Column("by", "name", rank=3), each.backend),
                *((column, unit.show(took.get(size))) for column, size in zip(times, sizes, strict=True)),
                (Column("± %", rank=1), fmt.spread_points(max(point.spread for point in each.points))),
                (Column("ring", rank=1), fmt.ratio(_factor(each, said[each.workers]))),
                (Column("busy %"), fmt.points(each.busy)),
            )
        )
    return (Sheet.of(f"{title}; ring: times as long as links say", rows),)


def _factor(each: Collective, said_s: Sequence[float | None]) -> float | None:
    """At the largest size."""
    return fmt.against(each.points[-1].seconds, said_s[-1])


def formula_s(profile: Profile, each: Collective) -> list[float | None]:
    """What the ring formula says at each of its sizes, in seconds; None: a link is missing."""
    rings, workers = CostModel(profile).rings, frozenset(each.workers)
    said = (rings.formula_s(workers, point.bytes) for point in each.points)
    return [seconds if math.isfinite(seconds) else None for seconds in said]


def collectives_data(profile: Profile) -> list[dict[str, Any]]:
    """The same for `--json`; `formula_s` has what the links alone say at each size."""
    return [{**encode(each), "formula_s": formula_s(profile, each)} for each in profile.collectives]
