"""Hooks beside those with which transformers collects hidden states."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from assigner.model.marking.collecting import only_looks

SEEN: list[Any] = []


def looks(_module, given, early=False):
    if early:
        return
    SEEN.extend(given)


class Method:
    def looks(self, _module, _given):
        self.seen = True


def may_change(_module, given, factor=None):
    return factor and (given[0] * factor,)


def changes_once(_module, given):
    if SEEN:
        return (given[0] * 2,)
    return None


def falls_through(_module, given):
    return given or None


def yields(_module, given):
    yield given


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (looks, True), (Method().looks, True), (lambda *_: None, True), (may_change, False), (changes_once, False),
        (falls_through, False), (yields, False), (lambda _, given: SEEN.append(given), False), (SEEN.append, False),
        (partial(looks), False),
    ],
)  # fmt: skip
def test_what_only_looks_is_told_by_its_code(hook, expected):
    """A plain function or method that can return nothing but None; what another function gives nobody knows."""
    assert only_looks(hook) is expected
