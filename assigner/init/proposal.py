"""Which submodules of a model would be good partitions: repeated ones by a pattern, and large ones beside them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from assigner.init.draft import MarkPattern

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

LEAST_SHARE = 0.01
"""Of the model's parameters: what is smaller goes with a neighbour."""


def propose(model: nn.Module, called: Container[str] | None = None) -> tuple[MarkPattern, ...]:
    """Patterns of partitions, in the model's order.

    Args:
        model: May lie on the meta device.
        called: Names of the modules whose forward is called; None: not known.

    A list of modules, or a Sequential that repeats a class, gives one partition an item (`layers.*`), wherever it lies.
    What lies beside them and holds a hundredth of the parameters is a partition of its own. In a model that repeats
    nothing each module with a matrix or a kernel is one: a convolution computes much with few parameters.
    """
    total = sum(parameter.numel() for parameter in model.parameters()) or 1
    repeats = any(map(_is_repeated, model.modules()))
    found = _visit(model, "", lambda each: _parameters(each) >= LEAST_SHARE * total if repeats else _has_matrix(each))
    return tuple(mark for mark, first in found if called is None or first in called)


def not_proposed(model: nn.Module, called: Container[str] | None = None) -> tuple[list[str], list[str]]:
    """Modules with a matrix that `propose` gives no partition of their own: those not called, and those too small."""
    named = {mark.pattern for mark in propose(model, called)}
    others = [(mark, first) for mark, first in _visit(model, "", _has_matrix) if mark.pattern not in named]
    unused = [mark.pattern for mark, first in others if called is not None and first not in called]
    return unused, [mark.pattern for mark, _ in others if mark.pattern not in unused]


def _visit(module: nn.Module, prefix: str, counts: Callable[[nn.Module], bool]) -> Iterator[tuple[MarkPattern, str]]:
    """Marks, each with the name of the first module that it names."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_repeated(child):
            yield MarkPattern(f"{path}.*", len(child)), f"{path}.{next(iter(dict(child.named_children())))}"  # type: ignore[arg-type]
        elif not _has_forward(child) or any(map(_is_repeated, child.modules())):
            yield from _visit(child, f"{path}.", counts)
        elif counts(child):
            yield MarkPattern(path, 1), path


def _is_repeated(module: nn.Module) -> bool:
    """True for a container whose items are alike and are called one by one."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    classes = Counter(type(each) for each in module if _parameters(each))
    return all(map(_has_forward, module)) and bool(classes) and classes.most_common(1)[0][1] > 1


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
