"""The builder's own tensors and modules, once a pipeline trains copies of them.

    model = Net()                                  what a plain script has, and may still hold
    pipeline = Pipeline(Workload(lambda: model, ...), plan)
    pipeline.step(batch)                           trains copies, each partition on its rank
    clip_grad_norm_(model.parameters(), 1.0)       would clip nothing: refused
    torch.save(model.state_dict(), "model.pt")     would save what was never trained: refused
    loss + model.moe.auxiliary                     what a forward leaves is on the copies: refused
    kept = dict(pipeline.named_parameters())
    pipeline.move(another)                         trains other copies from then on
    kept["a.weight"].clamp_(-1, 1)                 would clamp what nobody reads: refused

A script may ask such a weight for its shape, freeze it (each step looks whether it has) and load other values into it,
with which it is the script's own again. Frozen weights and buffers with values may be read, but for running statistics
and what a step has moved. Another pipeline would begin with the values of the builder, too: it is to be loaded first.
What is written through `.data` of them, which torch counts as no change, is counted, so that a step finds it. At what
a pipeline had under an earlier plan no step looks any more: a script may ask it for its shape alone.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from assigner.errors import UsageError
from assigner.model.deferred.mutation import storage_of
from assigner.model.members import buffers, parameters
from assigner.usercode import is_asked_by_user, is_own_call

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The tensors that are trained elsewhere or have no values, and their names."""
_moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Those of them that a pipeline had under an earlier plan."""
_aliases: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of some of them, what else a script holds of their memory, as `weight.data`: it is among them too."""
_unsaved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Those of them that no state_dict has, so that nobody loads them."""
_left: WeakKeyDictionary[nn.Module, _Left] = WeakKeyDictionary()
"""What forwards of copies leave on modules."""
_CLASS: Any = object.__dict__["__class__"]
_trained: WeakSet[nn.Module] = WeakSet()
"""Models of which a pipeline has trained copies."""
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
_SETS = _of("requires_grad", access="__set__") | _of("requires_grad_")
_LIKE = _of("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor") | {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
}  # fmt: skip
"""What makes a tensor of this one's shape, or of its type, and takes no value of it."""
_DATA, _DEVICE = (next(iter(_of(name, access="__get__"))) for name in ("data", "device"))


