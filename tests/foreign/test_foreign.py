"""What judges models and habits that nobody here wrote; test_foreign_*.py have the list, in parts."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest
import torch
from foreign.case import MODULES, Case, all_cases
from foreign.daily import DAILY
from foreign.harness import Judge, Setting, Verdict, distance, plain
from foreign.hooks import Net
from foreign.judged import PARTS
from foreign.refusals import SHOWS_THROUGH
from foreign.run import found, read, write
from torch.nn.functional import mse_loss
from workloads import workload

from assigner.errors import AssignerError
from assigner.model.marking import partition_graph
from assigner.verification.checking import check_model

if TYPE_CHECKING:
    from assigner.model.workload import Workload


def test_every_day_has_cases_of_every_module():
    """The names of those that `make test` runs are in the list, and every module of it has one."""
    daily = [each for each in all_cases() if each.name in DAILY]
    assert {each.name for each in daily} == DAILY
    assert all(each.usual for each in daily)
    assert {each.group for each in daily} == {each.group for each in all_cases()}


def test_each_module_is_in_one_part():
    """Every module of the list is in one of the parts that the test files run."""
    assert sorted(itertools.chain(*PARTS.values())) == sorted(MODULES)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in DAILY else pytest.mark.sweep) for each in sorted(SHOWS_THROUGH)]
)
def test_what_shows_through_a_capture_is_found_by_the_check(name: str):
    """Code that asks for the type of its tensors takes another way in a capture: no plan is made for it."""
    made = next(each for each in all_cases() if each.name == name).make()
    with pytest.raises(AssignerError):
        check_model(made, partition_graph(made))


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.name, marks=() if each.name in DAILY else pytest.mark.sweep)
        for each in all_cases()
        if each.group == "kept_tables" and each.refusal
    ],
)
def test_tables_that_depend_on_the_longest_length_are_refused(each: Case):
    """They are not equal by chance, for the lengths of the batches of the list."""
    verdict = Judge(each).verdict(Setting(1, 1))
    assert verdict.kind == "refused", verdict.words


def test_no_micro_batch_of_one_row_where_batch_norm_needs_two():
    """Five rows over three micro-batches: a cut of 2, 2 and 1 is avoided, and plain torch over the same cut agrees."""
    case = next(each for each in all_cases() if each.name == "BatchNorm, marked with its layer")
    verdict = Judge(case).verdict(Setting(1, 3))
    assert verdict.kind == "equal", verdict.words


def test_a_wrong_result_is_found():
    """A loss that is off by a millionth in the second training is a difference, and says where it begins."""
    trainings = itertools.count()

    def make() -> Workload:
        factor = 1 + 1e-6 * next(trainings)
        return workload(Net, "first", "second", "last", loss=lambda made, wanted: factor * mse_loss(made, wanted))

    verdict = Judge(Case("off", "tests", make)).verdict(Setting())
    assert verdict.kind == "different"
    assert verdict.words.startswith("step 0: loss")


def test_rows_cut_wrongly_are_found():
    """Whole batches are what counts for several micro-batches, unless a case says that these differ by nature."""
    case = Case("mixed", "tests", lambda: workload(Net, "first", "second", "last", loss=over_rows))
    assert Judge(case).verdict(Setting(1, 2)).kind == "different"
    assert Judge(replace(case, inherent=True)).verdict(Setting(1, 2)).kind == "equal"


@pytest.mark.parametrize(
    ("make", "alike"),
    [
        (Net, True),
        (lambda: torch.nn.Sequential(Net(), torch.nn.Dropout(0.5)), False),
        (lambda: torch.nn.Sequential(Net(), Scaled()), False),
    ],
    ids=["as in training", "dropout", "another operation with the same result"],
)
def test_that_evaluation_is_as_training_is_seen(make, alike):
    """What is left out where evaluation has nothing of its own is left out nowhere else."""
    made = workload(make, loss=mse_loss)
    assert plain(made, 1).modes_alike is alike


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x if self.training else x * 1


def over_rows(made, wanted):
    return (made.mean() - wanted.mean()).square()


def test_no_number_is_equal_to_no_number():
    """What plain torch makes nan or infinite has to be that, in the same places, and nothing else may be."""
    nan, inf = math.nan, math.inf
    for mine, theirs, off in (
        (nan, nan, 0.0), (inf, inf, 0.0), ([1.0, nan, inf, 2.0], [1.0, nan, inf, 4.0], 0.5),
        (nan, 1.0, inf), (1.0, nan, inf), (inf, -inf, inf), (inf, 1.0, inf), ([1.0, nan], [nan, 1.0], inf),
    ):  # fmt: skip
        assert distance(torch.tensor(mine), torch.tensor(theirs)) == off


def test_a_run_that_was_stopped_goes_on(tmp_path):
    """Verdicts are read as they were written; a case counts when all its ranks have said something."""
    setting, path = Setting(2, 2, "all"), tmp_path / "found.json"
    verdicts = {("dropout", setting): Verdict("equal", "", inherent=True, lost=("0.weight",))}
    write(verdicts, path)
    assert read(path) == verdicts
    assert read(tmp_path / "none") == {}
    for rank in range(2):
        words = {"setting": asdict(setting), **asdict(Verdict("equal"))}
        lines = [json.dumps({"case": name, **words}) for name in ("both", "first of them")[: 2 - rank]]
        (tmp_path / f"{rank}.jsonl").write_text("\n".join(lines))
    assert found(tmp_path) == {("both", setting): Verdict("equal")}


def test_a_refusal_counts_where_its_words_do():
    """An error is allowed where the case has words for it; equal always is; an exception of another kind never."""
    case = Case("refused", "tests", lambda: workload(Net), refusal="hook|listed")
    assert case.allows("refused", "UsageError: a hook")
    assert not case.allows("refused", "UsageError: another thing")
    assert case.allows("equal", "")
    assert not case.allows("foreign", "KeyError: hook")
    assert not replace(case, refusal="").allows("refused", "UsageError: a hook")
