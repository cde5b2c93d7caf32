"""Which submodules are partitions: marked in code, by name patterns, or the children of an nn.Sequential."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from torch import nn

from assigner import formatting as fmt
from assigner.errors import MarkingError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ATTRIBUTE = "_assigner_mark"
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Mark:
    """What the user said of one partition: the arguments of `partition`."""

    name: str = ""
    pin: str | None = None
    colocate: str | None = None
    apart: str | None = None
    rematerialise: Literal["never", "always"] | None = None


def partition(
    module: Module,
    *,
    name: str = "",
    pin: str | None = None,
    colocate: str | None = None,
    apart: str | None = None,
    rematerialise: Literal["never", "always"] | None = None,
) -> Module:
    """Mark a submodule as one partition, where the model is built.

    `self.head = assigner.partition(Head(), pin="worker:0")`

    The module stays what it is: same object, same parameter names, same state_dict.

    Args:
        module: The submodule.
        name: The partition's name; left out: the module's name in the model.
        pin: Where it must run: a worker (`worker:1/cpu`), a worker's kind, or a host.
        colocate: A label; partitions with the same label share a worker.
        apart: A label; no two partitions with the same label share a worker.
        rematerialise: "never" (its forward must not run twice) or "always"; left out: as the solver likes.

    Returns:
        The module itself.
    """
    if not isinstance(module, nn.Module):
        raise MarkingError(f"partition() was given {type(module).__name__}", hint="give it an nn.Module")
    if rematerialise not in (None, "never", "always"):
        raise MarkingError(f"rematerialise={rematerialise!r} is not allowed", hint='expected "never" or "always"')
    module.__dict__[_ATTRIBUTE] = Mark(name, pin, colocate, apart, rematerialise)
    return module


def matches(pattern: str, name: str) -> bool:
    """`*` and `?` stand for anything but a dot, `**` for anything: `blocks.*` is each block, not what is in it."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    wild = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.fullmatch("".join(wild.get(part, re.escape(part)) for part in parts), name) is not None


def _example(model: nn.Module) -> str:
    """A pattern that matches something in a model: the items of its first list, or its first submodule."""
    lists = (f"{name}.*" for name, each in model.named_modules()
             if name and isinstance(each, nn.ModuleList | nn.Sequential))  # fmt: skip
    return next(lists, next((name for name, _ in model.named_children()), "blocks.*"))


def find_marks(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, Mark]:
    """The marked submodules by their names in the model.

    Marks in code and patterns add up; a module that several names lead to goes by its first one. With neither, a model
    that is an nn.Sequential has its children as partitions.

    Raises:
        MarkingError: nothing is marked, a pattern matches nothing, one mark lies inside another, a marked module is
            compiled by its own `compile()`, or two partitions have one name.
    """
    names = {name: module for name, module in model.named_modules() if name}
    every = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    first = {id(module): name for name, module in reversed(names.items())}
    marks = {name: module.__dict__[_ATTRIBUTE] for name, module in names.items() if _ATTRIBUTE in module.__dict__}
    for pattern in patterns:
        matched = list(dict.fromkeys(first[id(module)] for name, module in every.items() if matches(pattern, name)))
        if not matched:
            numbered = [re.sub(r"(?<=\.)\d+", "*", name) for name in names]
            raise MarkingError(
                f"mark {pattern!r} matches no submodule of {type(model).__name__}",
                hint=fmt.meant(pattern, [*numbered, *every], "submodules"),
            )
        for name in matched:
            marks.setdefault(name, Mark())
    if not marks and isinstance(model, nn.Sequential):
        marks = {name: Mark() for name, _ in model.named_children()}
    if not marks:
        raise MarkingError(
            f"no partition is marked in {type(model).__name__}",
            hint=f"wrap submodules in assigner.partition(...), or name them: --mark '{_example(model)}'",
        )
    for name in marks:
        outer = next((other for other in marks if name.startswith(other + ".")), None)
        if outer is not None:
            raise MarkingError(
                f"{name!r} is marked and lies inside {outer!r}, which is marked too",
                hint="a partition is never split: drop one of the two marks",
            )
        if names[name]._compiled_call_impl is not None:
            raise MarkingError(
                f"{name!r} is marked, and compiled by its own compile(): a call of it is no call of a module then",
                hint="leave that out: Workload(compile=True) compiles each partition, or takes options for that",
            )
    called = [mark.name or name for name, mark in marks.items()]
    twice = next((name for name in called if called.count(name) > 1), None)
    if twice is not None:
        raise MarkingError(f"two partitions are named {twice!r}", hint="give each its own name")
    return {name: marks[name] for name in names if name in marks}
