"""Objects of torch.distributions: what they were given, apart from what their own code keeps on them."""

from __future__ import annotations

import inspect
import operator
import weakref
from typing import Any

from torch.distributions import Distribution, Transform
from torch.distributions.constraints import Constraint
from torch.distributions.utils import lazy_property

WITH_CODE = (Distribution, Transform, Constraint)
"""Classes of torch's whose methods read what their objects have by names of their own."""
_LAST = "_cached_x_y"
"""Where a transform keeps what it has computed last, and of what."""
_met: dict[int, tuple[weakref.ref[Any], frozenset[str]]] = {}
"""Such objects by their ids, and the lazy properties that they had then: what they were given."""


def given_attributes(held: Any) -> dict[str, Any]:
    """What such an object has, without what lazy properties have made since it was first met."""
    names = (name for name in vars(held) if isinstance(inspect.getattr_static(type(held), name, None), lazy_property))
    lazy = frozenset(names)
    key = id(held)
    known = _met.get(key)
    if known is None or known[0]() is not held:
        known = _met[key] = weakref.ref(held, lambda _: _met.pop(key, None)), lazy
    made = (lazy - known[1]) | {_LAST}
    return {name: each for name, each in vars(held).items() if name not in made}


def put_given(held: Any, values: dict[str, Any]) -> None:
    """What lazy properties have made of other values goes, and what a transform has computed last."""
    space, now = vars(held), given_attributes(held)
    if [*now] != [*values] or not all(map(operator.is_, now.values(), values.values())):
        fresh = {_LAST: (None, None)} if _LAST in space else {}
        space.clear()
        space.update(values | fresh)
