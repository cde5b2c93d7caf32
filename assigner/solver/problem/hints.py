"""The user's hints, made fit for a profile: patterns to names, labels and reserves into it, contradictions out.

Behind `resolve` every name in the options is a partition or a worker of the profile.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import UsageError
from assigner.formats.fineness import cut_into, cut_obstacle
from assigner.location import rank_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile, Worker
    from assigner.solver.problem.options import RematRule, SolveOptions

RANKS = "ranks"
"""As the only entry of `order`: every worker, in the order of their ranks."""


def resolve(profile: Profile, options: SolveOptions) -> tuple[Profile, SolveOptions]:
    """The profile with labels, reserves and prices, and the options with plain names.

    Raises:
        UsageError: a hint names what the profile has not, or two hints contradict each other.
    """
    profile = replace(profile, workers=tuple(_priced(profile, options.prices)))
    _check_batch(profile, options)
    _check_sharing(options)
    pins = _pins(profile, options)
    rules = _rules(profile, options.rematerialise)
    for name, partition in profile.partition.items():
        if partition.rematerialise is not None and rules.setdefault(name, partition.rematerialise) != (
            partition.rematerialise
        ):
            raise UsageError(
                f"rematerialise: {name!r} is marked {partition.rematerialise}, and asked for {rules[name]}"
            )
    apart = tuple(_groups(profile, "apart", options.apart)) + _labels(profile, "apart")
    together = tuple(_groups(profile, "together", options.together)) + _labels(profile, "colocate")
    merged = _merge(together)
    for name, other in ((a, b) for group in apart for a, b in itertools.combinations(group, 2)):
        if any(name in group and other in group for group in merged):
            raise UsageError(f"apart: {name!r} and {other!r} are to be kept together, too", hint="drop one of the two")
    only, order = tuple(_only(profile, options.only)), tuple(_workers(profile, options.order))
    if only and order and not {*only} & {*order}:
        raise UsageError(
            f"order: none of its workers may be used; only {', '.join(only)} may", hint="drop one of the two"
        )
    _check_prices(profile, options, only, order)
    label = {name: " + ".join(group) for group in merged for name in group}
    profile = replace(
        profile,
        workers=tuple(_limited(profile, options)),
        partitions=tuple(
            replace(each, colocate=label.get(each.name), apart=None, rematerialise=None) for each in profile.partitions
        ),
    )
    return profile, replace(
        options, pins=pins, forbid=_forbidden(profile, options, pins), rematerialise=rules, apart=apart, together=(),
        reserve={}, memory={}, prices={},
        only=only, order=order, max_replicas=options.max_replicas if options.shares else 1,
    )  # fmt: skip


def completing(options: SolveOptions, plan: Plan, profile: Profile) -> SolveOptions:
    """The options with what a partial plan says of its partitions: their worker, and whether they run twice.

    Raises:
        FormatError: the plan is of another workload, or names what the profile has not.
        UsageError: it contradicts a pin or a rematerialisation asked for, or has a stage on several workers.
    """
    from assigner.formats.plan import refuse_replicas
    from assigner.schedule.simulate import check_fit

    check_fit(plan, profile, whole=False)
    refuse_replicas(plan, "--complete, which pins each partition to one worker")
    pins, rules = dict(options.pins), dict(options.rematerialise)
    for stage in plan.stages:
        for name in stage.partitions:
            if name in pins and not profile.matches(pins[name], profile.worker[stage.worker]):
                raise UsageError(f"pin: {name}={pins[name]}, and the plan to complete has it on {stage.worker}")
            pins[name] = stage.worker
            rule: RematRule = "always" if name in stage.rematerialise else "never"
            if rules.setdefault(name, rule) != rule:
                raise UsageError(f"rematerialise: {name!r} is {rules[name]} here, and {rule} in the plan to complete")
    return replace(options, pins=pins, rematerialise=rules)


def _check_sharing(options: SolveOptions) -> None:
    """Raise UsageError where workers that share a stage are not searched, or can bring nothing."""
    if options.max_replicas in (1, None):
        return
    if options.objective == "latency":
        raise UsageError(
            f"max-replicas: {options.max_replicas} is not allowed with objective latency: one micro-batch goes through"
            " one worker of each stage, whoever shares it",
            hint="leave --max-replicas out",
        )
    if options.schedule == "interleaved":
        raise UsageError(
            f"max-replicas: {options.max_replicas} is not allowed with schedule interleaved: a worker that shares a"
            " stage has no other",
            hint="--schedule auto, gpipe or 1f1b",
        )


def _check_batch(profile: Profile, options: SolveOptions) -> None:
    batch = options.batch(profile)
    count = options.micro_batches
    fineness = profile.workload.fineness
    if count is None:
        return
    obstacle = fineness.obstacle(count, batch) or cut_obstacle(batch, count)
    if obstacle is not None:
        nearest = _nearest(batch, count, fineness.most(batch))
        raise UsageError(
            f"micro-batches: {count} is not allowed: {obstacle}",
            hint=f"the nearest allowed: {' and '.join(map(str, nearest))}",
        )


def _nearest(batch: int, count: int, most: int) -> list[int]:
    """The numbers of micro-batches below and above one, up to the most allowed, into which a batch can be cut."""
    below = next((n for n in range(min(count, most), 0, -1) if cut_into(batch, n) == n), None)
    above = next((n for n in range(count, most + 1) if cut_into(batch, n) == n), None)
    return [n for n in (below, above) if n is not None]


def _check_prices(profile: Profile, options: SolveOptions, only: Sequence[str], order: Sequence[str]) -> None:
    """Raise UsageError where money is to be compared and a worker that may be used has no price."""
    for worker in profile.workers if options.objective == "cost" else ():
        used = (not only or worker.name in only) and (not order or worker.name in order)
        if worker.cost_per_hour is None and used:
            raise UsageError(
                f"objective cost: the profile has no cost_per_hour for {worker.name}",
                hint="--price WORKER=MONEY, of a worker, kind or host, gives it",
            )


def _names(profile: Profile, hint: str, pattern: str) -> list[str]:
    """The partitions that a name or a pattern means."""
    if pattern in profile.partition:
        return [pattern]
    found = [name for name in profile.order if fnmatchcase(name, pattern)]
    if not found:
        raise UsageError(
            f"{hint}: {pattern!r} is not a partition of this profile",
            hint=fmt.meant(pattern, profile.order, "partitions"),
        )
    return found


def _forbidden(profile: Profile, options: SolveOptions, pins: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    found: dict[tuple[str, str], None] = {}
    for pattern, spec in options.forbid:
        _check_worker(profile, f"forbid: {pattern}={spec}", spec)
        found |= dict.fromkeys((name, spec) for name in _names(profile, "forbid", pattern))
    for name, spec in found:
        pin = pins.get(name)
        if pin is not None and all(profile.matches(spec, w) for w in profile.workers if profile.matches(pin, w)):
            raise UsageError(f"forbid: {name!r} is pinned to {pin!r}, and {spec!r} is forbidden", hint="drop one")
    return tuple(found)


def _check_worker(profile: Profile, hint: str, spec: str) -> None:
    if not any(profile.matches(spec, worker) for worker in profile.workers):
        every = [name for w in profile.workers for name in (rank_name(w.name), w.kind, w.host)]
        known = fmt.meant(spec, every, "workers")
        raise UsageError(
            f"{hint}: {spec!r} names no worker, kind or host of this profile",
            hint=f"patterns are for names of partitions; {known}" if {*spec} & {*"*?["} else known,
        )


def _pins(profile: Profile, options: SolveOptions) -> dict[str, str]:
    pins: dict[str, str] = {}
    for pattern, pin in options.pins.items():
        _check_worker(profile, f"pin: {pattern}={pin}", pin)
        for name in _names(profile, "pin", pattern):
            narrower = _narrower(profile, pins.setdefault(name, pin), pin)
            if narrower is None:
                raise UsageError(f"pin: {name!r} is pinned to {pins[name]!r} and to {pin!r}")
            pins[name] = narrower
    return pins


def _narrower(profile: Profile, pin: str, other: str) -> str | None:
    """Of two pins the one whose workers are all the other's too; None: they contradict each other."""
    mine, its = ({each.name for each in profile.workers if profile.matches(spec, each)} for spec in (pin, other))
    return pin if mine <= its else other if its <= mine else None


