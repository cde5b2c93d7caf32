"""What code between partitions leaves in Python: a captured graph has none of it, so the next call must do the same.

    self.calls += 1                        read first, and another value each time: refused
    self.ready = True                      read first, and the same from then on: all else must be, too
    self.rows = x.shape[0]                 set before it is read: a local variable, whatever it holds
    self.mask = ones(n).tril()             follows from shapes alone: made anew by the graph (else: tables)

Where more than such tensors is left, the forward is exported once more with what it has left, and must be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind

from assigner.errors import MarkingError
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import ABSENT, StateChange, put
from assigner.model.deferred.mutation import storage_of
from assigner.model.deferred.reach import Names, reach
from assigner.model.marking.interception import in_words, is_hook, values_of
from assigner.model.marking.leftovers import Notes, attribute_of
from assigner.model.marking.nodes import call_of, shape_alone, written_by
from assigner.model.marking.opaque import is_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.export import ExportedProgram

    from assigner.model.marking.interception import Interceptions
    from assigner.model.marking.opaque import OpaqueCalls


class Remains:
    """What the forward of one export has left in Python.

    Args:
        program: The export.
        caught: What has happened in it.

    Attributes:
        changes: Python state that is another now.
        replaced: The buffers and parameters in whose places there are tensors of other shapes.
    """

    def __init__(self, program: ExportedProgram, caught: Interceptions) -> None:
        self.program, self.changes, self.replaced, self.reads = program, caught.changes, caught.replaced, caught.reads

    def follows_from_shapes(self, change: StateChange) -> bool:
        """Whether a tensor was left that is made of shapes alone."""
        makers = self._makers(change.now) if isinstance(change.now, FakeTensor) else []
        return bool(makers) and all(map(shape_alone, makers))

    def _makers(self, tensor: torch.Tensor) -> list[fx.Node]:
        """The nodes that make a tensor, or write to it; none: it was made within a call, or before."""
        memory = storage_of(tensor)
        return [
            node
            for node in self.program.graph.nodes
            for each in (node, *written_by(node))  # a list of tensors is written to, or a call's
            if isinstance(value := each.meta.get("val"), torch.Tensor) and storage_of(value) == memory
        ]

    def beyond_shapes(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Those of some traced tensors that do not follow from shapes alone, by name."""
        return [name for name, each in named if not all(map(shape_alone, self._makers(each)))]

    def is_mask(self, change: StateChange) -> bool:
        """Whether it was left where nothing was before: a mask that is kept, and made anew wherever it is read."""
        return (change.before is None or change.before is ABSENT) and self.follows_from_shapes(change)

    @property
    def others(self) -> list[StateChange]:
        """The changes beside such masks."""
        return [each for each in self.changes if not self.is_mask(each)]

    @property
    def tables(self) -> list[StateChange]:
        """What follows from shapes, and the forward may find as another one has left it."""
        every = (*self.changes, *self.replaced)
        return [each for each in every if self.follows_from_shapes(each) and self.reads.has(attribute_of(each))]

    @property
    def notes(self) -> Notes:
        """What it leaves and reads in attributes."""
        return Notes(self.others, self.reads)


def check_repeated(
    model: nn.Module, first: Remains, caught: Interceptions, again: Callable[[], ExportedProgram]
) -> None:
    """A second call must do what the first one has done, and change nothing more that it reads.

    So it must where a cached function has made objects, or tensors are left where no module leads to: of what was there
    before, changes are seen.

    Args:
        model: Whose forward; torch.export has put back what was there before, but leaves what was not.
        first: What it has left.
        caught: What happens in the model's code; of `again`, too.
        again: Exports it once more.

    Raises:
        MarkingError: it does something else.
    """
    if kept := first.beyond_shapes(caught.kept):
        raise MarkingError(
            f"the forward of {type(model).__name__} keeps in {kept[0]} (functools.cache), for its next call, what it"
            " has made outside its partitions of weights, values or draws: a captured graph would make it anew",
            hint="mark a larger module that contains the line: what is inside a partition runs as it is; or make it in"
            " the model's builder (register_buffer)",
        )
    changes, made = first.others, [f"what {name} has made" for name in caught.made]
    made += first.beyond_shapes(caught.outside)
    if not changes and not made:
        return
    settled = [
        each for each in changes
        if isinstance(each.holder, nn.Module) and each.before is not ABSENT and type(each.now) in ATOMS
    ]  # fmt: skip
    put((vars(each.holder), each.key, each.now) for each in settled)
    masks = [
        (space, each.key, each.before)
        for each in first.changes
        if first.is_mask(each) and (space := _space(each)) is not None
    ]
    put(masks)
    opaque = caught.opaque
    words, calls = _in_words(first.program), len(opaque.calls)
    try:
        second = again()
        same = _in_words(second) == words
    except Exception:
        if not masks:
            raise
        second, same = first.program, False  # it looks for a mask that it makes but once
    odd = [each for each in Remains(second, caught).others if not _is_replaced_tensor(each)]
    del opaque.calls[calls:]
    further = [each for each in odd if caught.reads.has(attribute_of(each))]
    noted = [each for each in odd if not caught.reads.has(attribute_of(each))]
    if (
        same
        and not further
        and not _reads_replaced(first)
        and not (_reached([*settled, *noted], opaque) or _hooked(first, caught))
    ):
        return
    found = [*(each.name for each in (*further, *changes)), *made]
    called = {call.module for call in opaque.calls}
    passed = [each for each in opaque.names if each not in called and found[0].startswith(f"{each}.")]
    if passed:
        raise MarkingError(
            f"the forward of {type(model).__name__} never calls {passed[0]!r}, only modules in it, whose code is"
            f" followed then: it changes {found[0]}, and a captured graph would do what the first call did for ever",
            hint="mark the modules that the forward calls, or have it call this one",
        )
    named = [*further, *changes][:1]
    for container, label in opaque.filled:
        if any(container is each.holder for each in named):
            raise MarkingError(
                f"{label} changes {found[0]}, which the forward of {type(model).__name__} gives it and keeps for its"
                " next call: a captured graph would do what the first call did for ever",
                hint="give it one that is made in each forward, as {}; what is made once for all may be in an attribute"
                " of the module that makes it",
            )
    raise MarkingError(
        f"the forward of {type(model).__name__} changes {found[0]} outside its partitions: a"
        " captured graph would do what the first call did for ever",
        hint="keep it in a buffer (register_buffer) that tensor operations change, or mark a larger module that"
        " contains the line; set a flag in the model's builder",
    )


