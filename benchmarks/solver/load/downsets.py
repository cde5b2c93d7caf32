"""Downsets: the sets of items that can lie in front of a cut of the line.

A stage of a line is the difference of two downsets. Model graphs are nearly chains and have few; a dynamic program
over them is exact. Where there are too many, those along some topological orders still give good placements.

Source: Tarnawski et al., NeurIPS 2020, section 5 ("ideals").
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from load.items import Items


def all_downsets(items: Items, *, most: int) -> list[int] | None:
    """Every downset as a bit mask, smaller ones first; None: there are more than `most`."""
    needs = [sum(1 << other for other in before) for before in items.before]
    after: list[list[int]] = [[] for _ in needs]
    for item, before in enumerate(items.before):
        for other in before:
            after[other].append(item)
    free = sum(1 << item for item, need in enumerate(needs) if not need)
    layer = {0: free}  # downset: items that can be added
    found = [0]
    while layer:
        following: dict[int, int] = {}
        for held, frontier in layer.items():
            rest = frontier
            while rest:
                bit = rest & -rest
                rest ^= bit
                larger = held | bit
                if larger in following:
                    continue
                opened = sum(1 << k for k in after[bit.bit_length() - 1] if needs[k] & ~larger == 0)
                following[larger] = (frontier ^ bit) | opened
        found += sorted(following)
        if len(found) > most:
            return None
        layer = following
    return found


def along(orders: Iterable[Sequence[int]]) -> list[int]:
    """The downsets that are prefixes of these topological orders, smaller ones first."""
    found = {0}
    for order in orders:
        held = 0
        for item in order:
            held |= 1 << item
            found.add(held)
    return sorted(found, key=lambda held: (held.bit_count(), held))


def some_orders(items: Items, *, count: int, seed: int) -> list[list[int]]:
    """Topological orders: the items' own, breadth first, depth first, then random ones."""
    rng = random.Random(seed)  # noqa: S311 - a search, not a secret
    orders = [list(range(items.count)), _order(items, lambda _: 0), _order(items, lambda free: free - 1)]
    while len(orders) < count:
        stay = rng.choice((0.0, 0.6, 0.9))  # how often the newest branch is followed

        def pick(free: int, stay: float = stay) -> int:
            return free - 1 if rng.random() < stay else rng.randrange(free)

        orders.append(_order(items, pick))
    return orders[:count]


def _order(items: Items, pick: Callable[[int], int]) -> list[int]:
    """The order in which `pick` chooses, by its number, one of so many free items, the newest last."""
    waits = [len(before) for before in items.before]
    after: list[list[int]] = [[] for _ in waits]
    for item, before in enumerate(items.before):
        for other in sorted(before):
            after[other].append(item)
    free = [item for item, number in enumerate(waits) if not number]
    order = []
    while free:
        item = free.pop(pick(len(free)))
        order.append(item)
        for other in after[item]:
            waits[other] -= 1
            if not waits[other]:
                free.append(other)
    return order


def members(downsets: Sequence[int], count: int) -> NDArray[np.bool_]:
    """Row d, column i: downset d holds item i."""
    width = (count + 7) // 8
    packed = np.frombuffer(b"".join(held.to_bytes(width, "little") for held in downsets), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(downsets), width), axis=1, bitorder="little")
    return bits[:, :count].astype(bool)
