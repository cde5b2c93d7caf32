"""What a forward on fake tensors shows: what it writes, reads and differentiates, whose memory its results lie in.

What is inside a partition is not traced, only run on fake tensors for the shapes of what comes out. There
`if mask.any():` has no answer; but a module whose outputs look the same whichever way it goes needs none: both ways of
such a decision are tried, and must agree.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, cast

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import GradientEdge
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from assigner.model.deferred.memento import placed
from assigner.model.deferred.mutation import DROPOUTS, storage_of
from assigner.model.marking.operations import Operations
from assigner.usercode import is_asked_by_user, running_line

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping

Named = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Alias:
    """A result that lies in the memory of a tensor that was given, that a module has, or of an earlier result."""

    kind: str  # "given", "own" or "made"
    index: int | str  # which of them; of its own the name in the model, empty for what is no parameter and no buffer
    exact: bool  # it is that tensor; False: some view of it


_TRUTHS = (torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero)
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class WithoutValues(Operations):
    """Has a dropout that drops nothing give back its input itself on fake tensors, as it does on others.

    And asks for the truth of numbers (`if mask.sum():`) as that of a comparison, of which both ways are tried.

    And runs an LSTM, GRU or RNN over the first step of a sequence alone; its outputs get the sequence's length. Torch
    would run step after step, which takes long, and holds for one length of the sequence.
    """

    def run(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What one gives."""
        if function in DROPOUTS:
            words = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
            if words.get("p") == 0 or not words.get("training", True):
                return words["input"]
        if function in _TRUTHS and args and args[0].dtype is not torch.bool:
            return function(args[0] != 0, **kwargs)
        state, weights = (args[1], args[2]) if len(args) == 9 and function in _RECURRENT else (None, None)
        if state is None or not isinstance(weights, list | tuple) or (function is torch.lstm) is torch.is_tensor(state):
            return function(*args, **kwargs)  # also packed sequences: how long each is only values tell
        given, batch_first = args[0], args[8]
        time = 1 if batch_first else 0
        steps, *ends = function(given.narrow(time, 0, 1), *args[1:])
        outputs = steps.transpose(0, time).expand(given.size(time), -1, -1).contiguous()
        return outputs.transpose(0, time), *ends


def ctc_losses() -> contextlib.AbstractContextManager[Any]:
    """CTC losses with lengths in tensors go through on fake tensors in the block.

    Torch has them raise there, for their values decide how wide a table is that the backward alone reads.
    """

    def made(mode: FakeTensorMode, _func: Any, log_probs: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        steps, rows, _ = log_probs.shape
        environment = cast("ShapeEnv", mode.shape_env)
        width = environment.create_unbacked_symint()  # twice the longest target, and one
        environment.pending_fresh_unbacked_symbols.remove(width.node.expr)  # the loss itself has not got it
        with mode:
            return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, width)

    return placed([(op_implementations_dict, torch.ops.aten._ctc_loss.Tensor, made)])


def on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Fake tensors that the block asks for on a GPU are on the CPU, where it has all others.

    So a forward goes through that names the device which the script has chosen, or has made the default.
    """
    original: Any = FakeTensorMode.__torch_dispatch__

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and (device := kwargs.get("device")) is not None and device.type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return original(mode, func, types, args, kwargs)

    return placed([(FakeTensorMode, "__torch_dispatch__", dispatch)])


def own_tensors(inside: Named) -> dict[str, torch.Tensor]:
    """The parameters and buffers of some modules, by name."""
    return {
        f"{name}.{key}": tensor
        for name, module in inside
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None
    }


def put_back(inside: Named, own: dict[str, torch.Tensor]) -> None:
    """The module's own tensors in their places again."""
    for name, module in inside:
        for held in (module._parameters, module._buffers):
            for key in held:
                before = own.get(f"{name}.{key}")
                if held[key] is not before:
                    held[key] = before  # type: ignore[assignment]


def agreed(ways: Sequence[Any], environment: ShapeEnv | None) -> Any:
    """One result from those that a forward gives on several ways: a size that is not the same on all depends on data.

    None: structure, types or plain values differ.
    """
    listed, structure = pytree.tree_flatten(ways[0])
    others = [pytree.tree_flatten(way) for way in ways[1:]]
    if any(spec != structure or [*map(_look, leaves)] != [*map(_look, listed)] for leaves, spec in others):
        return None
    sizes: dict[tuple[str, ...], Any] = {}
    found = []
    for leaf, *rest in zip(listed, *(leaves for leaves, _ in others), strict=True):
        if not torch.is_tensor(leaf) or all([*map(str, each.shape)] == [*map(str, leaf.shape)] for each in rest):
            found.append(leaf)
            continue
        assert environment is not None
        shape = []
        for dim, size in enumerate(leaf.shape):
            words = tuple(str(each.shape[dim]) for each in (leaf, *rest))
            if len(set(words)) > 1 and words not in sizes:
                sizes[words] = environment.create_unbacked_symint()
            shape.append(sizes.get(words, size))
        found.append(leaf.new_empty(shape))
    return pytree.tree_unflatten(found, structure)


