"""`assigner profile`: measure a workload on every worker, here or under torchrun."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assigner.document import refuse_existing
from assigner.errors import MeasurementError, UsageError

from . import console
from .options import Force

if TYPE_CHECKING:
    from assigner.profiler import ProfileOptions

_WORKLOAD, _RANKS, _MEASURING = "The workload", "Ranks on this host", "Measuring"


def profile_command(
    workload: Annotated[
        str, typer.Argument(metavar="WORKLOAD", help="FILE.py:FUNCTION, or FILE.py:FUNCTION(width=512).")
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PROFILE", help="The profile file to write.", show_default=False)
    ],
    mark: Annotated[
        list[str] | None,
        typer.Option(help="Name pattern of partitions: 'blocks.*'. Repeatable.", rich_help_panel=_WORKLOAD),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Local ranks to start; under torchrun its own count.", rich_help_panel=_RANKS)
    ] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of a rank.", rich_help_panel=_RANKS)] = 1,
    micro_batches: Annotated[
        str,
        typer.Option(metavar="N,N", help="Micro-batch sizes to measure, in samples.", rich_help_panel=_MEASURING),
    ] = "",
    max_message: Annotated[
        int | None,
        typer.Option(min=1024, metavar="BYTES", help="Largest message of the link sweeps.", rich_help_panel=_MEASURING),
    ] = None,
    reserve: Annotated[
        float, typer.Option(help="Share of memory that plans leave alone.", rich_help_panel=_MEASURING)
    ] = 0.08,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="One worker at a time, not all at once.", rich_help_panel=_MEASURING)
    ] = False,
    force: Force = False,
) -> None:
    """Measure partitions, memory and links."""
    from assigner.profiler import ProfileOptions

    options = ProfileOptions(
        micro_batches=_sizes(micro_batches),
        marks=tuple(mark or ()),
        max_message=max_message,
        reserve=reserve,
        isolated=isolated,
    )
    if "RANK" in os.environ:
        _measure_as_rank(workload, output, options, threads=threads, force=force)
        return
    refuse_existing(output, force=force)
    _check_workload(workload, options)
    _start_ranks(workers, threads)
    console.notice(f"profile written to {output}\nnext: assigner solve {output} -o plan.json")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise UsageError(f"--micro-batches {text!r}: expected whole numbers", hint="--micro-batches 4,8") from error


def _check_workload(entry: str, options: "ProfileOptions") -> None:
    """Find the partitions once before any rank starts: what is wrong with a workload is said once, and soon."""
    from assigner.marking import partition_graph
    from assigner.workload import load_workload

    workload = load_workload(entry)
    graph = partition_graph(workload, options.marks)
    kinds = len({piece.kind for piece in graph.pieces})
    console.notice(f"{entry}: {len(graph.pieces)} partitions of {kinds} kinds, {len(graph.edges)} edges")


def _start_ranks(workers: int, threads: int) -> None:
    from assigner.launch import Layout, RankFailedError, launch

    command = [sys.executable, "-m", "assigner_cli", *sys.argv[1:]]
    try:
        launch(command, Layout(ranks=workers), {"OMP_NUM_THREADS": str(threads)})
    except RankFailedError as error:
        if error.exit_code != RankFailedError.exit_code:
            raise  # the rank has said what was wrong with its use
        raise MeasurementError(f"a measurement was lost: {error.message}", hint=error.hint) from error


def _measure_as_rank(entry: str, output: Path, options: "ProfileOptions", *, threads: int, force: bool) -> None:
    """One rank of a run that is going on; rank 0 writes the file."""
    import torch

    from assigner.profile import save_profile
    from assigner.profiler import profile_workload
    from assigner.workload import load_workload

    from .measuring import MeasuringProgress

    torch.set_num_threads(threads)
    first = os.environ["RANK"] == "0"
    if first:
        refuse_existing(output, force=force)
    with MeasuringProgress(wanted=first) as progress:
        profile = profile_workload(load_workload(entry), entry, options, progress=progress.update)
    if profile is None:
        return
    save_profile(profile, output, force=force)
    if profile.warnings:
        more = f" and {len(profile.warnings) - 1} more like it" if len(profile.warnings) > 1 else ""
        console.notice(f"warning: {profile.warnings[0]}{more}; assigner show {output} lists them")
