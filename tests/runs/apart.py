"""Ranks that share a GPU, each as if it were on a host of its own: NCCL passes between them, through sockets.

    torchrun --nproc-per-node 2 tests/runs/apart.py -m assigner_cli profile ... --devices cuda:0,cuda:0
    torchrun --nproc-per-node 2 tests/runs/apart.py SCRIPT ...

NCCL refuses two ranks on one GPU of one host. What these do with NCCL is what ranks on two GPUs do; how fast it is says
nothing, for the GPU changes between them.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from assigner.runtime.messages import nccl


def keep_apart() -> None:
    """Called before CUDA starts in this process."""
    rank = os.environ["RANK"]
    os.environ |= {
        "NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
    }  # fmt: skip
    nccl._device_name = lambda device: f"{device} of {rank}"


def main() -> None:
    keep_apart()
    is_module = sys.argv[1] == "-m"
    name = sys.argv[2 if is_module else 1]
    sys.argv[:] = [name, *sys.argv[3 if is_module else 2 :]]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).parent))
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
