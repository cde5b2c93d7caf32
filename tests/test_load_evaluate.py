"""The evaluator: loads by hand in every convention, and every rule that a placement can break."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from load import (
    DeviceClass,
    LoadProblem,
    Node,
    Option,
    Output,
    Stage,
    Transfer,
    evaluate,
)

from assigner.errors import FormatError


def diamond(transfer: Transfer, **changes) -> LoadProblem:
    """a -> (b, c), b -> d, c -> d; a's output costs 1, b's 2, c's 4; every node takes 10 (20 on the slow class)."""
    problem = LoadProblem(
        nodes=tuple(Node(name, (Option("as is", (10.0, 20.0), stored=2, fixed=1),)) for name in "abcd"),
        outputs=(Output(0, (1, 2), 1.0), Output(1, (3,), 2.0), Output(2, (3,), 4.0)),
        order=((0, 1), (0, 2), (1, 3), (2, 3)),
        devices=(DeviceClass("fast", 2, 100), DeviceClass("slow", 1, 100, pays=False)),
        transfer=transfer,
    )
    return replace(problem, **changes)


def placed(*groups: tuple[int, str]) -> list[Stage]:
    """Stages as (class, letters of nodes), first options."""
    return [Stage(c, tuple("abcd".index(letter) for letter in held), (0,) * len(held)) for c, held in groups]


THREE = placed((0, "a"), (1, "b"), (0, "cd"))


@pytest.mark.parametrize(
    ("transfer", "loads"),
    [
        (Transfer("added"), (11, 20, 20 + 1 + 2)),
        (Transfer("added", factor=3), (13, 20, 20 + 3 + 6)),
        (Transfer("relayed", factor=8), (10, 20, 24)),
    ],
)
def test_loads_by_hand(transfer, loads):
    """A value costs either end once, in every rule; a class that does not pay is left with its compute."""
    found = evaluate(diamond(transfer), THREE)
    assert found.loads == pytest.approx(loads)
    assert found.value == pytest.approx(max(loads))
    assert not found.broken


def test_relayed_values_pass_through_the_stages_between():
    """What a later stage reads, the stages before it receive and send on."""
    line = diamond(Transfer("relayed", factor=20), devices=(DeviceClass("fast", 4), DeviceClass("slow", 0)))
    found = evaluate(line, placed((0, "a"), (0, "b"), (0, "c"), (0, "d")))
    assert found.loads == pytest.approx((20, max(20, 20 * (1 + 2)), 20 * (2 + 4), 20 * (2 + 4)))


def test_replicas_share_compute_and_transfers():
    """On r devices: (compute + (r - 1) / r * sync) / r, transfers 1 / r of their time; each replica is a device."""
    nodes = tuple(Node(name, (Option("as is", (10.0, 20.0)),), sync=4.0) for name in "abcd")
    problem = diamond(
        Transfer("relayed", factor=6), nodes=nodes, replicas=2, devices=(DeviceClass("fast", 3), DeviceClass("slow", 0))
    )
    stages = [replace(placed((0, "abc"))[0], replicas=2), *placed((0, "d"))]
    assert evaluate(problem, stages).loads == pytest.approx(((30 + 12 / 2) / 2, 6 * (2 + 4)))
    assert "3 stages" not in str(evaluate(problem, stages).broken)
    assert evaluate(replace(problem, replicas=1), stages).value == math.inf


def test_memory_by_hand():
    """In flight by the position from the end, by the option of each node."""
    keep, again = Option("keep", (1.0, 1.0), stored=2, fixed=1), Option("again", (2.0, 2.0), fixed=1)
    nodes = tuple(Node(name, (keep, again)) for name in "abcd")
    problem = diamond(Transfer("added"), nodes=nodes, from_end=True)
    stages = [Stage(0, (0, 1), (0, 1)), Stage(1, (2, 3), (0, 0))]
    assert evaluate(problem, stages).memory == pytest.approx((2 * 2 + 1 + 1, 1 * (2 + 2) + 2))


@pytest.mark.parametrize(
    ("changes", "stages", "says"),
    [
        ({}, placed((0, "a"), (0, "bc")), "d is not placed"),
        ({}, [*THREE[:2], *placed((0, "bcd"))], "b is placed twice"),
        ({}, placed((1, "ab"), (1, "cd")), "2 stages on 1 devices of class slow"),
        ({}, placed((0, "ad"), (0, "bc")), "b lies behind d"),
        ({"devices": (DeviceClass("fast", 2, 5), DeviceClass("slow", 1))}, THREE, "needs 6 of 5 bytes"),
        (
            {"nodes": tuple(Node(n, (Option("as is", (1.0, math.inf)),), "x" if n in "ad" else None) for n in "abcd")},
            THREE,
            "colour x is on 2 devices",
        ),
    ],
)
def test_broken_rules_are_named(changes, stages, says):
    """A placement that breaks a rule has an infinite value and says which rule."""
    found = evaluate(diamond(Transfer("added"), **changes), stages)
    assert found.value == math.inf
    assert any(says in each for each in found.broken), found.broken


def test_a_node_with_the_wrong_number_of_times_is_refused():
    """One time for each class of devices."""
    with pytest.raises(FormatError, match="node a"):
        diamond(Transfer("added"), nodes=(Node("a", (Option("as is", (1.0,)),)),))
