"""Writes that autograd does not see, into what a backward has saved before.

    y = torch.sigmoid(h)              its backward reads y
    y.data.round_()                   torch counts no change: plain PyTorch has the rounded values in that backward

    g = self.gate(h.data)             and the other way round: its backward reads h
    h += g                            the change counts for h, and not for what was read

A captured graph is without writes: there the operation in front keeps what was there, and gives other gradients. What
is saved of which memory autograd itself knows. So where a graph has such a write, and only there, it runs once more on
tensors without values, without these writes, and what lies behind its results is looked at. What is saved for a
gradient that nobody takes does not count, nor does another part of the same memory.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.utils.checkpoint
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.model.deferred.memento import placed
from assigner.model.deferred.mutation import ElementPlaces, storage_of, tensor_leaves, written_tensors
from assigner.model.marking.fakeforward import is_same_view, on_cpu
from assigner.model.marking.interception import ASSIGNED, is_hook
from assigner.model.marking.nodes import call_of, given_to, is_result, line_of, storages, written_by
from assigner.model.marking.opaque import is_call
from assigner.model.marking.roworder import SCATTERING
from assigner.model.marking.writing import wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from assigner.model.marking.functional import Functional
    from assigner.model.marking.observation import CallEffects
    from assigner.model.marking.opaque import OpaqueCall
    from assigner.model.marking.operations import Way

_SAVES_NOTHING = SCATTERING | {"copy_", "add_", "sub_", "fill_", "zero_", "masked_fill_", "masked_scatter_"}
_MOST_ELEMENTS = 1 << 22  # of more, two parts of one memory are taken for one


class _MemoryPart(NamedTuple):
    """What is saved or written of a memory."""

    turn: int  # of the node that does so, in the graph
    storage: int
    tensor: torch.Tensor | None  # lies there as the part does; None: it may be all of it
    words: str = ""  # who has saved it, for people; of a write empty
    is_result: bool = False  # it is saved as a result of the operation, and so with its memory
    counter: torch.Tensor | None = None  # torch counts a write to the one as to the other; None: it counts none


_Place = tuple[torch.Tensor, _MemoryPart]  # a tensor as a call has it, and as the graph does


def check_unseen_writes(given: Functional) -> None:
    """Refuse a write that autograd does not see into what a backward has saved."""
    writes = _unseen_writes(given)
    if not writes.targets or not torch.is_grad_enabled():
        return
    rerun = _Rerun(given, writes)
    for node, write in rerun.writes:
        share = _is_assigned if any(each.target is ASSIGNED for each in node.all_input_nodes) else _overlap
        before = (each for each in rerun.saved if each.turn < write.turn and each.storage == write.storage)
        found = next((each for each in before if not _count_together(each, write) and share(each, write)), None)
        if found is not None:
            by = f" by {call_of(node).label}" if is_call(node) else ""
            written, read = (" through .data or .detach()", "") if write.counter is None else ("", " through .data")
            raise MarkingError(
                f"a tensor is changed in place{written}{by} ({line_of(node)}) that{read}"
                f" {found.words}: what its backward has saved of it would be changed there, too, where nothing is cut",
                hint="write it out of place, as x = x.masked_fill(mask, 0), or to a copy (x.clone()), for the gradient"
                " of what was read; change a weight in front of all that use it; or mark a larger module that contains"
                " both",
            )


class _UnseenWrites(NamedTuple):
    """What a graph writes where autograd may not see it."""

    # by the nodes that write what each writes to, and whether torch counts that, for others in the memory of what was
    # cut off before, or nowhere
    targets: dict[fx.Node, list[tuple[fx.Node, bool]]]
    cut_off: set[fx.Node]  # their tensors are cut off the gradient, in a memory of others


def _unseen_writes(model: Functional) -> _UnseenWrites:
    found = _UnseenWrites({}, set())
    state = {name: node for node, name in model.state.items()}
    memories: set[int] = set()  # of what is cut off
    for node in model.old.nodes:
        written = written_by(node) if memories else []
        hidden = [each for each in written if each in found.cut_off]
        reshapes = torch.Tag.inplace_view in getattr(node.target, "tags", ())  # and changes no value
        others = [] if reshapes else [each for each in written if each not in found.cut_off]
        counted = [each for each in others if memories.intersection(storages(each))]
        if is_call(node):
            unseen = [given_to(node)[n] for n in _written_unseen(call_of(node).effects)]
            hidden += [each for each in unseen if each not in hidden]
            memories.update(_cut_off_in(node, state))
        else:
            sources = {memory for each in node.all_input_nodes if each in found.cut_off for memory in storages(each)}
            if node.target is torch.ops.aten.detach.default or (sources and sources.intersection(storages(node))):
                found.cut_off.add(node)
                memories.update(storages(node))
        if hidden or counted:
            found.targets[node] = [*((each, False) for each in hidden), *((each, True) for each in counted)]
    return found


class _TrainedCall(NamedTuple):
    """A call that passes gradients on."""

    results: set[Any]  # the nodes of autograd's graph by which gradients come to it
    given: list[torch.Tensor]
    saved: list[_MemoryPart]  # by its backward


class _Rerun:
    """A graph that runs on tensors without values, but for some writes: what its backward would have saved is noted.

    an operation               autograd itself has it, and it is looked up once gradients come from the results there
    a write to a view          saves what it reads where nobody can look: all of that
    what cannot run like that  sizes depend on values, or too little is known of what it writes: all that it is given
    a call                     as each way through it has shown when it was learnt, if gradients come to its results
    """

    def __init__(self, given: Functional, unseen: _UnseenWrites) -> None:
        self.unseen = unseen
        self.writes: list[tuple[fx.Node, _MemoryPart]] = []  # what these would have written
        self.saved: list[_MemoryPart] = []  # what backwards have saved
        self._values: dict[fx.Node, Any] = {}
        self._wanted: list[torch.Tensor] = []  # gradients arrive here
        self._trained: list[_TrainedCall] = []
        self._linked: dict[int, int] = {}  # which memory lies somewhere in which other
        nodes = list(given.old.nodes)
        self._state = {name: node for node, name in given.state.items()}
        self._turn = 0
        turns: dict[int, int] = {}  # by autograd's own numbers
        mode = detect_fake_mode([leaf for node in nodes for leaf in tensor_leaves(node.meta.get("val"))])
        environment = None if mode is None else mode.shape_env
        with (
            mode or contextlib.nullcontext(), on_cpu(),
            contextlib.nullcontext() if environment is None else environment.suppress_guards(),
        ):  # fmt: skip
            for self._turn, node in enumerate(nodes):
                first = _next_number()
                self._values[node] = self._run(node)
                turns.update(dict.fromkeys(range(first, _next_number()), self._turn))
            self._look_behind(nodes, turns)

    def _look_behind(self, nodes: Sequence[fx.Node], turns: Mapping[int, int]) -> None:
        """Note what is saved behind the results, and by the calls that these gradients come to."""
        seen: set[Any] = {None}
        roots, calls = self._wanted, self._trained
        while roots:
            for function, each in saved_behind(roots, seen):
                turn = turns[function._sequence_nr()]
                part = self._part(each, _used_at(nodes[turn]))
                self.saved.append(part._replace(turn=turn, is_result=each.grad_fn is function, counter=None))
            reached = [each for each in calls if not seen.isdisjoint(each.results)]
            calls = [each for each in calls if seen.isdisjoint(each.results)]
            self.saved += [part for each in reached for part in each.saved]
            roots = [tensor for each in reached for tensor in each.given if tensor.requires_grad]

    def _of(self, tree: Any) -> Any:
        return fx.map_arg(tree, self._values.__getitem__)

    def _part(self, tensor: torch.Tensor, words: str = "") -> _MemoryPart:
        storage = storage_of(tensor)
        whole = storage in self._linked
        return _MemoryPart(
            self._turn, self._linked.get(storage, storage), None if whole else tensor, words, counter=tensor
        )

    def _run(self, node: fx.Node) -> Any:
        """What a node gives."""
        value, targets = node.meta.get("val"), self.unseen.targets.get(node, ())
        for each, is_counted in targets:
            part = self._part(self._values[each])
            self.writes.append((node, part if is_counted else part._replace(counter=None)))
        if node.op == "placeholder":
            return pytree.tree_map_only(torch.Tensor, lambda each: _leaf(each, requires=each.requires_grad), value)
        if is_call(node):
            return self._run_call(node)
        if is_result(node):
            return self._values[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.op == "output":
            self._want(tensor_leaves(self._of(node.args)))
        elif is_hook(node):
            tensor = self._of(node.args[1])
            if node.meta["hook"] is wanted and not tensor.requires_grad:
                tensor.requires_grad_()
        elif tensor_leaves(value):
            with torch.set_grad_enabled(not node.meta.get("without_gradient")):
                hidden = next((self._values[each] for each, is_counted in targets if not is_counted), None)
                return self._run_operation(node) if hidden is None else self._skip_write(node, hidden)
        return value

    def _want(self, tensors: Iterable[torch.Tensor]) -> None:
        self._wanted += [each for each in tensors if each.requires_grad]

    def _run_operation(self, node: fx.Node) -> Any:
        args, kwargs = self._of((node.args, node.kwargs))
        given = tensor_leaves((args, kwargs))
        if node.target is torch.ops.aten.detach.default:  # may have been a `.data`, for which other writes do not count
            return given[0].data
        written = written_tensors(node.target, args, kwargs)
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        if trains and any(each._is_view() for each in written) and _name(node.target) not in _SAVES_NOTHING:
            self._save_all(_others(given, written), node)  # a write to a view saves what it reads where nobody can look
        made = tensor_leaves(node.meta["val"])
        if not _open_sizes(made) - _open_sizes(given):
            with contextlib.suppress(RuntimeError):  # as it is: a tensor of which less is known here is written to
                return node.target(*args, **kwargs)  # type: ignore[operator]
        if trains:
            self._save_all(given, node)
            self._want(given)
        if written:
            return written[0]
        return pytree.tree_map_only(torch.Tensor, lambda each: _leaf(each, requires=trains).clone(), node.meta["val"])

    def _save_all(self, tensors: Iterable[torch.Tensor], node: fx.Node) -> None:
        self.saved += [self._part(each, _used_at(node)) for each in tensors]

    def _skip_write(self, node: fx.Node, target: torch.Tensor) -> torch.Tensor:
        """A write to what is cut off gives all that is cut off in this memory the gradient of what is written."""
        given = _others(tensor_leaves(self._of((node.args, node.kwargs))), [target])
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            self._want(given)
            if _name(node.target) not in _SAVES_NOTHING:
                self._save_all(given, node)
            for each in tensor_leaves([self._values[one] for one in self.unseen.cut_off if one in self._values]):
                if storage_of(each) == storage_of(target) and not each.requires_grad:
                    each.requires_grad_(_is_able(each))
        return target

    def _run_call(self, node: fx.Node) -> list[torch.Tensor]:
        """What a call gives; what its backward has saved is noted."""
        call, tensors = call_of(node), [self._values[each] for each in given_to(node)]
        effects = call.effects
        trains = bool(effects.wanting) and not node.meta.get("without_gradient")
        made: list[torch.Tensor] = []
        for n, each in enumerate(node.meta["val"]):
            alias = effects.aliases.get(n)
            known = None if alias is None or alias.kind == "own" else tensors if alias.kind == "given" else made
            if alias is not None and known is not None and alias.exact:
                made.append(known[int(alias.index)])
                continue
            made.append(_leaf(each, requires=trains and n in effects.wanting).clone())
            if alias is not None and known is not None:
                other = storage_of(known[int(alias.index)])
                self._linked[storage_of(made[-1])] = self._linked.get(other, other)
        if trains:
            ways = effects.ways or (None,)
            saved = [part for way in ways for part in self._saved_in(way, call, tensors, made)]
            self._trained.append(_TrainedCall({made[n].grad_fn for n in effects.wanting}, tensors, saved))
        return made

    def _saved_in(
        self, way: Way | None, call: OpaqueCall, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> Iterator[_MemoryPart]:
        """What a call has saved of what it was given, has made and has; where nobody knows, all of it.

        The way has tensors of its own in the places of these. One that is saved lies in the memory of some that were
        given, else that it has made, else that it has; it is those of them that are the same view, or else any.
        """
        label = call.label
        parts = [self._part(each, f"{label} was given before") for each in given]
        if way is None:
            yield from (*parts, *(self._part(made[n], f"{label} has made") for n in sorted(call.effects.wanting)))
            return
        try:
            found = _saved_on(way)
        except _RunsAgainError:  # a checkpoint reads again what it was given, and nobody looks at its counter
            yield from (each._replace(counter=None) for each in parts)
            return
        inputs, results, own = list[_Place](), list[_Place](), list[_Place]()
        for theirs, each, part in zip(way.given, given, parts, strict=True):
            is_made = any(each is one for one in made)
            inputs.append((theirs, part._replace(tensor=None) if is_made else part))
        for theirs, each in zip(way.made, made, strict=True):  # which part of it the results share nobody knows
            results.append((theirs, self._part(each, f"{label} has made")._replace(tensor=None)))
        for key, theirs in way.own.items():
            if key in self._state:
                own.append((theirs, self._part(self._values[self._state[key]], f"{label} has used before")))
        for function, each in found:
            there = next(filter(None, (_on_storage_of(each, places) for places in (inputs, results, own))), [])
            for theirs, part in [place for place in there if is_same_view(place[0], each)] or there:
                counter = part.counter if _have_one_counter(theirs, each) else None
                yield part._replace(is_result=each.grad_fn is function, counter=counter)


def _on_storage_of(tensor: torch.Tensor, places: Sequence[_Place]) -> list[_Place]:
    return [place for place in places if storage_of(place[0]) == storage_of(tensor)]


def _count_together(saved: _MemoryPart, write: _MemoryPart) -> bool:
    return saved.counter is not None and write.counter is not None and _have_one_counter(saved.counter, write.counter)


def _have_one_counter(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether torch counts a write to the one as one to the other, as it does unless a `.data` is between them."""
    counts = left._version, right._version
    torch.autograd.graph.increment_version(left)
    both = right._version != counts[1]
    torch._C._autograd._unsafe_set_version_counter((left, right), counts)
    return both


