"""The hosts of a run leave together: host 0 keeps the store open until the others have done with it.

torchrun's hosts meet once more when their ranks have ended, in a store that lives in host 0's launcher. Host 0 is
through as soon as all have arrived, and a slow host then finds the store closed: the run has succeeded, and it prints a
page about a broken connection.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # it is there, without `__all__`

if TYPE_CHECKING:
    from collections.abc import Iterator

MEETING_S = 300
FAREWELL_S = 20.0
_LEFT = "assigner/left"


@contextmanager
def leaving_together(*, nodes: int, node: int, address: str, port: int) -> Iterator[None]:
    """Hold host 0's store open around a block, and until every host's block has ended well.

    Args:
        nodes: Hosts of the run; with one nothing is done.
        node: This host's number.
        address: Address of host 0.
        port: The port of the store, which is shared with the launcher's own (`multi_tenant`).
    """
    if nodes == 1:
        yield
        return
    store = TCPStore(
        address, port, is_master=node == 0, timeout=timedelta(seconds=MEETING_S), wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip
    yield
    try:
        left = store.add(_LEFT, 1)
        until = time.monotonic() + FAREWELL_S
        while node == 0 and left < nodes and time.monotonic() < until:
            time.sleep(0.02)
            left = store.add(_LEFT, 0)
    except DistError:
        return  # host 0 has waited long enough and is gone: nobody is left to take leave of
