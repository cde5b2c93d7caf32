"""`assigner lab --from PROFILE`: hosts that behave like a profile's workers, scaled to this machine.

A worker that takes T seconds for the profile's work (forward and backward of its partitions at one micro-batch size)
gets k / T of a core, with k as large as this machine's cores allow. With t the seconds of the same work on one whole
core here, every worker then takes N = t / k times as long as in the profile. Wires get 1 / N of their rates, and
latencies N times theirs, so that compute and transfer keep their ratio.

What links say about the wires behind them follows the lab's own model: a message between two hosts goes at the lower
rate of their two wires, or of the wire between their racks where that is lower. So a host's wire is as fast as its
fastest link, and a pair far below both its wires is a pair in two racks.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from math import log
from statistics import median
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import FormatError, UsageError
from assigner.schedule.cost import CostModel, message_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.formats.profile import Link, Profile, Worker
    from assigner.lab.cluster import Machine

SHARE_OF_MACHINE = 0.85
"""Of all cores, and of the one core of a worker, goes to hosts; the rest is for the kernel's part of their work, for
this program, and for hosts that happen to meet on one core."""
START_UP_BYTES = 400 * 2**20
"""Python and torch of one rank: a profile's memory is what they leave."""
_SHARE_OF_MEMORY = 0.9
_PAYLOAD = 1448 / 1514  # of an Ethernet frame on a wire, what TCP carries
_FASTEST_MBIT = 10_000.0  # above it a wire is better left unshaped
_OWN_LATENCY_S = 150e-6  # a small message between two unshaped hosts of a lab
_LEAST_LATENCY_S = 50e-6
_LEAST_CORES = 0.02
_CORES_OF_QUOTA = re.compile(r"(?P<model>.*) \((?P<cores>\d+\.\d+) cores\)")
_NEAR = 0.5  # a pair with at least this share of what its two wires could do is in one rack
Pair = tuple[str, str]


@dataclass(frozen=True)
class DerivedField:
    """A field's value, and where it comes from. None: the field is left out, and the comment says why."""

    value: float | str | None
    comment: str


@dataclass(frozen=True)
class Derived:
    """A cluster file as it will be written: fields of each host, by name, and of the wire between racks, if any.

    `scale` is seconds here for one second of the profile; the notes stand at the head.
    """

    scale: float
    notes: tuple[str, ...]
    hosts: tuple[dict[str, DerivedField], ...]
    rack_link: dict[str, DerivedField]


@dataclass(frozen=True)
class SharedWork:
    """What workers are compared by: partitions that all were measured with, at one micro-batch.

    `seconds` are of their forwards and backwards, by worker.
    """

    partitions: tuple[str, ...]
    micro_batch: int
    seconds: dict[str, float]


def common_work(profile: Profile, also: Profile | None) -> SharedWork:
    """The most partitions, and then the largest micro-batch, that all workers have a price for.

    Another profile of the same workload, if there is one, must have the prices too.

    Raises:
        FormatError: no partition was measured on all workers at one size.
    """
    costs = [CostModel(each) for each in (profile, also) if each is not None]
    choices = []
    for size in sorted({point.micro_batch for point in profile.measurements}):
        held = tuple(
            name
            for name in profile.order
            if all(cost.obstacle(name, worker, size) is None for cost in costs for worker in cost.profile.worker)
        )
        choices.append((len(held), size, held))
    count, size, held = max(choices)
    seconds = {worker: _work_s(costs[0], worker, held, size) for worker in profile.worker}
    if not count or min(seconds.values()) <= 0:
        raise FormatError(
            "the profile's workers cannot be compared: no partition was measured on all of them",
            hint="profile them again with the same --micro-batches",
        )
    return SharedWork(held, size, seconds)


def _work_s(cost: CostModel, worker: str, partitions: Sequence[str], size: int) -> float:
    prices = [cost.partition(name, worker, size) for name in partitions]
    return sum(price.forward_s + price.backward_s for price in prices)


