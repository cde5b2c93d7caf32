"""Opaque calls: while a forward is captured, a module or an autograd.Function is one call of one registered operator.

The operator's fake implementation runs the real forward on fake tensors, so that shapes come out and nothing is
computed. A size that depends on values comes out as a symbol without a number. What the forward leaves behind in
Python (counters, lists, generators) is taken back.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy.random
import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.machine.generators import GeneratorStates
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import Memento, placed
from assigner.model.deferred.mutation import Writes, storage_of, tensor_leaves
from assigner.model.marking.casting import casting_within
from assigner.model.marking.changedarguments import (
    Arguments,
    Changed,
    containers,
    fill,
    once,
    plain_leaves,
    register_dataclasses,
    split,
)
from assigner.model.marking.collecting import collect, switched_off
from assigner.model.marking.fakeforward import (
    Disagreement,
    Named,
    WithoutValues,
    agreed,
    aliases_of,
    begun_among,
    decided,
    fresh_results,
    gradients_asked,
    gradients_taken,
    graph_asked,
    own_tensors,
    put_back,
    with_own_sizes,
)
from assigner.model.marking.isolation import CrossingError, Isolation, Surroundings, check_sent, check_unpacked
from assigner.model.marking.leftovers import Leftovers
from assigner.model.marking.modules import TOO_FEW_VALUES, accepts, calling_class, failed_at, forwards_called
from assigner.model.marking.observation import RETURNED, CallEffects, DecidedError, LearntCall, ValueDependence
from assigner.model.marking.operations import ListedWrites, Operations, Way
from assigner.usercode import user_line


@dataclass(frozen=True)
class OpaqueCall:
    """One opaque call."""

    module: str  # its name in the model; empty: it is no module
    function: Callable[..., Any] | None  # what is called where it is no module, on (args, kwargs) as they were
    arguments: Any  # (args, kwargs) with a Slot for each tensor and each size; the rest are constants
    effects: CallEffects  # what its forward gives and does
    learnt: bool  # what is said of its results was learnt from some calls: the next one may have others

    @property
    def label(self) -> str:
        """What is called, for people."""
        return _label(self.module, self.function)


def _label(module: str, function: Callable[..., Any] | None) -> str:
    return repr(module) if module else getattr(function, "__qualname__", "a function")


class Examined(NamedTuple):
    """What a look at a call has shown."""

    effects: CallEffects
    made: list[torch.Tensor]  # that it has returned
    sizes: list[Any]  # likewise, the symbolic ones
    shown: list[Any]  # of each way, by what its results are made


@dataclass(frozen=True)
class _AfterCall:
    """What a call has left: in Python, and of parameters and buffers; and what it has run."""

    values: Memento
    own: dict[str, torch.Tensor]
    operations: Operations


@dataclass
class _Session:
    """The calls of the capture that is going on; the operator's implementations look them up here."""

    forwards: list[Any] = field(default_factory=list)  # by the calls' numbers
    wanting: dict[int, frozenset[int]] = field(default_factory=dict)  # likewise, which results require a gradient
    running: str | None = None  # the module whose forward runs; empty: a function that is none; None: none does
    anchor: torch.Tensor | None = None  # what results seem to have been made of
    thread: int | None = None  # the one that captures; None: none does
    raised: list[tuple[str, Exception]] = field(default_factory=list)  # by calls of the forward, and refusals
    own: Arguments = field(default_factory=lambda: Arguments((), {}))  # what the call that runs is given


_session = _Session()
_library = torch.library.Library("assigner", "DEF")  # type: ignore[no-untyped-call]
_library.define("call(int number, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")  # type: ignore[no-untyped-call]


@torch.library.register_fake("assigner::call", lib=_library)  # type: ignore[untyped-decorator]
def _fake_call(number: int, tensors: list[torch.Tensor], sizes: list[Any]) -> list[torch.Tensor]:
    made: list[torch.Tensor] = _session.forwards[number](tensors, sizes)
    return made


class _Trained(torch.autograd.Function):
    """Gives a fake result the look of one that parameters lie behind: forwards ask for `requires_grad`."""

    @staticmethod
    def forward(_: Any, anchor: torch.Tensor, *made: torch.Tensor) -> Any:  # noqa: ARG004 - what makes it differentiable
        return tuple(
            each.new_empty_strided(each.size(), each.stride()) for each in made
        )  # no views: they may be written

    @staticmethod
    def backward(*_: Any) -> Any:
        raise MarkingError("a capture has no gradients")


_trained_twins: Callable[..., Any] = _Trained.apply


