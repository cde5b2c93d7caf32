"""The graphs that a pipeline's batches run through, the plan's own and others, each with its programs.

A capture holds for some inputs only (`assigner.model.marking.domain`). What does not fit the plan's own graph (another
path through the model's code, one row, another dtype or plain value, eval mode) gets a graph of its own: captured once,
on every rank alike, for all ranks see the same batches. It runs with the same modules and weights.

    rows of the micro-batches    4 4 4 1
    graph                        a a a b      the step runs a's program with three micro-batches, then b's with one
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner import formatting as fmt
from assigner.errors import AssignerError, FormatError, MarkingError, UsageError
from assigner.formats.orders import written_order
from assigner.formats.plan import Plan
from assigner.location import rank_of
from assigner.model.deferred.mutation import ElementPlaces
from assigner.model.marking import PartitionGraph, PartitionModule, Value
from assigner.model.marking.cut import recut
from assigner.model.marking.domain import InputKey, input_key
from assigner.model.marking.graph import UNREAD
from assigner.model.marking.modules import TOO_FEW_VALUES
from assigner.runtime.batch.microbatch import MicroBatch
from assigner.runtime.failures.callrecord import described
from assigner.runtime.messages.transport import Transport
from assigner.runtime.stages.replicas import check_shared, storing
from assigner.schedule.program import Payload, Program, Route, build_forward_program, build_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from assigner.model.marking.changedarguments import InputWrites
    from assigner.runtime.ranks.membership import Membership

_MOST_VARIANTS = 64  # of each mode; what is run longest ago goes first
_MOST_KEYS = 1024
_MANY = 5
"""Graphs that differ in plain numbers of the inputs alone: by then it is told what such a number costs."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One graph of the model, and what this rank has of it."""

    graph: PartitionGraph
    plan: Plan
    modules: Mapping[str, PartitionModule]
    transport: Transport | None  # gets to know the routes of its programs; None: there are no other ranks
    is_planned: bool = False  # it is the graph that the plan was made for
    _programs: dict[tuple[int, bool], Program] = field(default_factory=dict)

    def program(self, count: int, *, training: bool) -> Program:
        """What the workers do with so many micro-batches of whatever size; without `training` forwards alone.

        All of them are kept: no batch has more micro-batches than planned.
        """
        if (count, training) not in self._programs:
            plan = self.plan.cut(count, 1, batch_size=count)
            edges, ties = self.graph.edges, self.graph.ties
            program = build_program(plan, edges, ties) if training else build_forward_program(plan, edges)
            if self.transport is not None:
                headers = [
                    header_route(route)
                    for route in program.routes
                    if route.payload is Payload.ACTIVATION
                    and self.graph.values[Value(route.partition, route.output)].shape is None
                ]
                self.transport.know((*program.routes, *headers))
            self._programs[count, training] = program
        return self._programs[count, training]

    @cached_property
    def read_inputs(self) -> dict[int, str]:
        """The model's flattened inputs that this rank reads, each with a partition that does."""
        pieces = [piece for piece in self.graph.pieces if piece.name in self.modules]
        return {value.index: piece.name for piece in reversed(pieces) for value in piece.reads if not value.partition}

    @property
    def makers(self) -> tuple[int, ...]:
        """The ranks that make the model's output, each of some micro-batches; that of the first worker first."""
        return tuple(rank_of(worker) for worker in self.plan.holders[self.graph.last.name])


@dataclass(frozen=True)
class VariantGroup:
    """Micro-batches of one batch that run through one graph."""

    variant: Variant
    places: tuple[int, ...]  # their numbers in the batch
    micro_batches: tuple[MicroBatch, ...]


