"""Memory corrected by the peaks of a run, upwards only.

    measured = (1 + allocator's share) * (tensors + excess)

What a CPU worker holds beyond its tensors are the holes of its heap, and those grow with all that is held: its share is
raised, so that it holds for other partitions there too. A GPU's allocator leaves hardly any: what was held above the
prediction is workspace that was not profiled. So is on a CPU what no heap's holes explain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assigner.formats.profile import Worker
    from assigner.validation.comparison import WorkerAgreement

MOST_SHARE = 1.0
"""Holes of a heap may become as large as the tensors; more is something that does not grow with them."""
_ROUNDING = 1e-9


def held_beyond(worker: Worker, seen: WorkerAgreement) -> tuple[float, float]:
    """What a worker's peak above its prediction says.

    Args:
        worker: As profiled.
        seen: Its predicted and its measured peak.

    Returns:
        The allocator's share, 0 where it need not be raised, and the bytes of tensors that the workspace lacks.
    """
    if seen.measured_bytes <= seen.predicted_bytes * (1 + _ROUNDING):
        return 0.0, 0.0
    tensors = seen.predicted_bytes / (1 + worker.allocator_share)
    if not worker.device.startswith("cpu") or tensors <= 0:
        return 0.0, seen.measured_bytes / (1 + worker.allocator_share) - tensors
    share = seen.measured_bytes / tensors - 1
    if share <= MOST_SHARE:
        return share, 0.0
    most = max(MOST_SHARE, worker.allocator_share)
    return most, seen.measured_bytes / (1 + most) - tensors
