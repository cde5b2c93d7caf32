"""What a run rematerialises, micro-batch by micro-batch, and what follows for memory, checks and traces."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from builders import make_plan as made_plan
from builders import make_profile
from made_runs import run_in
from torch import nn
from workloads import graph_of, language, make_plan, skips, workload

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.formats.trace import load_trace
from assigner.report.agreement import agreement_report
from assigner.report.sheet import markdown
from assigner.runtime.forward.remat import Rematerialisation
from assigner.schedule.simulate import predict
from assigner.validation.comparison import agree, as_run

if TYPE_CHECKING:
    from pathlib import Path


FORWARDS = memoryview(bytearray(8)).cast("q")  # what a capture would not look into: a count that it sees is refused


def watched() -> None:
    """Has what is alive as an attribute: of what hangs on a function a capture looks at numbers and texts."""


watched.alive = []


class Watched(nn.Linear):
    """Counts its forwards, in a buffer and out of it, and watches a tensor that its backward needs."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FORWARDS[0] += 1
        self.count += 1
        kept = x.exp() if x.requires_grad else (x + 0 * self.bias[:1]).exp()
        watched.alive.append(weakref.ref(kept))
        return super().forward(kept)


def kept_graphs() -> int:
    return sum(each() is not None for each in watched.alive)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "micro_batches", "forwards", "kept"),
    [("never", 4, 8, 8), ("except_last", 4, 14, 2), ("always", 4, 16, 1), ("except_last", 1, 2, 2)],
)
def test_all_but_the_last_micro_batch(remat, micro_batches, forwards, kept):
    """One more forward for each rematerialised micro-batch, only the others' graphs are kept, buffers count once.

    A partition that will run again has its graph until its first forward is done.
    """
    watched.alive = []
    most = []

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        most.append(kept_graphs())
        return (output - targets).square().mean()

    made = workload(lambda: nn.Sequential(Watched(8, 8), Watched(8, 1)), loss=loss)
    with Pipeline(made, make_plan(made, micro_batches=micro_batches), graph=graph_of(made), remat=remat) as pipeline:
        FORWARDS[0], watched.alive, most = 0, [], []
        pipeline.step(made.make_batch(8, 0))
        assert FORWARDS[0] == forwards
        assert most[micro_batches - 1] == kept
        assert kept_graphs() == 0
        assert float(pipeline.state_dict()["1.count"]) == micro_batches


def test_dropout_and_losses_are_those_without():
    """The micro-batch that keeps its graph and those that do not draw the masks that all draw: equal to the bit.

    No weight is tied: one backward adds up the parts of its gradient in another order than two.
    """
    made = language(dropout=0.3, tied=False)
    found = []
    for remat in ("never", "except_last"):
        with Pipeline(made, make_plan(made, micro_batches=3), graph=graph_of(made), remat=remat) as pipeline:
            losses = [pipeline.step(made.make_batch(rows, rows)) for rows in (8, 7)]
            found.append((losses, {name: each.detach().clone() for name, each in pipeline.named_parameters()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(each, found[1][1][name]) for name, each in found[0][1].items())


def test_a_step_of_1f1b():
    """The last micro-batch is the step's last, also where backwards of others lie before it."""
    made = workload(lambda: nn.Sequential(Watched(8, 8), Watched(8, 1)))
    watched.alive = []
    with Pipeline(made, make_plan(made, schedule="1f1b"), graph=graph_of(made), remat="except_last") as pipeline:
        FORWARDS[0] = 0
        pipeline.step(made.make_batch(8, 0))
    assert FORWARDS[0] == 14


def test_which_runs_are_held_against_the_prediction():
    """Only those that take what was predicted or more: what is predicted not to fit will not fit."""
    made = skips()
    names = ["parts.0", "parts.1", "parts.2", "last"]
    some, everything = make_plan(made, remat=names[:1]), make_plan(made, remat=names)
    for plan, expected in ((some, (True, False, False, True)), (everything, (True, False, True, True))):
        choices = [Rematerialisation(choice, plan) for choice in ("plan", "always", "except_last", "never")]
        assert tuple(choice.takes_planned_memory for choice in choices) == expected
    assert Rematerialisation("plan", some).partitions == {"parts.0"}
    with pytest.raises(UsageError, match="remat='sometimes' is not allowed") as caught:
        Pipeline(made, some, remat="sometimes")
    assert "except_last" in caught.value.hint


def test_a_trace_says_so(tmp_path: Path):
    """A trace of such a run has the word, and is priced as if all were rematerialised; the report says that."""
    made = skips()
    with (
        Pipeline(made, make_plan(made), remat="except_last") as pipeline,
        pipeline.trace(tmp_path / "trace.json", last=1),
    ):
        pipeline.step(made.make_batch(8, 0))
    assert load_trace(tmp_path / "trace.json").remat == "except_last"
    profile = make_profile(work=[1.0, 2.0], slowness=[1.0, 2.0])
    plan = made_plan(profile, [(0, ["p0"]), (1, ["p1"])], micro_batches=4)
    trace = replace(run_in(profile, plan), remat="except_last")
    run = as_run(plan, trace)
    assert [stage.rematerialise for stage in run.stages] == [("p0",), ("p1",)]
    found = agree(plan, profile, trace)
    assert found.step.predicted_s == predict(run, profile).step_s
    assert "all but the last micro-batch of each step: it is priced as if that one, too" in markdown(
        agreement_report(found)
    )
    once = replace(plan, micro_batches=1, micro_batch_size=plan.workload.batch_size)
    assert not any(stage.rematerialise for stage in as_run(once, trace).stages)


def test_what_needs_no_backward_runs_once():
    """A partition that is frozen, and all before it: its forward is not run again for nothing."""

    def model() -> nn.Module:
        made = nn.Sequential(Watched(8, 8), nn.Linear(8, 1))
        made[0].requires_grad_(requires_grad=False)
        return made

    made = workload(model)
    with Pipeline(made, make_plan(made), graph=graph_of(made), remat="always") as pipeline:
        FORWARDS[0], watched.alive = 0, []
        pipeline.step(made.make_batch(8, 0))
        assert FORWARDS[0] == 4
        assert set(pipeline.gradients()) == {"1.weight", "1.bias"}
        assert float(pipeline.state_dict()["0.count"]) == 4


class Counts(nn.Linear):
    """Counts its forwards in one buffer in place, in another through .data, in a third from the second step on."""

    counts_late = False

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        for name in ("seen", "aside", "late"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("mask", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.aside.data.add_(1)
        if type(self).counts_late:
            self.late += 1
        return super().forward(x) * self.mask


def test_only_buffers_that_change_are_kept(monkeypatch: pytest.MonkeyPatch):
    """A recompute counts nothing twice, however it is counted, and copies no constant."""
    made = workload(lambda: nn.Sequential(Counts(8, 8), nn.Linear(8, 1)))
    with Pipeline(made, make_plan(made), graph=graph_of(made), remat="always") as pipeline:
        for n in range(2):
            monkeypatch.setattr(Counts, "counts_late", n > 0)
            pipeline.step(made.make_batch(8, n))
        state = pipeline.state_dict()
        assert [float(state[f"0.{name}"]) for name in ("seen", "aside", "late", "mask")] == [8, 8, 4, 1]
        runner = pipeline._installed.executor.runners["0"]
        kept = set(map(id, runner.state.writes))
        assert kept == {id(state[f"0.{name}"]) for name in ("seen", "aside", "late")}