def derive(profile: Profile, machine: Machine, *, here: Profile | None = None, netem: bool = True) -> Derived:
    """The cluster that behaves like a profile's workers.

    How fast this machine is, a profile of the same workload tells that was measured `here`, or else workers of the
    profile with this machine's processor. `netem`: this machine can add latency.

    Raises:
        UsageError: nothing tells how fast this machine is, or a host would get next to no core, or no memory.
        FormatError: the two profiles are of different workloads, or workers cannot be compared.
    """
    if here is not None and [each.name for each in here.partitions] != [each.name for each in profile.partitions]:
        raise FormatError(
            f"the two profiles are of different workloads: {profile.workload.name} and {here.workload.name}",
            hint=_measuring(profile),
        )
    work = common_work(profile, here)
    core_s, reason = _core_seconds(profile, work, machine, here)
    speed = {worker: 1 / seconds for worker, seconds in work.seconds.items()}
    k = SHARE_OF_MACHINE * min(machine.cores / sum(speed.values()), 1 / max(speed.values()))
    scale = core_s / k
    names = list(dict.fromkeys(worker.host for worker in sorted(profile.workers, key=lambda worker: worker.rank)))
    by_host = {name: [worker for worker in profile.workers if worker.host == name] for name in names}
    wires, memory = _Wiring(profile, scale, netem=netem), _memory(by_host, machine)
    hosts = []
    for name, workers in by_host.items():
        host = {
            "name": DerivedField(name, ""),
            "nproc": DerivedField(len(workers), f"workers: {', '.join(w.name for w in workers)}"),
        }
        host |= {"cpu": _share(name, workers, work, k), "memory_mib": memory[name]} | wires.fields(name)
        hosts.append(host)
    notes = (
        *_head(profile, work, machine),
        f"1 s of the profile is {fmt.number(scale)} s here: {reason}.",
        *_order_note(by_host),
        *wires.note(),
    )
    return Derived(scale, notes, tuple(hosts), wires.rack_link())


def _measuring(profile: Profile) -> str:
    """The command that measures a profile's workload on this machine."""
    return f"assigner profile {shlex.quote(profile.workload.entry)} -o here.json"


def _core_seconds(profile: Profile, work: SharedWork, machine: Machine, here: Profile | None) -> tuple[float, str]:
    """Seconds of the work on one whole core of this machine, and how that is known."""
    if here is not None:
        worker = next((each for each in here.workers if each.device == "cpu"), None)
        if worker is None:
            raise UsageError("the profile of this machine has no CPU worker", hint="measure one on its processor")
        seconds = _work_s(CostModel(here), worker.name, work.partitions, work.micro_batch) * _cores(worker)
        return seconds, f"one core here takes {fmt.seconds(seconds)} for the work, as measured on this machine"
    alike = [w for w in profile.workers if w.device == "cpu" and split_share(w.kind)[0] == machine.processor]
    if not alike:
        kinds = ", ".join(dict.fromkeys(worker.kind for worker in profile.workers))
        raise UsageError(
            f"nothing tells how fast this machine ({machine.processor}) is beside the profile's workers ({kinds})",
            hint=f"measure it: {_measuring(profile)}; then --here here.json",
        )
    seconds = median(work.seconds[worker.name] * _cores(worker) for worker in alike)
    names = ", ".join(worker.name for worker in alike)
    return seconds, (
        f"one core takes {fmt.seconds(seconds)} for the work, from {names}, whose processor has this machine's name"
        f" ({machine.processor}); --here with a profile measured on this machine is surer"
    )


def split_share(kind: str) -> tuple[str, float | None]:
    """A worker's kind, as `AMD EPYC (0.40 cores)`: the processor's model, and the cores of a quota; None: no quota."""
    match = _CORES_OF_QUOTA.fullmatch(kind)
    return (match["model"], float(match["cores"])) if match else (kind, None)


def _cores(worker: Worker) -> float:
    """Cores that a CPU worker computed with."""
    return min(split_share(worker.kind)[1] or worker.threads, worker.threads)


def _head(profile: Profile, work: SharedWork, machine: Machine) -> list[str]:
    when = f", measured {profile.created_at}" if profile.created_at else ""
    held, free = fmt.plural(len(work.partitions), "partition"), fmt.size(machine.memory_bytes)
    return [
        f"Hosts that behave like the workers of a profile of {profile.workload.name}{when},",
        f"scaled to a machine with {machine.cores:g} cores ({machine.processor}) and {free} free.",
        f"The work by which workers are compared: forward and backward of {held} at micro-batch {work.micro_batch}.",
    ]


def _order_note(by_host: dict[str, list[Worker]]) -> list[str]:
    ranks = [worker.rank for workers in by_host.values() for worker in workers]
    if ranks == list(range(len(ranks))):
        return []
    return ["The ranks of a run on these hosts are counted anew: the profile's do not stand host by host."]


