"""Where a difference begins: the first module whose outputs differ, or the code of the model between two of them."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from assigner.model.deferred.mutation import tensor_leaves
from assigner.usercode import traced_place, user_place
from assigner.verification.comparing import align, differing, held_items, is_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import fx, nn

    from assigner.model.marking import Piece
    from assigner.verification.comparing import Difference, Moment, Side
    from assigner.verification.exercise import Exercise
    from assigner.verification.partitions import Partitions
    from assigner.verification.plain import PlainModel

_MOST_LINES = 4


class _Call(NamedTuple):
    """One call of a module, by its name in the model, with the tensors that it was given and returned."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def find_beginning(exercise: Exercise, plain: PlainModel, cut: Partitions, found: Sequence[Difference]) -> str | None:
    """Repeat the steps up to a difference, and find the first call of a module that differs there.

    Args:
        exercise: What to train on.
        plain: The plain model, as it was built.
        cut: The captured partitions, as they were built.
        found: What differs, in the order in which it came to be.

    Returns:
        Where it begins, in words; None: before any forward, or behind all of them.
    """
    moment, item = found[0].moment, found[0].item
    if moment.phase == "start" or item.quantity == "parameter":
        return None
    for step in range(moment.step):
        for side in (plain, cut):
            side.train(step)
        gradients = held_items(exercise.graph, "gradient")
        align(plain, cut, list(differing(moment, gradients, plain.look, cut.look)))
        for side in (plain, cut):
            side.update()
    theirs: dict[str, list[_Call]] = defaultdict(list)
    modules = plain.submodules()
    with _watched(modules, lambda call: theirs[call.name].append(call)):
        _act(plain, moment)
    mine: list[_Call] = []
    held = {name: each for name, each in cut.submodules().items() if type(modules.get(name)) is type(each)}
    with _watched(held, mine.append):
        _act(cut, moment)
    for call in mine:
        known = theirs[call.name]
        if not any(_alike(call.outputs, other.outputs) for other in known):
            inside = any(_alike(call.inputs, other.inputs) for other in known)
            return _in_words(exercise, call.name, modules[call.name], inside=inside)
    if item.quantity == "gradient":  # a backward goes from the last partition to the first
        wrong = {each.item.partition for each in found if each.moment == moment and each.item.quantity == "gradient"}
        piece = next(piece for piece in reversed(exercise.graph.pieces) if piece.name in wrong)
        return (
            f"all forwards are right; it begins in the backward of partition {piece.name!r}{_at(*_root_lines(piece))}"
        )
    if item.quantity in ("loss", "output"):
        return f"every module is right: it begins behind them{_at(*_root_lines(exercise.graph.last))}"
    return None


def _act(side: Side, moment: Moment) -> None:
    if moment.phase == "evaluation":
        side.evaluate()
    else:
        side.train(moment.step)


@contextlib.contextmanager
def _watched(modules: Mapping[str, nn.Module], note: Callable[[_Call], None]) -> Iterator[None]:
    """Note every call of the modules, those of children first."""
    given: dict[str, list[list[torch.Tensor]]] = defaultdict(list)

    def before(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        given[name].append(_copies((args, kwargs)))

    def after(name: str, _module: nn.Module, _args: Any, outputs: Any) -> None:
        note(_Call(name, given[name].pop(), _copies(outputs)))

    handles = [
        handle
        for name, module in modules.items()
        for handle in (
            module.register_forward_pre_hook(partial(before, name), with_kwargs=True),
            module.register_forward_hook(partial(after, name)),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copies(tree: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in tensor_leaves(tree)]


def _alike(ones: Sequence[torch.Tensor], twos: Sequence[torch.Tensor]) -> bool:
    return len(ones) == len(twos) and all(map(is_same, ones, twos))


def _in_words(exercise: Exercise, name: str, module: nn.Module, *, inside: bool) -> str:
    pieces, last = exercise.graph.pieces, exercise.graph.last
    piece = next((piece for piece in pieces if any(f"{name}.".startswith(f"{each}.") for each in piece.called)), last)
    if inside:
        return (
            f"it begins in partition {piece.name!r}, in {name!r} ({type(module).__name__}{_at(_forward_line(module))})"
        )
    sources = [
        exercise.graph.piece[each] for each in sorted({value.partition for value in piece.reads if value.partition})
    ]
    able = [each for each in (*sources, piece) if _own_code(each)] or [*sources, piece]
    partitions = " or ".join(repr(each.name) for each in able)
    return f"it begins in partition {partitions}, before {name!r} is called{_at(*_root_lines(*able))}"


def _at(*lines: str | None) -> str:
    known = [line for line in lines if line]
    return f", at {', '.join(known)}" if known else ""


def _forward_line(module: nn.Module) -> str | None:
    """Where the forward of a module's class begins; None: in torch, or in no file."""
    try:
        forward = type(module).forward
        place = user_place([(inspect.getsourcefile(forward) or "", inspect.getsourcelines(forward)[1])])
    except (OSError, TypeError):
        return None
    return f"{place[0]}:{place[1]}" if place and place[0] else None


def _own_code(piece: Piece) -> list[fx.Node]:
    """What a partition runs beside its modules."""
    return [
        node
        for node in piece.graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    ]


def _root_lines(*pieces: Piece) -> list[str]:
    """The lines of the user's code beside marked modules that some partitions run; the first few."""
    found: dict[str, None] = {}
    for node in (node for piece in pieces for node in _own_code(piece)):
        if place := traced_place(node.meta.get("stack_trace") or ""):
            found[f"{place[0]}:{place[1]}"] = None
    return list(found)[:_MOST_LINES]
