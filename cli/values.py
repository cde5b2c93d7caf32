"""Texts and paths of the line as they are, without the schema library that typer converts every value with.

Loading it takes longer than most commands need for all of their work. Numbers and choices that are given still go its
way, for its checks; a default needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PLAIN = {str: str, Path: Path, list[str]: str, list[Path]: Path}


class Plain:
    """Takes the place of what typer converts the values of one option or argument with.

    Args:
        param: The option or argument.
    """

    def __init__(self, param: Any) -> None:
        self._make, self._default = _PLAIN.get(param.type_descriptor.annotation), param.default
        self._typers = param.get_runtime_param

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value as the command gets it."""
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if type(value) is type(self._default) and value == self._default:
            return value
        texts = list(value) if several and not isinstance(value, str) else [value]
        if self._make is None or any(not isinstance(text, str) or "\0" in text for text in texts):
            return self._typers().coerce(value, param=param, ctx=ctx)
        made = [self._make(text) for text in texts]
        return made if several else made[0]


def take_plainly(params: list[Any]) -> None:
    """Let these options and arguments take their values so."""
    for param in params:
        plain = Plain(param)
        param.get_runtime_param = lambda plain=plain: plain


def switched_off(option: Any) -> Any:
    """An option for help as a switch that is off; its own default is None, which has to be converted."""
    if option is not None:
        option.default = False
    return option
