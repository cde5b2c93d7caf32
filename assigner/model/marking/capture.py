"""One forward of the model as a graph, with every marked module as one opaque call.

The forward of each marked module, and of each largest unmarked module beside them, is replaced by a call of one
registered operator; torch.export then sees one node for the module and ordinary ATen nodes for the glue between them.
An unmarked module that is given or returns what nobody could send, as a function, is part of the glue instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.model.deferred.caches import caches_put_back
from assigner.model.deferred.memento import Memento, StateChange
from assigner.model.marking.casting import casting
from assigner.model.marking.changedarguments import InputWrites
from assigner.model.marking.checks import Check, Checks
from assigner.model.marking.domain import Domain, check_arguments, find_domain, input_key
from assigner.model.marking.exportable import exportable, made_by_eval, twin
from assigner.model.marking.fakeforward import ctc_losses, on_cpu
from assigner.model.marking.functional import Functional
from assigner.model.marking.interception import Interceptions
from assigner.model.marking.isolation import CrossingError
from assigner.model.marking.leftovers import Notes, left_behind
from assigner.model.marking.modules import failed_at, opaque_modules, unregistered_named
from assigner.model.marking.nodes import note_calls, without_regions
from assigner.model.marking.observation import DecidedError, LearntCall, ValueDependence
from assigner.model.marking.opaque import OpaqueCall, OpaqueCalls, replaced
from assigner.model.marking.realforward import Maker, example_inputs, learn
from assigner.model.marking.repeats import Remains, check_repeated, check_replaced, tensors_beside
from assigner.model.marking.rows import RowLeaves, find_carriers, in_groups
from assigner.model.marking.silence import silence
from assigner.model.marking.tables import FoundTables, check_tables
from assigner.model.workload import IN_CONTAINERS, call_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.model.deferred import DeferredModel
    from assigner.model.marking.domain import InputKey


@dataclass
class Capture:
    """A captured forward."""

    graph: fx.Graph  # without writes; opaque calls are `assigner.call` nodes
    together: list[list[fx.Node]]  # groups of its nodes that one partition must run
    program: ExportedProgram  # the export that it came from
    opaque: list[str]  # names of the modules that are one call
    calls: list[OpaqueCall]  # by their number in the graph
    checks: list[Check]  # what raises in it, by its number
    inputs: list[Any]  # the flattened example inputs, (args, kwargs)
    rows: int | None  # how many rows they have; None: no tensor is among them
    carriers: list[int | None]  # for each of them the dimension that is the rows; None: it has none
    domain: Domain  # the inputs that it holds for
    left: dict[tuple[int, str], str]  # who changes what in Python (see `left_behind`)
    notes: Notes  # what of it is in followed modules' attributes, and what code outside of partitions reads there first
    tables: list[StateChange]  # what it keeps for the next one and reads first, and what follows from shapes alone
    read_elsewhere: frozenset[tuple[str, str]]  # what code outside of partitions reads of theirs (see `Leftovers.read`)
    flags: dict[str, bool]  # what code outside of partitions was told of parameters' `requires_grad`
    deferred_statistics: frozenset[str]  # names of BatchNorms' running statistics, which move at a step's end
    writes: InputWrites  # what it changes of the inputs
    autocast: str | None  # the type that autocast computes in; None: no autocast
    training: bool  # it runs with gradients
    opened: Mapping[str, CrossingError]  # the unmarked modules that were followed, with why
    kept: FoundTables  # the values of the tables, for the example inputs; none before these are looked at
    found: Mapping[str, torch.Tensor] = field(default_factory=dict)  # buffers that it may read: of tables found there

    @cached_property
    def kinds(self) -> dict[str, tuple[InputKind, str]]:
        """What each placeholder stands for, by its name: its kind, and the parameter, buffer or constant."""
        return _input_kinds(self.program)

    @cached_property
    def users(self) -> list[str]:
        """The placeholders of the model's inputs, in the order of `inputs`."""
        return [name for name, (kind, _) in self.kinds.items() if kind is InputKind.USER_INPUT]

    @property
    def given(self) -> list[Any]:
        """What stands in the graph for each of `inputs`: of a tensor one without values."""
        values = {node.name: node.meta.get("val") for node in self.graph.nodes if node.op == "placeholder"}
        return [values.get(name) for name in self.users]

    @property
    def holds_for_any_rows(self) -> bool:
        """No input's number of rows is fixed in it."""
        carried = [(each, dim) for each, dim in zip(self.given, self.carriers, strict=True) if dim is not None]
        rows = [each.shape[dim] for each, dim in carried if isinstance(each, torch.Tensor)]
        return all(isinstance(each, torch.SymInt) and each.node.expr.free_symbols for each in rows)


