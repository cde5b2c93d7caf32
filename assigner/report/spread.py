"""How sure a profile's figures are, in a few lines: the worst, how many, which of them weigh, and what to do."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.formats.profilewarnings import (
    WIDE_SPREAD,
    WideFigure,
    busy_text,
    crowded_text,
    limits,
    other_warnings,
    profile_warnings,
    wide_figures,
)
from assigner.report.partitions import group_share, model_s
from assigner.report.partitions import groups as grouped
from assigner.report.sheet import Line, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import Profile
    from assigner.report.partitions import PartitionGroup

WEIGHS = 0.05
"""From this share of a worker's time on, a partition's spread matters to plans."""
DOUBTFUL_SPREAD = 0.3
"""A spread above this of a partition that matters is told beside every plan from the profile."""
_NAMED = 3
"""Partitions that are named."""
_OTHERS = 6
"""Warnings that are not about spread: how many are listed."""


@dataclass(frozen=True)
class Weighed:
    """Partitions whose times vary on a worker that spends much of its time on them.

    They share the measurement, and the worker is the one on which it varies the most (IQR / median); `share` is theirs
    of the worker's time for the whole model.
    """

    partitions: tuple[str, ...]
    worker: str
    spread: float
    share: float


def weighed(groups: Sequence[PartitionGroup], wide: Sequence[WideFigure]) -> tuple[Weighed, ...]:
    """The wide timings that matter, the widest first, each group of partitions once."""
    totals = model_s(groups)
    spreads: dict[tuple[str, str], float] = {}
    for each in wide:
        if each.partition:
            spreads[each.partition, each.worker] = max(each.spread, spreads.get((each.partition, each.worker), 0.0))
    found = []
    for group in groups:
        worst: Weighed | None = None
        for row in group.rows:
            for worker in row.workers:
                spread = max((spreads.get((name, worker), 0.0) for name in group.partitions), default=0.0)
                share = group_share(group, row, totals[worker])
                if spread and share >= WEIGHS and (worst is None or spread > worst.spread):
                    worst = Weighed(group.partitions, worker, spread, share)
        found += [worst] if worst else []
    return tuple(sorted(found, key=lambda each: -each.spread))


def doubt(profile: Profile) -> str | None:
    """One sentence on a profile that no plan's prediction can rest on; None: it is sound.

    A busy machine and workers that share too few cores come first, then partitions that plans hang on and whose times
    vary much.
    """
    busy, crowded = busy_text(profile), crowded_text(profile)
    told = [*([f"the profile was {busy}"] if busy else []), *([f"in the profile {crowded}"] if crowded else [])]
    if told:
        return "; ".join(told)
    heavy = [each for each in weighed(grouped(profile), wide_figures(profile)) if each.spread > DOUBTFUL_SPREAD]
    if not heavy:
        return None
    worst = f"{fmt.ranges(heavy[0].partitions)} by {fmt.spread(heavy[0].spread)} on {heavy[0].worker}"
    more = f" and {len(heavy) - 1} more" if len(heavy) > 1 else ""
    return f"what this plan hangs on varies in the profile: {worst}{more} (assigner show says more)"


def warnings(profile: Profile, groups: Sequence[PartitionGroup], *, everything: bool = False) -> Report:
    """What a reader should know before trusting the profile; `everything`: each warning on a line of its own."""
    if everything:
        return tuple(_warning(text) for text in (*profile_warnings(profile), *other_warnings(profile)))
    others = (*limits(profile), *other_warnings(profile))
    lines = [_warning(text) for text in others[:_OTHERS]]
    if len(others) > _OTHERS:
        lines.append(_warning(f"{len(others) - _OTHERS} more like these: -v lists all"))
    return (*lines, *_spreads(profile, groups))


def _warning(text: str) -> Line:
    return Line(f"warning: {text}", "warning")


def _spreads(profile: Profile, groups: Sequence[PartitionGroup]) -> Report:
    wide = wide_figures(profile)
    if not wide:
        return ()
    timings = {(each.partition, each.worker) for each in wide if each.partition}
    links = {(each.worker, each.target) for each in wide if each.target}
    measured = {(each.partition, each.worker) for each in profile.measurements if each.infeasible is None}
    counts = []
    if timings:
        counts.append(f"{len(timings):,} of {fmt.plural(len(measured), 'timing')}")
    if links:
        counts.append(f"{len(links):,} of {fmt.plural(len(profile.links), 'link')}")
    worst = wide[0]
    said = (
        f"{' and '.join(counts)} vary by more than {100 * WIDE_SPREAD:.0f} % (IQR / median); the worst:"
        f" {worst.name}, {fmt.spread(worst.spread)} {worst.where}"
    )
    heavy = weighed(groups, wide)
    return (_warning(said), *_matter(heavy, timings=bool(timings)), *_remedy(profile, heavy, links=bool(links)))


def _matter(heavy: Sequence[Weighed], *, timings: bool) -> Report:
    """Which of them plans hang on."""
    if not timings:
        return ()
    if not heavy:
        little = f"{100 * WEIGHS:.0f} % of a worker's time"
        return (Line(f"  none of these partitions takes {little}, so plans hardly hang on them"),)
    told = [
        f"{fmt.ranges(each.partitions)}, {fmt.spread(each.spread)} on {each.worker}"
        f" ({100 * each.share:.0f} % of its time)"
        for each in heavy[:_NAMED]
    ]
    more = f"; and {len(heavy) - _NAMED} more" if len(heavy) > _NAMED else ""
    return (Line(f"  what plans hang on: {'; '.join(told)}{more}"),)


def _remedy(profile: Profile, heavy: Sequence[Weighed], *, links: bool) -> Report:
    """What to do about it: measure again what matters."""
    names = [each.partitions[0] for each in heavy] if len(heavy) <= _NAMED else ["compute"]
    only = " ".join(f"--only {shlex.quote(name)}" for name in [*names, *(["links"] if links else [])])
    entry = shlex.quote(profile.workload.entry) if profile.workload.entry else "WORKLOAD"
    rest = Line("  -v lists all; assigner solve --robust plans for the slow end of them")
    if not only:
        return (rest,)
    return (Line(f"  measure again on quiet workers: assigner profile {entry} -o PROFILE {only}"), rest)


def spread_data(profile: Profile, groups: Sequence[PartitionGroup]) -> dict[str, Any]:
    """The same for `--json`, every figure."""
    wide = wide_figures(profile)
    return {"limit": WIDE_SPREAD, "wide": encode(wide), "weighed": encode(weighed(groups, wide))}
