"""The graph of partitions: what each runs, reads and makes, as modules that a rank can build alone."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.export.exported import PartitionContent
from assigner.formats.profile import Edge, Tie
from assigner.model.deferred import DeferredModel
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import ABSENT, Memento, StateChange
from assigner.model.deferred.mutation import is_view, storage_of
from assigner.model.deferred.originals import unwatched
from assigner.model.marking.changedarguments import InputWrites
from assigner.model.marking.domain import Domain, Size
from assigner.model.marking.isolation import CrossingError
from assigner.model.marking.leftovers import Notes
from assigner.model.marking.marks import Mark
from assigner.model.marking.nodes import is_item, reached
from assigner.model.marking.partitionmodule import PartitionModule, around_module, build_module
from assigner.model.marking.realforward import Maker
from assigner.model.marking.rows import BatchRows
from assigner.model.marking.tables import FoundTables
from assigner.model.members import named_buffers, named_parameters

LEAF = object()
UNREAD = ""
"""Stands for a partition, where none holds what is lent."""


class Value(NamedTuple):
    """A tensor that a partition reads: output `index` of `partition`, or input `index` of the model (partition "")."""

    partition: str
    index: int  # type: ignore[assignment]  # not the method of tuples


@dataclass(frozen=True)
class ValueShape:
    """What is known of a value between partitions.

    Args:
        bytes_per_sample: Its bytes as a line over the rows, as `Workload.batch` counts them: the slope.
        fixed_bytes: At no rows.
        dtype: Its type.
        gradient: A gradient comes back for it.
        shape: Its sizes; None: they depend on data.
        order: Its dimensions from the outermost in memory to the innermost, where that is not their own order: a
            message carries values alone, and what reads them may ask for strides.
        asked: Code behind it looks whether it requires a gradient.
    """

    bytes_per_sample: float
    fixed_bytes: float
    dtype: torch.dtype
    gradient: bool
    shape: tuple[int | Size, ...] | None
    order: tuple[int, ...] | None = None
    asked: bool = False

    def laid_out(self, received: torch.Tensor) -> torch.Tensor:
        """A value that has come in a message, as it lies in its maker's memory."""
        if self.order is None:
            return received
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return received.permute(self.order).contiguous().permute(inverse)

    def sizes(self, inputs: Sequence[Any]) -> tuple[int, ...] | None:
        """The value's shape for one micro-batch, given the flattened inputs of it; None: it depends on data."""
        if self.shape is None:
            return None
        return tuple([size if isinstance(size, int) else size.evaluate(inputs) for size in self.shape])