class _Dims(NamedTuple):
    """What may vary: the dimension of the rows, and the others."""

    rows: Any
    others: Any


_ANY_ROWS = (_Dims(Dim.DYNAMIC, Dim.AUTO), _Dims(Dim.AUTO, Dim.AUTO), _Dims(Dim.DYNAMIC, Dim.STATIC))
_THESE_ROWS = (_Dims(Dim.AUTO, Dim.AUTO), _Dims(Dim.STATIC, Dim.STATIC))
_THESE_SIZES = (_Dims(Dim.AUTO, Dim.STATIC), _Dims(Dim.STATIC, Dim.STATIC))


def capture(
    deferred: DeferredModel,
    marked: Sequence[str],
    maker: Maker,
    row_leaves: RowLeaves,
    inputs: Any,
    *,
    autocast: str | None,
    any_rows: bool = True,
    training: bool = True,
    sized: InputKey | None = None,
    opened: Mapping[str, CrossingError] | None = None,
    others: Sequence[FoundTables] = (),
) -> Capture:
    """Capture one forward, in the mode that the model is in.

    Args:
        deferred: The model; left as it was.
        marked: Names of the partitions' modules.
        maker: Has batches with values, which tell what modules give whose forward needs some.
        row_leaves: Which inputs carry rows; NOTHING: those whose first dimension is that of the first tensor.
        inputs: Example inputs, as a batch has them; only shapes, types and plain values count.
        autocast: The type that autocast computes in; it decides the types of the values.
        any_rows: The capture must hold for any number of rows, and the example has two or more; False: it holds for
            these inputs, and for what the forward treats alike.
        training: It runs with gradients; False: under torch.no_grad(), as evaluation does.
        sized: The key of inputs: where these have the same sizes, but for the rows, it holds for no others. A forward
            that needs values there takes seconds to be followed with symbols for all sizes.
        opened: Unmarked modules whose code is followed, as in another capture, each with why.
        others: What other captures leave, which this one may find.

    Raises:
        MarkingError: the forward cannot be traced; the message has the line.
    """
    model = deferred.model
    leaves, structure = pytree.tree_flatten(call_arguments(inputs))
    _, carriers = find_carriers(row_leaves, structure, leaves)
    these_sizes = sized is not None and input_key(structure, leaves).differs_in_rows(sized, carriers)
    tables = {name for each in others for name in each.by_name}
    tables &= {name for name, _ in model.named_buffers()}
    originals = deferred.materialise(tables) if tables else {}
    check_arguments(type(model).__name__, model.forward, inputs)
    looks = _Looks(model, marked, autocast, row_leaves, dict(opened or {}))
    fewer = _THESE_SIZES if these_sizes else _THESE_ROWS

    def again(tables: FoundTables, key: InputKey) -> Capture:
        with tables.placed(model):
            second = looks.widest(key.inputs(), fewer, ValueDependence())
        second.found = tables.by_name
        return second

    with caches_put_back(model), unregistered_named(model), silence(), torch.set_grad_enabled(training):
        while True:
            dependence = ValueDependence()
            try:
                try:
                    found = looks.widest(inputs, _ANY_ROWS if any_rows else fewer, dependence)
                except MarkingError:
                    wanted = {name: why for name, why in dependence.wanting.items() if name not in looks.learnt}
                    if not wanted:
                        raise
                else:
                    found.found = originals
                    may_find = [each for each in others if any(map(found.notes.reads.has, each.values))]
                    found.kept = check_tables(looks.name, found, may_find, again)
                    return found
                learnt = learn(
                    deferred, looks.names, example_inputs(maker, leaves, carriers), structure,
                    wanted=wanted, autocast=autocast, training=training,
                )  # fmt: skip
                looks.know(learnt, wanted)
            except MarkingError as error:
                if looks.open(error):
                    continue
                if looks.opened:
                    raise opened_in_vain(error, looks.opened) from error
                raise


