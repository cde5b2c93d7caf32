"""A run that is watched from its start, and while it makes its process group.

    joining         while the group is made     a rank that will not come is told of by its launcher
    watched_run     from then on                through a connection of its own

What fails while a group is made is that group's: the next one begins without it.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]  # without `__all__`

from assigner.errors import WorkerError
from assigner.runtime.failures.cause import gloo_words
from assigner.runtime.failures.failure import FailureWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store  # type: ignore[attr-defined]

    from assigner.launch.sockets import Connections

_NO_ADDRESS = re.compile(r"tcp/device\.cc|Unable to (?:find|resolve)|makeDeviceFor|unsupported gloo device")
_MOMENT_S = 0.6  # more than two polls


def watched_run(
    name: str,
    store: Store,
    worker: str,
    connections: Connections | None,
    exit_code: int = WorkerError.exit_code,
    *,
    ranks: int,
) -> FailureWatch:
    """Watch a run from now on, through a connection of its own.

    Args:
        name: The run's, the same on every rank.
        store: Its process group's.
        worker: This rank's worker.
        ranks: How many the run has.
        connections: See `FailureWatch`.
        exit_code: See `FailureWatch`.
    """
    own = root = store.clone()  # type: ignore[attr-defined]
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    if connections is not None:
        connections.guard()
    return FailureWatch(
        PrefixStore(name, own), worker, ranks=ranks, launcher=root, connections=connections, exit_code=exit_code
    )


@contextmanager
def joining(store: Store, name: str, worker: str, ranks: int) -> Iterator[FailureWatch]:
    """Watch while a block makes the process group: a launcher may tell of a rank that will not come.

    Args:
        store: The job's store, without prefixes; a connection of its own.
        name: The group's, the same on every rank.
        worker: This rank.
        ranks: How many the group will have.

    Raises:
        WorkerError: the ranks lost each other, or this one cannot take part.
    """
    watch = FailureWatch(PrefixStore(f"{name} joining", store), worker, ranks=ranks, launcher=store)
    # a rank that waits for one that will not come learns of nothing by itself, and that one never knows
    watch.grace_s = watch.stay_s = _MOMENT_S
    watch.busy_since = time.monotonic()
    try:
        yield watch
    except RuntimeError as error:  # torch has no type of its own for a connection that broke
        if _is_own(error):
            watch.report("joining the run", error)
            raise WorkerError(
                f"{worker} cannot join the run{gloo_words(error)}",
                hint="GLOO_SOCKET_IFNAME names the network interface to use; without it, the host's name must resolve",
            ) from error
        raise watch.lost("another worker", "joining the run", error).to_error() from error
    finally:
        watch.close()


def _is_own(error: RuntimeError) -> bool:
    """Whether gloo found no interface or address of this host; all else that it says while it joins is of others."""
    return not isinstance(error, DistError) and bool(_NO_ADDRESS.search(str(error)))
