"""Words and limits that formats, flags and solver share; flags are made at start-up, so nothing else is imported."""

from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "interleaved-1f1b", "listed"]
Objective = Literal["step", "throughput", "latency", "cost"]
Backend = Literal["gloo", "mpi", "nccl"]
RunRemat = Literal["plan", "always", "except_last", "never"]
"""What a run rematerialises: as its plan says; all; all but in a step's last micro-batch; nothing."""

MOST_ROWS = 10**9
"""Samples of a batch; and nothing else that is counted comes to more."""
MOST_MICRO_BATCHES = 65_536
"""Of a step; every one of them is simulated, and run, by itself."""