def _rules(profile: Profile, given: Mapping[str, RematRule]) -> dict[str, RematRule]:
    rules: dict[str, RematRule] = {}
    for pattern, rule in given.items():
        for name in _names(profile, f"{rule}-remat", pattern):
            if rules.setdefault(name, rule) != rule:
                raise UsageError(f"rematerialise: {name!r} is asked for never and for always")
    return rules


def _groups(profile: Profile, hint: str, groups: Iterable[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    for patterns in groups:
        names = tuple(dict.fromkeys(name for pattern in patterns for name in _names(profile, hint, pattern)))
        if len(names) < 2:
            given = fmt.plural(len(names), "partition")
            raise UsageError(f"{hint}: {','.join(patterns)!r} names {given}; a group has two or more")
        yield names


def _labels(profile: Profile, field: str) -> tuple[tuple[str, ...], ...]:
    """The groups that the profile's own labels make."""
    found: dict[str, list[str]] = {}
    for name in profile.order:
        label = getattr(profile.partition[name], field)
        if label is not None:
            found.setdefault(label, []).append(name)
    return tuple(tuple(names) for names in found.values() if len(names) > 1)


def _merge(groups: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Groups that share a member become one."""
    merged: list[dict[str, None]] = []
    for group in groups:
        new = dict.fromkeys(group)
        for old in [each for each in merged if not each.keys().isdisjoint(new)]:
            merged.remove(old)
            new = old | new
        merged.append(new)
    return [tuple(group) for group in merged]


def _matching(profile: Profile, hint: str, given: Mapping[str, float]) -> Iterator[tuple[Worker, list[float]]]:
    """Each worker with the values of all that match it, in the order in which they were given."""
    for spec in given:
        _check_worker(profile, hint, spec)
    for worker in profile.workers:
        yield worker, [value for spec, value in given.items() if profile.matches(spec, worker)]


def _priced(profile: Profile, prices: Mapping[str, float]) -> Iterator[Worker]:
    for worker, found in _matching(profile, "price", prices):
        yield replace(worker, cost_per_hour=found[-1]) if found else worker


def _limited(profile: Profile, options: SolveOptions) -> Iterator[Worker]:
    """Workers with no more memory than they may use; what is left free stays free beside it."""
    reserves = _matching(profile, "reserve", options.reserve)
    for (worker, free), (_, sizes) in zip(reserves, _matching(profile, "memory", options.memory), strict=True):
        reserve = max(free, default=worker.reserve_bytes)
        most = min(sizes) + reserve if sizes else worker.memory_bytes
        yield replace(worker, reserve_bytes=reserve, memory_bytes=min(worker.memory_bytes, most))


def _only(profile: Profile, specs: tuple[str, ...]) -> Iterable[str]:
    for spec in specs:
        if "," in spec and not any(profile.matches(spec, worker) for worker in profile.workers):
            again = " ".join(f"--only {name.strip()}" for name in spec.split(",") if name.strip())
            raise UsageError(f"only: {spec!r} names several workers at once", hint=f"one each time: {again}")
        _check_worker(profile, "only", spec)
    return (w.name for w in profile.workers if any(profile.matches(spec, w) for spec in specs))


def _workers(profile: Profile, order: tuple[str, ...]) -> Iterable[str]:
    if order == (RANKS,):
        yield from (worker.name for worker in sorted(profile.workers, key=lambda worker: worker.rank))
        return
    named: dict[str, str] = {}
    for spec in order:
        found = [w.name for w in profile.workers if spec in (w.name, rank_name(w.name))]
        if not found:
            raise UsageError(f"order: {spec!r} is no worker of this profile", hint="worker:1,worker:0, or ranks")
        if found[0] in named:
            before = f", the first time as {named[found[0]]!r}" if named[found[0]] != spec else ""
            raise UsageError(f"order: {spec!r} stands twice{before}")
        named[found[0]] = spec
        yield found[0]