@dataclass
class _Looks:
    """The looks that are taken at a forward until it is captured, and what they have shown so far."""

    model: nn.Module
    marked: Sequence[str]
    autocast: str | None
    row_leaves: RowLeaves
    opened: dict[str, CrossingError]  # the unmarked modules whose code is followed, each with why
    learnt: dict[str, Sequence[LearntCall]] = field(default_factory=dict)  # what modules give, of values

    def __post_init__(self) -> None:
        self.name, self.checks = type(self.model).__name__, Checks(self.model)

    @property
    def names(self) -> list[str]:
        """The modules whose forward is one call."""
        return opaque_modules(self.model, self.marked, self.opened)

    def know(self, learnt: Mapping[str, Sequence[LearntCall]], wanted: Iterable[str]) -> None:
        """What was learnt of the wanted modules counts, and of others with the same forward."""
        kinds = {type(self.model.get_submodule(name)) for name in wanted}
        for name, calls in learnt.items():
            if calls and type(self.model.get_submodule(name)) in kinds:
                self.learnt.setdefault(name, calls)

    def open(self, error: MarkingError) -> bool:
        """Follow the code of the module on whose account there is an error; False: there is none that may be opened."""
        if not isinstance(error, CrossingError) or error.module in ("", *self.marked):
            return False
        kind = type(self.model.get_submodule(error.module))  # others of it have the same forward
        alike = [name for name in self.names if type(self.model.get_submodule(name)) is kind]
        self.opened.update({name: error for name in alike if name not in self.marked})
        return True

    def widest(self, inputs: Any, wished: Sequence[_Dims], dependence: ValueDependence) -> Capture:
        """The export in which the most may vary; of the many kinds of errors that torch raises the last try's."""
        export: Callable[..., Capture] = partial(self._export, inputs, dependence=dependence)
        *tries, last = wished
        for dims in tries:
            try:
                found = self.checks.carried(partial(export, dims))
            except Exception as error:  # noqa: BLE001 - the last try's is reported
                if isinstance(error, DecidedError):
                    break  # it is the same where less may vary
            else:
                if wished is not _ANY_ROWS or found.holds_for_any_rows:
                    return found
            if dependence.failed is not None:
                break  # however little varies, that module needs values
        dependence.fixing.clear()  # in the last try nothing but the rows may vary
        dependence.line = ""
        return _or_explain(lambda: self.checks.carried(partial(export, last)), self.name, dependence)

    # An entry of the cache, with symbols for sizes, costs more than it saves: a tenth to a third. Export has its own.
    @torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # type: ignore[untyped-decorator]
    def _export(self, inputs: Any, dims: _Dims, *, dependence: ValueDependence) -> Capture:
        model, names = self.model, self.names
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        leaves, structure = pytree.tree_flatten(call_arguments(inputs))
        # One tensor that stands at two places is two inputs: the next batch may have two tensors there.
        real = pytree.tree_unflatten(_each_its_own(leaves), structure)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: mode.from_tensor(tensor, static_shapes=True), real
        )
        shapes = ShapesCollection()  # type: ignore[no-untyped-call]
        rows, carriers = find_carriers(self.row_leaves, structure, leaves)
        for leaf, carrier, fake in zip(leaves, carriers, pytree.tree_leaves((args, kwargs)), strict=True):
            if torch.is_tensor(leaf) and leaf.dim():
                kinds = [dims.rows if n == carrier else dims.others for n in range(leaf.dim())]
                shapes[fake] = {
                    n: kind if leaf.size(n) > 1 or kind is Dim.DYNAMIC else Dim.STATIC for n, kind in enumerate(kinds)
                }
        unmarked = [each for each in names if each not in self.marked]
        by_eval = {} if torch.is_grad_enabled() else made_by_eval(model)
        twins = {id(each): twin(each, mode) for each in by_eval.values()}
        opaque = OpaqueCalls(
            model, names, self.autocast, self.learnt, dependence, unmarked=unmarked, made_anew=twins.values()
        )
        is_first = dims == _ANY_ROWS[0]  # the last try tells who takes rows for a number
        caught = Interceptions(model, opaque, self.checks, carriers if is_first else ())
        with mode:
            anchor = torch.empty((), requires_grad=True, device="cpu")
        calls, watched = replaced(opaque, anchor), caught.active()
        kept = Memento(model.named_modules()).exchanged(twins)  # torch.export gives modules copies of lists and dicts
        ready = exportable(model, mode, args, kwargs)
        with kept, ready, calls, watched, mode, casting(self.autocast, "cpu"), ctc_losses(), on_cpu():
            dynamic = shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]

            def exported() -> ExportedProgram:
                program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
                graph = without_regions(program.graph_module, autocast=self.autocast is not None)
                note_calls(graph, opaque.calls, caught.hooks)
                return program

            program = exported()
            left, changes_inputs = Remains(program, caught), caught.changes_inputs
            check_repeated(model, left, caught, exported)
        check_replaced(model, left)
        _check_ways_out(model, program, {name: twins[id(each)] for name, each in by_eval.items()})
        domain = find_domain(program, input_key(structure, leaves))
        functional = Functional(program.graph, _input_kinds(program))
        statistics = frozenset(
            f"{name}.{key}"
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, _BatchNorm)
            for key in ("running_mean", "running_var", "num_batches_tracked")
        )
        return Capture(
            graph=functional.graph, together=functional.together, program=program, opaque=opaque.names,
            calls=opaque.calls, checks=self.checks.known, inputs=leaves, rows=rows, carriers=carriers, domain=domain,
            left=left_behind(opaque.leftovers, left.changes), notes=left.notes, tables=left.tables,
            read_elsewhere=opaque.leftovers.read, flags=caught.flags, deferred_statistics=statistics,
            writes=InputWrites(functional.written_inputs, changes_inputs),
            autocast=self.autocast, training=torch.is_grad_enabled(), opened=self.opened,
            kept=FoundTables(domain.example, {}, torch.is_grad_enabled(), self.opened),
        )  # fmt: skip


