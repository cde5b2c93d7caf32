"""`assigner check`, and what `profile` says of the same before it measures."""

import json

import pytest

SOUND = """
import torch
from torch import nn

import assigner


class Clipping(torch.optim.SGD):
    def step(self):
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1e-3)
        super().step()


def workload(clips=False):
    return assigner.Workload(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
        batch=lambda rows, generator: (torch.randn(rows, 4, generator=generator), torch.zeros(rows, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: (Clipping if clips else torch.optim.SGD)(parameters, lr=0.1),
        batch_size=8,
    )
"""


@pytest.fixture(autouse=True)
def model(folder):
    """model.py in the current folder."""
    (folder / "model.py").write_text(SOUND)


def test_a_sound_model_is_told_in_two_lines(assigner):
    """The result with the time that it took, and what was compared."""
    result = assigner("check", "model.py:workload")
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first.startswith("model.py:workload: the partitions compute what the model computes, to the last bit (check")
    assert second == (
        "3 partitions apart from each other: two steps and an evaluation of 7 rows in 3 micro-batches, with and without"
        " rematerialisation"
    )


def test_json_has_what_a_profile_has(assigner):
    """One object, with the entry that was checked."""
    found = json.loads(assigner("check", "model.py:workload", "--mark", "0", "--mark", "2", "--json").stdout)
    assert found["kind"] == "check"
    assert found["workload"] == "model.py:workload"
    assert (found["result"], found["exact"], found["partitions"], found["cautions"]) == ("equal", True, 2, [])


def test_a_model_that_would_train_something_else_is_an_error(assigner):
    """Exit code 2, in words; nothing is on stdout."""
    result = assigner("check", "model.py:workload(clips=True)")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "error: cut into partitions the model computes something else than as it is" in result.stderr
    assert "hint: the gradients were equal, so it is the optimizer" in result.stderr


def test_profile_refuses_it_before_anything_is_measured(assigner, folder, in_this_process):
    """No rank is started, and no file is there."""
    result = assigner("profile", "model.py:workload(clips=True)", "-o", "new.json")
    assert result.exit_code == 2
    assert "computes something else" in result.stderr
    assert not (folder / "new.json").exists()
