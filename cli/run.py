"""`assigner run`: start a training script on the ranks of a plan."""

import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assigner.errors import UsageError

from . import console
from .options import Config, MasterAddr, MasterPort, Nnodes, NodeRank, PlanFile, Ranks, Threads, layout
from .provenance import behind

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.launch.ranks import Layout

_MOST_NAMES = 8


def run_command(
    plan: PlanFile,
    command: Annotated[
        list[str], typer.Argument(metavar="-- SCRIPT ...", help="The training script and its arguments.")
    ],
    *,
    threads: Threads = 1,
    ranks: Ranks = None,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    master_addr: MasterAddr = "",
    master_port: MasterPort = 29500,
    config: Config = None,  # noqa: ARG001 - its callback answers
) -> None:
    """Start a training script on the plan's ranks.

    At its end it says how long a step with its update took, beside the prediction. Settings may come from the
    environment (ASSIGNER_RUN_THREADS=4) and from a TOML file; a flag counts for more.
    """
    from assigner.formats.document import UnknownFieldWarning
    from assigner.formats.plan import load_plan

    with warnings.catch_warnings(action="ignore", category=UnknownFieldWarning):  # rank 0 reads it too, and says that
        loaded = load_plan(plan)
    console.quieten_torch()
    where = layout(
        loaded, ranks=ranks, nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port
    )
    script = Path(command[0])
    if script.suffix == ".py" and not script.is_file():
        raise UsageError(f"{script}: no such file", hint="assigner run PLAN -- SCRIPT.py ARGUMENTS")
    if script.suffix != ".py" and shutil.which(command[0]) is None:
        raise UsageError(
            f"{script}: no program of that name can be run", hint="assigner run PLAN -- SCRIPT.py ARGUMENTS"
        )
    program = [sys.executable, "-u", *command] if script.suffix == ".py" else list(command)
    _tell_idle(loaded, where)
    from assigner.launch.ranks import launch
    from assigner.machine.starvation import NOTICED, RanksWatch

    with RanksWatch(ranks=where.ranks, threads=threads) as watch:
        variables = {"OMP_NUM_THREADS": str(threads), "ASSIGNER_PLAN": str(plan.resolve())}
        unused = (
            f"warning: no rank made a Pipeline: the plan was not used, and every rank ran {command[0]} by itself\n"
            "hint: train with assigner.Pipeline(workload, plan): docs/porting.md goes through a script"
        )
        found = launch(program, where, variables, notice=console.notice, on_unused=lambda: console.notice(unused))
    if found is not None:
        from assigner.formats.profilewarnings import busy_text
        from assigner.report.measured import step_times_text

        (checked, _), profile, _ = behind(loaded, plan)
        console.notice(step_times_text(found, checked))
        if profile is not None and (busy := busy_text(profile)) is not None:
            console.notice(f"warning: the profile was {busy}; on a quiet one the prediction would be lower")
    if watch.share() >= NOTICED:
        console.notice(
            f"warning: other processes had up to {100 * watch.share():.0f} % of the processor time of a rank here: its"
            " steps took longer than on a quiet machine"
        )


def _tell_idle(plan: "Plan", where: "Layout") -> None:
    """On one host: the ranks for which the plan has nothing to do."""
    from assigner.location import rank_of

    used = {rank_of(worker) for worker in plan.workers}
    idle = [f"worker:{rank}" for rank in range(where.ranks) if rank not in used] if where.nodes == 1 else []
    if idle:
        names = ", ".join(idle[:_MOST_NAMES]) + (", ..." if len(idle) > _MOST_NAMES else "")
        console.notice(f"warning: the plan has nothing to do for {names}: idle")
