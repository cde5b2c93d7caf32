"""One forward of the model as a graph, with every marked module as one opaque call.

The forward of each marked module, and of each largest unmarked module beside them, is replaced by a call of one
registered operator; torch.export then sees one node for the module and ordinary ATen nodes for the glue between them.
An unmarked module that is given or returns what nobody could send, as a function, is part of the glue instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import ABSENT, Memento, StateChange, put
from assigner.model.deferred.mutation import storage_of
from assigner.model.deferred.reach import reach
from assigner.model.marking.casting import casting
from assigner.model.marking.checks import Check, Checks
from assigner.model.marking.domain import Domain, check_arguments, find_domain, input_key
from assigner.model.marking.exportable import exportable, made_by_eval, twin
from assigner.model.marking.fakeforward import ctc_losses, is_tensor, on_cpu
from assigner.model.marking.functional import Functional
from assigner.model.marking.interception import Interceptions, in_words, is_hook
from assigner.model.marking.isolation import CrossingError
from assigner.model.marking.leftovers import Notes, attribute_of, left_behind
from assigner.model.marking.modules import failed_at, opaque_modules, unregistered_named
from assigner.model.marking.nodes import shape_alone, without_regions
from assigner.model.marking.observation import DecidedError, LearntCall, ValueDependence
from assigner.model.marking.opaque import OpaqueCall, OpaqueCalls, is_call, replaced
from assigner.model.marking.rows import RowLeaves, find_carriers, in_groups
from assigner.model.marking.silence import silence
from assigner.model.marking.tables import CapturedTables, FoundTables, check_tables
from assigner.model.workload import IN_CONTAINERS, call_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.model.marking.domain import InputKey

    Learner = Callable[[Sequence[str], Mapping[str, Exception | None]], Mapping[str, Sequence[LearntCall]]]


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
    found: Mapping[str, torch.Tensor] = field(default_factory=dict)  # buffers that it may read: of tables found there
    opened: dict[str, CrossingError] = field(default_factory=dict)  # the unmarked modules that were followed, with why
    kept: FoundTables | None = None  # the values of the tables, for the example inputs; None: there are none

    @cached_property
    def kinds(self) -> dict[str, tuple[InputKind, str]]:
        """What each placeholder stands for, by its name: its kind, and the parameter, buffer or constant."""
        return _input_kinds(self.program)

    @cached_property
    def users(self) -> list[str]:
        """The placeholders of the model's inputs, in the order of `inputs`."""
        return [name for name, (kind, _) in self.kinds.items() if kind is InputKind.USER_INPUT]

    @property
    def holds_for_any_rows(self) -> bool:
        """No input's number of rows is fixed in it."""
        values = {node.name: node.meta.get("val") for node in self.graph.nodes if node.op == "placeholder"}
        carried = [
            (values.get(name), dim) for name, dim in zip(self.users, self.carriers, strict=True) if dim is not None
        ]
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
    model: nn.Module,
    marked: Sequence[str],
    inputs: Any,
    *,
    autocast: str | None,
    any_rows: bool,
    row_leaves: RowLeaves,
    training: bool,
    learner: Learner,
    these_sizes: bool,
    opened: Mapping[str, CrossingError],
    others: Sequence[CapturedTables],
    originals: Mapping[str, torch.Tensor],
) -> Capture:
    """Capture one forward, in the mode that the model is in.

    Args:
        model: On the meta device; left as it was.
        marked: Names of the partitions' modules.
        inputs: Example inputs, as a batch has them; only shapes, types and plain values count.
        autocast: The type that autocast computes in; it decides the types of the values.
        any_rows: The capture must hold for any number of rows, and the example has two or more; False: it holds for
            these inputs, and for what the forward treats alike.
        row_leaves: Which inputs carry rows; NOTHING: those whose first dimension is that of the first tensor.
        training: It runs with gradients; False: under torch.no_grad(), as evaluation does.
        these_sizes: It need not hold for other sizes of the inputs than these, beside the rows.
        learner: Learns what opaque modules give whose forward needs values.
        opened: Unmarked modules whose code is followed, as in another capture, each with why.
        others: What other captures leave, which this one may find.
        originals: Buffers in their places as the builder has made them, by name.

    Raises:
        MarkingError: the forward cannot be traced; the message has the line.
    """
    check_arguments(type(model).__name__, model.forward, inputs)
    with unregistered_named(model), silence(), torch.set_grad_enabled(training):
        learnt: dict[str, Sequence[LearntCall]] = {}
        opened = dict(opened)
        checks, whose = Checks(model), type(model).__name__
        fewer = _THESE_SIZES if these_sizes else _THESE_ROWS
        tries = _ANY_ROWS if any_rows else fewer
        while True:
            names, dependence = opaque_modules(model, marked, opened), ValueDependence()
            export = partial(
                _export, model, names,
                marked=marked, autocast=autocast, known=row_leaves, checks=checks, learnt=learnt,
            )  # fmt: skip

            def again(tables: FoundTables, key: InputKey, export: Any = export) -> Capture:
                with tables.placed(model):
                    second = _first_export(partial(export, key.inputs()), checks, ValueDependence(), whose, fewer)
                second.found = tables.by_name
                return second

            try:
                try:
                    found = _first_export(partial(export, inputs), checks, dependence, whose, tries)
                except MarkingError:
                    wanted = {name: why for name, why in dependence.wanting.items() if name not in learnt}
                    if not wanted:
                        raise
                else:
                    found.opened, found.found = opened, originals
                    may_find = [each for each in others if any(map(found.notes.reads.has, each.left.values))]
                    if found.tables or may_find:
                        found.kept = check_tables(whose, found, may_find, again)
                    return found
                kinds = {type(model.get_submodule(name)) for name in wanted}  # others of them have the same forward
                for name, calls in learner(names, wanted).items():
                    if calls and type(model.get_submodule(name)) in kinds:
                        learnt.setdefault(name, calls)
            except MarkingError as error:
                if isinstance(error, CrossingError) and error.module not in ("", *marked):
                    kind = type(model.get_submodule(error.module))  # others of it have the same forward
                    alike = [name for name in names if type(model.get_submodule(name)) is kind]
                    opened.update({name: error for name in alike if name not in marked})
                elif opened:
                    raise opened_in_vain(error, opened) from error
                else:
                    raise


