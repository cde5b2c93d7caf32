"""`assigner bench`: train under each plan in turn, and put what it took beside what was predicted."""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assigner.errors import UsageError

from . import console
from .compare import load_named, measured_runs
from .options import Config, Json, MasterAddr, MasterPort, Nnodes, NodeRank, PlanFiles, Ranks, Threads, layout

if TYPE_CHECKING:
    from assigner.report.comparison import Named


def bench_command(
    plans: PlanFiles,
    *,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a plan in each round.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="How often each plan gets its turn.")] = 2,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before those, which do not count.")] = 2,
    traces: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the traces there, for simulate --against.")
    ] = None,
    threads: Threads = 1,
    ranks: Ranks = None,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    master_addr: MasterAddr = "",
    master_port: MasterPort = 29500,
    as_json: Json = False,
    config: Config = None,  # noqa: ARG001 - its callback answers
) -> None:
    """Train under each plan in turn: predicted and measured.

    The plans' own workload is trained, with the batches that it makes. The plans take turns, so that what slows the
    machine for a while slows all of them. Settings may come from the environment (ASSIGNER_BENCH_STEPS=50) and from a
    TOML file; a flag counts for more.
    """
    console.quieten_torch()
    from assigner.launch.ranks import launch

    named = load_named(plans, None)
    where = [
        layout(
            each.plan, ranks=ranks, nnodes=nnodes, node_rank=node_rank, master_addr=master_addr,
            master_port=master_port,
        )
        for each in named
    ]  # fmt: skip
    with ExitStack() as stack:
        folder = traces or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="assigner-bench-")))
        written = {(n, turn): folder / f"{plan.stem}.{n + 1}.{turn + 1}.json"
                   for turn in range(rounds) for n, plan in enumerate(plans)}  # fmt: skip
        _make(folder, list(written.values()))
        for (n, turn), trace in written.items():
            if node_rank == 0:
                console.notice(f"round {turn + 1} of {rounds}: {named[n].name}")
            given = [str(plans[n]), str(trace), "--steps", str(steps), "--warm-up", str(warm_up)]
            command = [sys.executable, "-u", "-m", "assigner.bench", *given]
            launch(command, where[n], {"OMP_NUM_THREADS": str(threads)})
        if node_rank == 0:
            _show(named, [path for path in written.values() if path.exists()], as_json=as_json)


def _make(folder: Path, files: list[Path]) -> None:
    """The folder of the traces, in which none of them is yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--traces: cannot make {folder}: {error.strerror}", hint="name another folder") from error
    found = next((path for path in files if path.exists()), None)
    if found is not None:
        raise UsageError(f"--traces: {found} exists", hint="name another folder, or remove it")


def _show(named: "list[Named]", files: list[Path], *, as_json: bool) -> None:
    from assigner.report.comparison import comparison_data, notes
    from assigner.report.measured import measured
    from assigner.report.sheet import Line

    found = measured_runs(named, files)
    if as_json:
        console.show_json(comparison_data(named, traces=found))
        return
    told = (Line(text, "warning") for text in notes(named))
    console.show((*told, *measured([(each.name, each.plan) for each in named], found)))
