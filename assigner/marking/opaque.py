"""Opaque modules: while a forward is captured, a module's forward is one call of one registered operator.

The operator's fake implementation runs the module's real forward on fake tensors, so that shapes come out and nothing
is computed. A size that depends on values comes out as a symbol without a number.
"""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from assigner.errors import MarkingError
from assigner.marking.casting import casting_within
from assigner.usercode import user_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
    """One call of an opaque module.

    Args:
        module: Its name in the model.
        arguments: (args, kwargs) with a Slot for each tensor and each size; the rest are constants.
        results: What it returned, with a Slot for each tensor.
        written: Which of its tensors its forward writes to in place.
    """

    module: str
    arguments: Any
    results: Any
    written: frozenset[int]


@dataclass
class _Session:
    """The calls of the capture that is going on; the operator's fake implementation looks them up here."""

    forwards: list[Any] = field(default_factory=list)


_session = _Session()
_library = torch.library.Library("assigner", "DEF")  # type: ignore[no-untyped-call]
_library.define("call(int number, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")  # type: ignore[no-untyped-call]


@torch.library.register_fake("assigner::call", lib=_library)  # type: ignore[untyped-decorator]
def _fake_call(number: int, tensors: list[torch.Tensor], sizes: list[Any]) -> list[torch.Tensor]:
    made: list[torch.Tensor] = _session.forwards[number](tensors, sizes)
    return made


def is_call(node: fx.Node) -> bool:
    """True if a node is a call of an opaque module."""
    return node.op == "call_function" and node.target is torch.ops.assigner.call.default


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which storages are written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            named = zip(func._schema.arguments, args, strict=False)
            words = [(word, kwargs[word.name]) for word in func._schema.arguments if word.name in kwargs]
            for word, value in [*named, *words]:
                if word.alias_info is not None and word.alias_info.is_write:
                    self.storages |= {_storage(leaf) for leaf in pytree.tree_leaves(value) if is_tensor(leaf)}
        return func(*args, **kwargs)


def is_tensor(leaf: Any) -> bool:
    """True if a leaf of inputs, arguments or results is a tensor."""
    return isinstance(leaf, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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


def _opaque(name: str, forward: Any, calls: list[OpaqueCall], autocast: str | None) -> Any:
    """A forward that calls the operator; its fake implementation runs `forward` and notes what it gave.

    Autocast is off inside an operator's implementation: it is entered again for the forward.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments, tensors, sizes = _split((args, kwargs))
        _check_plain(name, arguments)
        number = len(_session.forwards)
        seen: dict[str, Any] = {}

        def run(fakes: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
            inner_args, inner_kwargs = fill(arguments, fakes, numbers)
            with torch.no_grad(), casting_within(autocast), _Writes() as writes, _told(name):
                results, made, strange = _split(forward(*inner_args, **inner_kwargs))
            if strange:
                raise MarkingError(
                    f"{name!r} returns a size that depends on its input",
                    hint="return tensors, or mark a larger module around it",
                )
            made = _with_own_sizes(made)
            given = {_storage(fake) for fake in fakes}
            seen["results"] = results
            seen["written"] = frozenset(n for n, fake in enumerate(fakes) if _storage(fake) in writes.storages)
            # The operator must not return what it was given, nor one tensor twice.
            return [torch.empty_like(each) if _storage(each) in given else each.view_as(each) for each in made]

        _session.forwards.append(run)
        made = torch.ops.assigner.call(number, tensors, sizes)
        calls.append(OpaqueCall(name, arguments, seen["results"], seen["written"]))
        return fill(seen["results"], made)

    return call


def _check_plain(name: str, arguments: Any) -> None:
    """What is no tensor is a constant of the partition: an object would carry values that nobody sends.

    Raises:
        MarkingError: an argument is neither a tensor nor a plain value.
    """
    for leaf in pytree.tree_leaves(arguments):
        if not isinstance(leaf, (*_PLAIN, Slot)):
            raise MarkingError(
                f"{name!r} is given a {type(leaf).__name__}, which is neither a tensor nor a plain value",
                hint="give it tensors, numbers, text, None, or tuples, lists and dicts of them; a Hugging Face model"
                " makes no cache with use_cache=False in its config",
            )


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Name the module whose Python code asks for a tensor's value: no larger one would help."""
    try:
        yield
    except GuardOnDataDependentSymNode as error:
        raise MarkingError(
            f"a tensor's value decides what runs in {name!r}, at {user_line(error)}",
            hint="write it with tensor operations (torch.where, a mask, index_add): shapes may depend on values, but"
            " not what runs; Hugging Face's experts do so with experts_implementation='grouped_mm' or 'batched_mm'",
        ) from error


def _with_own_sizes(made: list[torch.Tensor]) -> list[torch.Tensor]:
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
        sizes = [own(size) for size in tensor.shape]
        same = all(one is other for one, other in zip(sizes, tensor.shape, strict=True))
        found.append(tensor if same else tensor.new_empty(sizes))
    mine = {size.node.expr for size in known.values()}
    environment.pending_fresh_unbacked_symbols[:] = [
        each for each in environment.pending_fresh_unbacked_symbols if each in mine
    ]
    return found


def opaque_modules(model: nn.Module, marked: Sequence[str]) -> list[str]:
    """The modules whose forward becomes one call: the marked ones, and the largest ones that hold no mark."""
    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            inside = any(mark.startswith(name + ".") for mark in marked)
            has_forward = type(child).forward is not nn.Module.forward
            if name in marked or (has_forward and not inside):
                found.append(name)
            else:
                visit(child, name + ".")

    visit(model, "")
    return found


@contextlib.contextmanager
def replaced(model: nn.Module, names: Sequence[str], calls: list[OpaqueCall], autocast: str | None) -> Iterator[None]:
    """Opaque calls while the block runs: of the forward together with its hooks, which the module keeps."""
    modules = {model.get_submodule(name): name for name in reversed(names)}
    _session.forwards.clear()
    try:
        for module, name in modules.items():
            module.__dict__["_call_impl"] = _opaque(name, module._call_impl, calls, autocast)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("_call_impl", None)
        _session.forwards.clear()