def opened_in_vain(error: MarkingError, opened: Mapping[str, CrossingError]) -> MarkingError:
    """An error, with why the code of unmarked modules was followed: it may come from there."""
    causes = {cause.module: cause.message for cause in opened.values()}
    ways = [f"{message}: mark a larger module around {name!r}" for name, message in causes.items()]
    return MarkingError(error.message, hint="; or ".join([*ways, *filter(None, [error.hint])]))


def _or_explain(export: Callable[[], Capture], name: str, dependence: ValueDependence) -> Capture:
    """The last try: the least may vary. Its error is the one that the user sees."""
    try:
        return export()
    except MarkingError:
        dependence.fixing.clear()
        raise
    except (MemoryError, torch.OutOfMemoryError):
        raise  # it says nothing of the model
    except Exception as error:
        said = str(error).strip().splitlines()
        if isinstance(error, GuardOnDataDependentSymNode):
            sized = [
                dependence.sizes[each] for each in sorted(error.cond.free_symbols, key=str) if each in dependence.sizes
            ]
            what = f"a size of what {sized[0]} returns, which depends on values," if sized else "a tensor's value"
            said = [f"{what} decides what runs there"]
        elif isinstance(error, DataDependentOutputException):
            operation = str(error.func).split(".")[-2]
            said = [f"{operation} makes a plain number or truth of a tensor's values, which a graph cannot hold"]
        reason = said[0][:200] if said else type(error).__name__
        if reason.startswith("Constraints violated"):
            where = f", as it takes it for a number at {dependence.line}" if dependence.line else ""
            raise MarkingError(
                f"the forward of {name} works for one number of rows alone{where}",
                hint="a list with an entry for each row, int() or float() of x.shape[0], a NumPy array of so many rows"
                " or a loop over them makes it so: use tensors whose first dimension is the rows, as torch.arange(n)"
                "[None].expand(len(x), -1); x.shape[0] * 1.0 for float(x.shape[0]) and x.shape[0] ** 0.5 for"
                " math.sqrt(x.shape[0]); or mark a larger module that contains the line",
            ) from error
        dependence.fixing.clear()
        if strange := re.match(r"Found <class '([^']+)'> in output", reason):
            raise MarkingError(
                f"the forward of {name} returns a {strange[1]}, which holds tensors in its own way",
                hint="return tensors, or tuples, lists, dicts or dataclasses of them",
            ) from error
        if strange := re.match(r"Unsupported input type <class '(?:(.*)\.)?(\w+)'>", reason):
            is_numpys, is_array = strange[1] == "numpy", strange[2] == "ndarray"
            made = "a tensor, torch.from_numpy(x)" if is_array else "Python's own number, int(x) or float(x)"
            raise MarkingError(
                f"the inputs of {name} have a {'NumPy ' * is_numpys}{strange[2]} among them, which is no tensor, plain"
                " value or container of Python's",
                hint=f"have Workload.batch and the data loader give {made}" if is_numpys else IN_CONTAINERS,
            ) from error
        raise MarkingError(
            f"the forward of {name} cannot be traced {failed_at(error)}: {reason}",
            hint="mark a larger module that contains this line, or give the model as an nn.Sequential"
            f"{in_groups(reason)}",
        ) from error


