"""Keywords that a forward takes as `**kwargs`, while it is captured: torch.export wants a parameter for each input."""

from __future__ import annotations

import contextlib
import inspect
import keyword
from typing import TYPE_CHECKING, Any

from assigner.errors import MarkingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn


@contextlib.contextmanager
def named_keywords(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """`forward(x, **kwargs)` has the signature of `forward(x, *, y)` while the block runs, where `y` is given.

    torch.export finds by it whose shapes may vary. It looks for an input of `**kwargs` below that name first, and below
    its own in the end as well (torch 2.13, `_get_range_constraints`), so that no form of dynamic shapes fits.

    Raises:
        MarkingError: a name of `**kwargs` is none that a parameter can have.
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
    before = model.__dict__.get("forward")
    model.__dict__["forward"] = called
    try:
        yield
    finally:
        if before is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = before
