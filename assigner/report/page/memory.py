"""Memory over the simulated step as figures, one entry for each worker; bytes are whole, but for those of `always`.

    always   what is there all the time: parameters, gradients, optimizer state, buffers
    levels   [activations, workspace, messages]: every state of the rest that occurs
    moments  [when, level]: the level holds from then on

Moments are in seconds, to a nanosecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assigner.formats.plan import WorkerPrediction
    from assigner.report.page.shown import Shown
    from assigner.schedule.occupancy import Occupancy


def memory_data(page: Shown) -> list[dict[str, Any]]:
    """What every worker of a plan holds over the step, beside what it may hold."""
    return [_worker(held, said) for held, said in zip(page.memory, page.predicted.workers, strict=True)]


def _worker(held: Occupancy, said: WorkerPrediction) -> dict[str, Any]:
    levels: dict[tuple[int, int, int], int] = {}
    moments = []
    for each in held.held:
        level = (round(each.activations), round(each.workspace), round(each.messages))
        moments.append([round(each.at_s, 9), levels.setdefault(level, len(levels))])
    return {
        "worker": held.worker,
        "capacity_bytes": said.capacity_bytes,
        "allowed_bytes": said.peak_bytes,
        "peak_bytes": held.peak.total,
        "peak_at_s": held.highest.at_s,
        "always": {
            "parameters": held.state.parameters, "gradients": held.state.gradients,
            "optimizer": held.state.optimizer, "buffers": held.state.buffers,
        },
        "levels": [list(level) for level in levels],
        "moments": moments,
    }  # fmt: skip
