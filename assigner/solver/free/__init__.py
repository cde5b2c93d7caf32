"""Placements of any shape: branches of a graph on different workers, several stages a worker.

Problem ── Table (prices in numbers) ── Room (memory, remat) ─┬─ Exhaustive ── Rows ── Sweep   small: proven optimum
                                                             ├─ starts ── Wander ── Sweep     larger: good plans
                                                             └─ Bounds, LoadModel             larger: a lower bound
"""

from __future__ import annotations

from assigner.solver.free.setting import settings

__all__ = ["settings"]
