"""What transformers collects while a model runs: the results of its layers, as `hidden_states`.

    model.forward     switches the hooks of its layers on
    layers[0]         -> a hook appends what the layer returned
    model.forward     switches them off, and reads what was collected

A layer that is a partition runs on some worker, where they are off. So they are while it is captured, and what it
returned is collected behind its call, as by code between partitions.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
import sys
import types
from typing import TYPE_CHECKING, Any

from assigner.errors import MarkingError
from assigner.model.deferred.memento import placed
from assigner.model.deferred.ownership import HOOKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from assigner.model.marking.fakeforward import Named

_LIBRARY = "transformers.utils.output_capturing"


def collector_variable() -> Any:
    """The context variable by which hooks are switched on; None: there is none."""
    return getattr(_switch(), "context_var", None)


@contextlib.contextmanager
def switched_off(name: str, inside: Named) -> Iterator[None]:
    """No hook collects anything in the block, in which a partition runs, with its modules.

    Raises:
        MarkingError: it would be of a module within the partition, whose result the partition does not return.
    """
    collected = _collected()
    if collected is None:
        yield
        return
    for inner, module in inside:
        for hook in _hooks(module) if inner != name else ():
            if (key := _closed(hook, "key")) in collected:
                raise MarkingError(
                    f"transformers collects {key!r} of {inner!r}, which is inside of {name!r}: the partition does not"
                    " return them",
                    hint=f"output_{key}=False in the model's config or call, or mark a larger module that reads them",
                )
    switch = _switch()
    if switch.compiling:  # as torch.export has it: a variable of the file's
        with placed([(switch, "global_var", None)]):
            yield
    else:
        token = switch.context_var.set(None)
        try:
            yield
        finally:
            switch.context_var.reset(token)


def collect(name: str, module: nn.Module, args: Sequence[Any], result: Any) -> None:
    """Have a partition's own hooks collect what it has returned, behind all of its hooks.

    It was called with `args`: its hooks before the forward may give that other ones.

    Raises:
        MarkingError: they would collect something else in a plain run: what other hooks may change in the partition.
    """
    collected = _collected()
    hooks = [each for each in _hooks(module) if collected is not None and _closed(each, "key") in collected]
    for hook in hooks:
        key = _closed(hook, "key")
        every = [*module._forward_hooks.values()]
        reads_arguments = _closed(hook, "capture_initial_hidden_state") and key == "hidden_states"
        behind = every[every.index(hook) :]
        if not all(only_looks(each) for each in behind if each not in _hooks(module)):
            _refuse_hook(name, key, "a forward hook registered behind transformers' own may change what it returns")
        if reads_arguments and not collected[key] and not all(map(only_looks, module._forward_pre_hooks.values())):
            _refuse_hook(name, key, "a forward pre-hook may change what it is given, which is the first of them")
        hook(module, args, result)


def only_looks(hook: Callable[..., Any]) -> bool:
    """A hook is a function that returns None whichever way it goes: by its code, for a flag may let it change later."""
    code = getattr(hook, "__code__", None)
    if not isinstance(code, types.CodeType) or code.co_flags & _ENDS_OTHERWISE:
        return False
    steps = [*dis.get_instructions(code)]
    return all(
        (step.opname == "RETURN_CONST" and step.argval is None)
        or (before.opname, before.argval, step.is_jump_target) == ("LOAD_CONST", None, False)
        for before, step in itertools.pairwise(steps) if step.opname in _RETURNS
    )  # fmt: skip


_RETURNS = ("RETURN_VALUE", "RETURN_CONST")
_ENDS_OTHERWISE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _refuse_hook(name: str, key: str, why: str) -> None:
    raise MarkingError(
        f"transformers collects {key!r} of {name!r}, and {why}: the partition returns the end of its forward alone",
        hint=f"output_{key}=False in the model's config or call, or have the model's code do what the hook does (a"
        f" function that returns nothing may stay), or mark a larger module that contains {name!r} and reads them",
    )


def _collected() -> Any:
    """What has been collected so far; None: nothing is to be."""
    switch = _switch()
    return None if switch is None else switch.get()


def _switch() -> Any:
    """What switches the hooks on, and has what they collect; None: the library is not loaded."""
    return getattr(sys.modules.get(_LIBRARY), "_active_collector", None)


def _closed(hook: Callable[..., Any], name: str) -> Any:
    """What one of the library's hooks closes over; None: it has no such name."""
    return inspect.getclosurevars(hook).nonlocals.get(name)


def hooks_of(modules: Named) -> dict[str, list[Any]]:
    """The hooks on some modules, by the modules' names, but for the library's own."""
    return {
        name: [each for kind in HOOKS for each in getattr(module, kind).values() if each not in _hooks(module)]
        for name, module in modules
    }


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    return [each for each in module._forward_hooks.values() if getattr(each, "__module__", None) == _LIBRARY]
