"""Who has a stage, as a plan says it: one worker, or several with their shares of the micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.formats.stage import Replica, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import Profile


def held_by(stage: Stage, workers: Sequence[str], shares: Sequence[int], profile: Profile) -> Stage:
    """A stage on workers, each with so many micro-batches; who has none is left out. No shares: one worker has it."""
    threads = {name: profile.worker[name].threads for name in workers}
    if not shares:
        return replace(stage, sole_worker=workers[0], threads=threads[workers[0]])
    held = [(name, share) for name, share in zip(workers, shares, strict=True) if share]
    if len(held) == 1:
        return held_by(stage, [held[0][0]], (), profile)
    return replace(stage, replicas=tuple(Replica(name, share, threads[name]) for name, share in held))
