"""What `train` and `eval` of a model's own do, and those of its parts, which a pipeline has copies of.

the root's train(False)    what it sets of a part, numbers and texts, is set on the part's copy
a part's own               is called on the copy: it may merge weights, which no other can
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from assigner import formatting as fmt
from assigner.errors import UsageError
from assigner.model.deferred.codenames import words_in
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import ABSENT, Memento
from assigner.model.deferred.ownership import home_of, is_users
from assigner.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from assigner.model.deferred import DeferredModel


def settle_mode(model: Any) -> None:
    """Have modules with a `train` of their own do what it does: one may keep its BatchNorm in eval mode.

    A training script calls it on the model before its loop. What nn.Module's own `train` would do beside that, to
    parts that the builder has in another mode, is taken back. A `train` that is another method is refused.
    """
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    for name, module in modules.items():
        if _has_own(module):
            _check_switch(name, module)
    switch_modes(modules.values(), {module: module.training for module in modules.values()})


def _has_own(module: nn.Module) -> bool:
    return type(module).train is not nn.Module.train


def train_methods(modules: Iterable[nn.Module]) -> list[FunctionType]:
    """What runs of the classes of those with a `train` of their own where it is called: that, and what it names."""
    found: dict[FunctionType, None] = {}
    waiting = [(type(each), "train") for each in modules if _has_own(each)]
    while waiting:
        kind, name = waiting.pop()
        for method in (vars(base).get(name) for base in kind.__mro__):
            if isinstance(method, FunctionType) and is_users(home_of(method)) and method not in found:
                found[method] = None
                waiting += ((kind, word) for word in words_in(method.__code__))
    return [*found]


def _check_switch(name: str, module: nn.Module) -> None:
    parameters = [*inspect.signature(type(module).train).parameters.values()][1:]
    first = parameters[0] if parameters else inspect.Parameter("none", inspect.Parameter.KEYWORD_ONLY)
    is_mode = first.name == "mode" or isinstance(first.default, bool) or first.annotation in (bool, "bool")
    if not is_mode and first.kind is not inspect.Parameter.VAR_POSITIONAL:
        raise UsageError(
            f"{type(module).__name__} ({name or 'the model'}) has a method train({', '.join(map(str, parameters))}) in"
            " the place of nn.Module's train(mode=True), which train() and eval() of a model call to switch the mode",
            hint="give the method another name, as fit",
        )


def switch_modes(modules: Iterable[nn.Module], flags: Mapping[nn.Module, bool]) -> None:
    """Call `train` of those that have one of their own, as `train` and `eval` of a model do.

    One within another is called by that, and again only if its mode is another one. Flags that are merely the mode's,
    as nn.Module's `train` sets them, stay as they were. Modules come parents first; one without a flag is evaluated.
    """
    reached: dict[nn.Module, bool] = {}
    for module in modules:
        mode = flags.get(module, False)
        if _has_own(module) and reached.get(module) is not mode:
            before = {each: each.training for each in module.modules()}
            module.train(mode)
            for each, flag in before.items():
                reached[each] = mode
                if each.training is mode:
                    each.training = flag


def eval_attributes(deferred: DeferredModel, parts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the model's `eval()` leaves on its modules where `eval()` of the parts, by name, leaves something else.

    By each name of a module attributes and their values: `training`, and of parts numbers and texts, or ABSENT. Where
    it changes something else of a part it is refused.
    """
    model = deferred.model
    modules = {name: each for part in parts for name, each in model.get_submodule(part).named_modules(prefix=part)}
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    built = Memento(modules.items())
    with deferred.mode(training=False):
        whole = {(id(each.holder), each.key): each for each in built.changes()}
        found: dict[str, dict[str, Any]] = {
            name: {"training": module.training} for module, each in names.items() for name in each
        }
    with deferred.mode(training=True):
        switch_modes(modules.values(), {})
        own = {(id(each.holder), each.key): each for each in built.changes()}
    for place, change in {**own, **whole}.items():
        wanted = change.now if place in whole else change.before
        made = own[place].now if place in own else change.before
        is_same = repr(wanted) == repr(made) if _is_plain(wanted) else place in own  # which makes it anew
        if is_same or change.key == "training":
            continue
        if isinstance(change.holder, nn.Module) and change.holder in names and _is_plain(wanted):
            for name in names[change.holder]:
                found[name][change.key] = wanted
            continue
        raise UsageError(
            f"eval() of {type(model).__name__}, the model, changes {change.name}, of which a partition has a"
            " copy: only numbers and texts that are attributes of its modules are set there",
            hint="do it in train(mode) of the partition's module, which is called there; or set a number or a flag",
        )
    return found


def left_in_eval(deferred: DeferredModel) -> str | None:
    """The parts with parameters that train in eval mode although `train()` of the model would switch them, in words.

    None: there are none in which the mode matters. One that is a layer by itself somebody has put in that mode.
    """
    now = {module for module in deferred.model.modules() if not module.training}
    found: list[str] = []
    with deferred.mode(training=True):
        with user_code("the model's train()"):
            deferred.model.train()
        for name, module in deferred.model.named_modules():
            if module in now and module.training and not any(f"{name}.".startswith(f"{each}.") for each in found):
                found.append(name)
    parts = {name: deferred.model.get_submodule(name) for name in found if name}
    named = [name for name, part in parts.items() if _trains(part) and any(map(_has_modes, part.children()))]
    if not named:
        return None
    return (
        f"{fmt.first_of(named)}: built in eval mode, as from_pretrained gives it, and trained: without dropout, and its"
        " BatchNorm with the statistics that it has; model.train() at the end of the builder switches it, as it does"
        " in front of a training loop"
    )


def _trains(part: nn.Module) -> bool:
    return any(each.requires_grad for each in part.parameters())


def _has_modes(part: nn.Module) -> bool:
    return any(
        (isinstance(each, _NormBase) and each.running_mean is not None)
        or any(isinstance(rate := vars(each).get(key), float) and rate > 0 for key in ("p", "dropout", "drop_prob"))
        for each in part.modules()
    )


def _is_plain(value: Any) -> bool:
    return value is ABSENT or type(value) in ATOMS
