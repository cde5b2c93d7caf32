"""How finely a workload lets its batches be cut: kept by every part of the program, and said where it matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from builders import make_profile
from torch import nn
from workloads import WIDTH, Reference, graph_of, make_plan, workload

from assigner import Pipeline
from assigner.errors import FormatError, UsageError
from assigner.formats.fineness import Fineness, micro_batch_count, rows_each
from assigner.formats.merging import check_same_workload
from assigner.formats.plan import load_plan, save_plan
from assigner.formats.profile import Verification
from assigner.formats.profilewarnings import other_warnings, profile_warnings
from assigner.profiler.assembly import verified, workload_reference
from assigner.profiler.session import check_sizes, default_micro_batches, without_single_rows
from assigner.report.page.shown import splits
from assigner.report.placementchanges import settings
from assigner.report.plan import candidates, plan_report, title
from assigner.report.profile import verification_report
from assigner.report.sheet import Line
from assigner.runtime.batch.microbatch import fair_sizes
from assigner.schedule.cost import CostModel
from assigner.solver import SolveOptions, solve, solve_baseline
from assigner.solver.whatif import price_what_ifs
from assigner.verification.checking import check_model


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, 1))


@pytest.mark.parametrize(
    ("most", "least", "rows", "count"),
    [(None, None, 8, 8), (3, None, 8, 3), (None, 3, 8, 2), (3, 4, 8, 2), (None, 9, 8, 1), (1, None, 8, 1)],
)
def test_the_most_micro_batches(most, least, rows, count):
    """By number and by rows; a batch that is whole is always allowed. One more is refused in words."""
    fineness = Fineness(most, least)
    assert fineness.most(rows) == count
    assert fineness.obstacle(count, rows) is None
    assert (fineness.obstacle(count + 1, rows) is None) == (most is least is None)


@pytest.mark.parametrize(
    ("rows", "fineness", "count"),
    [(12, Fineness(), 4), (11, Fineness(), 4), (11, Fineness(min_rows=3), 3), (7, Fineness(min_rows=3), 2),
     (2, Fineness(min_rows=3), 1), (12, Fineness(max_micro_batches=1), 1)],
)  # fmt: skip
def test_ragged_batches_keep_the_fewest_rows(rows, fineness, count):
    """A batch of fewer rows than planned is cut into fewer micro-batches."""
    assert micro_batch_count(rows, 4, 3, fineness) == count


@pytest.mark.parametrize(("rows", "count", "said"), [(32, 5, "6 or 7"), (32, 4, "8"), (7, 3, "2 or 3"), (1, 1, "1")])
def test_rows_of_a_micro_batch_are_those_that_training_makes(rows, count, said):
    """Where a batch does not come out even, both numbers are shown."""
    assert rows_each(rows, count) == said
    assert rows_each(rows, count, joint="-") == said.replace(" or ", "-")
    assert said.split(" or ") == [str(each) for each in sorted({*fair_sizes(rows, count)})]


@pytest.mark.long
def test_an_uneven_batch_is_shown_with_both_sizes():
    """In the headline, the candidates, a comparison and the what-ifs: 5 micro-batches of 7 rows would be 35."""
    profile = make_profile(work=[1.0] * 4, slowness=[1, 1], batch=32)
    options = SolveOptions(micro_batches=5)
    plan = price_what_ifs(solve(profile, options), profile, options).plan
    assert "batch of 32 as 5 micro-batches of 6 or 7 " in title(plan).text
    assert {row[1] for row in candidates(plan)[0].rows} == {"5 x 6-7"}
    assert settings(plan)["micro-batches"] == "5 x 6-7"
    assert "8 micro-batches of 4 instead of 5 of 6 or 7" in [each.what for each in plan.what_if]


@pytest.mark.parametrize("limit", [{"max_micro_batches": 0}, {"min_rows": -1}, {"min_rows": 2.0}, {"min_rows": True}])
def test_limits_are_whole_numbers(limit):
    """Anything else is refused by value."""
    with pytest.raises(UsageError, match=f"Workload.{min(limit)}: {min(limit.values())!r} is not allowed"):
        replace(workload(chain, "*"), **limit)


def limited(**limits: Any) -> Any:
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0, 1.0], batch=8)
    return replace(profile, workload=replace(profile.workload, **limits))


def test_every_search_keeps_to_the_limits():
    """Candidates, baselines and what-ifs; a number that is asked for and not allowed is refused in words."""
    profile, options = limited(min_rows=4), SolveOptions()
    solution = solve(profile, options)
    assert {each.micro_batches for each in solution.plan.candidates} == {1, 2}
    assert solve_baseline(profile, "equal", options).micro_batches <= 2
    changes = price_what_ifs(solution, profile, options).plan.what_if
    assert not any("4 micro-batches" in each.what for each in changes)
    with pytest.raises(UsageError, match=r"micro-batches: 4 is not allowed: Workload.min_rows asks for 4 or more rows"):
        solve(profile, SolveOptions(micro_batches=4))
    with pytest.raises(UsageError, match="max_micro_batches allows 1 micro-batch at most") as caught:
        solve(limited(max_micro_batches=1), SolveOptions(micro_batches=2))
    assert caught.value.hint is not None
    assert caught.value.hint == "the nearest allowed: 1"
    with pytest.raises(UsageError, match="leaves 2") as caught:
        solve(limited(min_rows=3), SolveOptions(batch_size=7, micro_batches=3))
    assert caught.value.hint == "the nearest allowed: 2"


def test_sizes_that_are_measured_are_those_that_plans_may_have():
    """By default; another one is refused before anything is measured."""
    assert default_micro_batches(32, Fineness(min_rows=8)) == (8, 32)
    assert default_micro_batches(32, Fineness(max_micro_batches=1)) == (32,)
    made = replace(workload(chain, "*", rows=32), min_rows=8)
    check_sizes(made, (8, 16, 32))
    with pytest.raises(UsageError, match=r"micro-batch size 64: Workload.batch_size is 32") as caught:
        check_sizes(made, (8, 64))
    assert (caught.value.hint or "").startswith("1 to 32")
    with pytest.raises(UsageError, match=r"micro-batch size 4: no plan uses it: .*min_rows asks for 8"):
        check_sizes(made, (8, 4))


def test_one_size_is_no_warning_where_one_is_allowed():
    """Nothing else could have been measured."""
    profile = limited(max_micro_batches=1)
    one = profile.measurements[0].micro_batch
    points = tuple(each for each in profile.measurements if each.micro_batch == one)
    assert profile_warnings(replace(profile, measurements=points)) == ()


def test_a_file_whose_plan_is_finer_than_its_own_workload_allows_is_refused(tmp_path):
    """A batch that is not cut may have fewer rows than a micro-batch must have."""
    plan = make_plan(workload(chain, "*"), micro_batches=4)
    for limits in ({"max_micro_batches": 2}, {"min_rows": 3}):
        save_plan(replace(plan, workload=replace(plan.workload, **limits)), tmp_path / "fine.json", force=True)
        with pytest.raises(FormatError, match=r"fine.json: micro_batches: 4 is not allowed: Workload\."):
            load_plan(tmp_path / "fine.json")
    save_plan(make_plan(replace(workload(chain, "*"), min_rows=9), micro_batches=1), tmp_path / "whole.json")
    assert load_plan(tmp_path / "whole.json").micro_batches == 1


def test_a_file_with_more_micro_batches_than_training_makes_is_refused(tmp_path):
    """Of 7 samples 4 micro-batches would be of 1 or 2: training makes 3, which is what a prediction has to be of."""
    plan = make_plan(workload(chain, "*", rows=7), micro_batches=4)
    save_plan(plan, tmp_path / "uneven.json")
    with pytest.raises(FormatError, match=r"4 is not allowed: training cuts a batch of 7 into 3 .*of 2 or 3") as caught:
        load_plan(tmp_path / "uneven.json")
    assert caught.value.hint == "for 3, micro_batch_size is 3"


def test_a_pipeline_refuses_a_plan_that_is_too_fine():
    """One made by hand, or for the workload as it was; also as the target of a move."""
    made = workload(chain, "*")
    plan = make_plan(made, micro_batches=4)
    fewer = replace(made, max_micro_batches=2)
    with pytest.raises(UsageError, match=r"into 4 micro-batches, and Workload\.max_micro_batches allows 2"):
        Pipeline(fewer, plan, graph=graph_of(made))
    with Pipeline(fewer, make_plan(made, micro_batches=2), graph=graph_of(made)) as pipeline:
        with pytest.raises(UsageError, match="into 4 micro-batches"):
            pipeline.move(plan)
        assert pipeline.step(made.make_batch(8, 0)) > 0


def test_rows_of_ragged_batches_in_a_run():
    """BatchNorm of the parts that a run makes is that of a plain loop over the same parts."""
    made = replace(workload(normalised, "*", rows=12), min_rows=3)
    reference = Reference(made)
    with Pipeline(made, make_plan(made, micro_batches=4), graph=graph_of(made)) as pipeline:
        x, y = made.make_batch(8, 1)
        loss = pipeline.step((x, y))
    parts = [reference.model(part) for part in x.split([4, 4])]
    assert loss == pytest.approx(F.mse_loss(torch.cat(parts), y).item(), abs=1e-12)


@pytest.mark.long
def test_what_sees_a_micro_batch_by_itself_is_told():
    """BatchNorm and a loss over rows: found by the check, kept by the profile, said of it and of plans with several."""

    def contrastive(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(made @ made.T, torch.arange(len(made))) + 0 * wanted.sum()

    made = workload(normalised, "*", loss=contrastive)
    found = check_model(made, graph_of(made))
    norm, loss = found.per_micro_batch
    assert norm == "BatchNorm ('0.1') normalises each by itself"
    assert loss.startswith("the loss or the model mixes rows")
    said = [each.text for each in verification_report(found, "m.py:w") if isinstance(each, Line)]
    assert f"caution: several micro-batches: {norm}" in said
    assert workload_reference(made, graph_of(made), "m.py:w").per_micro_batch == (norm,)
    profile = verified(limited(), found)
    assert f"the number of micro-batches changes what is trained: {norm}; {loss};" in profile.warnings[0]
    assert other_warnings(profile) == ()
    assert verified(profile, Verification(result="equal")).warnings == ()
    for count in (1, 2):
        plan = solve(profile, SolveOptions(micro_batches=count)).plan
        lines = [each.text for each in plan_report(plan) if isinstance(each, Line)]
        assert any(line.startswith("warning: 2 micro-batches do not train as one: Batch") for line in lines) == (
            count > 1
        )
    whole = replace(made, max_micro_batches=1)
    assert check_model(whole, graph_of(made)).per_micro_batch == ()
    assert profile_warnings(limited(max_micro_batches=1, per_micro_batch=(norm,))) == ()


def test_frozen_batch_norm_is_none():
    """One that is built in eval mode normalises by its running statistics."""

    def frozen() -> nn.Module:
        model = normalised()
        model[0].eval()
        return model

    made = workload(frozen, "*")
    assert workload_reference(made, graph_of(made), "").per_micro_batch == ()


def test_profiles_of_other_limits_are_not_put_together():
    """A plan from both could keep to one of them alone."""
    with pytest.raises(Exception, match="its min_rows is 4, not null"):
        check_same_workload(limited().workload, {}, limited(min_rows=4), names=("a", "b"))


class GraphLayer(nn.Module):
    """Attention over the neighbours of every node."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, nodes: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        found = self.values(nodes)
        scores = (found @ self.scores(nodes).T).masked_fill(near == 0, -9e15)
        return torch.softmax(scores, 1) @ found


