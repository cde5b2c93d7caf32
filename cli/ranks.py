"""One host's ranks of a run of several: what `assigner lab` starts on each host (`python -m assigner_cli.ranks`).

It does what torchrun does and reads the same flags; a failed rank is one line instead of tracebacks of the launcher.
"""

from __future__ import annotations

import argparse
import os
import sys

from assigner.errors import AssignerError

from .console import fail, notice, quieten_torch


def main() -> None:
    """Start the ranks, wait for them, and end with the exit code of what happened."""
    quieten_torch()
    from assigner.launch.ranks import Layout, launch

    parser = argparse.ArgumentParser(prog="python -m assigner_cli.ranks")
    for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    layout = Layout(given.nproc_per_node, given.nnodes, given.node_rank, given.master_addr, given.master_port)
    try:
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        launch(given.command, layout, threads, notice=notice)
    except AssignerError as error:
        fail(error.message, error.hint)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
