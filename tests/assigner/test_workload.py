"""The workload's own checks, and entries `FILE.py:FUNCTION(...)`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from workloads import make_plan, skips, towers

from assigner import Pipeline
from assigner.errors import FormatError, UsageError
from assigner.model.workload import call_arguments, entry_settings, load_workload

FILE = """
from neighbour import WIDTH
import torch
from torch import nn
from assigner import Workload

def workload(width=WIDTH, name="x"):
    return Workload(lambda: nn.Sequential(nn.Linear(width, 1)), lambda n, g: (torch.rand(n, width, generator=g),) * 2,
                    nn.functional.mse_loss, torch.optim.SGD, 4, name=name)

def module():
    return nn.Linear(1, 1)

def number():
    return 3
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    (tmp_path / "made.py").write_text(FILE)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path / "made.py"


def test_an_entry_is_called(file):
    """With arguments or without; a module beside the file can be imported."""
    assert load_workload(f"{file}:workload").model()[0].in_features == 3
    made = load_workload(f"{file}:workload(width=5, name='five')")
    assert (made.model()[0].in_features, made.name) == (5, "five")


def test_settings_of_an_entry(file):
    """Keywords take the place of the entry's own and of defaults; all of them are read back, and know no others."""
    made = load_workload(f"{file}:workload(width=5)", name="mine")
    assert dict(made.settings) == {"width": 5, "name": "mine"}
    assert (made.model()[0].in_features, made.name) == (5, "mine")
    assert entry_settings(f"{file}:workload(width=5)") == {"width": 5, "name": "x"}
    with pytest.raises(UsageError, match="has no setting 'lr'") as caught:
        load_workload(f"{file}:workload", lr=0.1)
    assert caught.value.hint == "it has width, name"


def test_a_setting_that_makes_another_model(file):
    """A plan takes settings that leave its model as it is; the refusal of others names them, then and now."""
    entry = f"{file}:workload(name='five')"
    plan = make_plan(load_workload(entry))
    plan = replace(plan, workload=replace(plan.workload, entry=entry))
    Pipeline(load_workload(entry, name="mine"), plan).close()
    with pytest.raises(FormatError, match=r"workload 'five', and this model of 'mine' is another") as caught:
        Pipeline(load_workload(entry, name="mine", width=5), plan)
    assert caught.value.hint == "give a plan that was solved for it"
    with pytest.raises(FormatError, match=r"another one: .*; it was made with width=5 in place of 3\n") as caught:
        Pipeline(load_workload(entry, width=5), plan)
    assert "PYTHONHASHSEED" in str(caught.value.hint), "a set's order makes another graph in each process"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("made:workload", r"names no workload\nhint: .*model.py:workload"),
        ("made.py", r"names no workload\nhint: .*made.py:workload"),
        ("nowhere.py:workload", "no such file"),
        ("{file}:absent", "has no function 'absent'"),
        ("{file}:number", "gave int\nhint: it must return an assigner.Workload$"),
        ("{file}:module", "gave Linear\nhint: .*; assigner init '.*:module' writes a file with one$"),
        ("{file}:workload(open('x'))", "is no function"),
        ("{file}:workload(width=open('x'))", "cannot be read"),
        ("{file}:workload(", "cannot be read"),
        ("{file}:os.getcwd()", "is no function"),
    ],
)
def test_entries_that_cannot_be_used(file, entry, message):
    """Each says what is wrong, and runs nothing but the named function."""
    with pytest.raises(UsageError, match=message):
        load_workload(entry.format(file=file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size: 0"),
        ({"reduction": "max"}, "reduction: 'max'"),
        ({"marks": "blocks"}, "is text"),
        ({"model": torch.nn.Linear(2, 2)}, "Workload.model is a module, a Linear"),
        ({"model": None}, "Workload.model is a NoneType"),
        ({"batch": [1]}, "Workload.batch is a list"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "Workload.optimizer is an optimizer, of type SGD"),
    ],
)
def test_values_are_checked(change, message):
    """A workload that cannot work is refused when it is made."""
    with pytest.raises(UsageError, match=message):
        replace(skips(), **change)


def test_batches_are_a_pair_and_repeatable():
    """The same seed gives the same batch; something else than a pair is refused."""
    one, again = skips().make_batch(3, 7), skips().make_batch(3, 7)
    assert torch.equal(one[0], again[0])
    with pytest.raises(UsageError, match="gave list, not a pair"):
        replace(skips(), batch=lambda rows, generator: [rows, generator]).make_batch(1, 0)


def test_how_the_model_is_called():
    """Tuples and lists are positional arguments, dicts keywords, the rest one argument."""
    (left, right), _ = towers().make_batch(2, 0)
    assert call_arguments((left, right)) == ((left, right), {})
    assert call_arguments({"x": left}) == ((), {"x": left})
    assert call_arguments(left) == ((left,), {})


def test_a_builder_of_optimizers_is_told_how_it_gets_names():
    """Where it takes parameters for pairs, whatever of it fails; and that several optimizers are none."""

    def unpacks(named):
        return torch.optim.SGD([{"params": [each]} for _, each in named], lr=0.1)

    def asks(params):
        return torch.optim.SGD([p for p in params if not p[0].endswith("bias")], lr=0.1)

    for builder in (unpacks, asks):
        with pytest.raises(UsageError, match=r"Workload\.optimizer failed at ") as caught:
            replace(skips(), optimizer=builder).make_optimizer(skips().model().named_parameters())
        assert "where its first argument is called named_parameters" in (caught.value.hint or "")
    several = replace(skips(), optimizer=lambda parameters: [torch.optim.SGD(parameters, lr=0.1)] * 2)
    with pytest.raises(UsageError, match=r"Workload\.optimizer gave list") as caught:
        several.make_optimizer(skips().model().named_parameters())
    assert "param groups of one" in (caught.value.hint or "")
