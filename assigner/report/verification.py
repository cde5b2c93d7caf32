"""What `assigner check` says of a model that it has not refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.sheet import Line

if TYPE_CHECKING:
    from assigner.formats.profile import Verification
    from assigner.report.sheet import Report


def verification_report(found: Verification, entry: str) -> Report:
    """What `assigner check` prints of the workload `entry`."""
    return (
        Line(f"{entry}: {verification_text(found)}", "strong"),
        Line(_way(found)),
        *(Line(f"caution: {text}", "warning") for text in found.cautions),
        *(Line(f"caution: several micro-batches: {text}", "warning") for text in found.per_micro_batch),
    )


def verification_text(found: Verification) -> str:
    """The result and what it took, in one line."""
    took = f"checked in {fmt.seconds(found.seconds)}"
    if found.result == "uncertain":
        return f"the partitions cannot be compared with the model ({took})"
    precision = "to the last bit" if found.exact else "within rounding"
    return f"the partitions compute what the model computes, {precision} ({took})"


def _way(found: Verification) -> str:
    rows = f"{fmt.plural(found.rows, 'row')} in {fmt.plural(found.micro_batches, 'micro-batch')}"
    parts = fmt.plural(found.partitions, "partition")
    if found.way == "pieces":
        return f"{parts}, one at a time for lack of memory: forwards of {rows}"
    if not found.trained:
        return f"{parts} apart from each other: outputs of {rows}"
    return f"{parts} apart from each other: two steps and an evaluation of {rows}, with and without rematerialisation"


def verification_data(found: Verification, entry: str) -> dict[str, Any]:
    """The same for `--json`; seconds are unrounded."""
    return {"kind": "check", "workload": entry, **encode(found)}
