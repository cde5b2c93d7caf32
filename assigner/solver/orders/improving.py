"""The best order found for one placement: list scheduling by every rule, then exchanges from the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.solver import tuning
from assigner.solver.contest import ROUNDING
from assigner.solver.orders.bounds import least_step_s
from assigner.solver.orders.every import EveryOrder
from assigner.solver.orders.exchanges import Exchanges
from assigner.solver.orders.listing import list_schedule, made_to_fit, rules_for, zero_bubble
from assigner.solver.orders.tasks import Orders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.solver.orders.tasks import PlacedTasks


@dataclass(frozen=True)
class FoundOrders:
    """Orders of a placement, and how good they are.

    Args:
        orders: Of each worker.
        step_s: Their step.
        bound_s: No order of the placement takes less.
    """

    orders: Orders
    step_s: float
    bound_s: float


def best_orders(
    tasks: PlacedTasks, starts: Iterable[Orders] = (), *, most: int, stop: Callable[[], bool] = lambda: False
) -> FoundOrders | None:
    """The best order that is found for a placement; None: none fits.

    Args:
        tasks: The placement.
        starts: Orders to begin with, as a named schedule's: what is found is never worse than those that fit, and the
            others are followed as far as there is room.
        most: So many tasks are timed at most, by exchanges.
        stop: True: the time is over.
    """
    bound, seen = least_step_s(tasks), set[int]()
    found: list[tuple[float, int, Orders]] = []

    def take(orders: Orders | None) -> bool:
        """Price an order; True: it cannot be better."""
        if orders is not None and not tasks.fits(orders):
            orders = made_to_fit(tasks, orders)
        key = hash(tuple(map(tuple, orders or ())))
        if orders is not None and key not in seen and tasks.fits(orders):
            seen.add(key)
            try:
                found.append((tasks.step_s(orders), len(found), orders))
            except FormatError:  # reductions of several stages would wait for each other
                return False
            return found[-1][0] <= bound * (1 + ROUNDING)
        return False

    if not any(take(orders) for orders in (*starts, zero_bubble(tasks))):
        for rule in rules_for(tasks):
            if stop() or take(list_schedule(tasks, rule)):
                break
    if not found:
        return None
    found.sort()
    step, _, orders = found[0]
    for first, _, start in found[: tuning.ORDER_STARTS]:
        better, value = Exchanges(tasks, most=most // tuning.ORDER_STARTS, stop=stop).run(start, first, enough=bound)
        if value < step:
            step, orders = value, better
        if step <= bound * (1 + ROUNDING) or stop():
            break
    if tasks.count <= tuning.EVERY_TASK and step > bound * (1 + ROUNDING):
        every = EveryOrder(tasks, limit=step * (1 - ROUNDING), nodes=tuning.EVERY_NODES)
        orders = every.run() or orders
        step = min(step, every.value) if every.best else step
        bound = step if every.finished else bound
    return FoundOrders(orders, step, min(bound, step))
