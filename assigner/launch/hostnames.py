"""The name of the host where a run's ranks meet: one that does not resolve is told within seconds, and whose it is.

torch would try for as long as for a rank that is late, in silence. Outside of Kubernetes such a name is wrong. In a pod
it may appear when the other pod is started: there it is said once, and waited for.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from assigner.errors import UsageError

_WRONG_S = 5.0  # a name server may be slow once
_PAUSE_S = 0.5
_POD = "KUBERNETES_SERVICE_HOST"


def wait_for_name(name: str, *, source: str, limit_s: float) -> None:
    """Return once a host's name resolves here; what is waited for is said once, on stderr.

    Args:
        name: The host's name or address.
        source: Who says that it is this one: `MASTER_ADDR`.
        limit_s: The longest wait of a pod for it.

    Raises:
        UsageError: it does not resolve.
    """
    begin, told = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:
            here = socket.gethostname()
            unknown = f"host {name!r}, where the ranks meet, is unknown on {here}: {error}; {source} names it"
        else:
            return
        waited_s = time.monotonic() - begin
        if waited_s > (limit_s if _POD in os.environ else min(limit_s, _WRONG_S)):
            raise UsageError(
                unknown, hint="set MASTER_ADDR to a name or an address of rank 0's host that all hosts know"
            )
        if waited_s > _WRONG_S and not told:
            told = True
            sys.stderr.write(f"waiting for up to {limit_s:g} s: {unknown}\n")
            sys.stderr.flush()
        time.sleep(_PAUSE_S)
