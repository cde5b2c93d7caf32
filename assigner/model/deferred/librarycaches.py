"""What Python and torch keep for themselves as they go: a file may have such a cache by a name of its own.

    from linecache import cache as lines      torch files the source of every graph in it

A walk does not meet it: it moves with what Python, torch and this program do, and says nothing of the model.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_OWNERS = sys.stdlib_module_names | {"torch", "numpy"}
_OTHERS = {("sys", "modules"), ("inspect", "modulesbyfile"), ("warnings", "onceregistry")}
"""Caches that are not called so, by module and name."""


def library_caches() -> Mapping[int, Any]:
    """The caches at the top of modules of Python and torch, by their ids: dicts, sets and lists that are called so."""
    return _found(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _found(_: int) -> dict[int, Any]:
    owners = [each for each in [*sys.modules] if each.partition(".")[0] in _OWNERS]
    pairs = ((owner, name, each) for owner in owners for name, each in list(_top(owner).items()))
    return {
        id(each): each
        for owner, name, each in pairs
        if ("cache" in name.lower() or (owner, name) in _OTHERS) and issubclass(type(each), (dict, set, list, deque))
    }


def _top(module: str) -> dict[str, Any]:
    """The names of a module; some put other objects in their own place in `sys.modules`."""
    found = getattr(sys.modules[module], "__dict__", None)
    return found if isinstance(found, dict) else {}