def _share(name: str, workers: list[Worker], work: SharedWork, k: float) -> DerivedField:
    shares = [k / work.seconds[worker.name] for worker in workers]
    if sum(shares) < _LEAST_CORES:
        raise UsageError(
            f"host {name} would get {sum(shares):.4f} of a core: the profile's workers are too unlike for this machine",
            hint="a machine with more cores, or a profile with fewer workers (assigner profile --merge builds them)",
        )
    text = f"the work takes {', '.join(fmt.seconds(work.seconds[worker.name]) for worker in workers)} there"
    if max(shares) > 1.1 * min(shares):
        text += "; its workers are unlike there and share alike here"
    if sum(shares) < 0.1:
        text += "; starting Python on so little takes minutes"
    return DerivedField(float(f"{sum(shares):.3g}"), text)


def _memory(by_host: dict[str, list[Worker]], machine: Machine) -> dict[str, DerivedField]:
    """As in the profile if this machine has it for all hosts at once, else in proportion."""
    start_up = {name: START_UP_BYTES * len(workers) for name, workers in by_host.items()}
    wanted = {name: sum(worker.memory_bytes for worker in workers) for name, workers in by_host.items()}
    room = _SHARE_OF_MEMORY * machine.memory_bytes - sum(start_up.values())
    if room <= 0:
        ranks = fmt.plural(sum(map(len, by_host.values())), "rank")
        raise UsageError(
            f"no memory would be left for hosts: Python and torch of {ranks} take {fmt.size(sum(start_up.values()))},"
            f" and {fmt.size(_SHARE_OF_MEMORY * machine.memory_bytes)} of this machine can be given away",
            hint="a machine with more memory, or a profile with fewer workers (assigner profile --merge builds them)",
        )
    factor = min(1.0, room / max(1.0, sum(wanted.values())))
    found = {}
    for name, size in wanted.items():
        text = f"{fmt.size(size)} there"
        if factor < 1:
            text += f", scaled by {fmt.number(factor)} to what this machine has"
        text += f", and {fmt.size(start_up[name])} for Python and torch"
        found[name] = DerivedField(round((factor * size + start_up[name]) / 2**20), text)
    return found


class _Wiring:
    """Fields of wires: rates divided by the scale, latencies multiplied by it."""

    def __init__(self, profile: Profile, scale: float, *, netem: bool) -> None:
        self._wires, self._scale, self._netem = find_wires(profile), scale, netem

    def fields(self, host: str) -> dict[str, DerivedField]:
        """Rack, rate and latency of one host."""
        wires, found = self._wires, {}
        if wires.rack_rate is not None:
            found["rack"] = DerivedField(wires.rack[host], "its links to the others of it are fast")
        if host in wires.rate:
            found["bandwidth_mbit"] = self._rate(wires.rate[host], "its fastest link")
        if host in wires.latency_s:
            found["latency_ms"] = self._latency(wires.latency_s[host], _OWN_LATENCY_S)
        return {name: setting for name, setting in found.items() if setting.comment}

    def note(self) -> list[str]:
        """How well the wires tell what the links were."""
        worst = self._wires.worst
        if worst is None:
            return []
        unit = fmt.rate_unit(worst.measured, worst.explained)
        told = f"{unit.text(worst.measured)} measured, {unit.text(worst.explained)} explained"
        return [f"Between {worst.pair[0]} and {worst.pair[1]} these wires are furthest from the links: {told}."]

    def rack_link(self) -> dict[str, DerivedField]:
        """The wire between racks."""
        if self._wires.rack_rate is None:
            return {}
        found = {
            "bandwidth_mbit": self._rate(self._wires.rack_rate, "links between racks (median)"),
            "latency_ms": self._latency(self._wires.rack_latency_s, 0.0),
        }
        return {name: setting for name, setting in found.items() if setting.comment}

    def _rate(self, rate: float, what: str) -> DerivedField:
        mbit = rate * 8e-6 / self._scale / _PAYLOAD
        text = f"{what}: {fmt.rate_unit(rate).text(rate)} there"
        if mbit > _FASTEST_MBIT:
            return DerivedField(None, f"{text}, {mbit:,.0f} Mbit/s here: more than is shaped; left out")
        return DerivedField(max(0.1, float(f"{mbit:.3g}")), text)

    def _latency(self, seconds: float, own_s: float) -> DerivedField:
        """Only what is above the lab's own; an empty comment: nothing to say."""
        more = seconds * self._scale - own_s
        if more < _LEAST_LATENCY_S:
            return DerivedField(None, "")
        text = f"a small message takes {fmt.seconds(seconds)} there"
        if not self._netem:
            return DerivedField(None, f"{text}; {more * 1e3:.3g} ms left out: this kernel has no netem")
        return DerivedField(float(f"{more * 1e3:.3g}"), text)