class GraphNetwork(nn.Module):
    """One graph, all of its nodes in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = GraphLayer(), GraphLayer()

    def forward(self, nodes: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(nodes, near)), near)


NODES = 14


def whole_graph(_rows: int, generator: torch.Generator) -> Any:
    """The same size however many rows are asked for, and targets of some of the nodes."""
    nodes = torch.randn(NODES, WIDTH, generator=generator, dtype=torch.float64)
    near = (torch.rand(NODES, NODES, generator=generator) > 0.6).double() + torch.eye(NODES)
    return (nodes, near), (torch.arange(NODES) % WIDTH, torch.arange(NODES) < 9)


def of_labelled(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    kinds, labelled = targets
    return F.cross_entropy(outputs[labelled], kinds[labelled])


@pytest.mark.long
def test_a_graph_network_is_trained_whole():
    """Checked, and trained as a plain loop does; where nothing limits it the check says why it used one micro-batch."""
    free = workload(GraphNetwork, "*", batch=whole_graph, loss=of_labelled, rows=NODES)
    made = replace(free, max_micro_batches=1)
    found = check_model(made, graph_of(free))
    assert (found.result, found.micro_batches, found.cautions) == ("equal", 1, ())
    assert "Workload.max_micro_batches=1 keeps plans to one" in check_model(free, graph_of(free)).cautions[-1]
    reference = Reference(made)
    plan = make_plan(free, [(0, ["one"]), (0, ["two"])], micro_batches=1)
    with Pipeline(made, plan, graph=graph_of(free)) as pipeline:
        for seed in range(3):
            batch = made.make_batch(NODES, seed)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=1e-12)
            assert pipeline.evaluate(batch) == pytest.approx(reference.loss(batch).item(), abs=1e-12)


def test_the_page_prices_what_is_allowed():
    """Its chart over the numbers of micro-batches ends at the most that there may be."""
    profile = limited(min_rows=4)
    plan = solve(profile, SolveOptions()).plan
    assert {each.micro_batches for each in splits(plan, CostModel(profile))} == {1, 2}


@pytest.mark.parametrize(
    ("norm", "least"),
    [
        (lambda: nn.BatchNorm1d(WIDTH), 2),
        (lambda: nn.Sequential(nn.Unflatten(1, (2, -1)), nn.BatchNorm1d(2), nn.Flatten()), None),
        (lambda: nn.LayerNorm(WIDTH), None),
    ],
)
def test_one_row_is_left_out_where_batchnorm_needs_two(norm, least):
    """A profile is then as with min_rows=2; several values of a channel within a row are enough."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, 1)), "*", rows=8)
    graph = graph_of(made)
    assert without_single_rows(made, graph).min_rows == least
    limited = replace(made, max_micro_batches=4)
    assert without_single_rows(limited, graph) is limited