def check_replaced(model: nn.Module, left: Remains) -> None:
    """A buffer of another shape in the place of one follows from shapes alone: it is made anew wherever it is read.

    Raises:
        MarkingError: it does not.
    """
    if lost := [each.name for each in left.replaced if not left.follows_from_shapes(each)]:
        raise MarkingError(
            f"the forward of {type(model).__name__} puts another tensor in the place of {lost[0]!r}, of another shape"
            " or type, or of a parameter",
            hint="a buffer may be replaced by one of its own shape and type; keep others in an attribute, or mark a"
            " module that contains the line",
        )


def tensors_beside(program: ExportedProgram) -> list[torch.Tensor]:
    """The tensors that a forward reads and that are no input, parameter or buffer."""
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.CONSTANT_TENSOR]
    return [program.constants[str(spec.target)] for spec in specs]


def _space(change: StateChange) -> dict[str, Any] | None:
    """The dict that has the entry; None: it is in none."""
    if isinstance(change.holder, nn.Module):
        return vars(change.holder)
    return change.holder if isinstance(change.holder, dict) and change.key is not None else None


def _is_replaced_tensor(change: StateChange) -> bool:
    return isinstance(change.before, torch.Tensor) and isinstance(change.now, torch.Tensor)


def _reads_replaced(left: Remains) -> bool:
    """True if a forward reads a tensor in whose place it leaves another one, for the next forward."""
    replaced = {id(change.before) for change in left.changes if _is_replaced_tensor(change)}
    return any(id(each) in replaced for each in tensors_beside(left.program))


def _reached(changes: Sequence[StateChange], opaque: OpaqueCalls) -> bool:
    """True if code of a call can reach a module that the code around it changes: its worker would not see that."""
    holders = {id(change.holder) for change in changes}
    functions = {call.label: call.function for call in opaque.calls if call.function is not None}
    inside = [each for modules in opaque.isolation.inside.values() for each in modules]
    return bool(holders) and any(id(each) in holders for _, each in reach(functions, inside))


def _hooked(left: Remains, caught: Interceptions) -> bool:
    """True if a hook can read what the forward changes: it runs in a backward, where no graph has changed anything."""
    values = enumerate(value for hook in caught.hooks.values() for value in values_of(hook))
    changed = {(id(each.holder), each.key) for each in left.others}
    holders = {holder for holder, _ in changed}
    for _, value in reach({f"hook {n}": each for n, each in values}, top="read") if changed else ():
        if isinstance(value, Names):
            if any((id(value.space), name) in changed for name in value.names):
                return True
        elif id(value) in holders:
            return True
    return False


def _in_words(program: ExportedProgram) -> list[str]:
    """A graph's nodes, each as what it does to which, and whether with gradients.

    Opaque calls by what they call, hooks by what they run.
    """
    numbers = {node: n for n, node in enumerate(program.graph.nodes)}
    found = []
    for node in program.graph.nodes:
        args: Any = fx.map_arg((node.args, node.kwargs), lambda each: f"%{numbers[each]}")
        if is_call(node):
            args = (call_of(node).label, repr(call_of(node).arguments), *args[0][1:])
        elif is_hook(node):
            args = (in_words(node.meta["hook"]), *args[0][1:])
        found.append(f"{node.op} {node.target} {args} {node.meta.get('without_gradient')}")
    return found
