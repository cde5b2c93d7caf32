"""Which of its arguments an operation writes to, which it may give back as they are, and what a block has written.

And whether two tensors have elements in one place.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.variable import VariableMeta
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from assigner.model.deferred.memento import placed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

# Operations that move running statistics, which their schemas do not say: the flag that says whether they do.
_MOVING = {
    **{f"aten::{name}batch_norm": "training" for name in ("", "native_", "cudnn_")},
    "aten::_batch_norm_impl_index": "training",
    "aten::instance_norm": "use_input_stats",
}
_STATISTICS = ("running_mean", "running_var")
# Operations that give back their input itself where they have nothing to do.
_IDLE = frozenset(f"aten::{name}" for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"))
DROPOUTS = frozenset((
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
    functional.feature_alpha_dropout, torch.dropout,
))  # fmt: skip
"""The same in Python."""


def named_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the operation's schema; those that are left out are not there."""
    words = [argument.name for argument in operation._schema.arguments]
    return {**dict(zip(words, args, strict=False)), **kwargs}


def written_names(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the arguments that this call writes to."""
    if not isinstance(operation, torch._ops.OpOverload):
        return []
    schema = operation._schema
    if schema.name in _MOVING:
        named = named_arguments(operation, args, kwargs)
        moves = named.get(_MOVING[schema.name])
        return [name for name in _STATISTICS if named.get(name) is not None] if moves else []
    if not schema.is_mutable:
        return []
    named = named_arguments(operation, args, kwargs)
    return [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and named.get(argument.name) is not None
    ]


def written_tensors(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that this call writes to."""
    names = written_names(operation, args, kwargs)
    if not names:
        return []
    named = named_arguments(operation, args, kwargs)
    return tensor_leaves([named[name] for name in names])


def is_view(operation: Any) -> bool:
    """True if an operation gives its argument's memory, and writes to none."""
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    given = [each.alias_info for each in operation._schema.returns if each.alias_info is not None]
    return bool(given) and not any(each.is_write for each in given)


def is_lent(tensor: torch.Tensor) -> bool:
    """True if a tensor's memory is that of an array or the like, which changes it without torch; a file's is not."""
    with torch._C.DisableTorchFunction():
        is_plain = not tensor.is_meta and tensor.layout is torch.strided
        storage = tensor.untyped_storage() if is_plain else None
        return storage is not None and not storage.resizable() and storage.filename is None


def gives_back(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if this call returns its first argument itself, though neither schema nor fake tensors say so."""
    if not isinstance(operation, torch._ops.OpOverload) or operation._schema.name not in _IDLE:
        return False
    named = named_arguments(operation, args, kwargs)
    return named.get("p") == 0 or not named.get("train")


def returned_arguments(operation: Any) -> list[str | None]:
    """For each result of an operation the name of the written argument that it is; None: it is a tensor of its own."""
    names: dict[str, str] = {}
    for argument in operation._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for label in argument.alias_info.before_set:
                names[label] = argument.name
    found: list[str | None] = []
    for result in operation._schema.returns:
        labels = result.alias_info.before_set if result.alias_info is not None else ()
        found.append(next((names[label] for label in labels if label in names), None))
    return found


def fresh_values(returned: Sequence[str | None], result: Any) -> list[Any]:
    """What an operation gives that is none of its arguments, by its `returned_arguments`."""
    results = list(result) if len(returned) > 1 else [result]
    return [each for each, name in zip(results, returned, strict=False) if name is None]


def is_random(operation: Any) -> bool:
    """True if an operation draws from a generator, also one that stands in a captured graph for such a one."""
    if isinstance(operation, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in operation.tags
    return bool(getattr(operation, "is_random", False))


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which `torch.cond` is Python's own decision: torch cannot compile both ways while a mode is on."""

    def __enter__(self) -> Any:
        self._cond = placed([(torch, "cond", branched)])
        self._cond.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._cond.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def branched(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """`torch.cond` of what may be a number, a size or a tensor: one of two functions is called, never both."""
    return (true_fn if pred else false_fn)(*operands)


class Writes(Watching):  # type: ignore[no-untyped-call]
    """Notes which storages are written to, also through `.data`, which torch does not count, and which are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()  # that are written to, by their numbers (`storage_of`)
        self.read: set[int] = set()  # that are given to any operation
        self.used: set[int] = set()  # likewise, but for the operations of a BatchNorm
        self.normed: set[int] = set()  # that are given to these
        self.effects = 0  # how many operations have written or drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = {storage_of(each) for each in (*args, *kwargs.values()) if _is_plain_tensor(each)}
        self.read |= read
        if "batch_norm" in func.__name__:
            self.normed |= read
        else:
            self.used |= read
        written = written_tensors(func, args, kwargs)
        self.storages.update(map(storage_of, written))
        self.effects += bool(written) or is_random(func)
        made = func(*args, **kwargs)
        results = made if isinstance(made, tuple | list) else (made,)
        self.used -= {storage_of(each) for each in results if _is_plain_tensor(each)} - read  # a number given again
        return made


def variable(kind: Any, data: Any = None, requires_grad: bool = False, *others: Any, **named: Any) -> Any:
    """What `torch.autograd.Variable` makes of a tensor, in operations that modes see: its own goes past them."""
    if not isinstance(data, torch.Tensor):
        return type.__call__(kind, data, requires_grad, *others, **named)
    made = data.detach()
    return made.requires_grad_() if requires_grad else made


class GradientUses(TorchFunctionMode):
    """Notes tensors whose `.grad` is asked for, or set, and may be one; and those whose `grad_fn` a model's code reads.

    Nothing adds to that of a buffer: it is None, unless code gives it one. `Module.to` asks for each parameter's, to
    convert it as the parameter; where that is as it should be, so is its gradient.

    Attributes:
        found: Those whose gradient was used.
        nodes: Those whose `grad_fn` was.
    """

    _TENSOR: Any = torch.Tensor
    _USES = frozenset((_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__))
    _ASKS = frozenset((_TENSOR.grad_fn.__get__,))
    _REQUIRES = frozenset((_TENSOR.requires_grad.__set__, _TENSOR.requires_grad_))

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []
        self.nodes: list[torch.Tensor] = []
        self._begun: list[torch.Tensor] = []  # leaves that came into being, or began to require a gradient
        self._first = torch._C._autograd._get_sequence_nr()
        self._variables = placed([(VariableMeta, "__call__", variable)])

    def __enter__(self) -> Any:
        self._variables.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._variables.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._USES:
            return self._used(func, args, kwargs or {})
        if func in self._ASKS and not _is_torchs(sys._getframe(1)):
            self.nodes.append(args[0])
        begins = func in self._REQUIRES and not args[0].requires_grad
        made = func(*args, **(kwargs or {}))
        new = args[0] if begins else made
        # of most results one look at autograd's flags is all: each operation of a forward comes here
        if isinstance(new, torch.Tensor) and _is_leaf(new) and (begins or not any(new is each for each in args)):
            self._begun.append(new)
        return made

    def _used(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        tensor, at = args[0], sys._getframe(2)
        is_kept = at.f_code is nn.Module._apply.__code__ and _is_idle(at.f_locals, tensor)
        may_have = tensor.requires_grad or isinstance(tensor, nn.Parameter) or tensor.grad is not None
        if may_have and not is_kept:
            self.found.append(tensor)
        made = func(*args, **kwargs)
        if not may_have and tensor.grad is not None:
            self.found.append(tensor)
        return made

    def earlier(self) -> list[torch.Tensor]:
        """Of `found` what backwards leave a gradient in, and was there before the block; no parameters."""
        return [each for each in self.found if not isinstance(each, nn.Parameter) and self._was_there(each)]

    def _was_there(self, tensor: torch.Tensor) -> bool:
        if _is_leaf(tensor):
            return not any(tensor is each for each in self._begun)
        node = tensor.grad_fn
        return tensor.retains_grad and node is not None and node._sequence_nr() < self._first


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether backwards leave gradients in a tensor without being asked to."""
    return tensor.requires_grad and tensor.is_leaf


def _is_torchs(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _is_idle(words: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    """Whether `Module._apply`, by what it has so far, leaves a parameter and its gradient as they are.

    So it is where a conversion of torch's own gives back the parameter itself.
    """
    is_torchs = getattr(words.get("fn"), "__module__", None) == nn.Module.__module__
    is_set = words.get("p_should_use_set_data") is True and words.get("p_should_use_swap_tensors") is False
    return is_torchs and is_set and words.get("param_applied") is tensor


def _is_plain_tensor(value: Any) -> bool:
    """True if a value is a tensor with a storage of its own."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class ElementPlaces:
    """Where the elements of a tensor lie in a memory, counted in elements."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first place behind all of them."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.start + (last + 1 if all(self.sizes) else 0)

    def meet(self, others: ElementPlaces, most: float = math.inf) -> bool:
        """Whether an element of the one lies where one of the other does; of more than `most`, whether one may."""
        if max(self.start, others.start) >= min(self.end, others.end):
            return False
        if max(math.prod(self.sizes), math.prod(others.sizes)) > most:
            return True
        first = min(self.start, others.start)
        taken = torch.zeros(max(self.end, others.end) - first, dtype=torch.bool, device="cpu")

        def places(each: ElementPlaces) -> torch.Tensor:
            sizes = [size if stride else 1 for size, stride in zip(each.sizes, each.strides, strict=True)]
            return taken.as_strided(sizes, each.strides, each.start - first)

        places(self).fill_(True)
        return bool(places(others).any())


def storage_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage, or of a tensor without one; once it is freed the number may be given again."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