def _is_able(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _leaf(tensor: torch.Tensor, *, requires: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(requires and _is_able(tensor))


def _others(tensors: Iterable[torch.Tensor], those: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in tensors if not any(each is one for one in those)]


def _open_sizes(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The symbols of sizes that depend on values."""
    return set().union(*map(free_unbacked_symbols, tensors))


def _used_at(node: fx.Node) -> str:
    return f"the code between partitions has used before, at {line_of(node)}"


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", "")).partition(".")[0]


def _next_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())


class _RunsAgainError(BaseException):
    """A backward runs a forward again: it reads what that was given."""


def _runs_again(*_: object, **__: object) -> NoReturn:
    raise _RunsAgainError


def _written_unseen(effects: CallEffects) -> list[int]:
    """Which of the tensors that it is given a call writes to in such a way; where nobody knows how, none."""
    if not effects.written:
        return []
    found: set[int] = set()
    for way in effects.ways:
        cut_off: set[int] = set()
        written: set[int] = set()
        for target, args, kwargs, made in way.operations:
            written.update(storage_of(each) for each in written_tensors(target, args, kwargs) if id(each) in cut_off)
            memories = {storage_of(each) for each in tensor_leaves((args, kwargs)) if id(each) in cut_off}
            is_cut = target is torch.ops.aten.detach.default
            cut_off.update(id(each) for each in tensor_leaves(made) if is_cut or storage_of(each) in memories)
        found.update(n for n, each in enumerate(way.given) if storage_of(each) in written)
    return sorted(found & effects.written)


def _cut_off_in(node: fx.Node, state: Mapping[str, fx.Node]) -> Iterator[int]:
    """The memories of what a call cuts off of what it is given, has or makes."""
    for way in call_of(node).effects.ways:
        made = [each.made for each in way.operations if each.target is torch.ops.aten.detach.default]
        cut_off = {storage_of(leaf) for leaf in tensor_leaves(made)}
        if not cut_off:
            continue
        own = [(state[key], each) for key, each in way.own.items() if key in state]
        held = [*zip(given_to(node), way.given, strict=True), *own]
        yield from (memory for each, theirs in held if storage_of(theirs) in cut_off for memory in storages(each))
        results = zip(node.meta["val"], way.made, strict=True)
        yield from (storage_of(each) for each, theirs in results if storage_of(theirs) in cut_off)


def _saved_on(way: Way) -> list[tuple[Any, torch.Tensor]]:
    """What backwards of a call have saved, on one way: of a write to a view the whole tensor shows nothing there."""
    writes = any(written_tensors(each.target, each.args, each.kwargs) for each in way.operations)
    inner = tensor_leaves([each.made for each in way.operations]) if writes else []
    torch._C._autograd._unsafe_set_version_counter(way.held, way.counts)  # what was written since is no hindrance
    return [*saved_behind([*way.made, *inner])]


def saved_behind(roots: Iterable[torch.Tensor], seen: set[Any] | None = None) -> Iterator[tuple[Any, torch.Tensor]]:
    """What autograd has saved for the gradients of some tensors, each with the node of its graph.

    What was changed since, so that torch sees it, is left out: that backward raises. The nodes in `seen` are passed
    over, and those behind the tensors are added. Something checkpointed in it raises `_RunsAgainError`.
    """
    waiting: list[Any] = [each.grad_fn for each in roots]
    seen = {None} if seen is None else seen
    with placed([(torch.utils.checkpoint, "_recomputation_hook", _runs_again)]):
        while waiting:
            function = waiting.pop()
            if function in seen:
                continue
            seen.add(function)
            waiting += [each for each, _ in function.next_functions]
            raw = [name for name in dir(function) if name.startswith("_raw_saved_")]  # the others are sizes and numbers
            names = [name.removeprefix("_raw") for name in raw]
            values = [*getattr(function, "__dict__", {}).values()]
            for name in names:
                with contextlib.suppress(RuntimeError):
                    values.append(getattr(function, name.lstrip("_") if name == "_saved_tensors" else name))
            yield from ((function, each) for each in tensor_leaves(values))


def _is_assigned(saved: _MemoryPart, write: _MemoryPart) -> bool:
    """Whether `.data =` changes what is saved: the tensor itself it does, and no view or result in its old memory."""
    if saved.is_result:
        return False
    return saved.tensor is None or write.tensor is None or is_same_view(saved.tensor, write.tensor)


def _overlap(saved: _MemoryPart, write: _MemoryPart) -> bool:
    left, right = (None if each.tensor is None else _places(each.tensor) for each in (saved, write))
    return left is None or right is None or left.meet(right, _MOST_ELEMENTS)


def _places(tensor: torch.Tensor) -> ElementPlaces | None:
    """For the example's sizes; None: nobody knows."""
    numbers = [_number(each) for each in (tensor.storage_offset(), *tensor.shape, *tensor.stride())]
    known = tuple(each for each in numbers if each is not None)
    if len(known) < len(numbers):
        return None
    return ElementPlaces(known[0], known[1 : tensor.dim() + 1], known[tensor.dim() + 1 :])


def _number(size: Any) -> int | None:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return None if size.node.hint is None else int(size.node.hint)
