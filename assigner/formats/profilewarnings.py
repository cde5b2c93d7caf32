"""What a reader of a profile should know before trusting it, worked out from the profile itself."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from assigner import formatting as fmt
from assigner.machine.starvation import NOTICED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from assigner.formats.profile import Profile

WIDE_SPREAD = 0.10
"""A figure whose spread (IQR / median) is above this gets a warning."""

_OF_SPREAD = re.compile(r": spread \d+( ?%|\.\d times)")


class WideFigure(NamedTuple):
    """A figure that varies much.

    Args:
        spread: IQR / median.
        partition: That was timed; empty: it is a link's.
        worker: Where; of a link, its source.
        target: Of a link.
        where: At which size, or of what.
    """

    spread: float
    partition: str
    worker: str
    target: str
    where: str

    @property
    def name(self) -> str:
        """Whose figure it is."""
        return f"{self.partition} on {self.worker}" if self.partition else f"link {self.worker} -> {self.target}"


def profile_warnings(profile: Profile) -> tuple[str, ...]:
    """Warnings that follow from a profile's figures: what plans cannot do first, then spreads, the widest first."""
    return (*limits(profile), *_spreads(profile))


def with_warnings(profile: Profile, others: Iterable[str] = ()) -> Profile:
    """The profile with the warnings that its figures give, and `others`; the spreads come last."""
    return replace(profile, warnings=(*limits(profile), *dict.fromkeys(others), *_spreads(profile)))


def other_warnings(profile: Profile) -> tuple[str, ...]:
    """The warnings of a profile that its figures do not give: they were seen while it was measured."""
    known = set(limits(profile))
    return tuple(text for text in profile.warnings if text not in known and not _OF_SPREAD.search(text))


def wide_figures(profile: Profile) -> tuple[WideFigure, ...]:
    """Every figure with a spread above `WIDE_SPREAD`, the widest first."""
    return tuple(sorted(_wide(profile), key=lambda each: each.spread, reverse=True))


def launch_bound(partition: str, worker: str, micro_batch: int, share: float) -> str:
    """The warning of a GPU that waits for its host."""
    return f"{_launch_bound(partition, worker, micro_batch)}: the host takes {share:.0%} of its time to hand it over"


def outdated(
    warning: str,
    *,
    points: Iterable[tuple[str, str, int]],
    workers: Collection[str],
    links: Collection[tuple[str, str]],
) -> bool:
    """Whether a warning that the figures do not give is about figures that were measured again since.

    Those are of `points` (partition, worker, micro-batch size), all of `workers`, and of `links` (source, target).
    """
    again = [
        *(_launch_bound(*point) for point in points),
        *(f"calibrated: {worker}:" for worker in workers),
        *(f"calibrated: link {source} to {target}:" for source, target in links),
    ]
    return warning.startswith(tuple(again))


def _launch_bound(partition: str, worker: str, micro_batch: int) -> str:
    return f"{partition} on {worker} at micro-batch {micro_batch} is launch-bound"


def limits(profile: Profile) -> Iterator[str]:
    """Warnings of a busy machine, which no figure is free of, and of what plans made from a profile cannot do."""
    workload, sizes = profile.workload, {each.micro_batch for each in profile.measurements}
    is_cut = workload.fineness.most(workload.batch_size) > 1
    if workload.per_micro_batch and is_cut:
        yield (
            f"the number of micro-batches changes what is trained: {'; '.join(workload.per_micro_batch)}; one"
            " micro-batch (solve with --micro-batches 1, or Workload.max_micro_batches=1) trains as without a plan"
        )
    if (busy := busy_text(profile)) is not None:
        yield f"{busy}; its figures are too high, and unevenly so: measure again when it is quiet"
    if (crowded := crowded_text(profile)) is not None:
        yield f"{crowded}: profile with fewer --workers or --threads"
    if len(sizes) == 1 and is_cut:
        yield f"one micro-batch size was measured ({sizes.pop()}): plans cannot use another"
    yield from _apart(profile)
    if amount := sum(not link.points[0].samples for link in profile.links):
        yield (
            f"{amount} of {len(profile.links)} links were not measured (points with 0 samples): each has the median of"
            " links of its class; --links all measures them"
        )
    yield from _shared_wires(profile)


