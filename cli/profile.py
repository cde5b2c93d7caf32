"""`assigner profile`: measure a workload on every worker, here or under torchrun."""

import functools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from assigner.errors import MeasurementError, UsageError
from assigner.files import entry_file, refuse_existing, refuse_input
from assigner.formats.document import UnknownFieldWarning
from assigner.launch.launcherwatch import end_with
from assigner.launch.stopping import SignalledExit
from assigner.machine.launchedrank import launched
from assigner.profiler.options import MEASURING, RANKS, ProfileDestination, ProfileOptions

from . import completion, console
from .check import compared
from .configuration import settings_file
from .given import Given
from .group import INTERRUPTED
from .options import Config, Force, written
from .signals import kept_from_children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.formats.profile import Profile, Verification
    from assigner.machine.launchedrank import Launched
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload

Result = TypeVar("Result")

_BEFORE = "What was measured before"
_FOUND = "ASSIGNER_VERIFICATION"
"""Tells the ranks that this process starts what the check has found; `null`: there was none."""


def profile_command(
    workload: Annotated[str | None, completion.WORKLOAD] = None,
    *,
    output: Annotated[Path, written("PROFILE", help="The profile file to write.")],
    workers: Annotated[
        int, typer.Option(min=1, help="Local ranks to start; under torchrun its own count.", rich_help_panel=RANKS)
    ] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of a rank.", rich_help_panel=RANKS)] = 1,
    options: Given[ProfileOptions],
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check", help="Do not compare the partitions with the model as it is.", rich_help_panel=MEASURING
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.", rich_help_panel=_BEFORE)
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Measure this again and update PROFILE: 'blocks.*', worker:1, worker:0-worker:1, compute, links,"
            " collectives. Repeatable.",
            rich_help_panel=_BEFORE,
        ),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="OTHER",
            help="Add this profile's workers. Repeatable. Two and no WORKLOAD: nothing is measured.",
            rich_help_panel=_BEFORE,
        ),
    ] = None,
    force: Force = False,
    config: Config = None,
) -> None:
    """Measure partitions, memory and links.

    Settings may come from the environment (ASSIGNER_PROFILE_THREADS=4) and from a TOML file; a flag counts for more.
    """
    if only and merge:
        raise UsageError("--only and --merge: one at a time", hint="merge first, then measure again in the new file")
    refuse_input(output, [entry_file(workload), settings_file(config), *(merge or [])])
    asked = options()
    if only and asked.reserve is not None:
        raise UsageError(
            "--only and --reserve: workers keep the memory and the reserve that PROFILE has for them",
            hint="measure without --only to set another reserve",
        )
    if workload is None:
        if resume or only or not merge or len(merge) < 2:
            raise UsageError(
                "no WORKLOAD: name what to measure, or two profiles to put together",
                hint="examples/gpt.py:workload -o profile.json, or --merge one.json --merge two.json -o all.json",
            )
        _merge_files(merge, output, force=force)
        return
    console.quieten_torch()
    files = ProfileDestination(
        output, force=force, resume=resume, only=tuple(only or ()), others=tuple(merge or ()), notice=console.notice
    )
    if (place := launched()) is not None:
        with console.prints_aside():
            _measure_as_rank(place, workload, asked, files, threads=threads, checks=not no_check)
        return
    if asked.backend == "mpi":
        raise UsageError(
            "--backend mpi: this command starts ranks that are none of MPI's",
            hint=f"mpirun -n {workers} assigner profile ... --backend mpi",
        )
    found = _apart(_check_before, workload, asked, files, workers=workers, checks=not no_check)
    _start_ranks(workers, threads, output, found)


def _load(paths: "Iterable[Path]") -> "tuple[tuple[str, Profile], ...]":
    from assigner.formats.profile import load_profile

    return tuple((str(path), load_profile(path)) for path in paths)


def _merge_files(paths: "Iterable[Path]", output: Path, *, force: bool) -> None:
    """Put finished profiles together."""
    from assigner.formats.merging import merged
    from assigner.formats.profile import save_profile

    refuse_existing(output, force=force)
    profile = merged(_load(paths))
    save_profile(profile, output, force=force)
    _warn(profile, output)
    console.notice(f"profile written to {output}: {len(profile.workers)} workers")


def _apart(body: "Callable[..., Result]", *args: Any, **kwargs: Any) -> "Result":
    """Call it in a process of its own: the memory that it takes is free again when the workers' is measured.

    Ctrl-C and SIGTERM end it, too.

    Raises:
        MeasurementError: the process was killed.
    """
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import active_children, get_context

    begin = functools.partial(_begin_apart, console.settings(), os.getpid())
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=begin) as process:
            try:
                with kept_from_children():
                    found = process.submit(body, *args, **kwargs)
                return found.result()
            except (KeyboardInterrupt, SignalledExit):
                for each in active_children():  # the block waits for its end
                    each.kill()
                raise
    except BrokenProcessPool as error:
        raise MeasurementError(
            "the process that looks at the model was killed; where it was the memory, the model does not fit here",
            hint="profile on a host with more memory; --no-check needs less",
        ) from error


def _begin_apart(settings: "console.Settings", parent: int) -> None:
    """What such a process does first: it ends with the one that waits for it."""
    console.configure(settings)
    end_with(parent)


