"""The figures as tables that can be pasted into the README."""

from __future__ import annotations

from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from contenders import reference
from intervals import Interval, of_median
from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cases import Case

MIB = 2**20


def _table(*columns: str, texts: int) -> Table:
    """An empty table; the first `texts` columns are words."""
    table = Table(box=box.MARKDOWN)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < texts else "right", no_wrap=True)
    return table


def _slowest(figures: Mapping[str, Any]) -> list[float]:
    """A round's step: that of the rank that took longest."""
    return [max(each) for each in zip(*figures["step_s"], strict=True)]


def _cpu(figures: Mapping[str, Any]) -> list[float]:
    """A round's processor time, the mean of the ranks."""
    return [sum(each) / len(each) for each in zip(*figures["cpu_s"], strict=True)]


def _range(value: Interval, form: str) -> str:
    return f"{value.median:{form}} ({value.low:{form}} to {value.high:{form}})"


def tiny_table(cases: Sequence[Case], figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """Processor time of a micro-batch on one worker, above the hand-written loop's."""
    table = _table(
        "case", "runtime", "CPU us per micro-batch and worker", "above raw, us (95 %)", "step ms",
        "step / raw (95 %)", texts=2,
    )  # fmt: skip
    for case in cases:
        found = figures[case.name]
        for name, mine in found.items():
            raw = found[reference(name)]
            cpu, cpu_raw = ([1e6 * s / case.micro_batches for s in _cpu(each)] for each in (mine, raw))
            above = of_median([a - b for a, b in zip(cpu, cpu_raw, strict=True)])
            table.add_row(
                case.name, name, f"{median(cpu):.0f}", "" if mine is raw else _range(above, ".0f"),
                f"{1e3 * median(_slowest(mine)):.1f}", "" if mine is raw else _range(_ratio(mine, raw), ".2f"),
            )  # fmt: skip
    return table


def _ratio(mine: Mapping[str, Any], raw: Mapping[str, Any]) -> Interval:
    return of_median([a / b for a, b in zip(_slowest(mine), _slowest(raw), strict=True)])


def real_table(figures: Mapping[str, Mapping[str, Any]], peaks: Mapping[str, Mapping[str, Any]]) -> Table:
    """Steps as ratios to those of `reference`, and peak memory."""
    against = "raw" if all(reference(name).startswith("raw") for found in figures.values() for name in found) else "DDP"
    table = _table(
        "case", "runtime", "step ms", "IQR", f"step / {against} (95 %)", "CPU ms a step and worker",
        "peak MiB by rank", texts=2,
    )  # fmt: skip
    for case, found in figures.items():
        for name, mine in found.items():
            raw, steps = found[reference(name)], _slowest(mine)
            low, middle, high = quantiles(steps, n=4, method="inclusive")
            table.add_row(
                case, name, f"{1e3 * middle:.0f}", f"{(high - low) / middle:.0%}",
                "" if mine is raw else _range(_ratio(mine, raw), ".3f"), f"{1e3 * median(_cpu(mine)):.0f}",
                _mib(peaks[case][name]),
            )  # fmt: skip
    return table


def _mib(peaks: Sequence[int | None]) -> str:
    return " + ".join(f"{peak / MIB:.0f}" for peak in peaks if peak is not None)


def remat_table(peaks: Mapping[str, Sequence[int | None]]) -> Table:
    """Peak memory by mode of rematerialisation."""
    modes = list(dict.fromkeys(name.rpartition(", ")[2] for name in peaks))
    table = _table("runtime", *modes, texts=1)
    for who in dict.fromkeys(name.rpartition(", ")[0] for name in peaks):
        table.add_row(who, *(_mib(peaks[f"{who}, {mode}"]) for mode in modes))
    return table


def predicted_table(figures: Mapping[str, Any]) -> Table:
    """Measured throughput as a share of the simulator's."""
    table = _table(
        "plan", "schedule", "predicted ms", "measured ms",
        "measured / predicted throughput (95 %)", texts=2,
    )  # fmt: skip
    for name, plan in figures.items():
        steps, predicted = _slowest(plan), plan["predicted_s"]
        table.add_row(
            name, f"{plan['schedule']} M={plan['micro_batches']}", f"{1e3 * predicted:.0f}",
            f"{1e3 * median(steps):.0f}", _range(of_median([predicted / step for step in steps]), ".3f"),
        )  # fmt: skip
    return table
