"""The profiler: measures a workload's partitions on every worker, and the links between workers.

It stands above the runtime: what it times is the runtime's own forward and backward of a partition, on the runtime's
own backend, so that a plan's prices are those of the program that will run.
"""

from __future__ import annotations

from assigner.profiler.session import Output, ProfileOptions, profile_workload

__all__ = ["Output", "ProfileOptions", "profile_workload"]
