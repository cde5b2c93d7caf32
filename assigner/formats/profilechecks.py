"""What a profile must hold for its parts to fit together: names that are unique, references that lead somewhere."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Literal, get_args

from assigner.errors import FormatError
from assigner.formats.document import check_unique
from assigner.formats.terms import Backend
from assigner.location import Location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import LinkPoint, Profile


_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check_profile(profile: Profile) -> None:
    """Refuse what contradicts itself.

    Raises:
        FormatError: a name stands twice, a reference leads nowhere, or the graph has a cycle; the message says where.
    """
    for section in ("workers", "partitions", "measurements"):
        if not getattr(profile, section):
            raise FormatError(f"{section}: empty; a profile has at least one")
    workers = [worker.name for worker in profile.workers]
    check_unique(workers, "workers[{}].name")
    check_unique([partition.name for partition in profile.partitions], "partitions[{}].name")
    _check_workers(profile)
    _check_links(profile)
    _check_wires(profile)
    _check_collectives(profile)
    _check_graph(profile)
    _check_measurements(profile)
    for n, partition in enumerate(profile.partitions):
        pin = partition.pin
        if pin is not None and not any(profile.matches(pin, worker) for worker in profile.workers):
            raise FormatError(
                f"partitions[{n}].pin: {pin!r} names no worker, kind or host of this profile",
                hint=f"workers: {', '.join(workers[:6])}",
            )


def _check_workers(profile: Profile) -> None:
    """A rank has one device, and its name is that of a rank."""
    ranks: dict[int, str] = {}
    for n, worker in enumerate(profile.workers):
        place = Location.parse(worker.name, where=f"workers[{n}].name")
        if not _DEVICE.fullmatch(worker.device):
            raise FormatError(f"workers[{n}].device: {worker.device!r} is unknown", hint="cpu, or cuda:N")
        if worker.device not in (place.device, place.device.partition(":")[0]):  # "cuda" may be any of them
            raise FormatError(
                f"workers[{n}].device: {worker.device!r} is not allowed; {worker.name!r} is on {place.device}",
                hint="a worker's name ends with its device",
            )
        if ranks.setdefault(place.rank, worker.name) != worker.name:
            raise FormatError(
                f"workers[{n}].name: {worker.name!r} and {ranks[place.rank]!r} have the same rank; a worker has one"
                " device",
                hint="give each worker a rank of its own",
            )


def _known(profile: Profile, what: Literal["worker", "partition"], name: str, path: str) -> None:
    if name not in getattr(profile, what):
        raise FormatError(f"{path}: {name!r} is not a {what} of this profile")


def _check_links(profile: Profile) -> None:
    pairs = []
    for n, link in enumerate(profile.links):
        _known(profile, "worker", link.source, f"links[{n}].source")
        _known(profile, "worker", link.target, f"links[{n}].target")
        if link.source == link.target:
            raise FormatError(f"links[{n}]: {link.source!r} is both source and target")
        check_points(link.points, f"links[{n}]", "a link")
        if link.backend not in get_args(Backend):
            raise FormatError(
                f"links[{n}].backend: {link.backend!r} is unknown", hint=f"one of {', '.join(get_args(Backend))}"
            )
        pairs.append(f"{link.source} -> {link.target}")
    check_unique(pairs, "links[{}]")


def _check_wires(profile: Profile) -> None:
    """Two or more links each, and no link on two; that a link was not measured does not matter."""
    on: dict[tuple[str, str], int] = {}
    for n, wire in enumerate(profile.wires):
        for k, link in enumerate(wire.links):
            source, target = link.source, link.target
            where = f"wires[{n}].links[{k}]"
            _known(profile, "worker", source, where)
            _known(profile, "worker", target, where)
            if source == target:
                raise FormatError(f"{where}: {source!r} is both source and target")
            if on.setdefault((source, target), n) != n:
                raise FormatError(f"{where}: {source} -> {target} is on wires[{on[source, target]}], too")
        check_unique([f"{link.source} -> {link.target}" for link in wire.links], f"wires[{n}].links[{{}}]")
        if len(wire.links) < 2:
            raise FormatError(f"wires[{n}].links: {len(wire.links)}; a wire that is shared has two or more")


def check_points(points: Sequence[LinkPoint], path: str, what: str) -> None:
    """Raise FormatError unless there are points whose sizes grow and are whole bytes, or none; `what` has them."""
    if not points:
        raise FormatError(f"{path}.points: empty; leave out {what} that was not measured")
    sizes = [point.bytes for point in points]
    if sorted(set(sizes)) != sizes:
        raise FormatError(f"{path}.points: sizes must grow, each once; found {sizes[:6]}")
    for n, point in enumerate(points):
        if 0 < point.bytes < 1:
            raise FormatError(f"{path}.points[{n}].bytes: {point.bytes} is not allowed; expected 0, or 1 or more")


def _check_collectives(profile: Profile) -> None:
    sets = []
    for n, each in enumerate(profile.collectives):
        for k, name in enumerate(each.workers):
            _known(profile, "worker", name, f"collectives[{n}].workers[{k}]")
        check_unique(each.workers, f"collectives[{n}].workers[{{}}]")
        if len(each.workers) < 2:
            raise FormatError(f"collectives[{n}].workers: {list(each.workers)}; an all-reduce takes two or more")
        check_points(each.points, f"collectives[{n}]", "an all-reduce")
        sets.append(" + ".join(sorted(each.workers)))
    check_unique(sets, "collectives[{}]")


def _check_graph(profile: Profile) -> None:
    keys = []
    sizes: dict[tuple[str, int], tuple[float, float]] = {}
    for n, edge in enumerate(profile.edges):
        _known(profile, "partition", edge.source, f"edges[{n}].source")
        _known(profile, "partition", edge.target, f"edges[{n}].target")
        size = (edge.bytes_per_sample, edge.fixed_bytes)
        if sizes.setdefault((edge.source, edge.output), size) != size:
            raise FormatError(
                f"edges[{n}]: output {edge.output} of {edge.source!r} has another size on an earlier edge;"
                " edges of one output carry one value",
                hint="give different values different `output` numbers",
            )
        keys.append(f"{edge.source}:{edge.output} -> {edge.target}")
    check_unique(keys, "edges[{}]")
    for n, tie in enumerate(profile.ties):
        for name in tie.partitions:
            _known(profile, "partition", name, f"ties[{n}].partitions")
        check_unique(tie.partitions, f"ties[{n}].partitions[{{}}]")
    _check_ties(profile)
    _ = profile.order


def _check_ties(profile: Profile) -> None:
    """Two or more partitions each, of whose parameters the shared ones are a part, each named once."""
    check_unique([tie.parameter for tie in profile.ties], "ties[{}].parameter")
    shared: dict[str, float] = defaultdict(float)
    for n, tie in enumerate(profile.ties):
        if len(tie.partitions) < 2:
            raise FormatError(
                f"ties[{n}].partitions: {list(tie.partitions)}; a parameter that is shared has two or more",
                hint="name all partitions that hold it, or leave the tie out",
            )
        for name in tie.partitions:
            most = profile.partition[name].parameter_bytes
            before, shared[name] = shared[name], shared[name] + tie.bytes
            if shared[name] > most * (1 + 1e-9):
                beside = f" beside {before:,.0f} of earlier ties" if before else ""
                raise FormatError(
                    f"ties[{n}].bytes: {tie.bytes:,.0f}{beside}, where all parameters of partition {name!r} have"
                    f" {most:,.0f}",
                    hint="the parameter's own bytes; each partition's parameter_bytes has them in it",
                )


def _check_measurements(profile: Profile) -> None:
    keys = []
    for n, measured in enumerate(profile.measurements):
        _known(profile, "partition", measured.partition, f"measurements[{n}].partition")
        _known(profile, "worker", measured.worker, f"measurements[{n}].worker")
        parts = measured.backward_input_s, measured.backward_weight_s, measured.waiting_bytes
        if any(each is None for each in parts) and any(each is not None for each in parts):
            raise FormatError(
                f"measurements[{n}]: backward_input_s, backward_weight_s and waiting_bytes go together;"
                " some are there and some are not"
            )
        keys.append(f"{measured.partition} on {measured.worker} at micro-batch {measured.micro_batch}")
    check_unique(keys, "measurements[{}]")