@dataclass(frozen=True)
class Piece:
    """One partition: its own part of the forward.

    Args:
        name: The partition's name.
        mark: What the user said of it.
        graph: Its forward: placeholders for `reads`, then for `sizes`; returns the values that others read, in order
            (the last partition: the leaves of the model's output).
        reads: Where the values that it reads come from.
        sizes: Numbers that it needs.
        constants: Tensors that the forward makes from literals.
        parameters: Names of the parameters that it holds.
        buffers: Names of its buffers.
        kind: Equal for partitions of the same structure, shapes and gradients.
        autocast: The type that autocast computes in; None: no autocast.
    """

    name: str
    mark: Mark
    graph: fx.Graph
    reads: tuple[Value, ...]
    sizes: tuple[Size, ...]
    constants: Mapping[str, torch.Tensor]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    kind: str
    autocast: str | None = None

    @property
    def state(self) -> tuple[str, ...]:
        """Names of parameters and buffers."""
        return self.parameters + self.buffers

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the modules that its graph calls."""
        return tuple(dict.fromkeys(str(node.target) for node in self.graph.nodes if node.op == "call_module"))


@dataclass(frozen=True)
class OutputTensor:
    """What is known of a tensor in the model's output.

    Args:
        source: The value that it is, where another partition makes it than the last; else which of the last one's.
        shape: Its sizes; None: they depend on data.
        dtype: Its type.
    """

    source: Value
    shape: tuple[int | Size, ...] | None
    dtype: torch.dtype


@dataclass(frozen=True)
class ModelOutput:
    """The model's output.

    Args:
        structure: Of what the model returns.
        leaves: LEAF for one that the last partition returns, else a plain value.
        rows: For each leaf the dimension that micro-batches are joined along; None: none, there are several, or the
            rows lie there in several blocks (blocks.py).
        rows_known: False: the capture has one fixed number of rows, and `rows` says nothing.
        tensors: For each leaf what is known of it; None: it is no tensor.
        unjoinable: For each leaf why those of micro-batches are not the batch's, in words; None: they are, or nothing
            is known of rows.
        behind: For each tensor that the last partition returns, and for each input of the model, the values between
            partitions and inputs that may be made of it: see `values_behind`.
    """

    structure: Any
    leaves: tuple[Any, ...]
    rows: tuple[int | None, ...]
    rows_known: bool
    tensors: tuple[OutputTensor | None, ...]
    unjoinable: tuple[str | None, ...]
    behind: Mapping[Value, frozenset[Value]]

    @property
    def made(self) -> list[int]:
        """The numbers of the leaves that the last partition returns."""
        return [n for n, each in enumerate(self.leaves) if each is LEAF]

    def filled(self, made: Sequence[Any]) -> list[Any]:
        """All leaves, from those that the last partition returned."""
        waiting = iter(made)
        return [next(waiting) if each is LEAF else each for each in self.leaves]


@dataclass(frozen=True)
class FirstCut:
    """What the first cut of a model keeps for further ones: for other inputs, or in the other mode.

    Args:
        maker: Has batches with values, for partitions whose forward needs them to be captured.
        learnt: What a partition returns was learnt from such batches, for these sizes beside the rows.
        opened: The unmarked modules whose code was followed, each with why.
        notes: Of all captures so far, each with what it leaves and reads in attributes.
        tables: What each of them leaves for the next one, in whichever mode.
    """

    maker: Maker
    learnt: bool
    opened: Mapping[str, CrossingError]
    notes: list[Notes]
    tables: list[FoundTables]


@dataclass(frozen=True, eq=False, repr=False)
class PartitionGraph:
    """A model cut at its marks.

    Args:
        deferred: The model without memory.
        pieces: The partitions in topological order; the last one makes the model's output.
        values: What is known of each value between partitions.
        output: The structure of the model's output, and what its leaves are.
        marks: Names of the marked modules.
        domain: The inputs that all this holds for.
        read: Python values that the model's code outside of partitions can read, as they were when it was captured.
        read_by_train: Those that a `train` of a module's own can read, which is called once, behind the builder.
        read_elsewhere: What code outside of partitions reads of their modules: the modules' names, and attributes'.
        flags: What code outside of partitions was told of parameters' `requires_grad`.
        writes: What the forward changes of the model's inputs.
        changed: Names of the parameters and buffers that modules change in this forward.
        left: What forwards change of the builder's objects, as `leftovers.left_behind` gives it.
        order: Of the operations of what partitions call, by its name, in all of its calls: see `Operations`. How calls
            follow each other, the graph says.
        rows: What carries the rows of a batch.
        first: What further cuts of the model go by; None: this is such a one.
        recuts: The same model cut for other inputs, by `training`, as far as that was needed (see `recut`).
    """

    deferred: DeferredModel
    pieces: tuple[Piece, ...]
    values: Mapping[Value, ValueShape]
    output: ModelOutput
    marks: tuple[str, ...]
    domain: Domain
    read: Memento = field(default_factory=lambda: Memento(()))
    read_by_train: Memento = field(default_factory=lambda: Memento(()))
    read_elsewhere: frozenset[tuple[str, str]] = frozenset()
    flags: Mapping[str, bool] = field(default_factory=dict)
    writes: InputWrites = field(default_factory=InputWrites)
    changed: frozenset[str] = frozenset()
    left: Mapping[tuple[int, str], str] = field(default_factory=dict)
    order: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rows: BatchRows = field(default_factory=BatchRows)
    first: FirstCut | None = None
    recuts: dict[bool, list[PartitionGraph]] = field(default_factory=lambda: {True: [], False: []})

    def check_read(self) -> None:
        """What was read when the model was captured is in the graph for ever: of each mode there is one.

        Raises:
            UsageError: some of it is another value now.
        """
        for change in self.read.changes():
            if change.key == "training" and change.holder in self.deferred.model.modules():
                continue
            if _is_filled_alike(change) and self.read.is_filled_by_readers(change.holder):
                continue
            raise UsageError(
                f"{change.name} has changed since the model was captured: the code between its partitions can read"
                " it, and would go on with the old value",
                hint="read it inside a marked module, which runs as it is; or make a new pipeline after the change",
            )
        for change in self.read_by_train.changes():
            raise UsageError(
                f"{change.name} has changed since the model was captured: a train() of a module's own can read it,"
                " which a script's loop would call again, and the pipeline does not",
                hint="read it in the module's forward; or make a new pipeline after the change, which goes on with what"
                " pipeline.save has kept",
            )

    def check_flags(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """What code between partitions does by a parameter's `requires_grad` is in the graph for ever, too.

        Raises:
            UsageError: one of which that was read has another one now.
        """
        for name, requires in self.flags.items():
            parameter = parameters.get(self.canonical.get(name, name))
            if parameter is not None and parameter.requires_grad != requires:
                raise UsageError(
                    f"requires_grad of {name} was {requires} when the model was captured: the code between its"
                    " partitions reads it, and would go on with that",
                    hint="read it inside a marked module, which runs as it is; or make a new pipeline of a builder that"
                    " trains what is trained now",
                )

    @cached_property
    def piece(self) -> dict[str, Piece]:
        """Pieces by name."""
        return {piece.name: piece for piece in self.pieces}

    @property
    def last(self) -> Piece:
        """The partition that makes the model's output, where the loss is computed."""
        return self.pieces[-1]

    def output_gradients(self, piece: Piece) -> tuple[bool, ...]:
        """Which of a partition's outputs get a gradient back; of the last one: its loss alone."""
        if piece is self.last:
            return (True,)
        made = sorted(value.index for value in self.values if value.partition == piece.name)
        return tuple(self.values[Value(piece.name, index)].gradient for index in made)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The values between partitions, one edge per reader."""
        return tuple(
            Edge(
                value.partition, piece.name, self.values[value].bytes_per_sample, value.index,
                self.values[value].fixed_bytes, self.values[value].gradient,
            )
            for piece in self.pieces
            for value in piece.reads
            if value.partition
        )  # fmt: skip

    @cached_property
    def holders(self) -> dict[str, list[str]]:
        """The partitions that run a module or hold a tensor, by its name."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for piece in self.pieces:
            for name in dict.fromkeys((*piece.called, *piece.state)):
                found[name].append(piece.name)
        return dict(found)

    @cached_property
    def homes(self) -> dict[str, str]:
        """The partition that runs an unmarked module or holds a tensor, by its name, where there is only one."""
        return {name: holders[0] for name, holders in self.holders.items() if len(holders) == 1}

    @cached_property
    def canonical(self) -> dict[str, str]:
        """For each name of a parameter or buffer the one by which its tensor goes: a shared one has several.

        Of a parameter that is its first one in the model; of a buffer the first under which a partition holds it, where
        none holds it under this one.
        """
        model, first, shared = self.deferred.model, dict[int, str](), dict[int, str]()
        parameters = named_parameters(model, remove_duplicate=False)
        found = {name: first.setdefault(id(tensor), name) for name, tensor in parameters}
        held = {name for piece in self.pieces for name in piece.buffers}
        buffers = list(named_buffers(model, remove_duplicate=False))
        for name, tensor in buffers:
            if name in held:
                shared.setdefault(id(tensor), name)
        return found | {name: name if name in held else shared.get(id(tensor), name) for name, tensor in buffers}

    @cached_property
    def persistent(self) -> frozenset[str]:
        """The names of parameters and buffers that belong to the model's state."""
        found = {name for name, _ in named_parameters(self.deferred.model, remove_duplicate=False)}
        for path, module in self.deferred.model.named_modules(remove_duplicate=False):
            names = module._buffers.keys() - module._non_persistent_buffers_set
            found.update(f"{path}.{name}" if path else name for name in names)
        return frozenset(found & self.canonical.keys())

    def takes_buffer(self, name: str, partitions: Iterable[str]) -> bool:
        """Whether one of these partitions can be given a buffer that its forward has registered: by its name alone."""
        path, _, leaf = name.rpartition(".")
        called = (each for partition in partitions for each in self.piece[partition].called)
        if name in self.canonical or not any(f"{path}.".startswith(f"{each}.") for each in called):
            return False
        try:
            module = self.deferred.model.get_submodule(path)
        except AttributeError:
            return False
        return leaf in module._buffers or not hasattr(module, leaf)

    @cached_property
    def plain_names(self) -> dict[str, str | None]:
        """For each key of the model's own state_dict the name of its tensor; None: its code makes that value.

        Empty where the keys are those names.
        """
        known = self.deferred.tensors()
        names: dict[Any, str] = {_place(tensor): name for name, tensor in reversed(known.items())}
        try:
            with unwatched():
                plain = self.deferred.model.state_dict(keep_vars=True)
        except Exception:  # noqa: BLE001 - it needs values
            return dict.fromkeys(self.persistent)
        found: dict[str, str | None] = {}
        for key, value in plain.items():
            if not key.endswith(_EXTRA_STATE_KEY_SUFFIX):
                place = _place(value) if isinstance(value, torch.Tensor) else None
                found[key] = key if key in known and _place(known[key]) == place else names.get(place)
        return {} if found.keys() == self.persistent and all(key == name for key, name in found.items()) else found

    @cached_property
    def unread(self) -> frozenset[str]:
        """The names of tensors of the model's state that no partition holds: no forward reads them."""
        held = {self.canonical.get(name, name) for piece in self.pieces for name in piece.state}
        return frozenset({self.canonical[name] for name in self.persistent} - held)

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several partitions hold, by their first name."""
        tensors = self.deferred.tensors()
        holders: dict[str, dict[str, None]] = defaultdict(dict)
        for piece in self.pieces:
            for name in piece.parameters:
                holders[self.canonical[name]][piece.name] = None
        return tuple(
            Tie(name, tuple(partitions), tensors[name].nbytes)
            for name, partitions in holders.items()
            if len(partitions) > 1
        )

    @cached_property
    def fingerprint(self) -> str:
        """`sha256:...` of the partitions, their kinds and their graph: equal for equal models."""
        text = repr(
            (
                [(piece.name, piece.kind, piece.reads) for piece in self.pieces],
                [(edge.source, edge.output, edge.target, edge.bytes_per_sample) for edge in self.edges],
                [(tie.parameter, tie.partitions) for tie in self.ties],
            )
        )
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def rebuild(
        self,
        base: PartitionGraph,
        modules: Mapping[str, PartitionModule],
        device: torch.device,
        lending: Mapping[str, Mapping[str, str]],
        unread: Mapping[str, torch.Tensor],
    ) -> dict[str, PartitionModule]:
        """This rank's partitions of this graph, around the modules and tensors of those that the first graph has.

        Args:
            base: The first graph.
            modules: Its partitions here, by name; those that this one lacks are left out.
            device: Where they are.
            lending: What partitions of this one are lent: see `lent`.
            unread: Of that what no partition of `base` holds, by name, with its values on the device.
        """
        wanted = {name for each in modules if each in self.piece for name in self.piece[each].buffers}
        wanted &= self.constants_beside(base)
        tensors = {**(self.deferred.materialise(wanted, device) if wanted else {}), **unread}
        lenders = {
            name: {each: modules[by] for each, by in lending.get(name, {}).items() if by != UNREAD} for name in modules
        }
        return {
            name: around_module(module, self.piece[name], device, tensors, lenders[name])
            for name, module in modules.items()
            if name in self.piece
        }

    def lent(self, base: PartitionGraph, workers: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
        """By partition the tensors that it reads in evaluations and can be lent, each with the partition that holds it.

        That is one of the same workers: both read one tensor. Or it is `UNREAD`: none of `base`, the first graph, holds
        it, for training does not use it, and every rank has it as it was built or loaded. Nothing of the evaluation may
        write it: no order of what two partitions do is kept there.
        """
        taken = self._storages(base.holders)  # a tensor that is a part of another one's memory is held, too
        unread = {name for name in base.unread if taken.isdisjoint(self._storages([name]))}
        written = self._storages(self.changed | self.written)
        found: dict[str, dict[str, str]] = {}
        for piece in self.pieces:
            own = {*base.piece[piece.name].state}
            lenders = {_holder(name): piece.name for name in own & {*piece.state}}
            found[piece.name] = {}
            for name in piece.state:
                if name in own or not written.isdisjoint(self._storages([name])):
                    continue
                near = [each for each in base.holders.get(name, ()) if workers[each] == workers[piece.name]]
                if base.canonical.get(name, name) in unread:
                    near = [UNREAD]
                if near and _is_apart(_holder(name), near[0], piece, lenders):
                    found[piece.name][name] = near[0]
        return found

    def constants_beside(self, base: PartitionGraph) -> frozenset[str]:
        """Buffers of this graph that are the same for ever on any worker.

        No partition of `base`, the first graph, holds them, no state_dict has them, so that nothing is loaded there,
        and no partition of this graph writes them.
        """
        taken = self._storages({*base.persistent, *base.holders})
        buffers = {name for piece in self.pieces for name in piece.buffers}
        return frozenset(name for name in buffers - self.written if taken.isdisjoint(self._storages([name])))

    def _storages(self, names: Iterable[str]) -> set[int]:
        """The memories of parameters and buffers; of names that the builder has made none for nothing."""
        return {self._storage[name] for name in names if name in self._storage}

    @cached_property
    def _storage(self) -> dict[str, int]:
        return {name: storage_of(tensor) for name, tensor in self.deferred.tensors().items()}

    @cached_property
    def written(self) -> frozenset[str]:
        """The names of tensors that code between partitions writes, or hands to what may."""
        return frozenset(name for piece in self.pieces for name in _written(piece.graph))

    def build(self, names: Iterable[str], device: torch.device | str = "cpu") -> dict[str, PartitionModule]:
        """The named partitions as modules with their initial weights; nothing else is materialised.

        A parameter that several of them hold is one tensor. Names in a module's state_dict are the model's own.
        """
        pieces = [self.piece[name] for name in names]
        tensors = self.deferred.materialise({name for piece in pieces for name in piece.state}, device)
        return {piece.name: build_module(self.deferred, piece, tensors, torch.device(device)) for piece in pieces}

    @cached_property
    def content(self) -> dict[str, PartitionContent]:
        """What each partition holds; what no partition uses stands under the name "".

        Together they cover the model's state_dict.
        """
        held: dict[str, PartitionContent] = {}
        for piece in self.pieces:
            read = [str(node.target) for node in piece.graph.nodes if node.op == "get_attr"]
            lone = dict.fromkeys(name for name in read if name not in piece.constants)
            held[piece.name] = PartitionContent(piece.called, tuple(lone), _meetings(piece))
        modules = {name for each in held.values() for name in each.modules}
        tensors = {name for each in held.values() for name in each.tensors}
        unused = [
            name
            for name in self.deferred.model.state_dict()
            if name not in tensors and not any(name.startswith(f"{module}.") for module in modules)
        ]
        return {**held, "": PartitionContent((), tuple(unused))}

    def rebuild_output(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The model's output, in its own structure, from what the last partition returned."""
        return pytree.tree_unflatten(self.output.filled(leaves), self.output.structure)


