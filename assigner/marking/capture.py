"""One forward of the model as a graph, with every marked module as one opaque call.

The forward of each marked module, and of each largest unmarked module beside them, is replaced by a call of one
registered operator; torch.export then sees one node for the module and ordinary ATen nodes for the glue between
them. The operator's fake implementation runs the module's real forward on fake tensors, so that shapes come out
and nothing is computed.
"""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from assigner.errors import MarkingError
from assigner.marking.casting import casting, casting_within
from assigner.marking.regions import without_regions
from assigner.usercode import user_line
from assigner.workload import call_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
class Capture:
    """A captured forward.

    Args:
        graph: The exported graph; opaque calls are `assigner.call` nodes.
        program: The export that it came from.
        calls: The opaque calls by their number in the graph.
        inputs: The flattened example inputs, (args, kwargs).
    """

    graph: fx.Graph
    program: ExportedProgram
    calls: list[OpaqueCall]
    inputs: list[Any]


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
                    self.storages |= {_storage(leaf) for leaf in pytree.tree_leaves(value) if _is_tensor(leaf)}
        return func(*args, **kwargs)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _split(tree: Any) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """A tree's tensors, its symbolic sizes, and the tree with slots in their places."""
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []

    def slot(leaf: Any) -> Any:
        if _is_tensor(leaf):
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
        number = len(_session.forwards)
        seen: dict[str, Any] = {}

        def run(fakes: list[torch.Tensor], numbers: list[Any]) -> list[torch.Tensor]:
            inner_args, inner_kwargs = fill(arguments, fakes, numbers)
            with torch.no_grad(), casting_within(autocast), _Writes() as writes:
                results, made, strange = _split(forward(*inner_args, **inner_kwargs))
            if strange:
                raise MarkingError(
                    f"{name!r} returns a size that depends on its input",
                    hint="return tensors, or mark a larger module around it",
                )
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
def _replaced(model: nn.Module, names: Sequence[str], calls: list[OpaqueCall], autocast: str | None) -> Iterator[None]:
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


@contextlib.contextmanager
def _fake_tensors(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """The model's meta tensors as fake CPU tensors while the block runs; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin

    try:
        for module in model.modules():
            held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in held:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        kept.append((tensors, name, tensor))
                        if id(tensor) not in made:
                            made[id(tensor)] = fake(tensor)
                        tensors[name] = made[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in kept:
            tensors[name] = tensor


def capture(model: nn.Module, marked: Sequence[str], inputs: Any, *, autocast: str | None = None) -> Capture:
    """Capture one forward, in the mode that the model was built in, with any number of rows.

    Args:
        model: On the meta device; left as it was.
        marked: Names of the partitions' modules.
        inputs: Example inputs of two rows or more, as a batch has them; only shapes and types count.
        autocast: The type that autocast computes in; it decides the types of the values.

    Raises:
        MarkingError: the forward cannot be traced; the message has the line.
    """
    names = opaque_modules(model, marked)
    with _silence():
        try:
            return _export(model, names, inputs, others=Dim.AUTO, autocast=autocast)
        except MarkingError:
            raise
        except Exception:  # noqa: BLE001 - torch.export raises many kinds; the second try's own error is reported
            return _export_or_explain(model, names, inputs, autocast)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what torch.export prints and logs on its way to an error off the screen: it comes out as a MarkingError."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _export_or_explain(model: nn.Module, names: Sequence[str], inputs: Any, autocast: str | None) -> Capture:
    """Second try: only the rows may vary. Its error is the one that the user sees."""
    try:
        return _export(model, names, inputs, others=Dim.STATIC, autocast=autocast)
    except MarkingError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines()
        if isinstance(error, GuardOnDataDependentSymNode):
            said = ["a tensor's value decides what runs there"]
        reason = said[0][:200] if said else type(error).__name__
        raise MarkingError(
            f"the forward of {type(model).__name__} cannot be traced at {user_line(error)}: {reason}",
            hint="mark a larger module that contains this line, or give the model as an nn.Sequential",
        ) from error


def _export(model: nn.Module, names: Sequence[str], inputs: Any, *, others: Any, autocast: str | None) -> Capture:
    calls: list[OpaqueCall] = []
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    real = call_arguments(inputs)
    leaves = pytree.tree_leaves(real)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: mode.from_tensor(tensor, static_shapes=True), real)
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    rows = next((leaf.size(0) for leaf in leaves if _is_tensor(leaf) and leaf.dim()), None)
    for leaf, fake in zip(leaves, pytree.tree_leaves((args, kwargs)), strict=True):
        if _is_tensor(leaf) and leaf.dim():
            first = Dim.DYNAMIC if leaf.size(0) == rows else others
            later = [others if leaf.size(n) > 1 else Dim.STATIC for n in range(1, leaf.dim())]
            shapes[fake] = dict(enumerate([first, *later]))
    replaced = _replaced(model, names, calls, autocast)
    with _fake_tensors(model, mode), replaced, mode, casting(autocast, "cpu"):
        dynamic = shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
    return Capture(without_regions(program.graph_module), program, calls, leaves)
