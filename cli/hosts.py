"""Where the ranks of a plan are: on this host, or on several that are started alike."""

from typing import TYPE_CHECKING, Annotated

import typer

from assigner.errors import UsageError

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.launch.ranks import Layout

_SEVERAL = "Several hosts (run the same command on each)"

Threads = Annotated[int, typer.Option(min=1, help="Compute threads of a rank; as profiled.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks on this host; else the plan's, shared out evenly.")]
Nnodes = Annotated[int, typer.Option(min=1, help="Hosts of the run.", rich_help_panel=_SEVERAL)]
NodeRank = Annotated[int, typer.Option(min=0, help="This host's number.", rich_help_panel=_SEVERAL)]
MasterAddr = Annotated[str, typer.Option(metavar="HOST", help="Address of host 0.", rich_help_panel=_SEVERAL)]
MasterPort = Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="Its port.", rich_help_panel=_SEVERAL)]


def layout(
    plan: "Plan", *, ranks: int | None, nnodes: int, node_rank: int, master_addr: str, master_port: int
) -> "Layout":
    """This host's place in a run of a plan.

    Raises:
        UsageError: the flags contradict each other, or the plan needs more ranks.
    """
    if nnodes > 1 and not master_addr:
        raise UsageError("--nnodes needs --master-addr", hint="give the address of host 0 on every host")
    if node_rank >= nnodes:
        raise UsageError(
            f"--node-rank {node_rank}: the run has {nnodes} hosts, numbered from 0", hint="--nnodes says how many"
        )
    if ranks is None:
        if plan.world_size % nnodes:
            raise UsageError(
                f"the plan's {plan.world_size} ranks cannot be shared evenly by {nnodes} hosts",
                hint="--ranks says how many this host has",
            )
        ranks = plan.world_size // nnodes
    if nnodes == 1 and ranks < plan.world_size:
        raise UsageError(
            f"--ranks {ranks}: the plan needs {plan.world_size} ranks", hint="leave it out, or give --nnodes"
        )
    from assigner.launch.ranks import Layout

    return Layout(ranks, nnodes, node_rank, master_addr, master_port)