class Variants:
    """The graphs that were needed so far; `graph` is the plan's own, and `modules` are this rank's partitions of it.

    `trained` are this rank's parameters that a script may freeze, by name; `unread` gives the values of tensors that no
    partition of the plan's graph holds.
    """

    def __init__(
        self,
        graph: PartitionGraph,
        plan: Plan,
        modules: Mapping[str, PartitionModule],
        member: Membership,
        *,
        trained: Mapping[str, torch.Tensor],
        unread: Callable[[Iterable[str], torch.device], Mapping[str, torch.Tensor]],
    ) -> None:
        self.planned = Variant(graph, plan, modules, member.transport, is_planned=True)
        self.plan, self.member, self._trained, self._unread = plan, member, trained, unread
        self._made: dict[bool, list[Variant]] = {True: [self.planned], False: []}
        self._known: OrderedDict[tuple[InputKey, bool], Variant] = OrderedDict()
        self._has_warned = False
        self.read_elsewhere = graph.read_elsewhere  # of any of them

    def made(self) -> list[Variant]:
        """All graphs so far, the plan's own first."""
        return [variant for variants in self._made.values() for variant in variants]

    def groups(self, micro_batches: Sequence[MicroBatch], *, training: bool) -> list[VariantGroup]:
        """The micro-batches of a batch by the graph that they run through, in order.

        Raises:
            MarkingError: the forward cannot be cut for these inputs as the plan has it.
            UsageError: a parameter is frozen now, or no more, where a forward looks at that; or a Python value has
                changed that only some of these graphs were captured with.
        """
        found: dict[Variant, list[int]] = {}
        last: InputKey | None = None
        for place, cut in enumerate(micro_batches):
            key = input_key(cut.structure, cut.inputs)
            if last is None or key != last:  # to compare is faster than to look up
                with _of_one_row(cut.rows, micro_batches):
                    last, variant = key, self._variant(key, cut.inputs, training=training)
                variant.graph.check_flags(self._trained)
                if not variant.is_planned:
                    variant.graph.check_read()
            found.setdefault(variant, []).append(place)
        for variant, places in found.items():
            if variant.graph.writes.tensors or variant.graph.writes.containers:
                for place in places:
                    _check_written(variant.graph.writes, micro_batches[place], micro_batches)
        return [
            VariantGroup(variant, tuple(places), tuple(micro_batches[place] for place in places))
            for variant, places in found.items()
        ]

    def _variant(self, key: InputKey, leaves: Sequence[Any], *, training: bool) -> Variant:
        known = self._known.get((key, training))
        if known is None:
            made = self._made[training]
            known = next((each for each in made if each.graph.domain.admits(key)), None)
            if known is None:
                self.member.at = f"capturing the forward again for inputs {key}"
                known = self._capture(key, leaves, training=training)
                self._warn(key, made)
                if not known.graph.read_elsewhere <= self.read_elsewhere:
                    self.read_elsewhere |= known.graph.read_elsewhere
                made.append(known)
                self._drop_oldest(made)
            self._known[key, training] = known
            if len(self._known) > _MOST_KEYS:
                self._known.popitem(last=False)
        self._known.move_to_end((key, training))
        if not known.is_planned:
            self._made[training].remove(known)
            self._made[training].append(known)
        return known

    def _warn(self, key: InputKey, made: Sequence[Variant]) -> None:
        """Tell once that a number which goes on changing, as one that is annealed, has a graph for each value."""
        others = {tuple(each.graph.domain.example.numbers_beside(key)) for each in made} - {()}
        if len(others) + 1 >= _MANY and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the model's inputs hold a plain number that has had {len(others) + 1} values so far, as"
                f" {others.pop()[0]}: the forward is captured again for each, which may take seconds; as a tensor,"
                " torch.tensor(...), it is captured once",
                stacklevel=2,
            )

    def _drop_oldest(self, made: list[Variant]) -> None:
        """Forget the graph that was used longest ago, and not that of the plan."""
        if len(made) > _MOST_VARIANTS:
            oldest = made.pop(1 if made[0].is_planned else 0)
            for key in [key for key, variant in self._known.items() if variant is oldest]:
                del self._known[key]

    def _capture(self, key: InputKey, leaves: Sequence[Any], *, training: bool) -> Variant:
        base = self.planned.graph
        what = f"for inputs {key}{'' if training else ' in eval mode'}"
        try:
            graph = recut(base, key.structure, leaves, training=training, order=self.plan.partitions)
            lending = lending_under(self.plan, graph, base, training=training)
            check_shared(self.plan, storing(graph))
            modules = self._around(graph, lending)
        except (MarkingError, FormatError) as error:
            _check_inputs(key, base.domain.example, error)
            # Its own cause is pages of torch.export; the message has the model's line.
            raise MarkingError(f"{what}: {error.message}", hint=error.hint) from None
        try:
            variant = Variant(graph, _with_partitions(self.plan, graph), modules, self.member.transport)
            variant.program(1, training=training)
        except FormatError as error:
            names = [each for each in self.plan.partitions if each not in graph.piece]
            without = f", which leave out {fmt.first_of(names)}," if names else ""
            raise MarkingError(
                f"{what}{without} the plan does not run: {error.message}",
                hint=error.hint
                or "solve with another schedule than the listed one (--schedule 1f1b), or give all"
                " batches inputs that use every partition",
            ) from error
        return variant

    def _around(self, graph: PartitionGraph, lending: Mapping[str, Mapping[str, str]]) -> dict[str, PartitionModule]:
        planned = self.planned
        first = {
            name: planned.graph.canonical.get(name, name)
            for partition in planned.modules
            for name, each in lending.get(partition, {}).items()
            if each == UNREAD
        }
        values = self._unread(first.values(), self.member.device)
        unread = {name: values[canonical] for name, canonical in first.items()}
        return graph.rebuild(planned.graph, planned.modules, self.member.device, lending, unread)


