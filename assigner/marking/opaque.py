"""Opaque calls: while a forward is captured, a module or an autograd.Function is one call of one registered operator.

The operator's fake implementation runs the real forward on fake tensors, so that shapes come out and nothing is
computed. A size that depends on values comes out as a symbol without a number. What the forward leaves behind in
Python (counters, lists, generators) is taken back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.marking.casting import casting_within
from assigner.marking.decisions import Disagreement, decided
from assigner.marking.fakeforward import (
    Alias,
    IdleDropouts,
    Named,
    Writes,
    aliases_of,
    any_way,
    current_tensor,
    fresh_results,
    is_tensor,
    look,
    own_tensors,
    put_back,
    storage_of,
    surroundings,
    tensor_ids,
    trained_names,
    with_own_sizes,
)
from assigner.marking.pythonstate import Draws, PythonState
from assigner.usercode import user_line

_PLAIN = (
    bool, int, float, complex, str, bytes, slice, range, set, frozenset, enum.Enum, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """The place of a traced argument among constants: the `index`-th tensor, or the `index`-th size."""

    kind: str
    index: int


@dataclass(frozen=True)
class OpaqueCall:
    """One opaque call.

    Args:
        module: The module's name in the model; empty: it is no module.
        function: What is called where it is no module, on (args, kwargs) as they were.
        arguments: (args, kwargs) with a Slot for each tensor and each size; the rest are constants.
        results: What it returned, with a Slot for each tensor.
        written: Which of its tensors its forward writes to in place.
        aliases: Results by their number that share memory with others.
        changed: Names, in the model, of the module's own parameters and buffers that its forward changes.
    """

    module: str
    function: Callable[..., Any] | None
    arguments: Any
    results: Any
    written: frozenset[int]
    aliases: dict[int, Alias]
    changed: frozenset[str]

    @property
    def label(self) -> str:
        """What is called, for people."""
        return repr(self.module) if self.function is None else getattr(self.function, "__qualname__", "a function")


@dataclass
class _Session:
    """The calls of the capture that is going on; the operator's implementations look them up here."""

    forwards: list[Any] = field(default_factory=list)
    trains: list[bool] = field(default_factory=list)
    depth: int = 0
    anchor: torch.Tensor | None = None


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
    if not torch.is_grad_enabled() or not (_session.trains[number] or any(each.requires_grad for each in tensors)):
        return list(made)
    able = [n for n, each in enumerate(made) if each.is_floating_point() or each.is_complex()]
    found = list(made)
    if able:
        for n, each in zip(able, _trained_twins(_session.anchor, *(made[n] for n in able)), strict=True):
            found[n] = each
    return found


_library.impl("call", _autograd_call, "Autograd")  # type: ignore[no-untyped-call]


def is_call(node: fx.Node) -> bool:
    """True if a node is an opaque call."""
    return node.op == "call_function" and node.target is torch.ops.assigner.call.default


def within_call() -> bool:
    """True while the forward of an opaque call runs on fake tensors."""
    return _session.depth > 0


def _split(tree: Any) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """A tree's tensors, its symbolic sizes, and the tree with slots in their places."""
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []

    def slot(leaf: Any) -> Any:
        if is_tensor(leaf):
            tensors.append(leaf)
            return Slot("tensor", len(tensors) - 1)
        if isinstance(leaf, torch.SymInt):
            sizes.append(leaf)
            return Slot("size", len(sizes) - 1)
        return leaf

    return pytree.tree_map(slot, tree), tensors, sizes


def fill(template: Any, tensors: Sequence[Any], sizes: Sequence[Any] = ()) -> Any:
    """A template with its slots filled."""
    filled = {"tensor": tensors, "size": sizes}
    return pytree.tree_map(lambda leaf: filled[leaf.kind][leaf.index] if isinstance(leaf, Slot) else leaf, template)


