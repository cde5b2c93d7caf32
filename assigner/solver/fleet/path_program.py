"""The least sum of a pipeline whose slowest servers stay below two limits: an exact dynamic program over kinds.

Or, with what a step loads each stage with, the least that is as long as any stage's load and the sum in front of it.

From the last boundary to the first, for every number of workers used of each kind,

    behind[i, c, used] = least seconds of one forward and one backward of everything from position i on,
                         the message over boundary i included, if a stage of class c lies before it

A class is a kind of worker; where links inside a host are faster than between hosts, it is a kind and what has been
used of its host since the pipeline came to it (the visit), so that a host cannot be stayed in for longer than its
workers last. Hosts are told apart by nothing else, and may be come back to: a relaxation.

Source: a dynamic program over (position, workers used, last worker); visits are the neighbourhoods
of Baldacci, Mingozzi and Roberti, Operations Research 59(5), 2011.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.solver.limits import tuning
from assigner.solver.problem.arrays import Floats, Ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.fleet.kind_sweeps import StepLoads
    from assigner.solver.limits.clock import SolveClock


@dataclass(frozen=True)
class ServerPrices:
    """Prices of intervals or of messages, inf: there is none.

    Intervals: arrays [kind, first, length - 1]. Messages, at their least: [position, left kind, right kind].

    Args:
        seconds: What it adds to the sum.
        forward, backward: What it is as a server.
    """

    seconds: Floats
    forward: Floats
    backward: Floats

    def within(self, limit_f: float, limit_b: float) -> Floats:
        """Seconds; inf where a server is above its limit."""
        return np.where((self.forward <= limit_f) & (self.backward <= limit_b), self.seconds, np.inf)

    def slowest(self, stages: Sequence[KindStage]) -> tuple[float, float]:
        """The slowest servers forward and backward of the stages of a pipeline, of which these are intervals."""
        at = tuple(np.array([(each.kind, each.first, each.length - 1) for each in stages]).T)
        return float(self.forward[at].max()), float(self.backward[at].max())


class LeastTrips(NamedTuple):
    """The least seconds of everything behind a stage, the message between included, by the workers used from it on.

    Args:
        seconds: [position behind the stage, what numbers of workers that differ little count as]; at 0 of everything.
        alike: By number of the workers used, what it counts as.
        workers: How many workers each of these has, on average.
    """

    seconds: Floats
    alike: Ints
    workers: Ints

    @property
    def least(self) -> float:
        """Seconds of everything."""
        return float(self.seconds[0].min())


@dataclass(frozen=True)
class KindStage:
    """One stage of a pipeline of kinds."""

    first: int
    length: int
    kind: int


@dataclass(frozen=True)
class KindPipeline:
    """A pipeline of kinds with the least sum, in seconds."""

    seconds: float
    steps: tuple[KindStage, ...]


@dataclass(frozen=True)
class WorkSplit:
    """What the stages from a position on, and those before it, must be done by: it rules out most numbers of workers.

    With any weights w, loads of at most m give m sum(w) >= sum over partitions of min over kinds of w[kind] seconds.

    Args:
        weights: One of each kind.
        behind: By position: the weighted seconds of a forward from there on.
        total: The weights of all workers.
    """

    weights: Floats
    behind: Floats
    total: float

    @property
    def level(self) -> float:
        """No slowest server is faster, in seconds."""
        return float(self.behind[0]) / self.total if self.total else 0.0


class PathProgram:
    """The dynamic program of one micro-batch count; OutOfTime where the time is over.

    Args:
        work: What they must do.
        between: Messages between any two workers, or, with `hosts`, between two hosts.
        inside: Messages inside a host; None: no difference is made.
        hosts: The workers of each kind on each host.
        toll: Without visits: what a message between two hosts takes longer than `between`, at least.
    """

    def __init__(
        self, counts: Sequence[int], *, most: int, work: WorkSplit, between: ServerPrices,
        inside: ServerPrices | None = None, hosts: Sequence[tuple[int, ...]] = (), toll: float = 0.0,
        clock: SolveClock,
    ) -> None:  # fmt: skip
        self.clock = clock
        self._kinds, self._work = len(counts), work
        self._between, self._inside = between, inside
        used, self._less = _numbers(counts, most, work.weights)
        self._used = used
        self._weight = used @ work.weights
        self._toll = toll * np.maximum(0, _hosts_for(used, hosts) - 1)
        self._more = [_inverse(less) for less in self._less]
        visits = _visits(hosts) if inside is not None else []
        fresh = [(kind, tuple(int(k == kind) for k in range(self._kinds))) for kind in range(self._kinds)]
        longer = [(kind, visit) for visit in visits if sum(visit) > 1 for kind in range(self._kinds) if visit[kind]]
        self._classes = sorted([*fresh, *longer], key=lambda c: (c[0], sum(c[1]) > 1, c[1]))
        number = {each: n for n, each in enumerate(self._classes)}
        self._of = [
            slice(*(sum(c[0] < k for c in self._classes) for k in (kind, kind + 1))) for kind in range(self._kinds)
        ]
        self._fresh = np.array([number[each] for each in fresh])
        self._inner = [(number[each], *self._before(each, number)) for each in self._classes if sum(each[1]) > 1]

    def _before(
        self, each: tuple[int, tuple[int, ...]], number: dict[tuple[int, tuple[int, ...]], int]
    ) -> tuple[Ints, Ints]:
        """Of a stage that stays in its host: the classes of the stage behind it, and their kinds."""
        kind, visit = each
        rest = tuple(count - (k == kind) for k, count in enumerate(visit))
        after = [k for k in range(self._kinds) if rest[k]]
        return np.array([number[k, rest] for k in after]), np.array(after)

    @property
    def boundaries(self) -> tuple[ServerPrices, ...]:
        """All messages that may be part of a path."""
        return (self._between,) if self._inside is None else (self._between, self._inside)

    @property
    def states(self) -> int:
        """States at each position: what a sweep's time grows with."""
        return len(self._classes) * len(self._weight)

    def least(
        self, stages: ServerPrices, limit_f: float, limit_b: float, *, loads: StepLoads | None = None
    ) -> KindPipeline | None:
        """The pipeline with the least sum of which no server is above its limit, in seconds; None: there is none.

        With `loads` what is least is the largest of each stage's load with the sum in front of it, and of the whole sum
        with their floor, without a toll.

        Raises:
            OutOfTime: the time is over.
        """
        run = _PathRun(self, stages, limit_f, limit_b, loads)
        run.fill()
        return run.trace()

    def trips(self, stages: ServerPrices, limit_f: float, limit_b: float) -> LeastTrips:
        """The least that lies behind stages where no server is above its limit; arguments as of `least`.

        Raises:
            OutOfTime: the time is over.
        """
        run = _PathRun(self, stages, limit_f, limit_b, None)
        run.fill()
        seconds = run.least_behind()
        alike, workers = _alike(self._used, tuning.ALIKE_NUMBERS // len(seconds))
        order = np.argsort(alike, kind="stable")
        starts = np.searchsorted(alike[order], np.arange(len(workers)))
        return LeastTrips(np.minimum.reduceat(seconds[:, order], starts, axis=1), alike, workers)


def _needed(seconds: Floats, limit: float) -> Floats:
    """The weights without which work is not done below a limit, which may be 0: none for no work, else inf."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.divide(seconds, limit, out=np.zeros_like(seconds), where=seconds > 0)


class _PathRun:
    """One run of a sweep, within two limits."""

    def __init__(
        self, sweep: PathProgram, stages: ServerPrices, limit_f: float, limit_b: float, loads: StepLoads | None
    ) -> None:
        self._sweep, self._loads = sweep, loads
        self._toll = sweep._toll if loads is None else np.zeros_like(sweep._toll)
        self._cost = stages.within(limit_f, limit_b)
        self._hops = sweep._between.within(limit_f, limit_b)
        self._inside = None if sweep._inside is None else sweep._inside.within(limit_f, limit_b)
        self._lengths = _lengths(self._cost)
        self._n = self._cost.shape[1]
        behind = sweep._work.behind
        slack = 1e-9 * sweep._work.total
        self._low = np.searchsorted(sweep._weight, _needed(behind, limit_f) - slack)
        room = sweep._work.total - _needed(behind[0] - behind, limit_f) + slack
        self._high = np.searchsorted(sweep._weight, room, side="right")
        # by position and class of the stage before it, whose worker counts as used already; only what is read is filled
        self._longest = int(self._lengths.max(initial=1))
        self._behind = np.empty((self._n + 1, len(sweep._classes), len(sweep._weight)))
        self._clear(self._n)
        floor = 0.0 if loads is None else loads.floor
        self._put(self._n, slice(None), np.full((len(sweep._classes), 1), floor), 0, 1)

    def fill(self) -> None:
        """Go over every boundary, the last first."""
        for i in range(self._n - 1, 0, -1):
            self._sweep.clock.check()
            self._clear(i)
            if self._lengths[:, i].any() and self._low[i] < self._high[i]:
                self._step(i, self._start(i))

    def least_behind(self) -> Floats:
        """Of the classes that may stand in front of each position the least; inf where nobody asks; at 0 of all."""
        found = np.full((self._n + 1, len(self._sweep._weight)), np.inf)
        found[self._n] = 0.0
        if self._low[0] < self._high[0]:
            found[0, self._low[0] : self._high[0]] = self._start(0).min(axis=0)
        for i in range(1, self._n):
            asked = slice(self._low[i - 1], self._high[max(0, i - self._longest)])
            found[i, asked] = self._behind[i, :, asked].min(axis=0)
        return found

    def _start(self, i: int) -> Floats:
        """Least seconds from position i on, by class of the stage that starts there and workers used, it included."""
        low, high = self._low[i], self._high[i]
        here = np.full((len(self._sweep._classes), max(0, high - low)), np.inf)
        for kind, of in enumerate(self._sweep._of):
            length = self._lengths[kind, i]
            if length:
                behind = self._behind[i + 1 : i + 1 + length, of, low:high]
                self._with_stage(behind, kind, i, slice(low, high)).min(axis=0, out=here[of])
        return here

    def _with_stage(self, behind: Floats, kind: int, i: int, numbers: slice) -> Floats:
        """What stages from i on, the shortest first, make of what lies behind each: [length, class, number]."""
        length = len(behind)
        cost = self._cost[kind, i, :length, None]
        if self._loads is None:
            return behind + cost[..., None]
        seconds, loads, which = self._loads(kind, i, length, numbers)
        seconds = np.maximum(seconds, cost)
        alike = (seconds == seconds[:, :1]).all()  # arrays of all numbers take long
        found: Floats = behind + (seconds[:, :1] if alike else seconds.take(which, axis=1))[:, None]
        np.maximum(found, loads.take(which, axis=1)[:, None], out=found)
        return found

    def _clear(self, i: int) -> None:
        """Nothing is known yet of what lies behind boundary i, wherever a stage before it may ask."""
        self._behind[i, :, self._low[i - 1] : self._high[max(0, i - self._longest)]] = np.inf

    def _put(self, i: int, classes: Ints | slice, seconds: Floats, low: int, high: int) -> None:
        """Keep what lies behind boundary i, for the numbers of workers `low` to `high` used behind it."""
        sweep = self._sweep
        for at, number in enumerate(np.arange(len(sweep._classes))[classes]):
            more, less = sweep._more[sweep._classes[number][0]]
            first, last = np.searchsorted(less, (low, high))
            self._behind[i, number, more[first:last]] = seconds[at, less[first:last] - low]

    def _step(self, i: int, here: Floats) -> None:
        """Go over boundary i."""
        sweep, band = self._sweep, (self._low[i], self._high[i])
        best = np.stack([here[of].min(axis=0) for of in sweep._of])
        self._put(i, sweep._fresh, (self._hops[i, :, :, None] + best[None]).min(axis=1), *band)
        for number, after, kinds in sweep._inner:
            assert self._inside is not None
            seconds = self._inside[i, sweep._classes[number][0], kinds, None]
            self._put(i, np.array([number]), (here[after] + seconds).min(axis=0)[None], *band)

    def trace(self) -> KindPipeline | None:
        """The best pipeline; None: there is none."""
        here, steps = self._start(0) + self._toll[self._low[0] : self._high[0]], []
        if not here.size or not np.isfinite(here).any():
            return None
        number, used = (int(each) for each in np.unravel_index(int(np.argmin(here)), here.shape))
        total, used, i = float(here[number, used]), used + int(self._low[0]), 0
        while True:
            kind = self._sweep._classes[number][0]
            length = self._lengths[kind, i]
            behind = self._behind[i + 1 : i + 1 + length, number : number + 1, used : used + 1]
            ways = self._with_stage(behind, kind, i, slice(used, used + 1))
            used = int(self._sweep._less[kind, used])
            steps.append(KindStage(i, int(np.argmin(ways)) + 1, kind))
            i += steps[-1].length
            if i == self._n:
                return KindPipeline(total, tuple(steps))
            number = self._next(self._start(i)[:, used - self._low[i]], number, i)

    def _next(self, here: Floats, number: int, i: int) -> int:
        """The class of the stage behind boundary i, given the one before it."""
        kind, visit = self._sweep._classes[number]
        if sum(visit) == 1:
            kinds = np.array([each[0] for each in self._sweep._classes])
            return int(np.argmin(here + self._hops[i, kind, kinds]))
        assert self._inside is not None
        after, kinds = next((after, kinds) for inner, after, kinds in self._sweep._inner if inner == number)
        return int(after[int(np.argmin(here[after] + self._inside[i, kind, kinds]))])


def _numbers(counts: Sequence[int], most: int, weights: Floats) -> tuple[Ints, Ints]:
    """All numbers of workers used of each kind, by their weight, and where one less of a kind stands."""
    dims = tuple(min(count, most) + 1 for count in counts)
    used = np.stack(np.unravel_index(np.arange(math.prod(dims)), dims), axis=1)
    used = used[used.sum(axis=1) <= most]
    used = used[np.argsort(used @ weights, kind="stable")]
    place = np.full(dims, len(used))
    place[tuple(used.T)] = np.arange(len(used))
    less = np.full((len(counts), len(used)), len(used))
    for kind in range(len(counts)):
        some = used[:, kind] > 0
        fewer = used[some] - np.eye(len(counts), dtype=int)[kind]
        less[kind, some] = place[tuple(fewer.T)]
    return used, less


def _alike(used: Ints, most: int) -> tuple[Ints, Ints]:
    """Which numbers of workers count as one where there are many, and about how many workers each of these has."""
    width, counts = 1, used.max(axis=0) + 1
    while width < counts.max() and math.prod((-(-counts // width)).tolist()) > most:
        width += 1
    _, alike, many = np.unique(-(-used // width), axis=0, return_inverse=True, return_counts=True)
    workers = np.rint(np.bincount(alike, weights=used.sum(axis=1)) / many).astype(np.int64)
    return alike, workers


def _hosts_for(used: Ints, hosts: Sequence[tuple[int, ...]]) -> Ints:
    """On how many hosts so many workers of each kind are at least."""
    if not hosts:
        return np.zeros(len(used), dtype=np.int64)
    each = np.array(hosts)
    counts = [*zip(used.T, each.T, strict=True), (used.sum(axis=1), each.sum(axis=1))]
    least: Ints = np.maximum.reduce(
        [np.searchsorted(np.cumsum(np.sort(there)[::-1]), wanted) + (wanted > 0) for wanted, there in counts]
    )
    return least


def _inverse(less: Ints) -> tuple[Ints, Ints]:
    """Numbers of workers from which one can be taken, in the order of what is left, and what is left."""
    more = np.flatnonzero(less < len(less))
    more = more[np.argsort(less[more], kind="stable")]
    return more, less[more]


def _visits(hosts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Everything that can be used of one host."""
    found = {
        visit for host in set(hosts) for visit in itertools.product(*(range(count + 1) for count in host))
    }  # fmt: skip
    return sorted(visit for visit in found if sum(visit))


def _lengths(cost: Floats) -> Ints:
    """Length of the longest interval that may be used, by kind and first position; 0: none."""
    finite = np.isfinite(cost)
    longest = cost.shape[2] - np.argmax(finite[:, :, ::-1], axis=2)
    return np.where(finite.any(axis=2), longest, 0)
