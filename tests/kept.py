"""Calls whose results are kept for the whole run of the tests.

functools.cache would not do: a capture empties what it keeps in the files of the model's classes (`_clear_caches` in
assigner/model/marking/interception.py), and most workloads stand in one file with their models.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Given = ParamSpec("Given")
Made = TypeVar("Made")


def kept(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """A function that is called once for each set of arguments."""
    made: dict[Any, Made] = {}

    @functools.wraps(make)
    def once(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        key = args, tuple(sorted(kwargs.items()))
        if key not in made:
            made[key] = make(*args, **kwargs)
        return made[key]

    return once
