"""Which of a model's modules a capture calls as a whole, which it follows, and which look at a whole micro-batch.

A marked module whose forward is called by that name, `block.forward(x)`: it is a call of the module. Torch runs none of
the module's hooks then. A partition calls its module, so both are the same where there are none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from assigner import formatting as fmt
from assigner.errors import MarkingError
from assigner.model.deferred.memento import placed
from assigner.model.deferred.mutation import storage_of
from assigner.model.deferred.ownership import HOOKS, STANDARD
from assigner.model.deferred.reach import reach
from assigner.model.members import buffers, named_buffers, named_parameters, parameters
from assigner.model.plainvalues import dtype_name
from assigner.usercode import UNKNOWN, running_line, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

TOO_FEW_VALUES = "more than 1 value per channel"
"""What torch says where a batch leaves BatchNorm or InstanceNorm nothing to normalise by."""


def opaque_modules(model: nn.Module, marked: Sequence[str], opened: Container[str] = ()) -> list[str]:
    """The modules whose forward becomes one call: the marked ones, and the largest ones that hold no mark.

    Of unmarked ones that are opened the code is followed.
    """
    found: list[str] = []
    kept = {id(model.get_submodule(name)) for name in marked}

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            inside = any(id(each) in kept for each in child.modules() if each is not child)  # by whatever name
            has_forward = inspect.getattr_static(type(child), "forward") is not nn.Module.forward
            if name in marked or (has_forward and not inside and name not in opened):
                found.append(name)
            else:
                visit(child, name + ".")

    visit(model, "")
    return found


def modules_outside(model: nn.Module, opaque: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules whose own code a capture follows: a model's by name, without opaque ones and what is in them."""
    inner = tuple(f"{name}." for name in opaque)
    return [
        (name, module) for name, module in model.named_modules() if name not in opaque and not name.startswith(inner)
    ]


def modules_inside(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """A module and those in it, by their names in the model."""
    return [*model.get_submodule(name).named_modules(prefix=name)]


def batch_norms(model: nn.Module) -> str | None:
    """The BatchNorm modules of a model that are in training mode, in words; None: there are none."""
    found = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    return f"BatchNorm ({fmt.first_of(found)}) normalises each by itself" if found else None


@contextlib.contextmanager
def unregistered_named(model: nn.Module) -> Iterator[None]:
    """Where the block fails over a module that nobody gives weights, as it is not registered, say so.

    Raises:
        MarkingError: naming the attribute that holds it; else the block's own.
    """
    try:
        yield
    except MarkingError as error:
        found = _unregistered(model) if "meta" in error.message else None
        if found is None:
            raise
        raise found from error


def _unregistered(model: nn.Module) -> MarkingError | None:
    """Of the first attribute of a module that holds weights, or a part of them, which it does not register."""
    registered = {id(each) for each in model.modules()} | {id(each) for each in parameters(model)}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in STANDARD:
                continue
            place = f"{path}.{name}".lstrip(".")
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            for each in items:
                has_weights = isinstance(each, nn.Module) and any(True for _ in parameters(each))
                if id(each) not in registered and (has_weights or isinstance(each, nn.Parameter)):
                    return MarkingError(
                        f"a {type(each).__name__} in {place}, a {type(value).__name__} of Python's, is not registered:"
                        " no optimizer trains it, and no partition has its weights",
                        hint="keep modules in an nn.ModuleList or nn.ModuleDict, or each as an attribute of its own,"
                        " and parameters likewise",
                    )
    named = {name for name, _ in named_buffers(model, remove_duplicate=False)}
    memories = {storage_of(each) for each in (*parameters(model), *buffers(model))}
    for where, each in reach({}, model.named_modules()):
        if not isinstance(each, torch.Tensor) or id(each) in registered or str(where) in named:
            continue
        if each.is_meta and each.grad_fn is None:
            if not each.requires_grad and storage_of(each) not in memories:
                return MarkingError(
                    f"the tensor in the attribute {where} has no values where the forward needs some: eval() of the"
                    " model has made it outside of a partition, or it was on the meta device before",
                    hint="have the train(mode) of a marked module make it, and its forward read it; or make it in the"
                    " forward",
                )
            return MarkingError(
                f"a tensor in the attribute {where} trains, or has the memory of a parameter or a buffer, and"
                " is not registered by that name: partitions have what is registered alone",
                hint="read the parameter or the buffer itself; what trains is to be an nn.Parameter",
            )
    return None


def listed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of a model's parameters that it also holds elsewhere than by their names, as in a list of Python's."""
    met = {id(each) for _, each in reach({}, model.named_modules())}
    return {name: each for name, each in named_parameters(model, remove_duplicate=False) if id(each) in met}


def check_hooks(model: nn.Module, opaque: Sequence[str]) -> None:
    """Refuse backward hooks of modules that are not one call: they have no node to hang on."""
    for name, module in modules_outside(model, opaque):
        if module._backward_hooks or module._backward_pre_hooks:
            raise MarkingError(
                f"{name or type(model).__name__!r} has a backward hook, and partitions inside it",
                hint="register it on a module that is marked, or inside one that is",
            )
    if module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks:
        raise MarkingError(
            "a backward hook is registered for all modules (register_module_full_backward_hook)",
            hint="register it on the modules that it is meant for",
        )


def forwards_called(
    modules: Iterable[nn.Module], names: Mapping[int, str] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Have code in the block that calls `module.forward` call the module.

    Not so within the module's own call, nor where its class has a `__call__` of its own, which does other work.

    Args:
        modules: Those that partitions call.
        names: Of modules, by their ids, of which one that is called so must have no hooks: its partition would run
            them. None: they may.

    Raises:
        MarkingError: such a module has hooks, or all modules have.
    """
    own = {id(each) for each in modules if calling_class(each) is nn.Module}

    def watched(kind: type) -> Callable[[Any, str], Any]:
        plain: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]

        def reading(module: Any, name: str) -> Any:
            found = plain(module, name)
            if name != "forward" or id(module) not in own or _is_within(module):
                return found

            @functools.wraps(found)
            def forward(*args: Any, **kwargs: Any) -> Any:
                if names is not None:
                    _check_unhooked(names[id(module)], module)
                return module(*args, **kwargs)

            return forward

        return reading

    return placed((kind, "__getattribute__", watched(kind)) for kind in {type(each) for each in modules})