@dataclass(frozen=True)
class Misfit:
    """A pair of hosts, its rate as measured, and as its wires explain it, in bytes/s."""

    pair: Pair
    measured: float
    explained: float


@dataclass(frozen=True)
class Wires:
    """Rates in bytes/s, latencies in seconds; a host without links is in neither."""

    rate: dict[str, float]  # of each host's wire
    latency_s: dict[str, float]  # of the smallest message that a host sends, within its rack where it has company there
    rack: dict[str, str]  # of each host: the name of its first host
    rack_rate: float | None  # of the wire between racks; None: there is one rack
    rack_latency_s: float  # what is added between racks
    worst: Misfit | None  # the pair that these explain worst; None: there are no links


def link_rate(link: Link) -> float | None:
    """The rate of messages beyond the largest that was measured, in bytes/s; None: noise hides it."""
    size = link.points[-1].bytes
    seconds = message_s(link.points, 2 * size) - link.points[-1].seconds
    return size / seconds if seconds > 0 else None


def find_wires(profile: Profile) -> Wires:
    """The wires that explain a profile's links between hosts."""
    host = {worker.name: worker.host for worker in profile.workers}
    rates: dict[Pair, list[float]] = defaultdict(list)
    latencies: dict[Pair, list[float]] = defaultdict(list)
    for link in profile.links:
        source, target = host[link.source], host[link.target]
        if source != target:
            latencies[source, target].append(link.points[0].seconds)
            rate = link_rate(link)
            if rate:
                rates[min(source, target), max(source, target)].append(rate)
    pairs = {pair: median(found) for pair, found in rates.items()}
    wire: dict[str, float] = defaultdict(float)
    for pair, rate in pairs.items():
        for name in pair:
            wire[name] = max(wire[name], rate)
    rack = _racks(list(dict.fromkeys(host.values())), pairs, wire)
    far = [rate for (left, right), rate in pairs.items() if rack[left] != rack[right]]
    between_racks = median(far) if far else None
    latency, between = _latencies({pair: median(found) for pair, found in latencies.items()}, rack)
    return Wires(dict(wire), latency, rack, between_racks, between, _worst(pairs, wire, rack, between_racks))


def _racks(hosts: Sequence[str], pairs: Mapping[Pair, float], wire: Mapping[str, float]) -> dict[str, str]:
    """Complete-linkage clustering: racks are joined, the nearest pair first, where no measured pair across is far.

    By chains of near pairs alone, a host on a thin wire, which is near to everybody, would make all racks one. Hosts
    without links are in the first rack.
    """
    share = {(left, right): rate / min(wire[left], wire[right]) for (left, right), rate in pairs.items()}
    near = [(u, v) for u, v in combinations(hosts, 2) if share.get((min(u, v), max(u, v)), 0.0) >= _NEAR]
    rack = {name: name for name in hosts}
    for pair in sorted(near, key=lambda pair: -share[min(pair), max(pair)]):
        new, old = sorted((rack[name] for name in pair), key=hosts.index)
        across = [each for (u, v), each in share.items() if new != old and {rack[u], rack[v]} == {new, old}]
        if across and min(across) >= _NEAR:
            rack = {name: new if of == old else of for name, of in rack.items()}
    first = next((name for name in hosts if name in wire), hosts[0])
    return {name: rack[name if name in wire else first] for name in hosts}


def _worst(
    pairs: Mapping[Pair, float], wire: Mapping[str, float], rack: Mapping[str, str], between: float | None
) -> Misfit | None:
    """The pair whose rate is the furthest from what the wires explain; None: no pair was measured."""
    found = []
    for (left, right), rate in pairs.items():
        limits = [wire[left], wire[right], *([between] if between is not None and rack[left] != rack[right] else [])]
        found.append(Misfit((left, right), rate, min(limits)))
    return max(found, key=lambda each: abs(log(each.measured / each.explained)), default=None)


def _latencies(pairs: Mapping[Pair, float], rack: Mapping[str, str]) -> tuple[dict[str, float], float]:
    """Seconds from each host, and what a pair in two racks has more."""
    near: dict[str, list[float]] = defaultdict(list)
    far: dict[str, list[float]] = defaultdict(list)
    for (source, target), seconds in pairs.items():
        (near if rack[source] == rack[target] else far)[source].append(seconds)
    own = {name: median(found) for name, found in near.items()}
    more = [seconds - own[name] for name, found in far.items() for seconds in found if name in own]
    return own, max(0.0, median(more)) if more else 0.0