def _check_before(
    entry: str, options: ProfileOptions, files: ProfileDestination, *, workers: int, checks: bool
) -> "Verification | None":
    """Look at the workload and the files once before any rank starts: what is wrong is said once, and soon."""
    from assigner.formats.merging import check_same_workload
    from assigner.model.marking import partition_graph
    from assigner.model.workload import load_workload
    from assigner.profiler.assembly import workload_reference
    from assigner.profiler.host import rank_device, visible_gpus
    from assigner.profiler.options import Selection
    from assigner.profiler.session import check_sizes, without_single_rows

    if not files.only:
        refuse_existing(files.path, force=files.force)
    with warnings.catch_warnings(action="ignore", category=UnknownFieldWarning):  # rank 0 reads them too, and says that
        others = _load([*files.others, *([files.path] if files.only else [])])
    with console.prints_aside():
        workload = load_workload(entry)
        check_sizes(workload, options.micro_batches)
        seen = [visible_gpus()] * workers
        for rank in range(workers):
            rank_device(options.devices, seen, rank)
        console.notice(f"{entry}: looking for its partitions")
        with console.under_way("looking for the model's partitions"):
            graph = partition_graph(workload, options.marks or None)
        Selection(files.only).check([piece.name for piece in graph.pieces], workers)
        measured = without_single_rows(workload, graph)
        here, kinds = workload_reference(measured, graph, entry), {piece.name: piece.kind for piece in graph.pieces}
        for name, profile in others:
            check_same_workload(here, kinds, profile, names=(entry, name))
        found = len({*kinds.values()})
        console.notice(f"{entry}: {len(graph.pieces)} partitions of {found} kinds, {len(graph.edges)} edges")
        return _verified(entry, workload, graph) if checks else None


def _verified(entry: str, workload: "Workload", graph: "PartitionGraph") -> "Verification":
    """Compare the partitions with the model, and say what came of it."""
    from assigner.report.profile import verification_text

    console.notice(f"{entry}: comparing the partitions with the model")
    found = compared(workload, graph)
    console.notice(f"{entry}: {verification_text(found)}")
    for text in found.cautions:
        console.notice(f"caution: {text}")
    return found


def _verify(entry: str, options: ProfileOptions) -> "Verification":
    """The same of a workload that is named."""
    from assigner.model.marking import partition_graph
    from assigner.model.workload import load_workload

    with console.prints_aside():
        workload = load_workload(entry)
        return _verified(entry, workload, partition_graph(workload, options.marks or None))


def _start_ranks(workers: int, threads: int, output: Path, found: "Verification | None") -> None:
    from assigner.formats.document import encode
    from assigner.launch.ranks import Layout, RankFailedError, launch

    command = [sys.executable, "-m", "assigner_cli", *sys.argv[1:]]
    try:
        launch(command, Layout(ranks=workers), {"OMP_NUM_THREADS": str(threads), _FOUND: json.dumps(encode(found))})
    except (KeyboardInterrupt, SignalledExit):
        console.notice(_kept(output, workers) or "nothing was measured yet")
        raise
    except RankFailedError as error:
        if error.exit_code != RankFailedError.exit_code:
            raise  # the rank has said what was wrong with its use
        hint = "; ".join(filter(None, (_kept(output, workers), error.hint)))
        raise MeasurementError(f"a measurement was lost: {error.message}", hint=hint) from error


def _kept(output: Path, workers: int) -> str | None:
    """What to do with the journals of a run that has ended early; None: there are none."""
    from assigner.profiler.journal import journal_path

    kept = any(journal_path(output, rank).exists() for rank in range(workers))
    return "what was measured is kept: --resume goes on from there" if kept else None


def _measure_as_rank(
    place: "Launched", entry: str, options: ProfileOptions, files: ProfileDestination, *, threads: int, checks: bool
) -> None:
    """One rank of a run that is going on; rank 0 writes the file, and checks where the launcher has not."""
    import torch

    from assigner.formats.document import decode
    from assigner.formats.profile import Verification
    from assigner.model.workload import load_workload
    from assigner.profiler.session import profile_workload
    from assigner.profiler.tasks import RefusedError

    from .progress import MeasuringProgress

    torch.set_num_threads(threads)
    found = decode(Verification | None, json.loads(os.environ.get(_FOUND, "null")))
    if checks and found is None and place.rank == 0:
        found = _apart(_verify, entry, options)
    workload = load_workload(entry)
    try:
        with MeasuringProgress(wanted=place.rank == 0, workers=place.ranks) as progress:
            profile = profile_workload(
                workload, entry, options, output=files, progress=progress.update, verification=found
            )
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error  # whoever started the ranks says so, once
    except RefusedError as error:
        if place.local_rank == 0:
            raise
        raise typer.Exit(error.exit_code) from error  # one rank of each host says why
    if profile is not None:  # on rank 0, whoever has started it
        _warn(profile, files.path)
        console.notice(f"profile written to {files.path}\nnext: assigner solve {files.path} -o plan.json")


def _warn(profile: "Profile", output: Path) -> None:
    """The first warnings of a new profile; all are in the file."""
    from assigner import formatting as fmt

    shown = profile.warnings[:3]
    for text in shown:
        console.notice(f"warning: {text}")
    if len(profile.warnings) > len(shown):
        more = fmt.plural(len(profile.warnings) - len(shown), "more warning")
        console.notice(f"{more}: assigner show -v {output}")