class _Original(torch.Tensor):
    """A tensor that still has the values which the builder has given it."""

    plain: ClassVar[type[torch.Tensor]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with torch._C.DisableTorchFunctionSubclass():
            loads = func is torch.Tensor.copy_ and isinstance(args[0], _Original) and not args[0].is_meta
            loads = loads and args[0] not in _moved
            is_use = func not in _ASKS or (func in _SETS and args[0] in _moved)
            given = pytree.tree_leaves((args[loads:], kwargs)) if is_use else ()
            trained = [each for each in given if isinstance(each, _Original) and each in _names]
            if func in _LIKE and not any(each.is_meta for each in trained):
                trained = []
            if trained and not _unwatched and not is_own_call():
                raise _untrained(trained[0], func)
            if loads:
                func(*args, **(kwargs or {}))
                _CLASS.__set__(args[0], plain_class(args[0]))
                for each in (args[0], *_aliases_of(args[0])):
                    if each in _names:
                        del _names[each]
                return args[0]
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
        _CLASS.__set__(self, plain_class(self))
        try:
            return getattr(self, method)(argument)
        finally:
            _CLASS.__set__(self, kept)


class _Apart:
    """Keeps what a class of the script does when another is made of it, as to note that, from one that it has not."""

    def __init_subclass__(cls) -> None:
        """Nothing."""


def _class_like(kind: Any, bases: tuple[type, ...], members: Mapping[str, Any]) -> Any:
    """A class that script and torch take for another one, whatever that one's class does where one is made of it."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    names["__class__"] = property(lambda _: kind)
    return type.__new__(type(kind), kind.__name__, (_Apart, *bases, kind), {**names, **members})


@functools.cache
def _original(kind: Any) -> Any:
    """A class of tensors like another one, of which a script notices that it uses them."""
    return _class_like(kind, (_Original,), {"plain": kind})


def _untrained(tensor: torch.Tensor, func: Any, hint: str = "") -> UsageError:
    asked = func.__name__ if func.__name__ not in ("__get__", "__set__") else func.__self__.__name__
    if tensor in _moved:
        return UsageError(
            f"the script uses {_names[tensor]} as it had it before pipeline.move ({asked}): under the new plan that is"
            " another tensor, and nothing reads or trains this one any more",
            hint=hint or "take tensors from pipeline.named_parameters() and pipeline.state_dict() anew after each move",
        )
    if tensor in _unsaved:
        hint = hint or (
            f"no state_dict has it: register it as persistent (register_buffer({_names[tensor].rpartition('.')[2]!r},"
            " ...)), and load_state_dict brings it; or evaluate with pipeline.evaluate and pipeline.forward"
        )
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


def keep_originals(
    tensors: Mapping[str, torch.Tensor], moving: Collection[str], beside: Iterable[torch.Tensor] = ()
) -> None:
    """Refuse from now on that a script uses what is another on the copies: what trains, or what forwards move.

    `beside`: what code of the script's reads; some may be in the memory of these, as `model.head.weight.data`.
    """
    for name, tensor in tensors.items():
        _watch(tensor)
        if tensor.requires_grad or tensor.is_meta or name in moving:
            _names[tensor] = name
    memory = {storage_of(each): each for each in tensors.values() if each in _names and not each.is_meta}
    for each in beside:
        original = memory.get(storage_of(each)) if each not in _names else None
        if original is not None:
            _watch(each)
            _names[each] = _names[original]
            _aliases[original] = [*_aliases_of(original), each]


def _aliases_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = _aliases.get(tensor, [])  # type: ignore[no-untyped-call]
    return found


def keep_moved(tensors: Mapping[str, torch.Tensor], but: Any) -> None:
    """Refuse from now on that a script uses what a pipeline had under an earlier plan, but for what it goes on with."""
    known = {id(each) for each in pytree.tree_leaves(but)}
    for name, tensor in tensors.items():
        if id(tensor) not in known:
            _watch(tensor)
            _names[tensor], _moved[tensor] = name, True


def _watch(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, _Original):
        kind: Any = type(tensor)
        _CLASS.__set__(tensor, _original(kind))


def note_moved(model: nn.Module, name: str) -> None:
    """Refuse from now on that a script uses a tensor which copies have moved, by one of its names."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = module._parameters.get(key, module._buffers.get(key))
    if isinstance(tensor, _Original) and tensor not in _names:
        _names[tensor] = name
        if key in module._non_persistent_buffers_set:
            _unsaved[tensor] = True


def note_trained(model: nn.Module) -> None:
    """A pipeline has trained copies of its modules."""
    _trained.add(model)


def is_outdated(model: nn.Module) -> bool:
    """Whether a pipeline has trained copies, and nobody has loaded the model with what came of them.

    What has no values yet is made anew for each pipeline.
    """
    return model in _trained and any(each in _names and not each.is_meta for each in parameters(model))


def keep_left(model: nn.Module, left: Mapping[nn.Module, Mapping[str, str]]) -> None:
    """Refuse from now on that a script uses what forwards leave on modules, if the model's tensors are kept."""
    for module, words in left.items() if _has_originals(model) else ():
        if module not in _left:
            module_class: Any = type(module)
            _CLASS.__set__(module, _watched(module_class))
        known = _left[module].words if module in _left else {}
        has_own = any(each in _names for each in (*module._parameters.values(), *module._buffers.values()))
        _left[module] = _Left({**known, **words}, ref(module if has_own else model))


def _has_originals(module: nn.Module | None) -> bool:
    return module is not None and any(each in _names for each in (*parameters(module), *buffers(module)))


class _Left(NamedTuple):
    """What forwards of copies leave on a module: of each attribute, what it is and whose forward changes it, in words.

    The module is the model where it has no tensors: with values of the script's own in these it is its own too.
    """

    words: Mapping[str, str]
    module: ref[nn.Module]

    def check(self, name: str) -> None:
        """Refuse that the script reads or sets an attribute; of another name than these, all of them."""
        if not _unwatched and _has_originals(self.module()):
            words = self.words[name] if name in self.words else next(iter(self.words.values()))
            raise UsageError(
                f"the script uses {words}: the pipeline runs copies of the modules that the builder has made, and this"
                " one stays as it was built",
                hint="return it from the forward: the loss, metrics and who calls pipeline.forward are given what that"
                " returns; what the script sets in the middle is an argument of forward, or in an object of its own",
            )


@functools.cache
def _watched(kind: Any) -> Any:
    """A class of modules like another one, but for attributes that forwards of copies change."""

    def reading(module: nn.Module, name: str) -> Any:
        left = _left.get(module)
        if left is not None and (name in left.words or name == "__dict__") and is_asked_by_user():
            left.check(name)
        return kind.__getattribute__(module, name)

    def setting(module: nn.Module, name: str, *value: Any) -> None:
        left = _left.get(module)
        if left is not None and name in left.words and is_asked_by_user():
            left.check(name)
        (kind.__setattr__ if value else kind.__delattr__)(module, name, *value)

    def reduced(module: nn.Module, protocol: Any) -> Any:
        left = _left.get(module)
        if left is not None and not is_own_call():
            left.check("")
        _CLASS.__set__(module, kind)
        try:
            return module.__reduce_ex__(protocol)
        finally:
            _CLASS.__set__(module, watched)

    members = {"__getattribute__": reading, "__setattr__": setting, "__delattr__": setting, "__reduce_ex__": reduced}
    watched = _class_like(kind, (), members)
    return watched


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
