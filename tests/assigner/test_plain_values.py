"""Plain values through JSON text: they come back as they were, and everything else is refused with its place."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict

import pytest
import torch

from assigner.errors import FormatError, UsageError
from assigner.model.plainvalues import from_json, to_json


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.1, math.inf, "text", [], [1, [2, "list"]], ("tuple", 1), {"a": {"b": [None, (1,)]}},
        {7: "seven", "a": 1, None: [2]}, Counter({3: 2, 5: 1}), {}, {"list": ["dict", {"x": ()}]}, {(1, 2): 3},
        torch.bfloat16, OrderedDict(b=1, a=2), torch.Size([2, 3]),
    ],
)  # fmt: skip
def test_there_and_back(value):
    """Values and their types survive, also lists that look like the marks of another kind."""
    found = from_json(json.loads(json.dumps(to_json(value, "state"))))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (torch.ones(1), r"state is a Tensor"), ({"a": [1, {2}]}, r"state\['a'\]\[1\] is a set"),
        ({"f": print}, r"state\['f'\] is a builtin_function_or_method"),
        ({torch.device("cpu"): 1}, "a key of state is a device"),
    ],
)  # fmt: skip
def test_what_is_not_plain(value, where):
    """The error says where the value is and what it is."""
    with pytest.raises(UsageError, match=where):
        to_json(value, "state")


@pytest.mark.parametrize(
    "found",
    [
        [],
        ["set", 1],
        [1, 2],
        ["dict", 3],
        ["dict", [[["list"]], 1]],
        ["Counter", ["a"]],
        ["Size", "a"],
        ["dtype", "x"],
        ["dtype"],
        ["dtype", []],
    ],
)
def test_what_nobody_wrote(found):
    """A damaged text is no value."""
    with pytest.raises(FormatError, match="checkpoint's state"):
        from_json(found)
