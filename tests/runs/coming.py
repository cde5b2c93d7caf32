"""One rank that comes to a run, as MASTER_PORT and its like say; another one never does.

    python tests/runs/coming.py [agent | patient] [RANK]

agent: a store is there already, as a launcher's agent keeps it. patient: it waits for longer than 3 s. RANK: the one
that is refused before it joins.
"""

from __future__ import annotations

import os
import sys

from torch.distributed import TCPStore

from assigner.errors import UsageError
from assigner.machine.launchedrank import launched
from assigner.runtime.messages.rendezvous import join_group, told_if_refused

port = int(os.environ["MASTER_PORT"])
kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if sys.argv[1:] == ["agent"] else None
place = launched()
assert place is not None
with told_if_refused():
    if sys.argv[2:] == [str(place.rank)]:
        raise UsageError("there is no such model here")
join_group(place, 300.0 if sys.argv[1:2] == ["patient"] else 3.0)