def _autograd_call(number: int, tensors: list[torch.Tensor], sizes: list[Any]) -> list[torch.Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        made = torch.ops.assigner.call(number, tensors, sizes)
    able = [n for n in sorted(_session.wanting[number]) if made[n].is_floating_point() or made[n].is_complex()]
    found = list(made)
    if able:
        with torch.enable_grad():  # a forward's own `requires_grad_` does so under torch.no_grad(), too
            twins = _trained_twins(_session.anchor, *(made[n] for n in able))
        for n, each in zip(able, twins, strict=True):
            found[n] = each
    return found


_library.impl("call", _autograd_call, "Autograd")  # type: ignore[no-untyped-call]


def is_call(node: fx.Node) -> bool:
    """True if a node is an opaque call."""
    return node.op == "call_function" and node.target is torch.ops.assigner.call.default


def within_call() -> bool:
    """True while the forward of an opaque call runs on fake tensors, and where `is_elsewhere` is."""
    return _session.running is not None or is_elsewhere()


def refusal(message: str, *, hint: str) -> MarkingError:
    """An error of what code between partitions does, which counts also where that code catches it."""
    error = MarkingError(message, hint=hint)
    _session.raised.append(("", error))
    return error


def is_elsewhere() -> bool:
    """True in other threads than the one that captures: what their code does meanwhile is no part of the forward."""
    return _session.thread not in (None, threading.get_ident())


def _usual_attributes() -> Collection[str]:
    """What every fake tensor of this capture has."""
    return vars(_session.anchor) if _session.anchor is not None else ()


def on_own(function: Callable[..., Any], arguments: Any, **values: Sequence[Any]) -> Any:
    """A call on a template of its arguments, filled: its result, with what it changes of their containers."""
    _session.own = own = Arguments(*fill(arguments, **values))
    result = function(*own.args, **own.kwargs)
    register_dataclasses(result)
    return own.beside(result)


class OpaqueCalls:
    """Makes opaque calls while one forward is captured, and keeps them.

    Args:
        model: Whose forward.
        names: The opaque modules.
        autocast: The type that autocast computes in.
        learnt: The calls of modules whose forward needs values, by the module's name, in order.
        dependence: Where such modules are taken down.
        unmarked: Of the modules those whose calls may run on several workers.
        made_anew: What stands for tensors in attributes that the modules make anew wherever they run.

    Attributes:
        calls: Those made so far, by their number in the graph.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        autocast: str | None,
        learnt: Mapping[str, Sequence[LearntCall]] | None = None,
        dependence: ValueDependence | None = None,
        *,
        unmarked: Collection[str] = (),
        made_anew: Collection[torch.Tensor] = (),
    ) -> None:
        self.model, self.names, self.autocast, self.unmarked = model, list(names), autocast, unmarked
        self.learnt = learnt or {}
        self.calls: list[OpaqueCall] = []
        self.dependence = dependence or ValueDependence()
        self.name_of = {id(model.get_submodule(name)): name for name in reversed(self.names)}
        self.isolation = Isolation(model, self.names, made_anew)
        self.leftovers = Leftovers(lambda: _session.running, self.isolation.inside)
        self._made: dict[str, int] = {}
        self._left: dict[str, _AfterCall] = {}  # by module, what its calls in this forward have changed
        self.filled: list[tuple[Any, str]] = []  # containers of the code around that calls have changed: by whom
        self._lent: list[tuple[str, Arguments]] = []  # containers that modules hold on to: by whom

    def begin(self) -> None:
        """The model's forward begins."""
        self.isolation.begin()
        self._made.clear()
        self._left.clear()
        self._lent.clear()
        self.filled.clear()
        _session.raised.clear()

    def module(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of a module that makes an opaque call."""
        module = self.model.get_submodule(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if within_call() or not accepts(module, args, kwargs):  # it raises a TypeError then, and nothing has run
                return forward(*args, **kwargs)
            try:
                with self.noticed_errors(repr(name)):
                    self.isolation.check_unchanged(name)
                    with switched_off(name, self.isolation.inside[name]):
                        result = self.call(name, forward, args, kwargs)
                    collect(name, module, args, result)
                return result
            except CrossingError as error:
                error.module = name
                raise

        return call

    @contextlib.contextmanager
    def noticed_errors(self, label: str) -> Iterator[None]:
        """Note what a call raises in the block."""
        try:
            yield
        except Exception as error:
            _session.raised.append((label, error))
            raise

    def check_ended(self) -> None:
        """The forward is done: see whether it has caught an error, or changed what a module holds, too.

        Raises:
            MarkingError: an error has led it another way than a run might go. What is refused here comes as it is.
            CrossingError: the module would find the change in its next call.
        """
        for label, error in _session.raised:
            if isinstance(error, MarkingError):
                raise error
            said = (str(error).strip().splitlines() or [""])[0][:200]
            raise MarkingError(
                f"the forward of {type(self.model).__name__} catches an error that {label} raises"
                f" ({type(error).__name__}: {said}), {failed_at(error)}: in a run nobody tells it of what happens on"
                " another worker",
                hint="decide before the call, by what the forward knows (isinstance, hasattr, a flag); or mark a larger"
                " module that contains what catches it",
            ) from error
        for name, lent in self._lent:
            if isinstance(lent.beside(None), Changed):
                raise CrossingError(
                    f"{name!r} goes on holding a list, dict or set that it is given or returns, and code outside of it"
                    " changes that: the worker that runs it would not see that",
                    hint="change a copy, as list(x) or dict(x), or have the module hold or return one; or mark a larger"
                    " module that contains both",
                    module=name,
                )

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An opaque call of a module's forward, or where the name is empty, of something that is no module."""
        label = _label(name, forward)
        check_unpacked(label, "is given", (args, kwargs))
        arguments, tensors, sizes = split(once(args, kwargs))
        check_sent(label, "is given", plain_leaves(arguments), tensors, _usual_attributes())
        inside = self.isolation.inside.get(name, [])
        learnt = self._learnt(name)
        number = len(self.calls)
        del _session.forwards[number:]  # of calls that have raised
        seen: list[CallEffects] = []

        def run(fakes: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
            own = own_tensors(inside)
            mode = detect_fake_mode(fakes) or detect_fake_mode(list(own.values()))
            environment = None if mode is None else mode.shape_env
            if learnt is not None and mode is not None and environment is not None:
                effects = learnt.effects
                with mode:
                    made = learnt.fakes(fakes, environment)
            else:
                called = partial(on_own, forward, arguments, tensor=fakes, size=numbers)
                examine = partial(self.examine, name, label, called, fakes, environment)
                with self._noticed(name, label, fakes):
                    effects, made, strange, _ = contextvars.copy_context().run(self._examined, name, examine)
                plain = plain_leaves(effects.results)
                if strange or any(isinstance(each, torch.SymFloat | torch.SymBool) for each in plain):
                    raise CrossingError(f"{label} returns a number that depends on its input", hint=RETURNED)
                check_sent(label, "returns", plain, made, _usual_attributes())
                made = [each.detach() for each in made]
            seen.append(effects)
            _session.wanting[number] = effects.wanting
            return fresh_results(self._sized(label, made), [*fakes, *own.values()])

        _session.forwards.append(run)
        made = torch.ops.assigner.call(number, tensors, sizes)
        self.calls.append(OpaqueCall(name, None if name else forward, arguments, seen[-1], learnt is not None))
        found = fill(seen[-1].results, tensor=made)
        given = Arguments(args, kwargs)
        self.filled += [(each, label) for each in given.changed_in(found)]
        result, every = given.take(found), [*given.containers, *containers((found,))]
        self._lent += [(name, Arguments([every[n]], {})) for n in sorted(seen[-1].kept)]
        return result

    def _sized(self, label: str, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a call returns, with symbols of its own for sizes that depend on values."""
        found = with_own_sizes(made)
        for size in (size for tensor in found for size in tensor.shape if isinstance(size, torch.SymInt)):
            self.dependence.sizes.update(dict.fromkeys(free_unbacked_symbols(size), label))
        return found

    def _learnt(self, name: str) -> LearntCall | None:
        """What was learnt of the next call of a module; None: its forward needs no values."""
        known, number = self.learnt.get(name), self._made.get(name, 0)
        self._made[name] = number + 1
        return None if known is None or number >= len(known) else known[number]

    def _keep_left(
        self, name: str, values: Memento, own: Mapping[str, torch.Tensor], ran: Sequence[Operations]
    ) -> None:
        """Keep how a call leaves its module, if that is not as it found it."""
        inside = self.isolation.inside.get(name, [])
        changed, now = self.leftovers.note(name, inside, values), own_tensors(inside)
        is_left = changed or now.keys() != own.keys() or any(now[key] is not own[key] for key in own)
        if ran and is_left:
            self._left[name] = _AfterCall(self.isolation.values_of(inside), now, ran[-1])

    def _examined(self, name: str, examine: Callable[..., Examined]) -> Examined:
        """As `examine`, of a module's first call or of a further one.

        Each call is captured, and of an unmarked module may run on a worker of its own, as if there were no other. So
        a further one must give the same, by what its results are made of, as where the one before has left its module.
        """
        before = self._left.get(name)
        if before is None:
            return examine()
        alone: Examined | None = None
        failed: Exception | None = None
        try:
            alone = examine()
        except Exception as error:  # noqa: BLE001 - it may lack what the call before has left
            failed = error
        inside = self.isolation.inside[name]
        self._left[name], own = before, own_tensors(inside)
        try:
            with before.values.restored():
                put_back(inside, before.own)
                behind = examine(known=before.operations.names)
        except Exception:
            if failed is not None:
                raise failed from None
            raise
        finally:
            put_back(inside, own)
        if alone is not None and (behind.shown == alone.shown or name not in self.unmarked):
            return alone
        raise CrossingError(
            f"{name!r} is called again in one forward, and reads what the call before has left in its attributes:"
            " nobody sends that from one call to the other",
            hint="return it from the one call and give it to the other, leave the module unmarked, or mark a larger one"
            " that contains both calls",
        ) from failed

    def examine(
        self,
        name: str,
        label: str,
        forward: Callable[[], Any],
        given: Sequence[torch.Tensor],
        environment: ShapeEnv | None,
        *,
        known: Mapping[int, str] | None = None,
    ) -> Examined:
        """Run a forward and see what it does; what it leaves in Python and on its module is taken back.

        It is called in a context of its own: no variable of that can be made one that was never set.

        Args:
            name: The module's name in the model; empty: it is no module.
            label: What is called, for people.
            forward: With its arguments.
            given: The tensors among them.
            environment: Of the sizes of tensors without values; None: they have values, and are trained with.
            known: By their ids, what other tensors are made of that it can read.

        """
        inside = self.isolation.inside.get(name, [])
        values, draws, around = self.isolation.values_of(inside), GeneratorStates.now(), Surroundings()
        own = own_tensors(inside)
        trains = any(each.requires_grad for each in (*given, *own.values()))
        turn = f" of call {number}" if (number := self._made.get(name, 1)) > 1 else ""
        names = {id(each): f"given {n}{turn}" for n, each in enumerate(given)}
        names = {**names, **{id(each): key for key, each in own.items()}, **(known or {})}
        written, graphs, seen, ran = set[int](), list[str](), list[CallEffects](), list[Operations]()
        shown: list[Any] = []

        def attempt() -> Any:
            writes = Writes() if environment is None else ListedWrites()
            operations = (Operations if environment is None else WithoutValues)(names, writes)
            random.seed(0)  # each process draws the same, and so has its operations in one order
            numpy.random.seed(0)
            with (
                operations, casting_within(self.autocast), writes, _inner(name),
                gradients_taken(given) as gradients, gradients_asked() as asked,
                graph_asked(given, own.values(), graphs),
            ):  # fmt: skip
                try:
                    found = forward()
                finally:
                    self.isolation.check_own(label, inside, writes.read, [*given, *own.values()])
            check_unpacked(label, "returns", found)
            written.update(writes.storages)
            leaves = tensor_leaves(found)
            is_written = [storage_of(each) in writes.storages for each in leaves]
            records, now = torch.is_grad_enabled(), own_tensors(inside)
            plain = [repr(each) for each in pytree.tree_leaves(found) if type(each) in ATOMS]
            shown.append((operations.shown(leaves), plain))
            ran.append(operations)
            kept = [("", each) for each in values.tensors]
            seen.append(CallEffects(
                results=None,
                written=frozenset(n for n, each in enumerate(given) if storage_of(each) in writes.storages),
                aliases=aliases_of(given, [*own.items(), *now.items(), *kept], leaves),
                changed=frozenset(
                    key for key, each in own.items()
                    if storage_of(each) in writes.storages or now.get(key) is not each
                ),
                replaced=frozenset(key for key, each in own.items() if now.get(key) is not each),
                differentiated=frozenset(gradients),
                wanting=frozenset(  # a write to a view says nothing of it to the whole fake tensor
                    n for n, each in enumerate(leaves) if each.requires_grad or (trains and records and is_written[n])
                ),
                begun=begun_among(leaves, [*given, *own.values(), *now.values()]),
                kept=self._kept_of(found, inside),
                asks=records and bool(asked),
                order=operations.order(leaves),
                ways=(Way(writes.operations, given, leaves, own),) if isinstance(writes, ListedWrites) else (),
            ))  # fmt: skip
            return found

        def undo() -> None:
            self.isolation.check_shared(name, values, written, around)
            self._keep_left(name, values, own, ran)
            ran.clear()  # a way that raises leaves nothing for the next call
            self.leftovers.note_written(name, inside, written)
            values.restore()
            put_back(inside, own)
            draws.put_back()

        try:
            result = decided(attempt, lambda found: agreed(found, environment), environment, undo)
        finally:
            undo()
        if graphs:
            raise MarkingError(
                f"the forward of {label} looks at the graph behind a tensor that it is given (is_leaf, grad_fn), or"
                f" hooks on to its node or a weight's, at {graphs[0]}: where a model is cut, graphs begin anew",
                hint="ask for requires_grad; register_hook of the tensor where it is made, of a weight in the builder;"
                " or mark a larger module that makes the tensor, too",
            )
        results, made, sizes = split(result)
        return Examined(CallEffects.any_of(results, seen), made, sizes, shown)

    def _kept_of(self, found: Any, inside: Named) -> frozenset[int]:
        """Which of the containers that a call is given, and that it returns, its modules hold, by their number."""
        every = [*_session.own.containers, *containers((found,))] if inside else []
        held = self.isolation.values_of(inside).holders() if every else ()
        return frozenset(n for n, each in enumerate(every) if id(each) in held)

    @contextlib.contextmanager
    def _noticed(self, name: str, label: str, fakes: Sequence[torch.Tensor]) -> Iterator[None]:
        """Take down that a module's forward fails, or takes a size that may vary for a number.

        Whose Python code asks for a tensor's value is named: no larger module would help.
        """
        sizes: list[Any] = [size for fake in fakes for size in fake.shape if isinstance(size, torch.SymInt)]
        open_before = [size for size in sizes if size.node.expr.free_symbols]
        try:
            yield
        except MarkingError:
            raise
        except Exception as error:
            is_decided = isinstance(error, Disagreement)
            if name and not is_decided and TOO_FEW_VALUES not in str(error):  # it would learn nothing from more rows
                self.dependence.failed = self.dependence.failed or (name, error)
            if is_decided or isinstance(error, GuardOnDataDependentSymNode):
                line = str(error) if is_decided else user_line(error)
                raise DecidedError(
                    f"a tensor's value decides what {label} returns, at {line}",
                    hint="write it with tensor operations (torch.where, a mask, index_add): shapes may depend on"
                    " values, but not what runs; Hugging Face's experts do so with experts_implementation='grouped_mm'"
                    f" or 'batched_mm'; of a number that is returned: {RETURNED}",
                ) from error
            raise
        finally:
            if name and any(not size.node.expr.free_symbols for size in open_before):
                self.dependence.fixing[name] = None


def _inner(name: str) -> contextlib.AbstractContextManager[None]:
    """The block runs within an opaque call, of a module by this name, or of a function.

    Torch's own call of modules: export's keeps a stack of those that run, and one that raises, as a way may that no
    value takes, would stay on it.
    """
    return placed([(_session, "running", name), (nn.Module, "__call__", nn.Module._wrapped_call_impl)])


@contextlib.contextmanager
def replaced(opaque: OpaqueCalls, anchor: torch.Tensor) -> Iterator[None]:
    """Opaque calls while the block runs: of the forward together with its hooks, which the module keeps.

    A class with a `__call__` of its own does work around the forward, which belongs to the call.
    """
    modules = {opaque.model.get_submodule(name): name for name in reversed(opaque.names)}
    calls = [
        (module.__dict__, "_call_impl", opaque.module(name, module._call_impl))
        for module, name in modules.items()
        if type(module).__call__ is nn.Module.__call__
    ]
    session = placed([(globals(), "_session", _Session(anchor=anchor, thread=threading.get_ident()))])
    by_name = forwards_called(
        [module for module, name in modules.items() if name not in opaque.unmarked], opaque.name_of
    )
    owners = {calling_class(module) for module in modules} - {nn.Module}
    own_calls = placed((each, "__call__", _own_call(each, opaque)) for each in owners)
    # leftovers ask who reads an attribute: their watch is the one that the reader calls
    with session, by_name, opaque.leftovers.guarded(), placed(calls), own_calls:
        yield


def _own_call(owner: Any, opaque: OpaqueCalls) -> Callable[..., Any]:
    original = owner.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = opaque.name_of.get(id(self))
        if name is None or within_call() or calling_class(self) is not owner:
            return original(self, *args, **kwargs)
        return opaque.module(name, partial(original, self))(*args, **kwargs)

    return call