def _check_written(writes: InputWrites, cut: MicroBatch, batch: Sequence[MicroBatch]) -> None:
    """What the forward changes of a micro-batch's inputs is nothing else in the batch: partitions work on copies."""
    if writes.containers and cut.shared:
        raise UsageError(
            "the model's forward changes a list or dict of its inputs that is among the targets, or twice among the"
            " inputs: the other one would be as it was",
            hint="return what the loss is to find there; or give it a copy, as dict(batch), if it is to find what was"
            " there",
        )
    if not writes.tensors:
        return
    others = [leaf for each in batch for leaf in pytree.tree_leaves(each.targets)]
    others += [leaf for each in batch if each is not cut for leaf in each.inputs]
    for n in sorted(writes.tensors):
        if any(_share(cut.inputs[n], each) for each in (*others, *cut.inputs[:n], *cut.inputs[n + 1 :])):
            raise UsageError(
                f"the model's forward writes in place to an input, {described(cut.inputs[n])}, in whose memory a target"
                " or another input lies, too: that would be as it was",
                hint="write to a copy, as x = x / 255, and return what the loss is to find; or give the other one as a"
                " copy, x.clone(), if it is to be what was there",
            )


def _memory(leaf: Any) -> range:
    """The addresses from a tensor's first element to its last one; empty: it has none."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_meta or not leaf.numel():
        return range(0)
    end = ElementPlaces(0, tuple(leaf.shape), leaf.stride()).end
    return range(leaf.data_ptr(), leaf.data_ptr() + end * leaf.element_size())


def _share(one: Any, other: Any) -> bool:
    """Whether an element of one tensor lies where one of another does."""
    mine, theirs = _memory(one), _memory(other)
    if max(mine.start, theirs.start) >= min(mine.stop, theirs.stop) or one.device != other.device:
        return False
    size = one.element_size()
    if size != other.element_size() or (mine.start - theirs.start) % size:
        return True
    left, right = (ElementPlaces(leaf.data_ptr() // size, tuple(leaf.shape), leaf.stride()) for leaf in (one, other))
    return left.meet(right)


def header_route(route: Route) -> Route:
    """The route of the shapes of a route's values, which depend on data and go ahead of them."""
    return route._replace(payload=Payload.SHAPE)


