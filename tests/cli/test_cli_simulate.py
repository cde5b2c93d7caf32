import gzip
import hashlib
import json
from dataclasses import replace

import pytest
from builders import make_plan
from trace_event_rules import read_trace_events

from assigner.formats.plan import ProfileReference, save_plan
from assigner.formats.profile import save_profile


def test_same_profile_agrees(assigner, solved):
    """A plan priced with the profile that it was solved from says what the plan says."""
    result = assigner("simulate", "solved.json", "--profile", "profile.json")
    assert result.exit_code == 0
    assert "the same as the plan's own prediction" in result.stdout
    assert "timeline of a step" in result.stdout
    assert "fits" in result.stdout


def test_json(assigner, solved):
    """--json has the new prediction, the stored one and the verdict on memory."""
    data = json.loads(assigner("simulate", "solved.json", "--profile", "profile.json", "--json").stdout)
    assert data["predicted"]["step_s"] == data["stored"]["step_s"] == solved.predicted.step_s
    assert data["fits"] is True
    assert data["step_change"] == 0
    assert data["own_profile"] is None
    assert {each["worker"] for each in data["timeline"]["predicted"]["actions"]} == {"worker:0/cpu", "worker:1/cpu"}


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
    assert "no prediction of its own" in result.stdout


@pytest.fixture
def known(folder, solved):
    """known.json: solved.json that says which profile it was solved from."""
    sha256 = hashlib.sha256((folder / "profile.json").read_bytes()).hexdigest()
    save_plan(replace(solved, profile=ProfileReference("profile.json", sha256)), folder / "known.json")


def test_the_profile_is_found(assigner, folder, profile, known):
    """Without --profile it is the one that the plan was solved from; a changed one is refused until it is named."""
    result = assigner("simulate", "known.json")
    assert result.exit_code == 0
    assert "priced with the profile it was solved from" in result.stdout
    save_profile(replace(profile, created_at="later"), folder / "profile.json", force=True)
    result = assigner("simulate", "known.json")
    assert result.exit_code == 5
    assert "profile.json has changed" in result.stderr
    named = assigner("simulate", "known.json", "--profile", "profile.json")
    assert "priced with another profile than it was solved from" in named.stdout


def test_a_plan_edited_by_hand_says_so(assigner, folder, known, equal):
    """Its own prediction is that of the plan before."""
    document = json.loads((folder / "known.json").read_text())
    document["stages"] = json.loads((folder / "equal.json").read_text())["stages"]
    (folder / "hand.json").write_text(json.dumps(document))
    result = assigner("simulate", "hand.json")
    assert "the plan itself says: step" in result.stdout
    assert "so the plan was changed since" in result.stdout
    assert "+/- %" in result.stdout


@pytest.mark.parametrize("columns", [None, 60, 80, 120, 200])
def test_no_line_is_longer_than_the_terminal(assigner, known, columns):
    """The timeline takes all of it."""
    out = assigner("simulate", "known.json", "--memory", columns=columns).stdout
    longest = max(map(len, out.splitlines()))
    assert longest == 120 if columns is None else longest <= columns
    if columns is not None and columns >= 80:
        assert longest == columns


def test_a_trace_is_written_for_perfetto(assigner, folder, known):
    """The screen is the same, the file keeps the format's rules, and stderr says where to open it."""
    plain = assigner("simulate", "known.json")
    result = assigner("simulate", "known.json", "--trace", "step.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == plain.stdout
    assert "wrote step.json" in result.stderr
    assert "ui.perfetto.dev" in result.stderr
    seen = read_trace_events((folder / "step.json").read_text())
    assert seen.other["plan"] == "known.json"
    assert seen.other["profile"] == "profile.json"
    assert ("worker:0/cpu predicted", "memory by use MiB") in seen.counters
    again = assigner("simulate", "known.json", "--trace", "step.json")
    assert again.exit_code == 2
    assert "--force" in again.stderr
    packed = assigner("simulate", "known.json", "--trace", "step.json.gz", "--json")
    assert json.loads(packed.stdout)["kind"] == "prediction"
    assert gzip.decompress((folder / "step.json.gz").read_bytes()) == (folder / "step.json").read_bytes()


def test_no_file_that_is_read_is_written(assigner, folder, known):
    """Not even by force, nor under another name of the same file."""
    (folder / "other.json").symlink_to("profile.json")
    for name in ("known.json", "profile.json", "./known.json", "other.json"):
        result = assigner("simulate", "known.json", "--trace", name, "--force")
        assert result.exit_code == 2
        assert "reads" in result.stderr
        assert result.stdout == ""


def test_a_step_needs_a_run(assigner, known):
    """--step without --against is a wrong use."""
    result = assigner("simulate", "known.json", "--step", "2")
    assert result.exit_code == 2
    assert "--against" in result.stderr


def test_a_step_without_time_is_told(assigner, folder, profile):
    """Where all was measured as 0 it says so in words; where a line has fallen to 0 it is refused as `solve` does."""
    plan = make_plan(profile, [(0, [f"p{n}" for n in range(6)])])
    save_plan(plan, folder / "alone.json")
    size = plan.micro_batch_size

    def measured(name, *times):
        first = {each.partition: each for each in profile.measurements if each.worker == "worker:0/cpu"}
        points = tuple(
            replace(each, micro_batch=rows, forward_s=seconds, backward_s=seconds, update_s=0.0)
            for each in first.values() for rows, seconds in times
        )  # fmt: skip
        others = tuple(each for each in profile.measurements if each.worker != "worker:0/cpu")
        save_profile(replace(profile, measurements=(*points, *others)), folder / name)
        return assigner("simulate", "alone.json", "--profile", name)

    still = measured("still.json", (size, 0.0), (2 * size, 0.0))
    assert still.exit_code == 0
    assert "predicted: a step of no time" in still.stdout
    assert "step 0 s" not in still.stdout
    falling = measured("falling.json", (2 * size, 1e-3), (4 * size, 3e-3))
    assert falling.exit_code == 5
    assert "falls to 0 or below" in falling.stderr
