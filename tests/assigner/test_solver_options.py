"""What cannot be asked is refused, with the value."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from builders import make_profile

from assigner.errors import UsageError
from assigner.formats.fineness import micro_batch_count
from assigner.formats.plan import load_plan, save_plan
from assigner.model.workload import load_workload
from assigner.schedule.cost import CostModel
from assigner.solver import SolveOptions, solve
from assigner.solver.problem.options import divisors
from assigner.usercode import parse_call

WRONG = [
    ({"gap": -0.1}, "-0.1"), ({"gap": 1.0}, "1.0"), ({"gap": math.nan}, "nan"), ({"gap": "x"}, "'x'"),
    ({"time_limit": "soon"}, "soon"), ({"only": ("worker:*",)}, "worker:*"), ({"time_limit": 0}, "0"),
    ({"time_limit": math.inf}, "inf"), ({"micro_batches": 0}, "0"), ({"micro_batches": 5}, "5"),
    ({"micro_batches": 16}, "16"), ({"batch_size": 0}, "0"), ({"batch_size": 7, "micro_batches": 5}, "7"),
    ({"remat": "sometimes"}, "sometimes"), ({"solver": "gurobi"}, "gurobi"), ({"seed": -1}, "-1"),
    ({"pins": {"p9": "worker:0"}}, "p9"), ({"pins": {"p0": "worker:7"}}, "worker:7"),
    ({"pins": {"p0": "gpu"}}, "gpu"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "named"), WRONG)
def test_a_wrong_option_is_refused_by_value(wrong, named):
    """UsageError (exit 2) whose message names the value."""
    with pytest.raises(UsageError) as caught:
        solve(make_profile(work=[1e-3] * 3, slowness=[1.0, 2.0]), SolveOptions(**wrong))
    assert named in caught.value.message
    assert caught.value.exit_code == 2


def test_divisors_are_all_of_them_in_order():
    """Every divisor once, smallest first."""
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(1) == (1,)
    assert divisors(7) == (1, 7)


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (8, (1, 2, 4, 8)),
        (10, (1, 2, 5, 10)),
        (7, (1, 2, 3, 7)),
        (22, (1, 2, 4, 8, 11, 22)),
        (97, (1, 2, 4, 8, 14, 25, 33, 97)),
    ],
)
def test_a_batch_with_few_divisors_has_numbers_of_micro_batches_in_between(batch, counts):
    """Every one of them cuts the batch: with one fewer of the same size it would not be whole."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0, 1.0], batch=batch)
    assert SolveOptions().counts(CostModel(profile)) == counts
    for count in counts:
        assert micro_batch_count(batch, count, -(-batch // count)) == count  # as training cuts it


def test_what_is_offered_is_what_training_makes_of_a_batch():
    """As it stands in a plan, which says how many samples each may have."""
    for batch in range(1, 700):
        counts = SolveOptions().counts(CostModel(make_profile(work=[1e-3] * 2, slowness=[1.0, 1.0], batch=batch)))
        assert all(micro_batch_count(batch, count, -(-batch // count)) == count for count in counts)
        assert set(counts) >= set(divisors(batch))


def test_a_prime_batch_is_not_one_micro_batch_or_as_many_as_samples(tmp_path):
    """Latency and bubbles are weighed as for any batch, and the plan can be read."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0, 1.0], batch=13, latency=6e-3)
    best = {count: solve(profile, SolveOptions(micro_batches=count, max_replicas=1)).plan for count in (1, 2, 4, 5, 13)}
    plan = solve(profile, SolveOptions(max_replicas=1, schedule="one-stage", gap=0.0)).plan
    assert plan.micro_batches not in (1, 13)
    assert plan.predicted.step_s == pytest.approx(min(each.predicted.step_s for each in best.values()))
    assert plan.micro_batch_size == -(-13 // plan.micro_batches)
    assert "equal" not in plan.solver.scope
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").micro_batches == plan.micro_batches


def test_importing_the_solver_is_light():
    """PuLP, HiGHS and numpy are imported inside `solve`."""
    code = "import sys, assigner.solver; print([m for m in ('pulp', 'highspy', 'numpy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_solving_needs_no_torch():
    """A laptop without torch can solve."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); sys.modules['torch'] = None\n"
        "from builders import make_profile\nfrom assigner.solver import solve\n"
        "print(len(solve(make_profile(work=[1e-3] * 3, slowness=[1.0, 2.0])).plan.stages))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) >= 1


@pytest.mark.parametrize(
    "wrong",
    [{"pins": {"p0": 3}}, {"pins": {"p0": None}}, {"pins": ["p0"]}, {"forbid": (("p0",),)}, {"together": 3},
     {"together": (("p0", "p1"), 3)}, {"time_limit": 10**400}],
)  # fmt: skip
def test_values_of_another_form_are_refused(wrong):
    """The field is named, and what it takes; lists do as well as tuples."""
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: .* is not allowed; expected"):
        SolveOptions(**wrong)
    assert SolveOptions(together=[["p0", "p1"]], forbid=[["p0", "worker:0"]], pins={"p0": "worker:0"})


@pytest.mark.parametrize("call", ["w(a={[]: 1})", f"w(a={'-' * 100_000}1)"])
def test_a_call_that_python_does_not_read_is_refused(call):
    """A list as a key, and more signs than the parser nests."""
    with pytest.raises(UsageError, match="cannot be read"):
        parse_call(call, "e.py", what="function", hint="")


def test_a_workload_file_whose_name_is_too_long_is_not_there():
    """More characters than the system takes."""
    with pytest.raises(UsageError, match="no such file"):
        load_workload(f"{'x' * 300}.py:w")
