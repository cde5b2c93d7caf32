"""A model as torch.export can take it, while its forward is captured: it has no weights, and may do as it likes."""

from __future__ import annotations

import contextlib
import inspect
import keyword
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from assigner.errors import MarkingError
from assigner.model.deferred.memento import placed
from assigner.model.deferred.mutation import storage_of
from assigner.model.deferred.reach import MODULE, reach
from assigner.model.marking.opaque import is_elsewhere, within_call
from assigner.model.marking.partitionmodule import any_names
from assigner.model.members import buffers, parameters
from assigner.usercode import running_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode

_OF_CLASSES = ("__dict__", "__weakref__", "__new__", "__call__")
"""What belongs to a class of its own, or to a graph of torch.fx that is called."""


@contextlib.contextmanager
def exportable(
    model: nn.Module, mode: FakeTensorMode, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """The model on the meta device can be exported for these inputs while the block runs.

    Raises:
        MarkingError: a name of `**kwargs` is none that a parameter can have.
    """
    with (
        fake_tensors(model, mode), _given_momenta(model), _symbolic_lengths(model),
        _named_keywords(model, args, kwargs), _as_written(model), any_names(),
    ):  # fmt: skip
        yield


@contextlib.contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """The model is a plain module while the block runs.

    It names its tensors by where they are, what is compiled by its own `compile()` runs as it is written, and a graph
    of torch.fx is called: torch.export would interpret it, without its hooks.
    """
    kind = type(model)
    named = [
        (model.__dict__, name, getattr(nn.Module, name).__get__(model))
        for name in ("named_parameters", "named_buffers")
        if getattr(type(model), name) is not getattr(nn.Module, name) or name in model.__dict__
    ]
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    with placed([*named, *((module.__dict__, "_compiled_call_impl", None) for module in compiled)]):
        if not issubclass(kind, fx.GraphModule):
            yield
            return
        bases = [base for base in reversed(kind.__mro__) if base not in nn.Module.__mro__]
        own = {name: each for base in bases for name, each in vars(base).items() if name not in _OF_CLASSES}
        model.__class__ = type(kind.__name__, (nn.Module,), own)
        try:
            yield
        finally:
            model.__class__ = kind


def _given_momenta(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A BatchNorm without momentum works it out from the value of a counter, which a fake tensor has not."""
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.momentum is None]
    return placed((vars(each), "momentum", 0.0) for each in norms)  # no shape depends on it


def fake_tensors(model: nn.Module, mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """The model's meta tensors as fake CPU tensors while the block runs; shared ones stay shared."""
    spaces = [space for module in model.modules() for space in (module._parameters, module._buffers)]
    held = [(space, key, each) for space in spaces for key, each in space.items() if each is not None]
    twins = {id(each): twin(each, mode) for _, _, each in held}
    return placed((space, key, twins[id(each)]) for space, key, each in held)


def twin(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor like a meta tensor."""
    with mode:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def made_by_eval(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `train(False)` of a model's modules has made, and keeps beside parameters and buffers, by its places.

    It has no values, as nothing here that is made of weights. In evaluations each rank's own modules make it anew.
    """
    own = {storage_of(each) for each in (*parameters(model), *buffers(model))}
    return {
        str(place): each
        for place, each in reach({}, model.named_modules())
        if isinstance(each, torch.Tensor) and each.is_meta and place.origin == MODULE
        and not each.requires_grad and storage_of(each) not in own
    }  # fmt: skip


def _length(value: Any) -> Any:
    """As `x.shape[0]`, which may be a symbol."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


def _symbolic_lengths(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """In the files of a model's forwards `len` gives symbols while the block runs; what is called `len` there stays.

    Of a tensor Python's own makes a number, and the capture would be one for that size.
    """
    forwards = (getattr(type(module), "forward", None) for module in model.modules())
    found = {id(names): names for each in forwards if (names := getattr(each, "__globals__", None)) is not None}
    files = [names for names in found.values() if "len" not in names and names is not globals()]
    return placed((names, "len", _length) for names in files)


@contextlib.contextmanager
def _named_keywords(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """`forward(x, **kwargs)` has the signature of `forward(x, *, y)` while the block runs, where `y` is given.

    torch.export finds by it whose shapes may vary. It looks for an input of `**kwargs` below that name first, and below
    its own in the end as well (torch 2.13, `_get_range_constraints`), so that no form of dynamic shapes fits.
    """
    forward = model.forward
    signature = inspect.signature(forward)
    named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = signature.parameters.keys() - {each.name for each in named}  # its name, where there is one
    others = [name for each in rest for name in signature.bind(*args, **kwargs).arguments.get(each, ())]
    if not others:
        yield
        return
    if strange := [each for each in others if not each.isidentifier() or keyword.iskeyword(each)]:
        raise MarkingError(
            f"the forward of {type(model).__name__} is given {strange[0]!r}, which is no name of a parameter in Python",
            hint="give this input under another name, or within a dict",
        )

    def called(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    given = (inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others)
    called.__signature__ = signature.replace(parameters=[*named, *given])  # type: ignore[attr-defined]
    with placed([(model.__dict__, "forward", called)]):
        yield


_MOVING = ("Module.to.", "Module.cuda.", "Module.cpu.", "Module.ipu.", "Module.xpu.")
"""Methods of torch's whose function gives a tensor with the values of the one that it is given."""


def unmoved(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """In the place of `Module._apply`, which `Module.to` and its kin call.

    Torch writes each tensor anew also where `.to(x.device)` finds it there already, and a capture's tensors cannot be
    written so. A call that changes neither type nor values is none, then; every rank moves its own partitions itself.

    Raises:
        MarkingError: code between partitions converts a module, or changes what it holds.
    """

    def apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **words: Any) -> Any:
        if is_elsewhere():
            return original(module, function, *args, **words)
        own = [*parameters(module), *buffers(module)]
        with torch.no_grad(), _disable_current_modes():
            if all(_is_left(each, function) for each in own):
                return module
        if within_call():
            return original(module, function, *args, **words)
        raise MarkingError(
            f"the forward converts the weights of a {type(module).__name__} outside its partitions, at"
            f" {running_line()}",
            hint="leave that out: each rank moves its own partitions to its device. Convert types in the model's"
            " builder, or compute with a converted tensor, weight.to(dtype)",
        )

    return apply


def _is_left(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a function leaves a tensor as it is, wherever that lies."""
    before = tensor._version
    made = function(tensor)
    if made is tensor:
        return tensor._version == before
    is_moved = getattr(function, "__module__", "") == nn.Module.__module__ and function.__qualname__.startswith(_MOVING)
    return is_moved and (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