def opened_in_vain(error: MarkingError, opened: Mapping[str, CrossingError]) -> MarkingError:
    """An error, with why the code of unmarked modules was followed: it may come from there."""
    causes = {cause.module: cause.message for cause in opened.values()}
    ways = [f"{message}: mark a larger module around {name!r}" for name, message in causes.items()]
    return MarkingError(error.message, hint="; or ".join([*ways, *filter(None, [error.hint])]))


def _first_export(
    export: Callable[..., Capture], checks: Checks, dependence: ValueDependence, name: str, wished: Sequence[_Dims]
) -> Capture:
    """The export in which the most may vary. torch.export raises many kinds of errors; the last try's is reported."""
    *tries, last = wished
    for dims in tries:
        try:
            found = checks.carried(partial(export, dims, dependence=dependence))
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
    return _or_explain(lambda: checks.carried(partial(export, last, dependence=dependence)), name, dependence)


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
            is_number = strange[1] == "numpy"
            raise MarkingError(
                f"the inputs of {name} have a {'NumPy ' * is_number}{strange[2]} among them, which is no tensor, plain"
                " value or container of Python's",
                hint="have Workload.batch and the data loader give Python's own number, int(x) or float(x)"
                if is_number
                else IN_CONTAINERS,
            ) from error
        raise MarkingError(
            f"the forward of {name} cannot be traced {failed_at(error)}: {reason}",
            hint="mark a larger module that contains this line, or give the model as an nn.Sequential"
            f"{in_groups(reason)}",
        ) from error


