"""A rank whose launcher is gone ends: nobody would end it, hear of its failure, or keep its run's store.

    assigner run, assigner profile      their own process, whose id stands in ASSIGNER_CAUSES
    torchrun, mpirun, srun              the nearest process above that is no rank itself
    ranks started by hand               nothing is watched: a shell may end before what it started

A thread looks at the launcher's process. That works for each of them, and through a script that stands between the
two: a signal at the parent's death (prctl) would be that of the script alone, and comes when the thread ends that
started the process; and a pipe's end that the launcher holds must be inherited, which other launchers do not do.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from assigner.errors import UsageError, WorkerError
from assigner.launch.failurereport import VARIABLE
from assigner.machine.kernel import ancestors, process_facts
from assigner.machine.launchedrank import launched, launched_rank, launcher_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOOK_S = 1.0

_watched: set[int] = set()


def began(process: int) -> str:
    """When a process began, in clock ticks since the machine's start; empty: there is none, or nobody has buried it."""
    facts = process_facts(process)
    return facts[19] if facts and facts[0] not in "ZX" else ""


def own_mark() -> str:
    """This process, as part of a name: `is_left_behind` tells by it that the process is gone."""
    return f"{os.getpid()}-{began(os.getpid())}"


def is_left_behind(mark: str) -> bool:
    """Whether the process of such a mark is gone: its id is no process's, or that of one that began at another time."""
    process, _, since = mark.partition("-")
    return process.isdigit() and bool(since) and began(int(process)) != since


def launcher_of(environment: Mapping[str, str] = os.environ) -> int | None:
    """The id of the process that has started this rank and its neighbours; None: none is known, or it cannot end."""
    own, _, _ = environment.get(VARIABLE, "").partition(" ")
    if own.isdigit():
        return int(own)
    try:
        place = launched(environment)
    except UsageError:  # whoever needs the rank tells of it
        return None
    if place is None:
        return None
    variable = "TORCHELASTIC_RUN_ID" if place.launcher == "torchrun" else place.variable  # pods set RANK for it, too
    found = launcher_process(variable) if variable in environment else 0
    return found if found > 1 else None


def end_with_launcher(*, joins: bool) -> None:
    """End this process, a rank, within seconds of its launcher's end.

    Args:
        joins: It takes part in the run. Else that is known of the launcher's own children alone: what a rank starts in
            turn may be meant to outlive the run.
    """
    launcher = launcher_of()
    if launcher is not None and (joins or launcher == os.getppid()):
        end_with(launcher)


def end_with(process: int) -> None:
    """End this one within seconds of the end of a process above it. A second call for the same one does nothing.

    Args:
        process: Its id. One that is not above this process, or whose state this user may not read, is not watched.
    """
    if process in _watched:
        return
    _watched.add(process)
    if process == os.getppid():  # ids come again: the kernel gives an orphan another parent
        is_there: Callable[[], bool] = lambda: os.getppid() == process  # noqa: E731
    elif process in ancestors() and (since := began(process)):  # in a container its id may be another process's
        is_there = lambda: began(process) == since  # noqa: E731
    else:
        return
    threading.Thread(target=_watch, args=(process, is_there), name="assigner-launcher", daemon=True).start()


def _watch(process: int, is_there: Callable[[], bool]) -> None:
    while is_there():
        time.sleep(LOOK_S)
    pid, _, folder = os.environ.get(VARIABLE, "").partition(" ")
    if folder and pid == str(process):
        shutil.rmtree(folder, ignore_errors=True)  # what the ranks hand over, which nobody reads any more
    rank = launched_rank()
    name = f"process {os.getpid()}" if rank is None else f"worker:{rank}"
    with suppress(Exception):  # the reader of our output may be gone as well
        sys.stderr.write(f"[{name}] error: process {process}, which has started it, is gone: ended\n")
        sys.stderr.flush()
    os._exit(WorkerError.exit_code)
