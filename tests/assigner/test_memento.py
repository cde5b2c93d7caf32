"""What is met in Python, put back, and told from what it was."""

from __future__ import annotations

import argparse
import functools
import random
import sys
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import AffineTransform, Categorical

from assigner.model.deferred.memento import ABSENT, Memento

TOTAL = {"calls": 0}


class Numbers(list[int]):
    """A list with an attribute."""

    total = 0


class Slots:
    """Two places, one of them with a name of its class's own."""

    __slots__ = ("__own", "ticks")

    def __init__(self) -> None:
        self.ticks, self.__own = 0, 0

    def tick(self) -> None:
        """Both."""
        self.ticks += 1
        self.__own += 1

    def read(self) -> Any:
        """Both."""
        return self.ticks, self.__own


class Box:
    """Holds something."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Counts(nn.Module):
    """A number of its own."""

    calls = 0


def closed(deep: bool = False) -> tuple[Any, Any, Any]:
    """A function that counts in its closure, or in an object there."""
    count, box = 0, Box({"n": 0})

    def change(*_: Any) -> None:
        nonlocal count
        if deep:
            box.inner["n"] += 1
        else:
            count += 1

    return change, change, lambda: (count, box.inner["n"])


def attribute() -> tuple[Any, Any, Any]:
    """A function that counts in its own attribute."""

    def change(*_: Any) -> None:
        change.count = getattr(change, "count", 0) + 1  # type: ignore[attr-defined]

    return change, change, lambda: vars(change).get("count")


def defaults() -> tuple[Any, Any, Any]:
    """One that counts in a default."""

    def change(seen: Any = Counter(), *, more: Any = defaultdict(int)) -> None:  # noqa: B006 - what is tested
        seen["n"] += 1
        more["n"] += 1

    seen, more = change.__defaults__[0], change.__kwdefaults__["more"]  # type: ignore[index]
    return change, change, lambda: (dict(seen), dict(more))


def reads() -> tuple[Any, Any, Any]:
    """One that counts in a name of its file, by another function."""
    return called, called, lambda: dict(TOTAL)


def called() -> None:
    """Calls one that counts."""
    count()


def count() -> None:
    """At the top of this file."""
    TOTAL["calls"] += 1


class Keeps:
    """For all of its objects."""

    seen: ClassVar[list[int]] = []
    table: ClassVar[dict[str, int]] = {"n": 0}

    @classmethod
    def add(cls, *_: Any) -> None:
        """One."""
        cls.table["n"] += 1


def closed_by_static_method() -> tuple[Any, Any, Any]:
    """What one closes over."""
    change, _, read = closed()

    class Local:
        @staticmethod
        def run() -> None:
            change()

    return Box(Local()), Local.run, read


def closed_by_property() -> tuple[Any, Any, Any]:
    """What one closes over, of the object's class."""
    change, _, read = closed(deep=True)

    class Local:
        @property
        def run(self) -> None:
            change()

    made = Local()
    return Box(made), lambda: made.run, read


def numpy_state(made: Any) -> Any:
    """Of a generator."""
    return made.bit_generator.state["state"]["state"]


def method() -> tuple[Any, Any, Any]:
    """A method in a partial."""
    slots = Slots()
    change = functools.partial(Slots.tick, slots)
    return functools.partial(change), change, slots.read


def bound() -> tuple[Any, Any, Any]:
    """A list's own method."""
    seen: list[int] = []
    return seen.append, lambda: seen.append(1), lambda: list(seen)


def of(made: Any, change: Any, read: Any) -> tuple[Any, Any, Any]:
    """An object, in another one."""
    return Box([made]), lambda: change(made), lambda: read(made)


def inner_module() -> tuple[Any, Any, Any]:
    """A module in a list in an object."""
    inner = nn.Sequential(Counts())
    return Box([inner]), lambda: setattr(inner[0], "calls", 3), lambda: inner[0].calls


def deep() -> tuple[Any, Any, Any]:
    """Deeper than Python recurses."""
    bottom: list[Any] = []
    made = bottom
    for _ in range(5000):
        made = [made]
    return made, lambda: bottom.append(1), lambda: len(bottom)


