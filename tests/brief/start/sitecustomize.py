"""For real processes, where this folder is on PYTHONPATH: `assigner profile` measures briefly, memory as ever."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SECONDS = {
    "assigner.profiler.sampling": {"WARM_UP_S": 0.02, "SAMPLE_S": 0.01, "LIMIT_S": 0.05},
    "assigner.profiler.links": {"_BUDGET_S": 0.02},
    "assigner.profiler.busy": {"_ALONE_S": 0.002, "_STREAM_S": 0.05},
    "assigner.profiler.collectives": {"_STREAM_S": 0.02, "_BUDGET_S": 0.02},
}
"""By module: how long it measures, at most; each of them must have such a name."""


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module, and changes its seconds."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, seconds in SECONDS[module.__name__].items():
            assert isinstance(getattr(module, name), float)
            setattr(module, name, seconds)


class Finder(importlib.abc.MetaPathFinder):
    """Of these modules alone."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, _: ModuleType | None = None) -> ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in SECONDS else None
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
