"""Bytes as figures of three digits: what a flag takes, and what a bisection steps through."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.solver.why.family import least

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.formats.plan import Plan


def _unit(size: float) -> fmt.Unit:
    return fmt.byte_unit(size or 1.0)  # nothing is told in bytes


def grain(size: float) -> float:
    """The bytes of one in the third digit of `size`, in its unit."""
    unit = _unit(size).size
    return unit * 10.0 ** (math.floor(math.log10(max(size / unit, 1.0)) + 1e-12) - 2)


def figure(size: float) -> str:
    """Bytes as a flag takes them, `1.25GiB`; what needs more than six digits in its unit is in bytes."""
    unit = _unit(size)
    text = f"{size / unit.size:.6g}"
    return f"{text}{unit.name}" if abs(float(text) * unit.size - size) < 0.5 else f"{size:.0f}B"


def floored(size: float) -> float:
    """The largest figure of three digits up to `size`, as it is read again from its text."""
    return _read(math.floor(size / grain(size) * (1 + 1e-12)) * grain(size))


def ceiled(size: float) -> float:
    """The smallest figure of three digits from `size` on, as it is read again from its text."""
    return _read(math.ceil(size / grain(size) * (1 - 1e-12)) * grain(size))


def _read(size: float) -> float:
    unit = _unit(size).size
    return float(f"{size / unit:.6g}") * unit


def least_figure(low: float, high: float, enough: Callable[[float], Plan | None]) -> tuple[float, Plan | None]:
    """The least figure of three digits that is enough.

    Args:
        low: Bytes that are not enough.
        high: Bytes that are.
        enough: A plan with so many bytes; None: there is none.

    Returns:
        The bytes with a plan; None where only `high`, rounded up, was found to be enough.
    """
    plan: Plan | None = None
    step = grain(high)

    def many(number: int) -> Plan | None:
        return enough(_read(number * step))

    while True:
        number, found = least(math.floor(low / step), math.ceil(high / step), many)
        low, high, plan = (number - 1) * step, _read(number * step), found or plan
        if grain(high) >= step:
            return high, plan
        step = grain(high)