class OpaqueCalls:
    """Makes opaque calls while one forward is captured, and keeps them.

    Args:
        model: Whose forward.
        names: The opaque modules.
        autocast: The type that autocast computes in.

    Attributes:
        calls: Those made so far, by their number in the graph.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], autocast: str | None) -> None:
        self.model, self.names, self.autocast = model, list(names), autocast
        self.calls: list[OpaqueCall] = []
        for name in self.names:
            for inner, module in _inside(model, name):
                if isinstance(module, torch.jit.ScriptModule):
                    raise MarkingError(
                        f"{inner!r} is a scripted module, which cannot be cut or copied to a worker",
                        hint="give the module itself; Workload.compile compiles each partition",
                    )
        self.name_of = {id(model.get_submodule(name)): name for name in reversed(self.names)}
        self._inside = {name: _inside(model, name) for name in self.names}
        self._owners: dict[int, set[str]] = {}
        self._tensors: dict[str, list[int]] = {}
        self._trained: dict[str, set[str]] = {}
        self._surroundings: dict[str, Any] = {}
        self._state: dict[str, PythonState] = {}

    def begin(self) -> None:
        """The model's forward begins: what the modules are made of now is what they must be made of when called."""
        self._tensors = {name: tensor_ids(self._inside[name]) for name in self.names}
        self._trained = {name: trained_names(self._inside[name]) for name in self.names}
        self._surroundings = surroundings()
        self._state = {name: PythonState.of(self._inside[name], with_files=True) for name in self.names}
        around = _outside(self.model, self.names)
        self._owners = {}
        for owner, modules in {**self._inside, "": around}.items():
            for number in PythonState.of(modules, with_files=True).holders:
                self._owners.setdefault(number, set()).add(owner)

    def module(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of a module that makes an opaque call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if within_call():
                return forward(*args, **kwargs)
            self._check_unchanged(name)
            return self._call(name, None, forward, args, kwargs)

        return call

    def function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An opaque call of something that is no module."""
        return self._call("", function, function, args, kwargs)

    def _check_unchanged(self, name: str) -> None:
        """The module runs elsewhere with its own weights and its own state: nobody may have given it others.

        Raises:
            MarkingError: its tensors or its attributes are not those that it had when the model's forward began.
        """
        if tensor_ids(self._inside[name]) != self._tensors[name]:
            raise MarkingError(
                f"{name!r} is called with other weights than its own (functional_call, or weights that are set)",
                hint="mark a larger module that contains the call, or give the weights as an argument of its forward",
            )
        changed = [each.name for changes in self._state[name].changes().values() for each in changes]
        fakes = [
            f"{inner}.{key}"
            for inner, module in self._inside[name]
            for key, value in module.__dict__.items()
            if isinstance(value, FakeTensor)
        ]
        around = surroundings()
        changed += [
            key for key in {**self._surroundings, **around} if around.get(key) is not self._surroundings.get(key)
        ]
        changed += [f"requires_grad of {each!r}" for each in trained_names(self._inside[name]) ^ self._trained[name]]
        if changed or fakes:
            raise MarkingError(
                f"attribute {(changed or fakes)[0]} is set from outside before {name!r} is called: the worker that runs"
                " it would not see that",
                hint="give the value as an argument of the module's forward, or mark a larger module that contains"
                " both",
            )

    def _call(
        self, name: str, function: Callable[..., Any] | None, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        label = repr(name) if function is None else getattr(function, "__qualname__", "a function")
        arguments, tensors, sizes = _split((args, kwargs))
        _check_plain(label, arguments, "is given")
        _check_bare(label, tensors, "is given")
        inside = self._inside.get(name, [])
        number = len(_session.forwards)
        seen: dict[str, Any] = {}

        def run(fakes: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
            inner_args, inner_kwargs = fill(arguments, fakes, numbers)
            state, draws = PythonState.of(inside, with_files=True), Draws.now()
            own = own_tensors(inside)
            written: set[int] = set()
            ways: list[dict[int, Alias]] = []

            def attempt() -> Any:
                with torch.no_grad(), casting_within(self.autocast), Writes() as writes, IdleDropouts(), _inner():
                    found = forward(*inner_args, **inner_kwargs)
                register_dataclasses(found)
                written.update(writes.storages)
                self._check_own(label, inside, writes.read, [*fakes, *own.values()])
                ways.append(aliases_of(fakes, [leaf for leaf in pytree.tree_leaves(found) if is_tensor(leaf)]))
                return found

            def undo() -> None:
                self._check_shared(name, state)
                state.restore()
                put_back(inside, own)
                draws.restore()

            mode = detect_fake_mode(fakes) or detect_fake_mode(list(own.values()))
            try:
                with _told(label):
                    outcome = decided(attempt, look, None if mode is None else mode.shape_env, undo)
                seen["changed"] = frozenset(
                    each for each, tensor in own.items()
                    if storage_of(tensor) in written or current_tensor(inside, each) is not tensor
                )  # fmt: skip
            finally:
                undo()
            results, made, strange = _split(outcome)
            if strange:
                raise MarkingError(
                    f"{label} returns a size that depends on its input",
                    hint="return tensors, or mark a larger module around it",
                )
            _check_plain(label, results, "returns")
            _check_bare(label, made, "returns")
            seen["aliases"], seen["results"] = any_way(ways), results
            seen["written"] = frozenset(n for n, fake in enumerate(fakes) if storage_of(fake) in written)
            return fresh_results(with_own_sizes(made), [*fakes, *own.values()])

        _session.forwards.append(run)
        _session.trains.append(any(each.requires_grad for _, module in inside for each in module._parameters.values()
                                   if each is not None))  # fmt: skip
        made = torch.ops.assigner.call(number, tensors, sizes)
        self.calls.append(
            OpaqueCall(
                name, function, arguments, seen["results"], seen["written"], seen["aliases"], seen["changed"]
            )
        )  # fmt: skip
        return fill(seen["results"], made)

    def _check_own(self, label: str, inside: Named, read: set[int], known: Sequence[torch.Tensor]) -> None:
        """A partition has its own tensors and those that it is given.

        Raises:
            MarkingError: its forward reads another tensor of the model, by an object that it holds.
        """
        others = read - {storage_of(each) for each in known}
        strangers = [pair for pair in self.model.named_modules() if others and pair not in inside]
        for name, tensor in own_tensors(strangers).items():
            if storage_of(tensor) in others:
                raise MarkingError(
                    f"{label} reads {name.lstrip('.')!r}, which is not its own: the worker that runs it may lack it",
                    hint="give it as an argument of the module's forward, or register the same tensor on the module",
                )

    def _check_shared(self, name: str, state: PythonState) -> None:
        """What a partition's forward leaves in an object that others can reach would stay on its worker.

        Raises:
            MarkingError: it changes such an object.
        """
        if not name:
            return
        for number, changes in state.changes().items():
            if state.holders[number].is_beyond:
                raise MarkingError(
                    f"{name!r} changes {changes[0].name}, which nobody can put back when its forward runs again",
                    hint="keep it in a buffer or in an attribute of the module",
                )
            if self._owners.get(number, {name}) - {name}:
                raise MarkingError(
                    f"{name!r} changes {changes[0].name}, which is shared with other parts of the model: they may run"
                    " on another worker, which would not see that",
                    hint="pass it through arguments and return values, or mark a larger module that contains all of it",
                )


@contextlib.contextmanager
def _inner() -> Iterator[None]:
    _session.depth += 1
    try:
        yield
    finally:
        _session.depth -= 1


def _outside(model: nn.Module, opaque: Sequence[str]) -> list[tuple[str, nn.Module]]:
    inner = tuple(f"{name}." for name in opaque)
    return [
        (name, module) for name, module in model.named_modules() if name not in opaque and not name.startswith(inner)
    ]


def modules_around(model: nn.Module, marked: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules whose own code a capture follows: the model itself, and those that hold marked ones."""
    return _outside(model, opaque_modules(model, marked))


def _inside(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    return [(f"{name}.{inner}".rstrip("."), each) for inner, each in model.get_submodule(name).named_modules()]


def register_dataclasses(output: Any) -> None:
    """Let pytree see into plain dataclasses that a forward returns."""
    while kinds := {type(leaf) for leaf in pytree.tree_leaves(output) if dataclasses.is_dataclass(leaf)}:
        for kind in kinds:
            pytree.register_dataclass(kind)


def _check_plain(label: str, values: Any, does: str) -> None:
    """What is no tensor is a constant of the partition: an object would carry values that nobody sends.

    Raises:
        MarkingError: a value is neither a tensor nor a plain one.
    """
    for leaf in pytree.tree_leaves(values):
        if not isinstance(leaf, (*_PLAIN, Slot)):
            raise MarkingError(
                f"{label} {does} a {type(leaf).__name__}, which is neither a tensor nor a plain value",
                hint="use tensors, numbers, text, None, or tuples, lists and dicts of them; a Hugging Face model"
                " makes no cache with use_cache=False in its config",
            )


def _check_bare(label: str, tensors: Sequence[torch.Tensor], does: str) -> None:
    """A message carries a tensor's values, and nothing that hangs on it.

    Raises:
        MarkingError: somebody has set an attribute on one of the tensors.
    """
    for tensor in tensors:
        if not isinstance(tensor, nn.Parameter) and (hung := _hung_on(tensor)):
            raise MarkingError(
                f"{label} {does} a tensor with an attribute of its own, {hung[0]!r}: between workers it would be lost",
                hint="pass the attribute's value as an argument or a result of its own",
            )


def _hung_on(tensor: torch.Tensor) -> list[str]:
    """The attributes that somebody has set on a fake tensor: not those that every one of them has."""
    usual = set(vars(_session.anchor)) if _session.anchor is not None else set()
    return [name for name in getattr(tensor, "__dict__", ()) if name not in usual and "memo" not in name]


@contextlib.contextmanager
def _told(label: str) -> Iterator[None]:
    """Name the module whose Python code asks for a tensor's value: no larger one would help."""
    try:
        yield
    except (Disagreement, GuardOnDataDependentSymNode) as error:
        line = str(error) if isinstance(error, Disagreement) else user_line(error)
        raise MarkingError(
            f"a tensor's value decides what {label} returns, at {line}",
            hint="write it with tensor operations (torch.where, a mask, index_add): shapes may depend on values, but"
            " not what runs; Hugging Face's experts do so with experts_implementation='grouped_mm' or 'batched_mm'",
        ) from error


def opaque_modules(model: nn.Module, marked: Sequence[str]) -> list[str]:
    """The modules whose forward becomes one call: the marked ones, and the largest ones that hold no mark."""
    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            inside = any(mark.startswith(name + ".") for mark in marked)
            has_forward = inspect.getattr_static(type(child), "forward") is not nn.Module.forward
            if name in marked or (has_forward and not inside):
                found.append(name)
            else:
                visit(child, name + ".")

    visit(model, "")
    return found


@contextlib.contextmanager
def replaced(opaque: OpaqueCalls, anchor: torch.Tensor) -> Iterator[None]:
    """Opaque calls while the block runs: of the forward together with its hooks, which the module keeps.

    A class with a `__call__` of its own does work around the forward, which belongs to the call.
    """
    modules = {opaque.model.get_submodule(name): name for name in reversed(opaque.names)}
    _session.forwards.clear()
    _session.trains.clear()
    _session.anchor = anchor
    with contextlib.ExitStack() as stack:
        for module, name in modules.items():
            if type(module).__call__ is nn.Module.__call__:
                module.__dict__["_call_impl"] = opaque.module(name, module._call_impl)
                stack.callback(module.__dict__.pop, "_call_impl", None)
        for each in {_calling_class(module) for module in modules} - {nn.Module}:
            stack.enter_context(_call_replaced(each, opaque))
        try:
            yield
        finally:
            _session.forwards.clear()
            _session.trains.clear()
            _session.anchor = None


def _calling_class(module: nn.Module) -> type:
    return next(each for each in type(module).__mro__ if "__call__" in vars(each))


@contextlib.contextmanager
def _call_replaced(owner: Any, opaque: OpaqueCalls) -> Iterator[None]:
    original = owner.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = opaque.name_of.get(id(self))
        if name is None or within_call() or _calling_class(self) is not owner:
            return original(self, *args, **kwargs)
        return opaque.module(name, partial(original, self))(*args, **kwargs)

    owner.__call__ = call
    try:
        yield
    finally:
        owner.__call__ = original
