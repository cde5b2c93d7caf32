"""Which submodules of a model would be good partitions: repeated ones by a pattern, and large ones beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from assigner.init.draft import MarkPattern
from assigner.model.marking.marks import matches
from assigner.model.members import parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEAST_SHARE = 0.01
"""Of the model's parameters: what is smaller goes with a neighbour."""


Called = Mapping[str, frozenset[str]]
"""The modules whose forward is called, by name, each with those whose results lie behind what it is given."""


def propose(model: nn.Module, called: Called | None = None) -> tuple[MarkPattern, ...]:
    """Patterns of partitions, in the model's order.

    Args:
        model: May lie on the meta device.
        called: What a forward calls; None: not known.

    A list of modules, or a Sequential that repeats a class, gives one partition an item (`layers.*`), wherever it lies.
    What lies beside them and holds a hundredth of the parameters is a partition of its own. In a model that repeats
    nothing each module with a matrix or a kernel is one: a convolution computes much with few parameters. What is
    called again with what another one has made of its results is none: one worker would have to run both.
    """
    marks = _large(model, called)
    names = {name: mark for name, _ in model.named_modules() for mark in marks if matches(mark.pattern, name)}
    behind = {name: (called or {}).get(name, frozenset()) for name in names}
    circles = {
        names[name] for name in names if name in behind[name]
        and any(name in behind[other] for other in behind[name] & names.keys() - {name})
    }  # fmt: skip
    return tuple(mark for mark in marks if mark not in circles)


def not_proposed(model: nn.Module, called: Called | None = None) -> tuple[list[str], list[str], list[str]]:
    """Modules with a matrix that `propose` gives no partition of their own.

    Returns:
        Those not called, those too small, and those called again with what others have made of their results.
    """
    large = [mark.pattern for mark in _large(model, called)]
    names = dict(model.named_modules())  # of a module that several names lead to the first one
    others = [(mark, first) for mark, first in _visit(model, "", _has_matrix)
              if mark.pattern not in large and first in names]  # fmt: skip
    unused = [mark.pattern for mark, first in others if called is not None and first not in called]
    kept = {mark.pattern for mark in propose(model, called)}
    small = [mark.pattern for mark, _ in others if mark.pattern not in unused]
    return unused, small, [each for each in large if each not in kept]


def _large(model: nn.Module, called: Called | None) -> list[MarkPattern]:
    """Patterns of what is repeated or large enough, and called."""
    total = sum(parameter.numel() for parameter in parameters(model)) or 1
    repeats = any(map(_is_repeated, model.modules()))
    found = _visit(model, "", lambda each: _parameters(each) >= LEAST_SHARE * total if repeats else _has_matrix(each))
    names = dict(model.named_modules()) if called is None else called
    return [mark for mark, first in found if first in names]


def _visit(module: nn.Module, prefix: str, counts: Callable[[nn.Module], bool]) -> Iterator[tuple[MarkPattern, str]]:
    """Marks, each with the name of the first module that it names."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_repeated(child):
            first = next(name for name, _ in child.named_children())
            yield MarkPattern(f"{path}.*", len(_items(child))), f"{path}.{first}"
        elif not _has_forward(child) or any(map(_is_repeated, child.modules())):
            yield from _visit(child, f"{path}.", counts)
        elif counts(child):
            yield MarkPattern(path, 1), path


def _is_repeated(module: nn.Module) -> bool:
    """True for a container whose items are alike and are called one by one."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    items = _items(module)
    classes = Counter(type(each) for each in items if _parameters(each))
    return all(map(_has_forward, items)) and bool(classes) and classes.most_common(1)[0][1] > 1


def _items(module: nn.Module) -> list[nn.Module]:
    """The modules of a container, one that it has twice both times; some places may hold None."""
    return [each for each in module._modules.values() if each is not None]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in parameters(module))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in parameters(module))