def _spreads(profile: Profile) -> Iterator[str]:
    """One line for each partition on each worker, and for each link, with its sizes."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for each in _wide(profile):
        known = found[each.name]
        known[each.where] = max(each.spread, known.get(each.where, 0.0))
    lines = []
    for name, spreads in found.items():
        listed = ", ".join(f"{fmt.spread(spread)} {where}" for where, spread in spreads.items())
        lines.append((max(spreads.values()), f"{name}: spread {listed}"))
    yield from (text for _, text in sorted(lines, reverse=True))


def busy_text(profile: Profile) -> str | None:
    """Where and how much others disturbed the measurement, and whether that of messages alone; None: nowhere much."""
    shares: dict[int, float] = defaultdict(float)
    computing = [(each.worker, each.starved) for each in profile.measurements]
    messages = [(end, link.starved) for link in profile.links for end in (link.source, link.target)]
    messages += [(name, each.starved) for each in profile.collectives for name in each.workers]
    for worker, starved in computing + messages:
        shares[profile.worker[worker].rank] = max(shares[profile.worker[worker].rank], starved)
    told = starved_text(shares)
    if told is None:
        return None
    beside = max((starved for _, starved in computing), default=0.0) < NOTICED
    return f"measured on a busy machine: {told}{', while links and all-reduces were measured' if beside else ''}"


def starved_text(shares: Mapping[int, float]) -> str | None:
    """`other programs had up to 40 % of the time of worker:1`, by the share that they had of each rank's.

    None: they had much of none.
    """
    ranks = sorted(rank for rank, share in shares.items() if share >= NOTICED)
    if not ranks:
        return None
    return f"other programs had up to {100 * max(shares.values()):.0f} % of the time of {_ranks_text(ranks)}"


def crowded_text(profile: Profile) -> str | None:
    """Which workers share fewer cores than they have threads, and what plans get wrong of it; None: none do by much."""
    found = [each for each in profile.workers if each.slower >= 1 + NOTICED]
    if not found:
        return None
    return (
        f"{_ranks_text(sorted(each.rank for each in found))} have fewer cores than threads: each computed up to"
        f" {max(each.slower for each in found):.1f}x as long as it does while others idle, and plans that leave workers"
        " out are predicted too slow"
    )


def _apart(profile: Profile) -> Iterator[str]:
    """Groups of workers with no link between them, as two profiles that were put together have."""
    groups = _linked_groups(profile)
    if len(groups) == 1 or not profile.links:  # with no links at all no plan has two workers, and `show` says so
        return
    shown = [_ranks_text(group) for group in groups[:4]] + (
        [f"{len(groups) - 4} more groups"] if len(groups) > 4 else []
    )
    yield (
        f"no links between {' and '.join(shown)}: no plan can use both; to measure them, start on all ranks, in this"
        f" order: torchrun ... -m assigner_cli profile {profile.workload.entry!r} -o PROFILE --only links"
    )


def _shared_wires(profile: Profile) -> Iterator[str]:
    for wire in profile.wires:
        ranks = ((profile.worker[each.source].rank, profile.worker[each.target].rank) for each in wire.links)
        names = [f"worker:{source} -> worker:{target}" for source, target in ranks]
        yield f"{fmt.series(names)} share a wire: {wire.slower:.1f}x slower together; plans are priced with it"


def _linked_groups(profile: Profile) -> list[list[int]]:
    """Ranks that links connect, in either direction, over any number of steps."""
    group = {name: {name} for name in profile.worker}
    for link in profile.links:
        if group[link.source] is not group[link.target]:
            fewer, more = sorted((group[link.source], group[link.target]), key=len)
            more |= fewer
            group.update(dict.fromkeys(fewer, more))
    return [
        sorted(profile.worker[name].rank for name in each)
        for each in {id(each): each for each in group.values()}.values()
    ]


def _ranks_text(ranks: list[int]) -> str:
    """`worker:0` or `worker:0-7` where they follow each other, else each."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"worker:{ranks[0]} to worker:{ranks[-1]}"
    return ", ".join(f"worker:{rank}" for rank in ranks)


def _wide(profile: Profile) -> Iterator[WideFigure]:
    for each in profile.measurements:
        if each.spread > WIDE_SPREAD:
            yield WideFigure(each.spread, each.partition, each.worker, "", f"at micro-batch {each.micro_batch}")
        if each.update_spread > WIDE_SPREAD:
            yield WideFigure(each.update_spread, each.partition, each.worker, "", "of the update")
    for link in profile.links:
        for point in link.points:
            if point.spread > WIDE_SPREAD and point.samples:
                yield WideFigure(point.spread, "", link.source, link.target, f"at {fmt.size(point.bytes)}")