def _check_ways_out(model: nn.Module, program: ExportedProgram, by_eval: Mapping[str, torch.Tensor]) -> None:
    """A tensor that a module made and did not return is a fake one without a node: export takes it for a constant."""
    words = pytree.tree_leaves([(node.args, node.kwargs) for node in program.graph.nodes])
    if any(isinstance(value, torch.Generator) for value in (*program.constants.values(), *words)):
        raise MarkingError(
            f"the forward of {type(model).__name__} draws from a generator of its own outside its partitions",
            hint="draw with torch's default generator, which the runtime seeds for every micro-batch, or mark a larger"
            " module that contains the line",
        )
    beside = tensors_beside(program)
    if any(each.is_meta for each in beside):
        raise MarkingError(
            f"the forward of {type(model).__name__} reads a tensor on the meta device",
            hint="make it in the model's builder, on no device, or in the forward",
        )
    if found := [name for name, made in by_eval.items() if any(made is each for each in beside)]:
        raise MarkingError(
            f"the forward of {type(model).__name__} reads {found[0]} outside its partitions, which eval() of the model"
            " makes of weights: a captured graph would not see it made anew",
            hint="mark a module that contains the line: what is inside a partition runs as it is, its own train(mode)"
            " too; or make it in the forward",
        )
    if any(isinstance(each, FakeTensor) for each in beside):
        raise MarkingError(
            f"the forward of {type(model).__name__} reads a tensor of a partition that the partition does not return:"
            " a hook or an attribute carries it",
            hint="return it from the marked module; a Hugging Face model collects nothing by hooks"
            " with output_attentions and output_router_logits left off, nor hidden states if its layers are partitions",
        )


def _each_its_own(leaves: Sequence[Any]) -> list[Any]:
    """The leaves, each tensor an object with memory of its own."""
    storages = [
        leaf.untyped_storage()._cdata if torch.is_tensor(leaf) and leaf.layout is torch.strided else None
        for leaf in leaves
    ]
    return [
        torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        if storage is not None and storage in storages[:n]
        else leaf
        for n, (leaf, storage) in enumerate(zip(leaves, storages, strict=True))
    ]


def _input_kinds(program: ExportedProgram) -> dict[str, tuple[InputKind, str]]:
    return {spec.arg.name: (spec.kind, spec.target or "") for spec in program.graph_signature.input_specs}