def _holder(name: str) -> str:
    """The module that has a tensor."""
    return name.rpartition(".")[0]


def _is_apart(holder: str, lender: str, piece: Piece, lenders: dict[str, str]) -> bool:
    """Whether the module that has a tensor can stand in a partition as its lender has it, beside what is there."""
    if not holder:
        return True
    if lender != UNREAD and any(f"{each}.".startswith(f"{holder}.") for each in piece.called):
        return False
    return lenders.setdefault(holder, lender) == lender


def _written(graph: fx.Graph) -> set[str]:
    """The names of tensors that a graph reads itself, and writes or hands to code that may."""
    found: set[str] = set()
    for node in (each for each in graph.nodes if each.op == "get_attr"):
        views = reached([node], lambda each: [user for user in each.users if is_view(user.target)])
        users = [user for view in views for user in view.users if user.op != "output" and not is_item(user)]
        if any(not isinstance(each.target, torch._ops.OpOverload) or each.target._schema.is_mutable for each in users):
            found.add(str(node.target))
    return found


def _is_filled_alike(change: StateChange) -> bool:
    """Whether a dict has by a class of tensors what the capture has left there by the class of its own tensors.

    So it has where code keeps what it finds out for each class, as einops: `KNOWN[type(x)] = found`.
    """
    held, key, now = change.holder, change.key, change.now
    if change.before is not ABSENT or not isinstance(held, dict) or not isinstance(key, type):
        return False
    made = dict.get(held, FakeTensor, ABSENT)
    is_same = made is now or (type(made) in ATOMS and type(made) is type(now) and repr(made) == repr(now))
    return issubclass(key, torch.Tensor) and not issubclass(key, FakeTensor) and is_same


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor's values lie, and how."""
    return storage_of(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _meetings(piece: Piece) -> tuple[frozenset[str], ...]:
    """Partitions whose tensors one operation between modules takes, each such group once."""
    inputs = (node for node in piece.graph.nodes if node.op == "placeholder")
    origin: dict[fx.Node, frozenset[str]] = {
        node: frozenset((value.partition,)) for node, value in zip(inputs, piece.reads, strict=False)
    }
    found: dict[frozenset[str], None] = {}
    for node in piece.graph.nodes:
        if node.op == "call_module":
            origin[node] = frozenset((piece.name,))
        elif node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            origin[node] = frozenset().union(*(origin.get(each, ()) for each in node.all_input_nodes))
            if len(origin[node]) > 1:
                found[origin[node]] = None
    return tuple(found)
