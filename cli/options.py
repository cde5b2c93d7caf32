"""Options that several commands share, and where they put a plan's ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assigner.errors import UsageError

from .configuration import load_configuration

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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
PlanFiles = Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Plans; the first is the baseline.")]
ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile file.")]
PricingProfile = Annotated[Path | None, typer.Option(metavar="PROFILE", help="Instead of the one it was solved from.")]
"""The profile that prices a plan."""
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="TOML",
        callback=load_configuration,
        is_eager=True,
        envvar="ASSIGNER_CONFIG",
        show_envvar=False,
        help="Take settings from this file; else from pyproject.toml.",
    ),
]
"""Settings from a file. Each command that has it is one of `configuration.TABLES`."""


def written(metavar: str, **more: Any) -> Any:
    """The flag of the file that a command writes."""
    return typer.Option("--output", "-o", metavar=metavar, **more)


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