def _check_unhooked(name: str, module: nn.Module) -> None:
    if any(getattr(module, each) or getattr(module_hooks, f"_global{each}") for each in HOOKS):
        raise MarkingError(
            f"the forward of {name!r} is called by that name, at {running_line()}: torch runs none of the module's"
            " hooks then, and its partition would",
            hint="call the module itself, or register no hook on it (torch.nn.utils.weight_norm and spectral_norm"
            " do; those of torch.nn.utils.parametrizations do not); or mark a larger module that contains the line",
        )


def calling_class(module: nn.Module) -> type:
    """The class whose `__call__` a module has."""
    return next(each for each in type(module).__mro__ if "__call__" in vars(each))


def accepts(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a module comes to its forward: not where Python finds no places for the arguments.

    True also where hooks may give it other ones, or a `__call__` of its own.
    """
    hooks = (module._forward_pre_hooks, module_hooks._global_forward_pre_hooks)
    if any(hooks) or calling_class(module) is not nn.Module:
        return True
    forward = object.__getattribute__(module, "forward")  # which a capture may watch
    try:
        places = inspect.signature(forward, follow_wrapped=False)
    except (TypeError, ValueError):  # it is none of Python's
        return True
    try:
        places.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_within(module: nn.Module) -> bool:
    """Whether a call of a module is under way in this thread."""
    return any(
        frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        for frame, _ in traceback.walk_stack(sys._getframe(2))
    )


_MOST = 100  # characters of what a module says of itself


def failed_at(error: BaseException) -> str:
    """`at FILE:LINE (code)`; in a library's module that no line of the user's has called, what that was given.

    in Linear(in_features=8, out_features=16, bias=True), given float32[4, 6]
    """
    line = user_line(error)
    return _innermost(error) or f"at {line}" if line == UNKNOWN else f"at {line}"


def _innermost(error: BaseException) -> str:
    """The innermost module whose forward was running, and the tensors that it was called with; empty: there is none."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        code, module = frame.f_code, frame.f_locals.get("self")
        if code.co_name == "forward" and isinstance(module, nn.Module):
            arguments = (frame.f_locals.get(name) for name in code.co_varnames[1 : code.co_argcount])
            given = [f"{dtype_name(each.dtype)}{[*each.shape]}" for each in arguments if isinstance(each, torch.Tensor)]
            said = ""
            with contextlib.suppress(Exception):  # code of others, while one of their errors is told
                said = module.extra_repr()[:_MOST]
            name = f"{type(module).__name__}{said and f'({said})'}"
            return f"in {name}, given {', '.join(given)}" if given else f"in {name}"
    return ""
