"""`assigner export`: a plan in the form of another tool."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from assigner.errors import UsageError

from . import console
from .completion import functions
from .options import Force, Json, PlanFile, PricingProfile, written

if TYPE_CHECKING:
    from assigner.export.exported import Exported, ModelContent
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

Format = Literal["device-map", "pipelining-schedule", "pipelining-modules", "torchgpipe", "dot"]
_EXACT = ("device-map", "pipelining-modules")


def export_command(
    plan: PlanFile,
    *,
    to: Annotated[
        Format,
        typer.Option(
            metavar="FORMAT",
            help="device-map: Hugging Face; pipelining-schedule, pipelining-modules: torch.distributed.pipelining and"
            " torchtitan; torchgpipe: arguments of GPipe; dot: a drawing for Graphviz.",
        ),
    ],
    output: Annotated[Path | None, written("FILE", help="The file to write; else stdout.")] = None,
    profile: PricingProfile = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="WORKLOAD",
            help="FILE.py:FUNCTION: build the model, without memory, to find what each partition holds. For device-map"
            " and pipelining-modules.",
            autocompletion=functions,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="dot: draw each of many like partitions.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a plan for accelerate, torch, Graphviz, ..."""
    from assigner.files import entry_file, put, refuse_existing, refuse_input
    from assigner.formats.plan import load_plan, profile_path
    from assigner.formats.profile import load_profile

    if workload is not None and to not in _EXACT:
        raise UsageError(f"--workload means nothing for {to}", hint=f"it is for {' and '.join(_EXACT)}")
    if everything and to != "dot":
        raise UsageError(f"--all means nothing for {to}", hint="it is for dot")
    refuse_existing(output, force=force, reads=[plan, profile, entry_file(workload)])
    found = load_plan(plan)
    where = profile_path(found, plan, profile)
    if output is not None:
        refuse_input(output, [where])
    known = load_profile(where)
    made = _exported(to, found, known, None if workload is None else _held(workload, found), every=everything)
    for note in made.notes:
        console.notice(f"note: {note}")
    if output is not None:
        put(output, made.text.encode(), force=force)
        console.notice(f"wrote {output}")
    if as_json:
        console.show_json({"kind": "export", "to": to, "content": made.data, "notes": list(made.notes)})
    elif output is None:
        console.show_text(made.text)


def _exported(to: Format, plan: "Plan", profile: "Profile", held: "ModelContent | None", *, every: bool) -> "Exported":
    from assigner.export.device_map import device_map
    from assigner.export.graphviz import partition_drawing
    from assigner.export.pipelining import module_names, schedule_csv
    from assigner.export.torchgpipe import balance

    match to:
        case "device-map":
            return device_map(plan, profile, held)
        case "pipelining-schedule":
            return schedule_csv(plan, profile)
        case "pipelining-modules":
            return module_names(plan, profile, held)
        case "torchgpipe":
            return balance(plan, profile)
        case "dot":
            return partition_drawing(plan, profile, every=every)


def _held(entry: str, plan: "Plan") -> "ModelContent":
    """What each partition holds, from the model itself; the only export that imports torch."""
    from assigner.model.workload import load_workload
    from assigner.runtime.plangraph import plan_graph

    with console.prints_aside():
        return plan_graph(load_workload(entry), plan).content