@contextlib.contextmanager
def _of_one_row(rows: int, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
    """Where the block refuses a micro-batch for its one row, say that the cut has made it so."""
    try:
        yield
    except MarkingError as error:
        if rows > 1 or len(micro_batches) == 1:
            raise
        raise MarkingError(
            f"{error.message}; it is a micro-batch of one row, of a batch that was cut into"
            f" {', '.join(str(each.rows) for each in micro_batches)}",
            hint=f"if one row is too few for it: {SINGLE_ROWS}{'' if error.hint is None else f'; else {error.hint}'}",
        ) from None


SINGLE_ROWS = (
    "Workload.min_rows=2 allows no micro-batch of one row; or solve with fewer micro-batches (--micro-batches), or give"
    " batches of other sizes"
)
"""What to do about a micro-batch of one row."""


def _check_inputs(given: InputKey, example: InputKey, error: AssignerError) -> None:
    """Inputs that the model cannot take, and of another kind than the workload's own, are most likely wrong.

    BatchNorm in training needs two values of a channel: a micro-batch of one row may have one.
    """
    if not given.is_like(example):
        raise UsageError(
            f"the model cannot take inputs ({given.signature()}): {error.message}; the workload's own are"
            f" ({example.signature()})",
            hint="give batches like those of Workload.batch, or change that and profile again"
            + ("" if error.hint is None else f"; if they are to differ: {error.hint}"),
        ) from None
    if TOO_FEW_VALUES in error.message:
        raise UsageError(
            f"a micro-batch ({given}) has one value of each channel, which BatchNorm cannot normalise in training",
            hint="give each micro-batch two rows or more: drop a last batch of one row (DataLoader's drop_last), or"
            " solve with fewer micro-batches (--micro-batches)",
        ) from None


def lending_under(
    plan: Plan, graph: PartitionGraph, base: PartitionGraph, *, training: bool
) -> dict[str, dict[str, str]]:
    """What partitions of a graph, `base` cut again, are lent under a plan (`PartitionGraph.lent`); in training nothing.

    They use that, what the plan's own graph has them hold, and nothing else.

    Raises:
        MarkingError: a partition would need a module or a tensor that another worker may hold.
    """
    lending = {} if training else graph.lent(base, plan.holders)
    constants = graph.constants_beside(base)
    for piece in graph.pieces:
        planned, given = base.piece[piece.name], lending.get(piece.name, {})
        strange = {*piece.state, *piece.called} - {*planned.state, *planned.called} - constants - given.keys()
        within = {each for each in piece.state if any(each.startswith(f"{module}.") for module in piece.called)}
        buffers = strange & set(piece.buffers) - within
        where, hint = "", None
        if strange and not training:
            where, hint = _elsewhere(min(buffers or strange), graph, base)
        if buffers:
            raise MarkingError(
                f"partition {piece.name!r} needs the buffer {min(buffers)!r}, which it does not hold under the plan"
                f"{where}: code between partitions reads it there for such inputs alone, or in this mode",
                hint=hint
                or "register it on a marked module that reads it, or make it in forward, as x.new_zeros(()); one with"
                " persistent=False that nothing else reads goes to every worker that needs it",
            )
        if strange:
            raise MarkingError(
                f"partition {piece.name!r} needs {min(strange)!r}, which it does not hold under the plan{where}",
                hint=hint
                or "mark a larger module that contains what differs, as one whose forward picks among the heads in"
                " its nn.ModuleDict, or a smaller one of its own for it",
            )
    return lending


def _elsewhere(name: str, graph: PartitionGraph, base: PartitionGraph) -> tuple[str, str | None]:
    """Who has a tensor that a partition needs in evaluations, and a way out, in words."""
    holders = [each.name for each in base.pieces if name in each.state]
    if holders:
        moves = name in graph.changed or name in graph.written
        where = f": {holders[0]!r} does{', and it is changed here' if moves else ''}"
        hint = f"read it behind {holders[0]!r}, or mark one larger module around both"
        return where, hint if moves else f"{hint}; where both are on one worker (--together), evaluations may read it"
    if base.canonical.get(name, name) in base.unread:
        return ": no partition does, for training does not use it, and it is changed here", (
            "change it in a marked module that training calls, too; what nothing changes any partition may read"
        )
    return "", None


def _with_partitions(plan: Plan, graph: PartitionGraph) -> Plan:
    """A plan without the partitions that a graph does not have, and without the stages that have no other."""
    if set(plan.partitions) <= set(graph.piece):
        return plan

    def left(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in graph.piece)

    stages = [
        replace(
            stage,
            partitions=left(stage.partitions),
            rematerialise=left(stage.rematerialise),
            replicas=tuple(
                each if each.updates is None else replace(each, updates=left(each.updates)) for each in stage.replicas
            ),
        )
        for stage in plan.stages
    ]
    kept = {n: place for place, n in enumerate(n for n, stage in enumerate(stages) if stage.partitions)}
    orders = {
        worker: written_order(step._replace(stage=kept[step.stage]) for step in steps if step.stage in kept)
        for worker, steps in plan.listed.items()
        if any(worker in stages[n].workers for n in kept)
    }
    return replace(plan, stages=tuple(stages[n] for n in kept), orders=orders)
