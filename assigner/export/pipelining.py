"""torch.distributed.pipelining: the plan's order of actions as a compute-only schedule, and the modules of each stage.

The schedule has one row a rank and one cell an action, here 1F1B of two stages and three micro-batches:

    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2

`_PipelineScheduleRuntime._load_csv(file, format="compute_only")` reads it and adds sends and receives; torchtitan takes
both files, as `pipeline_parallel_schedule_csv` and `module_fqns_per_model_part`. Row r belongs to the r-th worker in
the plan's pipeline order, so that with one stage a worker stage s is on rank s, as both expect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import UsageError
from assigner.export.exported import Exported, PartitionContent, as_json
from assigner.formats.orders import ListedStep
from assigner.formats.plan import refuse_replicas
from assigner.location import rank_of
from assigner.schedule.deadlock import played
from assigner.schedule.orders import LETTERS
from assigner.schedule.program import build_program
from assigner.schedule.simulate import check_fit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from assigner.export.exported import ModelContent
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile


def schedule_csv(plan: Plan, profile: Profile) -> Exported:
    """The plan's schedule in torch's compute-only form.

    Raises:
        UsageError: a stage of the plan has several workers, or the order of actions would wait for ever where every
            value goes from one stage to the next, as it does in torch.distributed.pipelining.
        FormatError: the profile is of another workload.
    """
    refuse_replicas(plan, "the export for torch.distributed.pipelining")
    check_fit(plan, profile)
    program = build_program(plan, profile.edges, profile.ties)
    rows = {
        worker: [
            ListedStep(each.stage, LETTERS[each.kind], each.micro_batch)
            for each in program.actions[worker]
            if each.kind in LETTERS
        ]
        for worker in plan.workers
    }
    _check_runs(rows, len(plan.stages))
    text = "".join(",".join(str(step) for step in row) + "\n" for row in rows.values())
    return Exported(text, text, (*_order(plan), *_skips(plan, profile), *_remat(plan)))


def module_names(plan: Plan, profile: Profile, held: ModelContent | None = None) -> Exported:
    """The modules of each stage by their names in the model, in torchtitan's form: a list of lists.

    Args:
        plan: What to export.
        profile: What it was solved from.
        held: What each partition holds; None: the partitions' names are those of modules.

    Raises:
        UsageError: a stage of the plan has several workers.
        FormatError: the profile is of another workload.
    """
    refuse_replicas(plan, "the export for torch.distributed.pipelining")
    check_fit(plan, profile)
    notes = []
    if held is None:
        held = {name: PartitionContent((name,)) for name in plan.partitions}
        notes.append(
            "modules outside the partitions are in no stage; --workload FILE.py:FUNCTION finds where the plan has them"
        )
    stages = [list(dict.fromkeys(each for name in s.partitions for each in held[name].modules)) for s in plan.stages]
    deep = [name for stage in stages for name in stage if name.count(".") > 1]
    if deep:
        notes.append(
            f"{deep[0]!r} lies deeper than a child of the model or an item of a list of it, which is as far as"
            " torchtitan's own split looks"
        )
    if lone := [each for name in plan.partitions for each in held[name].tensors]:
        notes.append(f"{fmt.ranges(list(dict.fromkeys(lone)))}: of no module that is listed; a split has to keep it")
    return as_json(stages, (*notes, *_ties(profile)))


def _check_runs(rows: Mapping[str, Sequence[ListedStep]], stages: int) -> None:
    """Play the rows, each value going to the neighbouring stage; raise UsageError if all ranks wait."""
    at, stuck = played(rows, {n: (n - 1,) for n in range(1, stages)}, {n: (n + 1,) for n in range(stages - 1)})
    step = next((row[at[worker]] for worker, row in rows.items() if worker in stuck), None)
    if step is not None:
        raise UsageError(
            f"stages[{step.stage}] would wait for ever at {step}: torch.distributed.pipelining hands every value from"
            " one stage to the next, and the plan's stages do not all hang together in that way",
            hint="assigner solve --schedule gpipe --max-replicas 1 makes a plan that can be exported",
        )


def _order(plan: Plan) -> Iterator[str]:
    ranks = [rank_of(worker) for worker in plan.workers]
    if ranks != list(range(len(ranks))):
        yield f"ranks 0 to {len(ranks) - 1} of the pipeline are, in this order, {', '.join(plan.workers)}"
    loop = [plan.workers.index(stage.worker) for stage in plan.stages]
    if loop != [n % len(plan.workers) for n in range(len(plan.stages))]:
        yield f"stages are not dealt out in turn: stage s is on rank {loop}[s]; build them so"


def _skips(plan: Plan, profile: Profile) -> Iterator[str]:
    far = [edge for edge in profile.edges if plan.stage_of[edge.target] > plan.stage_of[edge.source] + 1]
    if far:
        named = ", ".join(f"{edge.source} -> {edge.target}" for edge in far[:3]) + (", ..." if len(far) > 3 else "")
        yield f"values that pass over a stage ({named}): the stages between have to hand them on"


def _remat(plan: Plan) -> Iterator[str]:
    if again := [name for stage in plan.stages for name in stage.rematerialise]:
        yield f"rematerialised in the plan, not by this schedule: {fmt.ranges(again)} (torch.utils.checkpoint does it)"


def _ties(profile: Profile) -> Iterator[str]:
    for tie in profile.ties:
        yield (
            f"{tie.parameter} is shared by {' and '.join(tie.partitions)}; torch.distributed.pipelining does not add up"
            " the gradients of its copies"
        )
