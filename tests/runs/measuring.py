"""One rank of a profiling run that was started by hand; one of them fails on its way.

    python tests/runs/measuring.py RANK WAY

WAY: "killed" when the ranks tell each other what they have; "raises" there.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import assigner
from assigner.profiler.options import ProfileOptions
from assigner.profiler.rank import RankSession
from assigner.profiler.session import profile_workload

_, failing, way = sys.argv
agree = RankSession.agree


def fails(self: RankSession, *words: object) -> None:
    if os.environ["RANK"] == failing:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the trap snapped")
    agree(self, *words)  # type: ignore[arg-type]


RankSession.agree = fails  # type: ignore[method-assign]
made = assigner.Workload(
    lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    lambda rows, generator: (torch.rand(rows, 2, generator=generator), torch.zeros(rows, 2)),
    nn.functional.mse_loss,
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    4,
)
try:
    profile_workload(made, "made.py:workload", ProfileOptions(force_busy=True))
except assigner.AssignerError as error:
    sys.exit(assigner.tell(error))