def _look(leaf: Any) -> Any:
    """What must be the same of a leaf of a result on all ways."""
    return (str(leaf.dtype), leaf.dim()) if torch.is_tensor(leaf) else repr(leaf)


def aliases_of(
    fakes: Sequence[torch.Tensor], own: Iterable[tuple[str, torch.Tensor]], made: Sequence[torch.Tensor]
) -> dict[int, Alias]:
    """Which results lie in the memory of what was given, of what a module has, or of an earlier result."""
    found: dict[int, Alias] = {}
    known: dict[int, list[tuple[str, int | str, torch.Tensor]]] = defaultdict(list)
    for k, fake in enumerate(fakes):
        known[storage_of(fake)].append(("given", k, fake))
    for name, tensor in own:
        known[storage_of(tensor)].append(("own", name, tensor))
    for n, each in enumerate(made):
        others = known[storage_of(each)]
        matches = [Alias(kind, k, is_same_view(each, other)) for kind, k, other in others]
        if matches:
            found[n] = next((match for match in matches if match.exact), matches[0])
        others.append(("made", n, each))
    return found


def begun_among(made: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> frozenset[int]:
    """Which results a graph begins with, as `x.detach().requires_grad_()`, and are none of the other tensors."""
    known = {id(each) for each in others}
    return frozenset(
        n for n, each in enumerate(made) if each.requires_grad and _IS_LEAF.__get__(each) and id(each) not in known
    )


def fresh_results(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results for the operator, which must not return what it was given, nor one tensor twice."""
    known = {storage_of(each) for each in given}
    found = []
    for each in made:
        found.append(torch.empty_like(each) if storage_of(each) in known else each.view_as(each))
        known.add(storage_of(each))
    return found


def any_way(ways: Sequence[dict[int, Alias]]) -> dict[int, Alias]:
    """What may share memory, where a decision on values may lead one way or another."""
    found: dict[int, Alias] = {}
    for each in ways:
        for n, alias in each.items():
            sure = all(other.get(n) == alias for other in ways)
            found[n] = alias if sure else Alias(alias.kind, alias.index, exact=False)
    return found


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on one storage have the same elements, in the same order."""

    def geometry(tensor: torch.Tensor) -> tuple[str, ...]:
        return (str(tensor.dtype), str(tensor.storage_offset()), *map(str, tensor.shape), *map(str, tensor.stride()))

    return geometry(one) == geometry(other)


def with_own_sizes(made: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sizes that depend on values become symbols of the call: those that its forward made within stay there."""
    mode = detect_fake_mode(made)
    if mode is None or mode.shape_env is None:
        return made
    environment = mode.shape_env
    known: dict[Any, Any] = {}

    def own(size: Any) -> Any:
        if not isinstance(size, torch.SymInt) or not free_unbacked_symbols(size):
            return size
        expression = size.node.expr
        if expression not in known:
            known[expression] = size if expression.is_symbol else environment.create_unbacked_symint()
        return known[expression]

    found = []
    for tensor in made:
        before = list(tensor.shape)  # each look at a shape makes new symbols
        sizes = list(map(own, before))
        same = all(map(operator.is_, sizes, before))
        found.append(tensor if same else tensor.new_empty(sizes))
    mine = {size.node.expr for size in known.values()}
    environment.pending_fresh_unbacked_symbols[:] = [
        each for each in environment.pending_fresh_unbacked_symbols if each in mine
    ]
    return found


@contextlib.contextmanager
def gradients_taken(given: Sequence[torch.Tensor]) -> Iterator[set[tuple[int, int]]]:
    """Note which gradients a block takes within a forward, as by `torch.autograd.grad`.

    Yields pairs of the tensors that it is given: with respect to the first, of something that was made of the second.
    What the second one was made of is not seen there. Twice the same: the user's code in it uses that one's `.grad`.
    """
    found: set[tuple[int, int]] = set()
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward
    places = {place: n for n, each in enumerate(given) if (place := gradient_place(each)) is not None}
    asked = [(n, each) for n, each in enumerate(given) if _REQUIRES_GRAD.__get__(each)]

    def run_backward(outputs: Any, *arguments: Any, **words: Any) -> Any:
        inputs = arguments[3] if len(arguments) > 3 else ()
        wanted = [places[place] for each in inputs if (place := gradient_place(each)) in places]
        if wanted:
            reached = [places[place] for place in places_behind(outputs, places) if place in places]
            found.update((n, m) for m in reached for n in wanted if n != m)
        return original(outputs, *arguments, **words)

    def note(tensor: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            found.update((n, n) for n, each in asked if tensor is each)

    with placed([(autograd, "_engine_run_backward", run_backward)]), _noticed(note, "grad"):
        yield found


@contextlib.contextmanager
def gradients_asked() -> Iterator[list[Any]]:
    """What a block does, as far as it has come, that depends on whether a tensor requires a gradient.

    It runs functions under reentrant checkpoints, or the user's code in it asks a tensor that is no parameter.
    """
    found: list[Any] = []
    original: Any = CheckpointFunction.forward

    def forward(*args: Any) -> Any:
        found.append(args[1])
        return original(*args)

    checkpointed = placed([(CheckpointFunction, "forward", staticmethod(forward))])
    with _noticed(found.append, "requires_grad"), checkpointed:
        yield found


NODE_HOOKS: tuple[Any, str] = torch.autograd.function._HookMixin, "_register_hook"
"""What torch calls where a hook is put on a node of a graph."""


@contextlib.contextmanager
def graph_asked(given: Sequence[torch.Tensor], own: Collection[torch.Tensor], lines: list[str]) -> Iterator[None]:
    """Note the lines of the user's code in a block that ask what autograd's graph of a given tensor is, or hook on.

    A partition begins a graph of its own: what it is given is a leaf there, and is none where nothing is cut. By its
    edge alone, or that of one of its `own`, a gradient may be taken; a hook on the node behind it is no hook on all of
    that.
    """
    graph: Any = torch.autograd.graph
    arrival, registered = graph._get_grad_fn_or_grad_acc, getattr(*NODE_HOOKS)
    reached = list[torch.Tensor]()

    def note(tensor: torch.Tensor) -> None:
        if tensor.requires_grad and torch.is_grad_enabled() and any(tensor is each for each in given):
            lines.append(running_line())

    def reach(tensor: Any) -> Any:
        reached.extend(each for each in (*given, *own) if each is tensor)
        return arrival(tensor)

    def register(*hook: Any) -> Any:
        if reached and is_asked_by_user():
            lines.append(running_line())
        return registered(*hook)

    edges = (graph, "_get_grad_fn_or_grad_acc", reach), (*NODE_HOOKS, staticmethod(register))
    with _noticed(note, "is_leaf", "grad_fn"), placed(edges):
        yield


def _noticed(note: Callable[[torch.Tensor], None], *names: str) -> contextlib.AbstractContextManager[None]:
    """Call something for each tensor, but parameters, of which the user's code reads such an attribute in a block."""

    def asking(plain: Any) -> property:
        def get(tensor: torch.Tensor) -> Any:
            if not isinstance(tensor, nn.Parameter) and is_asked_by_user():
                note(tensor)
            return plain.__get__(tensor)

        return property(get, plain.__set__, plain.__delete__)

    kinds = (FakeTensor, torch.Tensor)  # what the first one has may be its own
    return placed((kind, name, asking(getattr(kind, name))) for name in names for kind in kinds)


GradientPlace = tuple[Any, int]
"""Where a gradient arrives: a node of torch's graph, and which of its outputs; of a leaf, which has none, its id."""

_IS_LEAF: Any = torch._C.TensorBase.__dict__["is_leaf"]  # as it is while a forward may not ask for it
_REQUIRES_GRAD: Any = torch._C.TensorBase.__dict__["requires_grad"]  # likewise
_LEAF = "torch::autograd::AccumulateGrad"


def gradient_place(each: Any) -> GradientPlace | None:
    """Where the gradient of a tensor, or of an edge of torch's, arrives; None: nowhere."""
    arrival = _arrival(each)
    return None if arrival is None else arrival[0]


def places_behind(each: Iterable[Any], stops: Container[GradientPlace] = ()) -> dict[GradientPlace, Any]:
    """Where a backward comes to that starts from tensors, or edges of torch's: there, and at what they are made of.

    Each place has its tensor where that is a leaf, else None. From `stops` it does not go on.
    """
    waiting = [arrival for start in each if (arrival := _arrival(start)) is not None]
    found: dict[GradientPlace, Any] = {}
    while waiting:
        place, leaf = waiting.pop()
        if place in found:
            continue
        found[place] = leaf
        if leaf is None and place not in stops:
            waiting += [_at(node, number) for node, number in place[0].next_functions if node is not None]
    return found


def _arrival(each: Any) -> tuple[GradientPlace, Any] | None:
    if isinstance(each, GradientEdge):
        return _at(each.node, each.output_nr)
    if not torch.is_tensor(each) or not each.requires_grad:
        return None
    return ((id(each), 0), each) if each.grad_fn is None else ((each.grad_fn, each.output_nr), None)


def _at(node: Any, number: int) -> tuple[GradientPlace, Any]:
    if node.name() != _LEAF:
        return (node, number), None
    return (id(node.variable), 0), node.variable


_MOST = 256  # decisions of one way
_LONGEST = 64  # turns of a `while`: one that waits for a value would ask for ever
_FLIPPED = 4  # decisions that are also tried alone
_ANSWERS = {
    bool: (sympy.false, sympy.true),
    int: (sympy.Integer(2), sympy.Integer(3)),
    float: (sympy.Float(0.5), sympy.Float(1.5)),
}


class Disagreement(Exception):  # noqa: N818 - no error yet: the caller says which module it is
    """The outputs of a forward depend on a decision on values; the message is the line."""


class _Decider:
    """Answers what a shape environment cannot: as usual, but for the one decision whose number is `flipped`."""

    def __init__(self, *, usual: bool, flipped: int | None = None) -> None:
        self.usual, self.flipped = usual, flipped
        self.asked = 0
        self.line = ""
        self._turns: dict[tuple[types.FrameType, int], tuple[int, Any]] = {}

    def answer(self, node: Any, _: GuardOnDataDependentSymNode) -> Any:
        """The answer to one decision; None: there is none."""
        if node.pytype not in _ANSWERS or self.asked >= _MOST or self._waits():
            return None
        self.line = self.line or running_line()
        self.asked += 1
        return _ANSWERS[node.pytype][self.usual != (self.asked - 1 == self.flipped)]

    def _waits(self) -> bool:
        """Whether a loop that ends with a decision has turned so often on this way that it may never end."""
        for frame, called in _running():
            if _is_in_while(frame.f_code, frame.f_lasti):
                turns, last = self._turns.get((frame, frame.f_lasti), (0, None))
                self._turns[frame, frame.f_lasti] = turns + (called is not last), called
        return any(turns > _LONGEST for turns, _ in self._turns.values())


def _running() -> Iterator[tuple[types.FrameType, types.FrameType]]:
    """The frames of the forward that runs, without those of torch, each with the one that it has called."""
    called, is_begun = sys._getframe(), False
    for frame, _ in walk_stack(called.f_back):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "assigner"):
            is_begun = True
            yield frame, called
        elif package == "assigner" and is_begun:
            return
        called = frame


@functools.cache
def _is_in_while(code: types.CodeType, offset: int) -> bool:
    """Whether the innermost loop around an instruction is a `while`: a `for` ends with what it goes over."""
    every = [*dis.get_instructions(code)]
    jumps = [each for each in every if each.opcode in (*dis.hasjrel, *dis.hasjabs)]
    starts = [each.argval for each in jumps if each.argval <= offset <= each.offset]
    if not starts:
        return False
    first = next(each for each in every if each.offset >= max(starts) and each.opname not in _EMPTY)
    return first.opname != "FOR_ITER"


_EMPTY = ("EXTENDED_ARG", "CACHE", "NOP")


@contextlib.contextmanager
def answering(environment: ShapeEnv, answer: Callable[[Any, GuardOnDataDependentSymNode], Any]) -> Iterator[None]:
    """Answer in a shape environment what it cannot, while the block runs.

    `answer` gives a sympy value for a node and the error that it would be; None: it is that error.
    """
    ask = environment.evaluate_sym_node

    def evaluate(node: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return ask(node, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            found = answer(node, error)
            if found is None:
                raise
            return found

    with placed([(environment, "evaluate_sym_node", evaluate)]):
        yield


def decided(
    run: Callable[[], Any], agreed: Callable[[list[Any]], Any], environment: ShapeEnv | None, undo: Callable[[], None]
) -> Any:
    """What `run` gives, whichever way its decisions on values go.

    Args:
        run: A forward on fake tensors.
        agreed: One result from those of several ways; None: they have nothing in common.
        environment: Of the fake tensors' sizes; None: there is none, and `run` is left alone.
        undo: Called between two runs.

    Raises:
        Disagreement: the results differ.
        Exception: what `run` raised, where no way through it was found.
    """
    if environment is None:
        return run()
    decider = _Decider(usual=False)
    found: list[Any] = []
    failure: BaseException | None = None
    try:
        with answering(environment, decider.answer):
            found.append(run())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised below, unless another way goes through
        failure = error
    if not decider.asked:
        if failure is not None:
            raise failure
        return found[0]
    others = [*(_Decider(usual=False, flipped=n) for n in range(min(decider.asked, _FLIPPED))), _Decider(usual=True)]
    for other in others:
        undo()
        # A way that raises is one not taken; so is one that ends the process.
        with contextlib.suppress(Exception, SystemExit), answering(environment, other.answer):
            found.append(run())
        if len(found) > 1 and agreed([found[0], found[-1]]) is None:  # the ways behind may be long ones
            raise Disagreement(decider.line)
    if not found:
        assert failure is not None
        raise failure
    return agreed(found)
