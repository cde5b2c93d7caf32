"""What a walk over what code can reach leaves out: what Python and torch keep for themselves."""

from __future__ import annotations

import linecache
import re
import sys

import pytest
from torch import nn

from assigner.model.deferred.memento import Memento
from assigner.model.deferred.reach import reach

cache = {"a": 1}
lines = linecache.cache


class Reads(nn.Module):
    """Looks into caches of several owners."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns, self.loaded = re._cache, sys.modules

    def forward(self, x):
        return x * cache["a"] if "nothing" not in lines else x


@pytest.mark.parametrize("top", ["followed", "read", "whole"])
def test_caches_of_libraries_are_not_met(top):
    """By whatever name; what the user calls a cache is the user's, and what moves in it counts."""
    module = Reads()
    met = {id(each) for _, each in reach({}, [("", module)], top=top)}
    assert met.isdisjoint(map(id, (linecache.cache, re._cache, sys.modules)))
    memento = Memento([("", module)], top="read")
    linecache.cache["<a test's>"] = (1, None, ["x"], "<a test's>")
    try:
        assert memento.changes() == []
    finally:
        del linecache.cache["<a test's>"]
    cache["a"] += 1
    assert [change.name for change in memento.changes()] == ["test_library_caches.cache['a']"]
