import csv
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from builders import make_plan, make_profile, worker_name
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _simulate_comms_compute

from assigner.errors import FormatError, UsageError
from assigner.export.exported import PartitionContent
from assigner.export.pipelining import module_names, schedule_csv
from assigner.formats.profile import Tie
from assigner.formats.stage import Stage
from assigner.schedule.program import ActionKind, build_program

NAMES = [f"p{n}" for n in range(6)]
GPIPE = [(0, NAMES[:2]), (1, NAMES[2:4]), (2, NAMES[4:])]
LOOPED = [(1, NAMES[:1]), (0, NAMES[1:3]), (1, NAMES[3:5]), (0, NAMES[5:])]
UNEVEN = [(0, NAMES[:1]), (1, NAMES[1:3]), (0, NAMES[3:4]), (2, NAMES[4:])]


@pytest.fixture(scope="module")
def profile():
    return make_profile(work=[1e-3] * 6, slowness=[1.0, 2.0, 3.0])


def plans(profile):
    gpipe = make_plan(profile, GPIPE)
    deep = tuple(replace(stage, in_flight=depth) for stage, depth in zip(gpipe.stages, (4, 2, 1), strict=True))
    return {
        "gpipe": gpipe,
        "1f1b": replace(gpipe, schedule="1f1b"),
        "1f1b, depths": replace(gpipe, schedule="1f1b", stages=deep),
        "interleaved": replace(make_plan(profile, LOOPED), schedule="interleaved"),
        "uneven": replace(make_plan(profile, UNEVEN), schedule="interleaved"),
    }


