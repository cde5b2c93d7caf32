"""For real processes, where this folder is on PYTHONPATH: profiles and traces are measured briefly, memory as ever."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LIMITS = runpy.run_path(str(Path(__file__).resolve().parent.parent / "__init__.py"))["LIMITS"]


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module, and changes its limits."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, limit in LIMITS[module.__name__].items():
            assert hasattr(module, name)
            setattr(module, name, limit)


class Finder(importlib.abc.MetaPathFinder):
    """Of these modules alone."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, _: ModuleType | None = None) -> ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in LIMITS else None
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
