"""Whom a rank blames that misses another one, and in which words: by what it has seen itself, and what others tell.

its connection broke, and it tells nothing           its process is gone, cut off or stuck
it waits for a third rank, which tells nothing       so is that one
it waits for a third rank, which is at something     others wait for that one in vain
all wait in a circle                                 it did not answer in time, and waits for another itself
its host does not answer                             that is cut off, or this rank's
the store that tells of others is gone, or stopped   so is host 0, which keeps it, or the launcher
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from assigner.launch.sockets import SILENCE_S
from assigner.location import rank_name
from assigner.runtime.failures.cause import Failure
from assigner.runtime.failures.questions import awaited_last

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.runtime.failures.questions import Doing

SILENT_HINT = "its own output, and its host, may say why"
CUT_HINT = f"a network that fails for {SILENCE_S:g} s ends a run, whatever timeout_s is"
NO_STORE_HINT = "rank 0, or the launcher, keeps the store: its own output, and its host, may say why"
_LATE_HINT = "where a rank may be late, as with its data, Pipeline(timeout_s=...) has the others wait longer"
_LATE = re.compile(r"[Tt]imed out|[Tt]ime-?out|took no message")
_LAUNCHER = "the launcher"


class MissedRank(NamedTuple):
    """A rank to which a connection broke, or that did not come, as the one sees it that misses it."""

    peer: str  # it, in words: "worker:1/cpu", "one of ...", "another worker"
    by: str  # the worker that misses it
    noticed: str  # who has noticed, where and how
    is_late: bool  # it was waited for in vain
    is_cut: bool  # a host does not answer
    is_alone: bool  # nor does any other than this one
    tells: bool  # ranks tell each other what they do

    @property
    def _either(self) -> str:
        silent = f"it did not answer for {SILENCE_S:g} s"
        return f"{silent}: its host is cut off, or that of {self.by}, or the wire loses much"

    @property
    def failure(self) -> Failure:
        """What is said where nobody tells more."""
        who, why, hint = self.peer, "its process is gone, cut off or stuck", SILENT_HINT
        if self.is_cut and self.is_alone:
            why = "its host is cut off, or its wire loses much: no other host answers"
            who, hint = self.by, CUT_HINT
        elif self.is_cut:
            why, hint = self._either, CUT_HINT
        elif self.is_late and not self.tells:
            why, hint = "it did not answer in time", _LATE_HINT
        return Failure(who, "", f"{why}; {self.noticed}", hint=hint)

    def among(self, doings: Mapping[int, Doing], *, rank: int, ranks: int) -> Failure:
        """Likewise, of all that ranks have told of what they do: whom others wait for. `rank` misses it."""
        mine, last = self.failure, awaited_last(self.peer, rank, doings, ranks)
        is_peer = last is None or f"worker:{last[0]}" == rank_name(self.peer)
        if last is not None and last[1] is None:  # it does not answer
            return mine if is_peer else replace(mine, worker=f"worker:{last[0]}")
        if is_peer and not self.is_late:
            return replace(mine, error=f"the connection to it broke, and its process is there; {self.noticed}")
        if last is None or last[1] is None:
            at = next((each.at for each in doings.values() if rank_name(each.worker) == rank_name(self.peer)), "")
            where = f", at {at}" if at else ""
            error = f"it did not answer in time, and waits for another itself{where}; {self.noticed}"
            return replace(mine, error=error, hint=_LATE_HINT)
        at, for_s = last[1].at, last[1].for_s
        what = f"it is at {at}" if at else "it is in no call of the pipeline"
        error = f"others wait for it in vain: {what}, for {for_s:.0f} s by now; {self.noticed}"
        return Failure(last[1].worker, "", error, hint=_LATE_HINT)

    def without_store(self, *, is_silent: bool) -> Failure:
        """Likewise, where the store is gone by which ranks tell each other; `is_silent`: it is there, and stopped."""
        mine = self.failure
        if mine.worker == self.by:
            return mine
        return host_gone(mine, is_silent=is_silent, state=self._either if self.is_cut else "")


def was_late(error: BaseException) -> bool:
    """Whether a wait for another rank came to its end, and nothing broke."""
    return bool(_LATE.search(str(error)))


def is_one_host() -> bool:
    """Whether a launcher of this host keeps the run's store."""
    return os.environ.get("GROUP_WORLD_SIZE") == "1"


def host_gone(noticed: Failure, *, is_silent: bool, state: str = "") -> Failure:
    """Host 0 keeps the store, and does not answer: whoever lost a connection after that is no first cause.

    Args:
        noticed: What this rank would say else.
        is_silent: The store is there, and stopped.
        state: What is known of the process that keeps it; empty: no more than that.
    """
    one_host = is_one_host()  # its launcher is gone, and says why itself
    if one_host and is_silent and noticed.worker == _LAUNCHER:
        return replace(noticed, error=f"it is stopped, and keeps the run's store; {noticed.error.partition('; ')[2]}")
    if one_host and is_silent:
        return replace(noticed, error=f"{noticed.error}; the launcher, which keeps the run's store, is stopped")
    if one_host or rank_name(noticed.worker) == "worker:0":
        return noticed
    what = "stopped, and so is the job's store" if is_silent else "gone with the job's store"
    state = state or f"its process is {what}, or cut off"
    return Failure("worker:0", "", f"{state}; after it, {noticed}", hint=SILENT_HINT)
