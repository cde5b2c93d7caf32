"""One rank that comes to a run, as MASTER_PORT and its like say; another one never does.

    python tests/runs/coming.py [agent | patient]

agent: a store is there already, as a launcher's agent keeps it. patient: it waits for longer than 3 s.
"""

from __future__ import annotations

import os
import sys

from torch.distributed import TCPStore

from assigner.machine.launchedrank import launched
from assigner.runtime.messages.rendezvous import join_group

port = int(os.environ["MASTER_PORT"])
kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if sys.argv[1:] == ["agent"] else None
place = launched()
assert place is not None
join_group(place, 300.0 if sys.argv[1:] == ["patient"] else 3.0)