@pytest.fixture
def group():
    """Process groups of any size in this process alone: torch's own stand-in, which moves nothing."""
    from torch.testing._internal.distributed import fake_pg

    def start(size):
        dist.init_process_group("fake", rank=0, world_size=size, store=fake_pg.FakeStore())

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b, depths", "interleaved", "uneven"])
def test_torch_loads_the_schedule(profile, group, tmp_path, name):
    """torch's own runtime reads it, finds each stage on its rank, and adds sends and receives that can all be done."""
    plan = plans(profile)[name]
    (tmp_path / "schedule.csv").write_text(schedule_csv(plan, profile).text)
    group(len(plan.workers))
    mine = [n for n, stage in enumerate(plan.stages) if stage.worker == plan.workers[0]]
    stages = [PipelineStage(nn.Linear(2, 2), n, len(plan.stages), torch.device("cpu")) for n in mine]
    runtime = _PipelineScheduleRuntime(stages, plan.micro_batches, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(str(tmp_path / "schedule.csv"), format="compute_only")
    ranks = {n: plan.workers.index(stage.worker) for n, stage in enumerate(plan.stages)}
    assert runtime.stage_index_to_group_rank == ranks
    moved = {
        rank: [
            each for each in row if each.computation_type.value in ("F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
        ]
        for rank, row in runtime.pipeline_order_with_comms.items()
    }
    played = _simulate_comms_compute(moved, ranks.__getitem__, len(ranks))
    assert {rank: [each for each in row if each] for rank, row in played.items()} == moved


def test_each_row_is_a_workers_own_order(profile):
    """Row by row the cells are the program that the plan's own runtime follows."""
    for plan in plans(profile).values():
        program = build_program(plan, profile.edges)
        rows = list(csv.reader(schedule_csv(plan, profile).text.splitlines()))
        for worker, row in zip(plan.workers, rows, strict=True):
            order = [each for each in program.actions[worker] if each.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
            assert row == [f"{each.stage}{each.kind.value[0].upper()}{each.micro_batch}" for each in order]


@pytest.mark.long
@pytest.mark.distributed
def test_it_trains_as_the_plain_model(forked, profile, tmp_path):
    """Two ranks train through torch.distributed.pipelining with both files; gradients are those of the plain model."""
    for name in ("1f1b", "interleaved"):
        stages = LOOPED if name == "interleaved" else [(1, NAMES[:4]), (0, NAMES[4:])]
        plan = replace(make_plan(profile, stages), schedule=name)
        (tmp_path / f"{name}.csv").write_text(schedule_csv(plan, profile).text)
        (tmp_path / f"{name}.json").write_text(module_names(plan, profile).text)
    forked.run("pipelining.py", tmp_path, ranks=2)
    for rank in range(2):
        worst = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert set(worst) == {"1f1b", "interleaved"}
        assert max(worst.values()) < 1e-12


def test_modules_in_torchtitans_form(profile):
    """A list of the modules' names for each stage; every partition is in one of them, in the plan's order."""
    made = module_names(make_plan(profile, GPIPE), profile)
    assert json.loads(made.text) == [NAMES[:2], NAMES[2:4], NAMES[4:]] == made.data
    assert "--workload" in made.notes[0]


def test_what_a_partition_holds_stands_for_it(profile):
    """With the model at hand the modules are its own, and one that two partitions of a stage use stands there once."""
    held = {name: PartitionContent((f"model.{name}", "model.rope")) for name in NAMES}
    made = module_names(make_plan(profile, GPIPE), profile, held)
    assert made.data[0] == ["model.p0", "model.rope", "model.p1"]
    assert made.notes == ()


def test_a_name_deeper_than_torchtitan_looks_is_noted(profile):
    """torchtitan splits children and items of their lists; what is deeper, or of no module, is worth a word."""
    held = {name: PartitionContent((f"transformer.h.{name}",), ("scale",)) for name in NAMES}
    deep, lone = module_names(make_plan(profile, GPIPE), profile, held).notes
    assert "'transformer.h.p0'" in deep
    assert lone.startswith("scale: ")


def test_order_of_ranks_is_noted(profile):
    """Where the pipeline's ranks are not the plan's own, the notes say who is who."""
    assert schedule_csv(make_plan(profile, GPIPE), profile).notes == ()
    (note,) = schedule_csv(plans(profile)["interleaved"], profile).notes
    assert note.endswith("worker:1/cpu, worker:0/cpu")
    (note,) = schedule_csv(plans(profile)["uneven"], profile).notes
    assert "[0, 1, 0, 2]" in note


def test_what_torch_does_otherwise_is_noted(profile):
    """Values that pass over a stage, rematerialised partitions and shared parameters are each said."""
    skipping = make_profile(work=[1e-3] * 6, slowness=[1.0] * 3, edges=[*((n, n + 1) for n in range(5)), (0, 5)])
    plan = make_plan(skipping, GPIPE)
    plan = replace(plan, stages=(replace(plan.stages[0], rematerialise=("p0", "p1")), *plan.stages[1:]))
    far, again = schedule_csv(plan, skipping).notes
    assert "p0 -> p5" in far
    assert "p0, p1" in again
    tied = replace(profile, ties=(Tie("word.weight", ("p0", "p5"), 1e3),))
    assert "word.weight" in module_names(make_plan(tied, GPIPE), tied).notes[-1]


def test_depths_that_only_branches_allow_are_refused():
    """Two towers on stages 0 and 1: stage 1 may take in more than stage 0, but not where values go hand to hand."""
    towers = make_profile(work=[1e-3] * 3, slowness=[1.0] * 3, edges=[(0, 2), (1, 2)])
    stages = tuple(Stage(worker_name(n), (f"p{n}",), in_flight=depth) for n, depth in enumerate((1, 3, 1)))
    plan = replace(make_plan(towers, GPIPE[:1]), stages=stages, schedule="1f1b")
    build_program(plan, towers.edges)
    with pytest.raises(UsageError, match=r"stages\[\d\] would wait for ever") as caught:
        schedule_csv(plan, towers)
    assert "gpipe" in caught.value.hint


def test_a_profile_of_another_workload_is_refused(profile):
    """Both exports say so instead of writing names of another model."""
    other = replace(profile, workload=replace(profile.workload, fingerprint="sha256:11"))
    for export in (schedule_csv, module_names):
        with pytest.raises(FormatError, match="sha256:11"):
            export(make_plan(profile, GPIPE), other)
