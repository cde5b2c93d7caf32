"""A marked module whose forward is called by that name, `block.forward(x)`: it is a call of the module.

Torch runs none of the module's hooks then. A partition calls its module, so both are the same where there are none.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import nn
from torch.nn.modules import module as module_hooks

from assigner.errors import MarkingError
from assigner.usercode import running_line

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterable, Iterator, Mapping

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def forwards_called(
    modules: Iterable[nn.Module], check: Callable[[nn.Module], None] = lambda _: None
) -> Iterator[None]:
    """Have code in the block that calls `module.forward` call the module.

    Not so within the module's own call, nor where its class has a `__call__` of its own, which does other work.

    Args:
        modules: Those that partitions call.
        check: Is given a module before its forward is called by that name.
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
                check(module)
                return module(*args, **kwargs)

            return forward

        return reading

    with contextlib.ExitStack() as stack:
        for kind in {type(each) for each in modules}:
            stack.enter_context(mock.patch.object(kind, "__getattribute__", watched(kind)))
        yield


def check_unhooked(names: Mapping[int, str]) -> Callable[[nn.Module], None]:
    """A check for `forwards_called`: a call by that name leaves out what a partition would do.

    Args:
        names: The modules' names in the model, by their ids.
    """

    def check(module: nn.Module) -> None:
        """Raises a MarkingError: the module has hooks, or all modules have."""
        if any(getattr(module, each) or getattr(module_hooks, f"_global{each}") for each in _HOOKS):
            raise MarkingError(
                f"the forward of {names[id(module)]!r} is called by that name, at {running_line()}: torch runs none of"
                " the module's hooks then, and its partition would",
                hint="call the module itself, or register no hook on it (torch.nn.utils.weight_norm and spectral_norm"
                " do; those of torch.nn.utils.parametrizations do not); or mark a larger module that contains the line",
            )

    return check


def calling_class(module: nn.Module) -> type:
    """The class whose `__call__` a module has."""
    return next(each for each in type(module).__mro__ if "__call__" in vars(each))


def _is_within(module: nn.Module) -> bool:
    """Whether a call of a module is under way in this thread."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False
