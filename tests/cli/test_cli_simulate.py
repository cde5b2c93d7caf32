import json
from dataclasses import replace

from assigner.plan import save_plan
from assigner.profile import save_profile


def test_same_profile_agrees(assigner, solved):
    """A plan priced with the profile that it was solved from says what the plan says."""
    result = assigner("simulate", "solved.json", "--profile", "profile.json")
    assert result.exit_code == 0
    assert "as the plan says itself" in result.stdout
    assert "fits" in result.stdout


def test_json(assigner, solved):
    """--json has the new prediction, the stored one and the verdict on memory."""
    data = json.loads(assigner("simulate", "solved.json", "--profile", "profile.json", "--json").stdout)
    assert data["predicted"]["step_s"] == data["stored"]["step_s"] == solved.predicted.step_s
    assert data["fits"] is True
    assert data["step_change"] == 0


def test_changed_profile_says_by_how_much(assigner, folder, profile):
    """With every time doubled the step is told to have doubled."""
    slower = tuple(
        replace(each, forward_s=2 * each.forward_s, backward_s=2 * each.backward_s, update_s=2 * each.update_s)
        for each in profile.measurements
    )
    save_profile(replace(profile, measurements=slower, links=profile.links), folder / "slow.json")
    data = json.loads(assigner("simulate", "solved.json", "--profile", "slow.json", "--json").stdout)
    assert 0.98 < data["step_change"] <= 1
    assert "now" in assigner("simulate", "solved.json", "--profile", "slow.json").stdout


def test_overfull_worker_is_named(assigner, folder, profile):
    """Where a worker's memory is too small, it is named with what it needs and has."""
    tiny = tuple(replace(worker, memory_bytes=1e6) for worker in profile.workers)
    save_profile(replace(profile, workers=tiny), folder / "tiny.json")
    result = assigner("simulate", "solved.json", "--profile", "tiny.json")
    assert result.exit_code == 0
    assert "does not fit: worker:0/cpu needs" in result.stdout
    assert "!" in result.stdout


def test_unpriced_plan(assigner, folder, solved):
    """A plan without a prediction is priced all the same."""
    save_plan(replace(solved, predicted=None), folder / "hand.json")
    result = assigner("simulate", "hand.json", "--profile", "profile.json")
    assert result.exit_code == 0
    assert "stores no prediction" in result.stdout
