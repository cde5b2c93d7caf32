"""The builder's own tensors and modules, once a pipeline trains copies of them.

    model = Net()                                  what a plain script has, and may still hold
    pipeline = Pipeline(Workload(lambda: model, ...), plan)
    pipeline.step(batch)                           trains copies, each partition on its rank
    clip_grad_norm_(model.parameters(), 1.0)       would clip nothing: refused
    torch.save(model.state_dict(), "model.pt")     would save what was never trained: refused
    loss + model.moe.auxiliary                     what a forward leaves is on the copies: refused

A script may ask such a weight for its shape, freeze it (each step looks whether it has) and load other values into it,
with which it is the script's own again. Frozen weights and buffers with values may be read, but for running statistics.
What is written through `.data` of them, which torch counts as no change, is counted, so that a step finds it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from assigner.errors import UsageError
from assigner.usercode import is_asked_by_user, is_own_call

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The tensors that are trained elsewhere or have no values, and their names."""
_left: WeakKeyDictionary[nn.Module, Mapping[str, str]] = WeakKeyDictionary()
"""What forwards of copies leave in a module's attributes, and where its name and whose forward: for people."""
_unwatched: list[None] = []
"""An entry for each block in which code of the user's reads weights for this program."""


_choosing: list[None] = []
"""An entry while param groups are made: the parameters for them are copies, and none is in a set of these."""


def _of(*names: str, access: str = "") -> frozenset[Any]:
    found = (getattr(torch.Tensor, name) for name in names)
    return frozenset(getattr(each, access) if access else each for each in found)


_ASKS = (
    _of(
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "nbytes", "itemsize",
        "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_nested", "is_quantized", "retains_grad", "_version",
        "_backward_hooks", "_post_accumulate_grad_hooks", access="__get__",
    )
    | _of("requires_grad", access="__set__")
    | _of(
        "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "is_contiguous",
        "is_floating_point", "is_complex", "is_signed", "data_ptr", "get_device", "is_shared", "__len__",
        "requires_grad_",
    )
    | {torch.is_floating_point, torch.is_complex, torch.numel, torch.get_device, torch.is_inference, torch.typename}
)  # fmt: skip
"""What tells nothing of values and gradients, and the flag at which every step looks."""
_DATA, _DEVICE = (next(iter(_of(name, access="__get__"))) for name in ("data", "device"))


class _Original(torch.Tensor):
    """A tensor that still has the values which the builder has given it."""

    plain: ClassVar[type[torch.Tensor]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.copy_ and isinstance(args[0], _Original) and not args[0].is_meta:
                _have_class(args[0], plain_class(args[0]))
            given = pytree.tree_leaves((args, kwargs)) if func not in _ASKS else ()
            trained = [each for each in given if isinstance(each, _Original) and each in _names]
            if trained and not _unwatched and not is_own_call():
                raise _untrained(trained[0], func)
            if func == _DEVICE and args[0].is_meta and not _unwatched and not is_own_call():
                return torch.device("cpu")  # where a batch may lie: `x.to(next(model.parameters()).device)`
            return args[0].detach() if func == _DATA and not trained else func(*args, **(kwargs or {}))

    def __hash__(self) -> int:
        if _choosing and self in _names and is_asked_by_user():
            raise _untrained(
                self,
                torch.Tensor.__hash__,
                "choose parameters by name: optimizer(named_parameters) is given the names",
            )
        return id(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._copied("__deepcopy__", memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied("__reduce_ex__", protocol)

    def _copied(self, method: str, argument: Any) -> Any:
        """What a method for copies gives: they have the class that the builder has made."""
        if self in _names and not _unwatched and not is_own_call():
            raise _untrained(self, getattr(torch.Tensor, method))
        kept = type(self)
        _have_class(self, plain_class(self))
        try:
            return getattr(self, method)(argument)
        finally:
            _have_class(self, kept)


@functools.cache
def _original(kind: Any) -> Any:
    """A class of tensors like another one, of which a script notices that it uses them."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, "plain": kind}
    return type(kind)(kind.__name__, (_Original, kind), names)


def _untrained(tensor: torch.Tensor, func: Any, hint: str = "") -> UsageError:
    """An error of a script that uses a tensor which nobody trains."""
    asked = func.__name__ if func.__name__ not in ("__get__", "__set__") else func.__self__.__name__
    return UsageError(
        f"the script uses {_names[tensor]} of the model that the builder has made ({asked}): the pipeline trains copies"
        f" of its modules, and this one {'has no values' if tensor.is_meta else 'stays as it was built'}",
        hint=hint
        or "what is trained: pipeline.named_parameters(), or pipeline.full_state_dict(), which load_state_dict of"
        f" {'another such model' if tensor.is_meta else 'the model'} takes; the optimizer is pipeline.optimizer, and"
        " pipeline.clip_grad_norm_ clips",
    )


def plain_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class that a tensor had before it was kept."""
    return tensor.plain if isinstance(tensor, _Original) else type(tensor)


def _have_class(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """The script's own references stay references to it."""
    tensor.__class__ = kind


def keep_originals(
    tensors: Mapping[str, torch.Tensor], moving: Collection[str], left: Mapping[nn.Module, Mapping[str, str]]
) -> None:
    """Refuse from now on that a script uses what is another on the copies.

    Args:
        tensors: The builder's parameters and buffers by name.
        moving: The names of those that forwards change, as running statistics.
        left: Its modules whose attributes forwards change, with the words for each attribute.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, _Original):
            kind: Any = type(tensor)
            _have_class(tensor, _original(kind))
        if tensor.requires_grad or tensor.is_meta or name in moving:
            _names[tensor] = name
    for module, words in left.items():
        if module not in _left:
            kind = type(module)
            module.__class__ = _watched(kind)
        _left[module] = words


@functools.cache
def _watched(kind: Any) -> Any:
    """A class of modules like another one, but for what they tell of attributes that forwards of copies change."""

    def reading(module: nn.Module, name: str) -> Any:
        words = _left.get(module)
        if words is not None and not _unwatched and (name in words or name == "__dict__") and is_asked_by_user():
            raise _changed_elsewhere(words[name] if name in words else next(iter(words.values())))
        return kind.__getattribute__(module, name)

    def reduced(module: nn.Module, protocol: Any) -> Any:
        module.__class__ = kind
        try:
            return module.__reduce_ex__(protocol)
        finally:
            module.__class__ = watched

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    watched: Any = type(kind)(kind.__name__, (kind,), {**names, "__getattribute__": reading, "__reduce_ex__": reduced})
    return watched


def _changed_elsewhere(words: str) -> UsageError:
    return UsageError(
        f"the script reads {words}: the pipeline runs copies of the modules that the builder has made, and this one"
        " stays as it was built",
        hint="return it from the forward: the loss, metrics and who calls pipeline.forward are given what that returns",
    )


def unwatched() -> contextlib.AbstractContextManager[None]:
    """This program has the model's own code run in the block, as to capture its forward."""
    return _noted(_unwatched)


def choosing_parameters() -> contextlib.AbstractContextManager[None]:
    """Param groups are made in the block."""
    return _noted(_choosing)


@contextlib.contextmanager
def _noted(blocks: list[None]) -> Iterator[None]:
    blocks.append(None)
    try:
        yield
    finally:
        blocks.pop()