# An entry of the cache, with symbols for sizes, costs more than it saves: a tenth to a third. Export has its own mode.
@torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # type: ignore[untyped-decorator]
def _export(
    model: nn.Module,
    names: Sequence[str],
    inputs: Any,
    dims: _Dims,
    *,
    checks: Checks,
    marked: Sequence[str],
    autocast: str | None,
    known: RowLeaves,
    learnt: Mapping[str, Sequence[LearntCall]],
    dependence: ValueDependence,
) -> Capture:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    leaves, structure = pytree.tree_flatten(call_arguments(inputs))
    # One tensor that stands at two places is two inputs: the next batch may have two tensors there.
    real = pytree.tree_unflatten(_each_its_own(leaves), structure)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: mode.from_tensor(tensor, static_shapes=True), real)
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    rows, carriers = find_carriers(known, structure, leaves)
    for leaf, carrier, fake in zip(leaves, carriers, pytree.tree_leaves((args, kwargs)), strict=True):
        if is_tensor(leaf) and leaf.dim():
            kinds = [dims.rows if n == carrier else dims.others for n in range(leaf.dim())]
            shapes[fake] = {
                n: kind if leaf.size(n) > 1 or kind is Dim.DYNAMIC else Dim.STATIC for n, kind in enumerate(kinds)
            }
    unmarked = [each for each in names if each not in marked]
    by_eval = {} if torch.is_grad_enabled() else made_by_eval(model)
    twins = {id(each): twin(each, mode) for each in by_eval.values()}
    opaque = OpaqueCalls(model, names, autocast, learnt, dependence, unmarked=unmarked, made_anew=twins.values())
    is_first = dims == _ANY_ROWS[0]  # the last try tells who takes rows for a number
    caught = Interceptions(model, opaque, checks, carriers if is_first else ())
    with mode:
        anchor = torch.empty((), requires_grad=True, device="cpu")
    calls, watched = replaced(opaque, anchor), caught.active()
    kept = Memento(model.named_modules()).exchanged(twins)  # torch.export gives modules copies of lists and dicts
    ready = exportable(model, mode, args, kwargs)
    with kept, ready, calls, watched, mode, casting(autocast, "cpu"), ctc_losses(), on_cpu():
        dynamic = shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]
        exported = partial(torch.export.export, model, args, kwargs, dynamic_shapes=dynamic, strict=False)
        program = exported()
        changes, replaced_buffers = caught.changes, caught.replaced
        _check_repeated(model, program, opaque, caught, exported)
    _check_replaced(model, program, replaced_buffers)
    _check_ways_out(model, program, {name: twins[id(each)] for name, each in by_eval.items()})
    domain = find_domain(program, input_key(structure, leaves))
    graph = without_regions(program.graph_module, autocast=autocast is not None)
    functional = Functional(graph, _input_kinds(program), opaque.calls, caught.hooks)
    tables = [each for each in (*changes, *replaced_buffers)
              if _follows_from_shapes(each, program) and caught.reads.has(attribute_of(each))]  # fmt: skip
    notes = Notes((each for each in changes if not _is_kept_mask(each, program)), caught.reads)
    statistics = frozenset(
        f"{name}.{key}"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm)
        for key in ("running_mean", "running_var", "num_batches_tracked")
    )
    return Capture(
        functional.graph, functional.together, program, opaque.names, opaque.calls, checks.known, leaves, rows,
        carriers, domain, left_behind(opaque.leftovers, changes), notes, tables, opaque.leftovers.read, caught.flags,
        statistics,
    )  # fmt: skip


def _check_repeated(
    model: nn.Module,
    program: ExportedProgram,
    opaque: OpaqueCalls,
    caught: Interceptions,
    again: Callable[[], ExportedProgram],
) -> None:
    """The forward leaves Python state changed: a second call must do the same, and change nothing more.

    So it must where a cached function has made objects: of those that were there before, changes are seen. A tensor
    that follows from the shapes of inputs alone (a mask that is kept) is none of that: it is made anew. Nor is what a
    forward notes in an attribute that it does not read before (the number of rows, states of a recurrence).
    """
    changes = [change for change in caught.changes if not _is_kept_mask(change, program)]
    made = [f"what {name} has made" for name in caught.made]
    if not changes and not made:
        return
    had = (each for each in changes if isinstance(each.holder, nn.Module) and each.before is not ABSENT)
    settled = [each for each in had if type(each.now) in ATOMS]
    for change in settled:  # torch.export has put back what was there before, but leaves what was not
        vars(change.holder)[change.key] = change.now
    masks = [
        (space, change.key, change.before)
        for change in caught.changes
        if _is_kept_mask(change, program) and (space := _space(change)) is not None
    ]
    put(masks)
    first, calls = _in_words(program, opaque, caught), len(opaque.calls)
    try:
        second = again()
        same = _in_words(second, opaque, caught) == first
    except Exception:
        if not masks:
            raise
        second, same = program, False  # it looks for a mask that it makes but once
    del opaque.calls[calls:]
    odd = [each for each in caught.changes if not _is_replaced_tensor(each) and not _is_kept_mask(each, second)]
    further = [change for change in odd if caught.reads.has(attribute_of(change))]
    noted = [change for change in odd if not caught.reads.has(attribute_of(change))]
    if same and not further and not _reads_replaced(program, changes) and not _reached([*settled, *noted], opaque):
        return
    found = [*(change.name for change in (*further, *changes)), *made]
    called = {call.module for call in opaque.calls}
    passed = [each for each in opaque.names if each not in called and found[0].startswith(f"{each}.")]
    if passed:
        raise MarkingError(
            f"the forward of {type(model).__name__} never calls {passed[0]!r}, only modules in it, whose code is"
            f" followed then: it changes {found[0]}, and a captured graph would do what the first call did for ever",
            hint="mark the modules that the forward calls, or have it call this one",
        )
    raise MarkingError(
        f"the forward of {type(model).__name__} changes {found[0]} outside its partitions: a"
        " captured graph would do what the first call did for ever",
        hint="keep it in a buffer (register_buffer) that tensor operations change, or mark a larger module that"
        " contains the line; set a flag in the model's builder",
    )


