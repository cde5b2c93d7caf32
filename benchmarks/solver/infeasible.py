"""Seeded problems without a plan: does the solver say so, and is the way out that it names one?

    python benchmarks/solver/infeasible.py [--instances 500] [--first 0] [--all-rows]

Each instance is a random feasible one (chain or graph) that is tightened, by one kind of constraint, until trying
every placement by hand finds none. Then

    refused   the solver raises InfeasibleError
    helps     the first way out, applied as its text says, gives a problem with a plan
    fits      that plan keeps to memory and hints, and its step is no longer than the table says
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from brute_force import random_instance

from assigner.errors import AssignerError, FormatError, InfeasibleError, WayOut
from assigner.formats.plan import Plan
from assigner.formats.profile import Link, LinkPoint
from assigner.formats.stage import Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.orders import SCHEDULES
from assigner.schedule.simulate import overfull, predict, prediction_of, worker_memory
from assigner.solver import SolveOptions, solve
from assigner.solver.problem.options import divisors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.profile import Profile, Worker

Case = tuple["Profile", SolveOptions]

KINDS = ("memory", "reserve", "remat", "links", "pins", "apart", "order", "workers", "mixed")
"""What an instance is tightened by."""


def whole_plan(profile: Profile, options: SolveOptions) -> Plan | None:
    """Some plan that fits and keeps to the options, by trying every one; None: there is none."""
    profile = _reserved(profile, options)
    cost = CostModel(profile)
    batch = options.batch_size or profile.workload.batch_size
    counts = divisors(batch) if options.micro_batches is None else (options.micro_batches,)
    workload = replace(profile.workload, batch_size=batch)
    for count, split in itertools.product(counts, _splits(profile, options)):
        stages = [_lightest(options, worker, part) for worker, part in split]
        twice = len({worker for worker, _ in split}) < len(split)
        schedules = ["interleaved"] if twice else ["gpipe", "1f1b"]
        for schedule in schedules if options.schedule == "auto" else [options.schedule]:
            if (schedule == "interleaved") != twice:
                continue
            held = [replace(stage, in_flight=1) for stage in stages] if schedule == "1f1b" else stages
            plan = Plan(
                workload=workload, schedule=schedule, micro_batches=count, micro_batch_size=batch // count,
                stages=tuple(held),
            )  # fmt: skip
            if _runs(plan, profile, cost):
                return plan
        if twice and options.schedule in ("auto", "listed"):
            plan = _one_at_a_time(Plan(
                workload=workload, schedule="interleaved", micro_batches=count, micro_batch_size=batch // count,
                stages=tuple(stages),
            ))  # fmt: skip
            if _runs(plan, profile, cost):
                return plan
    return None


def _one_at_a_time(plan: Plan) -> Plan:
    """The stages under listed orders with one micro-batch in flight, which needs least memory."""
    orders = dict.fromkeys(plan.workers, "")
    for m in range(plan.micro_batches):
        steps = [(stage.worker, f" {n}F{m}") for n, stage in enumerate(plan.stages)]
        steps += [(stage.worker, f" {n}B{m}") for n, stage in reversed([*enumerate(plan.stages)])]
        for worker, step in steps:
            orders[worker] += step
    return replace(plan, schedule="listed", orders={worker: text.strip() for worker, text in orders.items()})


def _reserved(profile: Profile, options: SolveOptions) -> Profile:
    def kept(worker: Worker) -> Worker:
        found = [size for spec, size in options.reserve.items() if profile.matches(spec, worker)]
        return replace(worker, reserve_bytes=max(found)) if found else worker

    return replace(profile, workers=tuple(map(kept, profile.workers)))


def _splits(profile: Profile, options: SolveOptions) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """Every way to cut an order of the graph and to give each piece a worker that the hints allow."""
    names = [worker.name for worker in profile.workers]
    for order, stages in itertools.product(_orders(profile), range(1, len(profile.order) + 1)):
        for cuts in itertools.combinations(range(1, len(order)), stages - 1):
            parts = [order[a:b] for a, b in itertools.pairwise((0, *cuts, len(order)))]
            for workers in itertools.product(names, repeat=stages):
                split = list(zip(workers, parts, strict=True))
                if all(a != b for a, b in itertools.pairwise(workers)) and keeps(profile, options, split):
                    yield split


def _orders(profile: Profile) -> list[tuple[str, ...]]:
    """Every order in which values come before those who read them."""
    return [
        order
        for order in itertools.permutations(profile.order)
        if all(order.index(edge.source) < order.index(edge.target) for edge in profile.edges)
    ]


def keeps(profile: Profile, options: SolveOptions, split: list[tuple[str, tuple[str, ...]]]) -> bool:
    """True if no hint forbids (worker, partitions) as stages in this order."""
    where = {name: worker for worker, part in split for name in part}
    for name, worker in where.items():
        pins = (profile.partition[name].pin, options.pins.get(name))
        if not all(pin is None or profile.matches(pin, profile.worker[worker]) for pin in pins):
            return False
    labels = {each.colocate for each in profile.partitions if each.colocate}
    groups = [tuple(each.name for each in profile.partitions if each.colocate == label) for label in labels]
    if any(len({where[name] for name in group}) > 1 for group in (*groups, *options.together)):
        return False
    if any(len({where[name] for name in group}) < len(group) for group in options.apart):
        return False
    if options.max_workers is not None and len(set(where.values())) > options.max_workers:
        return False
    ranks = [worker.partition("/")[0] for worker, _ in split]
    order = options.order
    return not order or (set(ranks) <= set(order) and [*map(order.index, ranks)] == sorted(map(order.index, ranks)))


def _lightest(options: SolveOptions, worker: str, part: tuple[str, ...]) -> Stage:
    """The stage with everything run twice that may be: what needs least memory."""
    twice = {"never": (), "always": part, "auto": part}[options.remat]
    rules = options.rematerialise
    again = tuple(name for name in part if rules.get(name, "always" if name in twice else "never") == "always")
    return Stage(worker, part, again)


def _runs(plan: Plan, profile: Profile, cost: CostModel) -> bool:
    for stage in plan.stages:
        if any(cost.obstacle(name, stage.worker, plan.micro_batch_size) for name in stage.partitions):
            return False
    for worker in plan.workers:
        if worker_memory(cost, plan, worker).total > profile.worker[worker].capacity_bytes:
            return False
    if plan.schedule not in SCHEDULES:  # not to be simulated yet: taken to run, so that it need not be proven not to
        return True
    try:
        prediction_of(plan, cost)
    except FormatError:  # a link is missing, or the stages wait for each other
        return False
    return True


def instance(seed: int) -> tuple[str, Case]:
    """A problem without a plan, and what it was tightened by."""
    rng = random.Random(seed)  # noqa: S311 - a benchmark, not a secret
    kind = KINDS[seed % len(KINDS)]
    for draw in itertools.count():
        profile = random_instance(
            1000 * seed + draw, partitions=rng.choice([3, 4, 4, 5]), workers=rng.choice([2, 3]),
            graph=rng.random() < 0.4, alike=rng.random() < 0.3, busy=rng.random() < 0.3,
            missing=rng.choice([0.0, 0.0, 0.3]), pins=rng.random() < 0.25,
        )  # fmt: skip
        options = SolveOptions(
            schedule=rng.choice(["gpipe", "1f1b", *(["auto"] * 4 if kind not in ("pins", "links") else [])]),
            micro_batches=rng.choice([None, None, 1, 2, 4]),
            remat=rng.choice(["auto", "auto", "auto", "never", "always"]), time_limit=20.0,
            max_replicas=1,
        )  # fmt: skip
        case: Case = _roomy(rng, profile, binding=kind in ("links", "workers", "mixed")), options
        if whole_plan(*case) is None:
            continue
        for _ in range(12):
            case = _tighter(rng, kind, case)
            if whole_plan(*case) is None:
                return kind, case
    raise AssertionError


def _roomy(rng: random.Random, profile: Profile, *, binding: bool) -> Profile:
    """Memory for all of it on each worker; `binding`: for about half of it."""
    batch = profile.workload.batch_size
    activation = {each.partition: each.activation_bytes / each.micro_batch for each in profile.measurements}
    whole = sum(activation.values()) * batch + 3e6 * len(activation)
    share = rng.uniform(0.45, 0.7) if binding else 1.6
    return replace(
        profile,
        workers=tuple(replace(each, memory_bytes=whole * share * rng.uniform(0.9, 1.1)) for each in profile.workers),
    )


def _tighter(rng: random.Random, kind: str, case: Case) -> Case:
    """One step further: less memory, a link less, a hint more."""
    if kind == "mixed":
        kind = rng.choice(KINDS[:-1])
    profile, options = TIGHTER[kind](rng, *case)
    if kind == "order":
        return TIGHTER[rng.choice(["pins", "memory"])](rng, profile, options)
    return TIGHTER["memory"](rng, profile, options) if kind in ("remat", "workers") else (profile, options)


def _ranks(profile: Profile) -> list[str]:
    return [worker.name.partition("/")[0] for worker in profile.workers]


def _less_memory(rng: random.Random, profile: Profile, options: SolveOptions) -> Case:
    workers = tuple(replace(each, memory_bytes=each.memory_bytes * rng.uniform(0.6, 0.9)) for each in profile.workers)
    return replace(profile, workers=workers), options


def _more_reserve(rng: random.Random, profile: Profile, options: SolveOptions) -> Case:
    worker, spec = rng.choice([*zip(profile.workers, _ranks(profile), strict=True)])
    left = worker.memory_bytes - options.reserve.get(spec, 0.0)
    more = {**options.reserve, spec: worker.memory_bytes - left * rng.uniform(0.1, 0.7)}
    return profile, replace(options, reserve=more)


def _less_remat(rng: random.Random, profile: Profile, options: SolveOptions) -> Case:
    return profile, replace(options, rematerialise={**options.rematerialise, rng.choice(profile.order): "never"})


def _fewer_links(rng: random.Random, profile: Profile, options: SolveOptions) -> Case:
    return replace(profile, links=tuple(each for each in profile.links if rng.random() < 0.6)), options


def _more_pins(rng: random.Random, profile: Profile, options: SolveOptions) -> Case:
    pin = {rng.choice(profile.order): rng.choice(_ranks(profile))}
    return profile, replace(options, pins={**options.pins, **pin})


def _more_apart(rng: random.Random, profile: Profile, options: SolveOptions) -> Case:
    pair = tuple(sorted(rng.sample(profile.order, 2)))
    labels = {profile.partition[name].colocate for name in pair}
    if len(labels) == 1 and labels != {None}:  # contradicts the mark, which is a usage error
        return profile, options
    return profile, replace(options, apart=(*options.apart, pair))


def _an_order(rng: random.Random, profile: Profile, options: SolveOptions) -> Case:
    ranks = _ranks(profile)
    return profile, replace(options, order=tuple(rng.sample(ranks, rng.choice([len(ranks) - 1, len(ranks)]))))


def _fewer_workers(_: random.Random, profile: Profile, options: SolveOptions) -> Case:
    most = (options.max_workers or len(profile.workers)) - 1
    return profile, replace(options, max_workers=max(1, most))


TIGHTER = {
    "memory": _less_memory, "reserve": _more_reserve, "remat": _less_remat, "links": _fewer_links, "pins": _more_pins,
    "apart": _more_apart, "order": _an_order, "workers": _fewer_workers,
}  # fmt: skip


SIZE = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}


def _bytes(text: str) -> float:
    found = re.fullmatch(r"([\d.e+]+)(GiB|MiB|KiB|B)", text)
    assert found is not None, text
    return float(found[1]) * SIZE[found[2]]


def applied(case: Case, how: str) -> Case:
    """The problem with a change made as its text says: flags into options, the rest into the profile."""
    for part in re.split(r" and ", how):
        profile, options = case
        words = part.split()
        if part.startswith("--"):
            case = profile, _flags(options, words)
        elif part.startswith("drop --"):
            case = profile, _dropped(options, words[1], words[2])
        elif part.startswith("drop "):
            case = _unmarked(profile, part), options
        elif part.startswith("give "):
            case = _given(profile, part), options
        elif part.startswith("profile the links "):
            case = _linked(profile, part.removeprefix("profile the links ")), options
        elif part.startswith("add a worker like "):
            case = _joined(profile, options, words[-1]), options
        else:
            raise ValueError(f"what does {part!r} mean?")
    return case


def _flags(options: SolveOptions, words: list[str]) -> SolveOptions:
    if "--reserve" in words:
        pairs = (word.split("=") for word in words[1::2])
        return replace(options, reserve={spec: _bytes(size) for spec, size in pairs})
    for flag, value in zip(words[::2], words[1::2], strict=True):
        field = flag.removeprefix("--").replace("-", "_")
        options = replace(options, **{field: int(value) if value.isdecimal() else value})
    return options


def _dropped(options: SolveOptions, flag: str, value: str) -> SolveOptions:
    if flag == "--pin":
        name, _, pin = value.partition("=")
        assert options.pins[name] == pin
        return replace(options, pins={other: pin for other, pin in options.pins.items() if other != name})
    if flag in ("--never-remat", "--always-remat"):
        assert f"--{options.rematerialise[value]}-remat" == flag
        rules = {name: rule for name, rule in options.rematerialise.items() if name != value}
        return replace(options, rematerialise=rules)
    if flag == "--apart":
        assert tuple(value.split(",")) in options.apart
        return replace(options, apart=tuple(each for each in options.apart if each != tuple(value.split(","))))
    assert flag == "--order"
    return replace(options, order=())


def _unmarked(profile: Profile, part: str) -> Profile:
    found = re.fullmatch(r'drop (\w+)="[^"]*" where (.*) (is|are) marked', part)
    assert found is not None, part
    field, names = found[1], set()
    for text in found[2].split(", "):
        first, last = re.fullmatch(r"p(\d+)(?:-(\d+) \(\d+\))?", text).groups()
        names |= {f"p{n}" for n in range(int(first), int(last or first) + 1)}
    return replace(
        profile,
        partitions=tuple(replace(each, **{field: None}) if each.name in names else each for each in profile.partitions),
    )


def _given(profile: Profile, part: str) -> Profile:
    memory = dict(text.removeprefix("give ").split() for text in part.split(", "))
    return replace(
        profile,
        workers=tuple(
            replace(each, memory_bytes=_bytes(memory[rank]))
            if (rank := each.name.partition("/")[0]) in memory
            else each
            for each in profile.workers
        ),
    )


def _linked(profile: Profile, pairs: str) -> Profile:
    """A measurement that finds the links as slow as the slowest; without any, as good as no time."""
    name = {worker.name.partition("/")[0]: worker.name for worker in profile.workers}
    there = {(link.source, link.target) for link in profile.links}
    like = max(profile.links, key=lambda link: link.points[-1].seconds, default=Link("", "", (LinkPoint(1, 0.0),)))
    links = list(profile.links)
    for pair in pairs.split(", "):
        u, v = (name[rank] for rank in pair.split(" - "))
        links += [replace(like, source=a, target=b) for a, b in ((u, v), (v, u)) if (a, b) not in there]
    return replace(profile, links=tuple(links))


def _joined(profile: Profile, options: SolveOptions, rank: str) -> Profile:
    """A worker of the same kind has come, with the same links."""
    worker = next(each for each in _reserved(profile, options).workers if each.name.partition("/")[0] == rank)
    copy = f"worker:{len(profile.workers)}/cpu"
    links = [replace(link, source=copy) for link in profile.links if link.source == worker.name]
    links += [replace(link, target=copy) for link in profile.links if link.target == worker.name]
    leaving = [link for link in profile.links if link.source == worker.name]
    coming = [link for link in profile.links if link.target == worker.name]
    if leaving and coming:
        there = max(leaving, key=lambda link: link.points[-1].seconds)
        back = max(coming, key=lambda link: link.points[-1].seconds)
        links += [replace(there, target=copy), replace(back, source=copy)]
    return replace(profile, workers=(*profile.workers, replace(worker, name=copy)), links=(*profile.links, *links))


def verdict(case: Case, *, all_rows: bool) -> tuple[str, tuple[WayOut, ...]]:
    """What is wrong, empty: nothing; and the ways out that the solver names."""
    try:
        solve(*case)
    except InfeasibleError as error:
        ways = error.ways_out
        wrong = [f"no way out: {error.message}"] if not ways else [_wrong(case, way) for way in ways]
        return next(filter(None, wrong if all_rows else wrong[:1]), ""), ways
    except AssignerError as error:
        return f"neither plan nor proof: {error.message}", ()
    return "a plan was found where there is none", ()


def _wrong(case: Case, way: WayOut) -> str:
    """Why a way out is none; empty: it is one."""
    try:
        profile, options = applied(case, way.how)
        plan = solve(profile, options).plan
    except AssignerError as error:
        return f"{way.how}: {error.message}"
    held = predict(plan, _reserved(profile, options))
    if overfull(held) or not keeps(profile, options, [(stage.worker, stage.partitions) for stage in plan.stages]):
        return f"{way.how}: the plan does not fit"
    if held.step_s > way.value * (1 + options.stop_gap):
        return f"{way.how}: {held.step_s:g} s, told {way.value:g} s"
    return ""


def main() -> int:
    """Run the instances; 1 if any fails."""
    parser = argparse.ArgumentParser(description="Problems without a plan, and ways out of them.")
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--all-rows", action="store_true", help="try every way out, not the first alone")
    given = parser.parse_args()
    start, spent, slowest = time.monotonic(), 0.0, 0.0
    kinds, sorts, failures, rows = Counter[str](), Counter[str](), 0, 0
    for seed in range(given.first, given.first + given.instances):
        kind, case = instance(seed)
        began = time.monotonic()
        wrong, ways = verdict(case, all_rows=given.all_rows)
        spent, slowest = spent + time.monotonic() - began, max(slowest, time.monotonic() - began)
        kinds[kind] += 1
        sorts[_sort(ways[0].how) if ways else "none"] += 1
        rows += len(ways)
        if wrong:
            failures += 1
            print(f"seed {seed} ({kind}): {wrong}", flush=True)
    print(f"tightened by: {', '.join(f'{name} {n}' for name, n in kinds.most_common())}")
    print(f"first way out: {', '.join(f'{name} {n}' for name, n in sorts.most_common())}; {rows} rows in all")
    print(
        f"{given.instances} infeasible instances: {given.instances - failures} refused with a way out that helps,"
        f" {failures} failures; {spent:.0f} s to solve (slowest {slowest:.1f} s),"
        f" {time.monotonic() - start:.0f} s in all"
    )
    return 1 if failures else 0


def _sort(how: str) -> str:
    """`--pin p0=worker:1` is a way out of the sort `drop --pin`."""
    sorts = []
    for part in how.split(" and "):
        words = part.split()
        flags = [word for word in words if word.startswith("--")]
        sorts.append(
            " ".join([*(["drop"] if words[0] == "drop" else []), *dict.fromkeys(flags)]) if flags else words[0]
        )
    return " + ".join(dict.fromkeys(sorts))


if __name__ == "__main__":
    sys.exit(main())
