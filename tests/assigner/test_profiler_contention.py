"""Links that share a wire are found by what they take together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from assigner.profiler import contention
from assigner.profiler.contention import Directed, SharedWire, find_shared_wires, joined_wires, shared_wires

if TYPE_CHECKING:
    from collections.abc import Sequence

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


class Wires:
    """A cluster where some sets of links share a wire, which they divide.

    Args:
        groups: The links of each wire, and how many of them it carries at full speed.
    """

    def __init__(self, *groups: tuple[set[Directed], int]) -> None:
        self.groups = groups
        self.tried: list[tuple[Directed, ...]] = []

    def slower(self, links: Sequence[Directed]) -> dict[Directed, float]:
        self.tried.append(tuple(links))
        found = dict.fromkeys(links, 1.0)
        for group, lanes in self.groups:
            here = group & set(links)
            for link in here:
                found[link] *= max(1.0, len(here) / lanes)
        return found


def find(wires: Wires, links: Sequence[Directed] = RING) -> list[SharedWire]:
    return shared_wires(links, wires.slower)


def test_links_of_their_own_are_not_suspected() -> None:
    """Where all at once are as fast as alone, nothing more is tried."""
    wires = Wires()
    assert find(wires) == []
    assert wires.tried == [tuple(RING)]


def test_two_wires_are_told_apart() -> None:
    """Two racks' wire carries one direction each: the links of each are named together."""
    wires = Wires(({(0, 1), (2, 3)}, 1), ({(1, 2), (3, 0)}, 1))
    assert find(wires) == [
        SharedWire(((0, 1), (2, 3)), pytest.approx(2)),
        SharedWire(((1, 2), (3, 0)), pytest.approx(2)),
    ]


def test_a_link_beside_a_shared_wire_is_not_named() -> None:
    """Only the links that lose time are said to share."""
    assert find(Wires(({(0, 1), (2, 3)}, 1))) == [SharedWire(((0, 1), (2, 3)), pytest.approx(2))]


def test_a_wire_that_is_full_with_four() -> None:
    """Four links that no two of which disturb each other are one group where all at once are slow."""
    assert find(Wires((set(RING), 2))) == [SharedWire(tuple(RING), pytest.approx(2))]


def test_many_slow_links_are_not_tried_in_pairs() -> None:
    """Of ten links that share a wire, all are named after one trial."""
    links = [(n, n + 1) for n in range(10)]
    wires = Wires((set(links), 1))
    assert find(wires, links) == [SharedWire(tuple(links), pytest.approx(10))]
    assert len(wires.tried) == 1


BACK = [(target, source) for source, target in RING]
UP = {(0, 1), (2, 3), (0, 3), (2, 1)}
DOWN = {(target, source) for source, target in UP}


def both_rounds(wires: Wires) -> list[SharedWire]:
    """Neighbours one way, then the other, then what was found together."""
    return joined_wires([find(wires, links) for links in (RING, BACK)], wires.slower)


def test_a_wire_of_both_rounds_is_one() -> None:
    """What leaves a rack goes over its uplink, to the next rank or to the one before: one wire of four links a way."""
    assert both_rounds(Wires((UP, 1), (DOWN, 1))) == [
        SharedWire(tuple(sorted(UP)), pytest.approx(4)),
        SharedWire(tuple(sorted(DOWN)), pytest.approx(4)),
    ]


def test_wires_of_one_round_each_stay_apart() -> None:
    """Where the other's links change nothing, there are two wires of two links."""
    there, back = {(0, 1), (2, 3)}, {(1, 0), (3, 2)}
    assert both_rounds(Wires((there, 1), (back, 1))) == [
        SharedWire(tuple(sorted(each)), pytest.approx(2)) for each in (there, back)
    ]


def test_wires_of_unlike_many_links_are_one_where_the_fewer_lose() -> None:
    """Four links that take 4 times as long take 6 times beside two of the same wire, which took twice as long."""
    many, few = [(0, 1), (2, 3), (4, 5), (6, 7)], [(1, 0), (3, 2)]
    wires = Wires(({*many, *few}, 1))
    found = joined_wires([find(wires, many), find(wires, few)], wires.slower)
    assert found == [SharedWire(tuple(sorted((*many, *few))), pytest.approx(6))]


def test_many_wires_are_not_tried_with_each_other() -> None:
    """Five of one round and one of the other stay as they are, without a trial."""
    wires = Wires()
    five = [SharedWire(((n, n + 10), (n, n + 20)), 2.0) for n in range(5)]
    one = [SharedWire(((7, 1), (7, 2)), 2.0)]
    assert joined_wires([five, one], wires.slower) == [*five, *one]
    assert wires.tried == []


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_bus_of_gpus_tells_in_less_time(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """Their messages may be larger, and 5 ms are enough to tell; of CPUs that much may be a wait for a core."""
    most: list[int] = []

    def sized(_: object, __: Directed, largest: int) -> int:
        most.append(largest)
        return largest

    monkeypatch.setattr(contention, "_telling_size", sized)

    def together(_: object, links: Sequence[Directed], __: object) -> dict[Directed, float]:
        return {link: 0.005 * (1 + link[0]) * len(links) for link in links}  # each has a time of its own

    monkeypatch.setattr(contention, "_together", together)
    lane: Any = SimpleNamespace(workers=2, reaches_gpu=lambda _: on_gpu)
    found = find_shared_wires(lane, 1 << 40)
    assert found == ([SharedWire(((0, 1), (1, 0)), pytest.approx(2))] if on_gpu else [])
    assert set(most) == {(1 << 28) if on_gpu else (1 << 26)}
