"""`assigner run`: start a training script on the ranks of a plan."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from assigner.errors import UsageError

from . import console
from .options import Config, PlanFile

_SEVERAL = "Several hosts (run the same command on each)"


def run_command(
    plan: PlanFile,
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- SCRIPT ...", help="The training script and its arguments.", show_default=False),
    ],
    *,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of a rank; as profiled.")] = 1,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this host; else the plan's, shared out evenly.")
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts of the run.", rich_help_panel=_SEVERAL)] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This host's number.", rich_help_panel=_SEVERAL)] = 0,
    master_addr: Annotated[str, typer.Option(metavar="HOST", help="Address of host 0.", rich_help_panel=_SEVERAL)] = "",
    master_port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", help="Its port.", rich_help_panel=_SEVERAL)
    ] = 29500,
    config: Config = None,  # noqa: ARG001 - its callback answers
) -> None:
    """Start a training script on the plan's ranks.

    Settings may come from the environment (ASSIGNER_RUN_THREADS=4) and from a TOML file; a flag counts for more.
    """
    from assigner.plan import load_plan

    loaded = load_plan(plan)
    if nnodes > 1 and not master_addr:
        raise UsageError("--nnodes needs --master-addr", hint="give the address of host 0 on every host")
    if node_rank >= nnodes:
        raise UsageError(
            f"--node-rank {node_rank}: the run has {nnodes} hosts, numbered from 0", hint="--nnodes says how many"
        )
    if ranks is None:
        if loaded.world_size % nnodes:
            raise UsageError(
                f"the plan's {loaded.world_size} ranks cannot be shared evenly by {nnodes} hosts",
                hint="--ranks says how many this host has",
            )
        ranks = loaded.world_size // nnodes
    if nnodes == 1 and ranks < loaded.world_size:
        raise UsageError(
            f"--ranks {ranks}: the plan needs {loaded.world_size} ranks", hint="leave it out, or give --nnodes"
        )
    script = Path(command[0])
    if script.suffix == ".py" and not script.is_file():
        raise UsageError(f"{script}: no such file", hint="assigner run PLAN -- SCRIPT.py ARGUMENTS")
    if script.suffix != ".py" and shutil.which(command[0]) is None:
        raise UsageError(
            f"{script}: no program of that name can be run", hint="assigner run PLAN -- SCRIPT.py ARGUMENTS"
        )
    program = [sys.executable, "-u", *command] if script.suffix == ".py" else list(command)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store is told in one line; torch adds a page
    from assigner.launch import Layout, launch
    from assigner.starvation import NOTICED, RanksWatch

    layout = Layout(ranks, nnodes, node_rank, master_addr, master_port)
    with RanksWatch(ranks=ranks, threads=threads) as watch:
        launch(program, layout, {"OMP_NUM_THREADS": str(threads), "ASSIGNER_PLAN": str(plan.resolve())})
    if watch.share() >= NOTICED:
        console.notice(
            f"warning: other processes had up to {100 * watch.share():.0f} % of the processor time of a rank here: its"
            " steps took longer than on a quiet machine"
        )