def adds(key: str) -> Any:
    """Sets an attribute."""
    return lambda made: setattr(made, key, getattr(made, key, 0) + 1)


CASES = {
    "closure": closed,
    "object in a closure": lambda: closed(deep=True),
    "attribute of a function": attribute,
    "defaults": defaults,
    "names of the file": reads,
    "partial": method,
    "append": bound,
    "module in an object": inner_module,
    "deep": deep,
    "slots": lambda: of(Slots(), Slots.tick, Slots.read),
    "namespace": lambda: of(argparse.Namespace(n=1), adds("n"), lambda made: vars(made).copy()),
    "simple namespace": lambda: of(types.SimpleNamespace(n=1), adds("n"), lambda made: vars(made).copy()),
    "user dict": lambda: of(UserDict(a=1), lambda made: made.update(a=2), dict),
    "user list": lambda: of(UserList([1]), lambda made: made.append(2), list),
    "counter": lambda: of(Counter("ab"), lambda made: made.update("a"), dict),
    "default dict": lambda: of(defaultdict(list), lambda made: made["a"], dict),
    "ordered": lambda: of(OrderedDict(a=1, b=2), lambda made: made.move_to_end("a"), list),
    "reordered": lambda: of({"a": 1, "b": 2}, lambda made: made.update(a=made.pop("a")), list),
    "list of a class": lambda: of(Numbers([1]), adds("total"), lambda made: vars(made).get("total")),
    "deque": lambda: of(deque([1], maxlen=1), lambda made: made.append(2), list),
    "bytes": lambda: of(bytearray(b"a"), lambda made: made.append(1), bytes),
    "set": lambda: of({1}, lambda made: made.add(2), set),
    "large array": lambda: of(np.zeros(3000), lambda made: made.__setitem__(1500, 1e-12), lambda made: made.tolist()),
    "array with none": lambda: of(np.array([np.nan, 1]), lambda made: made.__setitem__(1, 2), str),
    "numpy's generator": lambda: of(np.random.default_rng(1), lambda made: made.random(), numpy_state),
    "numpy's old generator": lambda: of(
        np.random.RandomState(1), lambda made: made.rand(), lambda made: made.get_state()[2]
    ),
    "python's generator": lambda: of(random.Random(1), lambda made: made.random(), lambda made: made.getstate()),
    "torch's generator": lambda: of(
        torch.Generator(), lambda made: torch.rand(1, generator=made), lambda made: made.get_state().tolist()
    ),
    "list of the class": lambda: of(Keeps(), lambda made: made.seen.append(1), lambda made: list(made.seen)),
    "dict of the class": lambda: of(Keeps(), Keeps.add, lambda _: dict(Keeps.table)),
    "static method": closed_by_static_method,
    "property": closed_by_property,
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_put_back(case: str) -> None:
    """Whatever has changed is as it was, and as it was again."""
    for as_other in (True, False):
        held, change, read = CASES[case]()
        module = Counts()
        module.held = held
        memento = Memento((), [held]) if as_other else Memento([("m", module)])
        before = read()
        change()
        now = read()
        assert now != before
        if case not in ("reordered", "ordered"):
            assert memento.has_changed()
        with memento.restored():
            assert read() == before
        assert read() == now
        with memento.put_back():
            change()
        assert read() == before
        assert not memento.has_changed()
        assert memento.changes() == []


def test_hooks_are_met() -> None:
    """Those of forwards always, those of backwards where they are asked for."""
    forward, _, ahead = closed()
    backward, _, behind = closed(deep=True)
    module = nn.Linear(1, 1)
    module.register_forward_hook(forward)
    module.register_full_backward_hook(backward)
    for backwards in (True, False):
        memento = Memento([("m", module)], backwards=backwards)
        before = ahead(), behind()
        with memento.put_back():
            module(torch.ones(1, 1, requires_grad=True)).sum().backward()
        assert ahead() == before[0]
        assert (behind() == before[1]) is backwards


def test_inference_tensors_are_left_out() -> None:
    """torch counts no changes of theirs."""
    module = nn.Linear(1, 1)
    with torch.inference_mode():
        module.seen = torch.zeros(1)
    memento = Memento([("m", module)])
    assert memento.tensors == []
    assert not memento.has_changed()
    module.seen = torch.zeros(1)
    assert memento.has_changed()


def test_changes_have_names() -> None:
    """As code would write them: attributes, items, what is closed over, and the class's own."""
    module = Counts()
    module.held = {"a": [1], "b": Box(2)}
    change, _, _ = closed()
    module.register_forward_hook(change)
    memento = Memento([("net.one", module)])
    module.calls = 3
    module.held["a"].append(2)
    module.held["b"].inner = 5
    module.held["c"] = 0
    change()
    Counts.calls = 4
    try:
        found = {each.name: (each.key, each.before, each.now) for each in memento.changes()}
    finally:
        memento.restore()
    assert found == {
        "net.one.calls": ("calls", ABSENT, 3),
        "net.one.held['a']": (None, (1,), (1, 2)),
        "net.one.held['b'].inner": ("inner", 2, 5),
        "net.one.held['c']": ("c", ABSENT, 0),
        "count": (None, [0], [1]),
        "Counts.calls": ("calls", 0, 4),
    }
    assert (Counts.calls, module.calls, module.held["a"]) == (0, 0, [1])


class ReadsFile(nn.Module):
    """By a function of its file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scaled."""
        return x * scale()


SCALE, UNREAD = 2.0, 3.0


def scale() -> float:
    """What the file says."""
    return SCALE


@pytest.mark.parametrize(("top", "seen"), [("followed", set()), ("read", {"SCALE"}), ("whole", {"SCALE", "UNREAD"})])
def test_names_of_files(top: Any, seen: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that code reads, or all; nobody could put back what another function binds there."""
    memento = Memento([("", ReadsFile())], top=top)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 4.0)
    monkeypatch.setattr(sys.modules[__name__], "UNREAD", 4.0)
    changes = memento.changes()
    assert {each.key for each in changes} == seen
    assert all(each.is_beyond and each.name == f"test_memento.{each.key}" for each in changes)


def test_what_lazy_properties_make_is_no_change():
    """Of a distribution or a transform; another value in the place of what it was given is one, and is put back."""

    def prior():
        return given

    given = Categorical(logits=torch.zeros(4))
    kept = Memento((), [prior])
    given.entropy()
    assert "probs" in vars(given)
    assert not kept.has_changed()
    given.logits = torch.ones(4)
    assert kept.has_changed()
    kept.restore()
    assert torch.equal(given.probs, torch.full((4,), 0.25))


def test_a_transform_goes_on_behind_what_is_put_back():
    """What it has computed last of other values is forgotten."""

    def scaled(x):
        return given(x)

    given = AffineTransform(torch.zeros(2), torch.ones(2), cache_size=1)
    kept, x = Memento((), [scaled]), torch.ones(2)
    scaled(x)
    assert not kept.has_changed()
    given.loc = torch.ones(2)
    scaled(x)
    kept.restore()
    assert torch.equal(scaled(x), x)


def test_what_is_hung_on_a_layer_of_torchs_is_met_whatever_hung_on_another():
    """A library's flag on one LayerNorm does not stand for a count on the next one: they have as many attributes."""

    def hung(name, value):
        norm = nn.LayerNorm(2)
        setattr(norm, name, value)
        return norm

    counts = {"calls": 0}
    Memento([("", hung("_is_initialized", True))])
    kept = Memento([("", hung("counts", counts))])
    counts["calls"] += 1
    assert kept.has_changed()


def test_others_of_one_type_are_all_met():
    """A loss and a metric that are functions both, each with what it closes over."""
    first, second = list[int](), list[int]()
    kept = Memento((), [lambda: first.append(0), lambda: second.append(0)])
    for each in (first, second):
        each.append(0)
        assert kept.has_changed()
        each.clear()
        assert not kept.has_changed()