def _reached(changes: Sequence[StateChange], opaque: OpaqueCalls) -> bool:
    """True if code of a call can reach a module that the code around it changes: its worker would not see that."""
    holders = {id(change.holder) for change in changes}
    functions = {call.label: call.function for call in opaque.calls if call.function is not None}
    inside = [each for modules in opaque.isolation.inside.values() for each in modules]
    return bool(holders) and any(id(each) in holders for _, each in reach(functions, inside))


def _space(change: StateChange) -> dict[str, Any] | None:
    """The dict that has the entry; None: it is in none."""
    if isinstance(change.holder, nn.Module):
        return vars(change.holder)
    return change.holder if isinstance(change.holder, dict) and change.key is not None else None


def _is_kept_mask(change: StateChange, program: ExportedProgram) -> bool:
    return (change.before is None or change.before is ABSENT) and _follows_from_shapes(change, program)


def _follows_from_shapes(change: StateChange, program: ExportedProgram) -> bool:
    """A tensor was left that is made of shapes alone."""
    if not isinstance(change.now, FakeTensor):
        return False
    storage = storage_of(change.now)
    values = ((node, node.meta.get("val")) for node in program.graph.nodes)
    makers = [node for node, value in values if isinstance(value, torch.Tensor) and storage_of(value) == storage]
    return bool(makers) and all(map(shape_alone, makers))


def _is_replaced_tensor(change: StateChange) -> bool:
    return isinstance(change.before, torch.Tensor) and isinstance(change.now, torch.Tensor)


def _reads_replaced(program: ExportedProgram, changes: Sequence[StateChange]) -> bool:
    """True if a forward reads a tensor in whose place it leaves another one, for the next forward."""
    replaced = {id(change.before) for change in changes if _is_replaced_tensor(change)}
    return any(id(each) in replaced for each in _tensors_beside(program))


def _in_words(program: ExportedProgram, opaque: OpaqueCalls, caught: Interceptions) -> list[str]:
    """A graph's nodes, each as what it does to which; opaque calls by what they call, hooks by what they run."""
    numbers = {node: n for n, node in enumerate(program.graph.nodes)}
    found = []
    for node in program.graph.nodes:
        args: Any = fx.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}")
        if is_call(node):
            call = opaque.calls[int(node.args[0])]
            args = (call.label, repr(call.arguments), *args[0][1:])
        elif is_hook(node):
            args = (in_words(caught.hooks.get(int(node.args[0]))), *args[0][1:])
        found.append(f"{node.op} {node.target} {args}")
    return found


def _check_replaced(model: nn.Module, program: ExportedProgram, replaced: Sequence[StateChange]) -> None:
    """A buffer of another shape in the place of one follows from shapes alone: it is made anew wherever it is read."""
    if lost := [each.name for each in replaced if not _is_kept_mask(each, program)]:
        raise MarkingError(
            f"the forward of {type(model).__name__} puts another tensor in the place of {lost[0]!r}, of another shape"
            " or type, or of a parameter",
            hint="a buffer may be replaced by one of its own shape and type; keep others in an attribute, or mark a"
            " module that contains the line",
        )


def _check_ways_out(model: nn.Module, program: ExportedProgram, by_eval: Mapping[str, torch.Tensor]) -> None:
    """A tensor that a module made and did not return is a fake one without a node: export takes it for a constant."""
    words = pytree.tree_leaves([(node.args, node.kwargs) for node in program.graph.nodes])
    if any(isinstance(value, torch.Generator) for value in (*program.constants.values(), *words)):
        raise MarkingError(
            f"the forward of {type(model).__name__} draws from a generator of its own outside its partitions",
            hint="draw with torch's default generator, which the runtime seeds for every micro-batch, or mark a larger"
            " module that contains the line",
        )
    beside = _tensors_beside(program)
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
        leaf.untyped_storage()._cdata if is_tensor(leaf) and leaf.layout is torch.strided else None for leaf in leaves
    ]
    return [
        torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        if storage is not None and storage in storages[:n]
        else leaf
        for n, (leaf, storage) in enumerate(zip(leaves, storages, strict=True))
    ]


def _tensors_beside(program: ExportedProgram) -> list[torch.Tensor]:
    """The tensors that a forward reads and that are no input, parameter or buffer."""
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.CONSTANT_TENSOR]
    return [program.constants[str(spec.target)] for spec in specs]


def _input_kinds(program: ExportedProgram) -> dict[str, tuple[InputKind, str]]:
    return {spec.arg.name: (spec.kind, spec.target or "") for spec in program.graph_signature.input_specs}
