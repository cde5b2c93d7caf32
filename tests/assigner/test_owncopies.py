"""Copies of modules, with the functions, bound methods and references that they hold."""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict

import pytest
import torch
from torch import fx, nn

from assigner.errors import UsageError
from assigner.model.marking.owncopies import own_copy


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.n = 0


class Held(nn.Module):
    """A module for attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.k = 0


def copied(module, known=None):
    """A copy of a module that is a model of its own."""
    return own_copy(module, "", known or {})


def test_functions_lead_to_the_copy():
    """By closures, defaults and attributes, and wherever they are held."""
    module = Held()

    def kept():
        return kept.module

    kept.module = module

    def closing():
        return (module,)

    module.closing, module.kept = lambda: module, kept
    module.default = lambda of=module: of
    module.keyword = lambda *, of=module: of
    module.partial = functools.partial(lambda of, _: of, module)
    module.table = {"a": [lambda: module]}
    module.indirect = lambda: closing()[0]
    module.factory = defaultdict(lambda: module)
    module.cached = functools.lru_cache(lambda: module)
    module.method = types.MethodType(lambda inner: (inner, module), module.inner)
    made = copied(module)
    found = [
        made.closing(), made.kept(), made.default(), made.keyword(), made.partial(0), made.table["a"][0](),
        made.indirect(), made.factory[0], made.cached(), made.method()[1],
    ]  # fmt: skip
    assert all(each is made for each in found)
    assert made.method()[0] is made.inner
    assert module.closing() is module
    assert made.kept.__qualname__ == kept.__qualname__
    assert not hasattr(made.closing, "__wrapped__")


def test_hooks_lead_to_the_copy():
    """A forward hook counts in the copy that it is called in."""
    module = Held()

    def count(*_):
        module.k += 1

    module.inner.register_forward_hook(count)
    (hook,) = copied(module).inner._forward_hooks.values()
    made = hook.__closure__[0].cell_contents
    hook()
    assert (module.k, made.k) == (0, 1)


def test_functions_that_share_names_go_on_sharing_them():
    """Also with one that leads to nothing else; two copies share nothing."""
    module, n = Held(), 0

    def up():
        nonlocal n
        n += module.inner.in_features

    module.up, module.now = up, lambda: n
    one, other = copied(module), copied(module)
    one.up()
    assert (module.now(), one.now(), other.now()) == (0, 2, 0)


def test_a_function_that_calls_itself():
    """The new one calls the new one."""
    module = Held()

    def down(depth):
        return module if depth == 0 else down(depth - 1)

    module.down = down
    made = copied(module)
    assert made.down(3) is made


def test_methods_of_c_and_weak_references_lead_to_the_copy():
    """Also from a submodule to the module that holds it."""
    module = Held()
    module.seen, module.counter = [], Counter()
    module.note, module.reference = module.seen.append, weakref.ref(module.counter)
    module.inner.parent = weakref.ref(module)
    made = copied(module)
    made.note(1)
    assert (module.seen, made.seen) == ([], [1])
    assert made.reference() is made.counter
    assert made.inner.parent() is made


def test_what_leads_to_nothing_copied_stays_the_same_object():
    """Functions of files and of the script's objects, with memory of their own or without."""
    module, memory, script = Held(), [], Counter()
    module.script, module.size = script, 3
    module.plain, module.own, module.of_script = test_a_function_that_calls_itself, lambda: memory, lambda: script
    module.note, module.reference, module.number = memory.append, weakref.ref(script), lambda size=module.size: size
    made = copied(module, {id(script): script})
    assert all(getattr(made, name) is getattr(module, name) for name in ("plain", "own", "of_script", "note"))
    assert made.reference is module.reference
    assert made.number is module.number


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("function", lambda other: lambda: other.bias),
        ("method", lambda other: other.forward),
        ("ReferenceType", weakref.ref),
    ],
)
def test_what_leads_to_another_part(kind, make):
    """It is refused, with both names."""
    model = nn.Sequential(Held(), nn.Linear(2, 2))
    model[0].read = make(model[1])
    with pytest.raises(UsageError, match=rf"0\.read \({kind}\) leads to '1', which is no part of '0'"):
        own_copy(model, "0", {})


class Alone:
    """Copies itself in a way of its own."""

    def __init__(self, call) -> None:
        self.call = call

    def __deepcopy__(self, memo):
        return Alone(self.call)


def test_what_copies_itself_and_leads_to_the_original():
    """It is refused by its attribute."""
    module = Held()
    module.alone = Alone(lambda: module.k)
    with pytest.raises(UsageError, match=r"Held\.alone\.call \(function\) cannot be copied"):
        copied(module)


def test_what_cannot_be_copied():
    """It is refused by its attribute, also in a closure or a hook, and where Python's copying does not end."""
    module = Held()
    iterator = (n for n in range(3))
    module.closing = lambda: module.k + next(iterator)
    with pytest.raises(UsageError, match=r"attribute 'closing' of module '' \(function\) cannot be copied"):
        copied(module)
    module = Held()
    module.ids = defaultdict()
    module.ids.default_factory = module.ids.__len__
    with pytest.raises(UsageError, match=r"attribute 'ids' of module '' .*recursion"):
        copied(module)


def test_hooks_of_what_copies_itself():
    """Torch's graphs leave them out of their copies; what such a hook holds is the copy's."""
    module = Held()
    module.traced = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    module.traced.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    module.traced.register_forward_hook(lambda *given: given[-1] * module.k)
    module.traced.register_full_backward_hook(lambda *given: (given[1][0] * 2,))
    made, x = copied(module), torch.ones(1, 2, requires_grad=True)
    made.k = 3
    weights = [each.detach().clone().requires_grad_() for each in made.traced.parameters()]
    expected = 3 * torch.nn.functional.linear(x + 1, *weights).tanh()
    assert torch.equal(made.traced(x), expected)
    assert not module.traced(x).any()
    (found,), (plain,) = (torch.autograd.grad(each.sum(), x) for each in (made.traced(x), expected))
    assert torch.allclose(found, 2 * plain)
