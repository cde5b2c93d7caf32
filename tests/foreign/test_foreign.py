"""Models and habits that nobody here wrote: each trains as in plain torch, or is refused in words where it may be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from foreign.case import Case, all_cases
from foreign.harness import Judge, Setting
from foreign.hooks import Net
from foreign.refusals import SHOWS_THROUGH
from torch.nn.functional import mse_loss
from workloads import workload

from assigner.errors import AssignerError
from assigner.marking import partition_graph
from assigner.verification import check_model

if TYPE_CHECKING:
    from assigner.workload import Workload


@pytest.mark.parametrize(
    "each", [each for each in all_cases() if each.usual], ids=lambda each: f"{each.group}: {each.name}"
)
def test_one_worker_trains_as_plain_torch(each: Case):
    """Whole batches and two micro-batches, nothing recomputed and everything, in training and in evaluation."""
    judge = Judge(each)
    for micro_batches, remat in itertools.product((1, 2), ("none", "all")):
        setting = Setting(1, micro_batches, remat)
        verdict = judge.verdict(setting).settled()
        assert each.allows(verdict.kind, verdict.words), f"{setting}: {verdict.kind}: {verdict.words}"


@pytest.mark.parametrize("name", sorted(SHOWS_THROUGH))
def test_what_shows_through_a_capture_is_found_by_the_check(name: str):
    """Code that asks for the type of its tensors takes another way in a capture: no plan is made for it."""
    made = next(each for each in all_cases() if each.name == name).make()
    with pytest.raises(AssignerError):
        check_model(made, partition_graph(made))


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


def over_rows(made, wanted):
    return (made.mean() - wanted.mean()).square()


def test_a_refusal_counts_where_its_words_do():
    """An error is allowed where the case has words for it; equal always is; an exception of another kind never."""
    case = Case("refused", "tests", lambda: workload(Net), refusal="hook|listed")
    assert case.allows("refused", "UsageError: a hook")
    assert not case.allows("refused", "UsageError: another thing")
    assert case.allows("equal", "")
    assert not case.allows("foreign", "KeyError: hook")
    assert not replace(case, refusal="").allows("refused", "UsageError: a hook")
