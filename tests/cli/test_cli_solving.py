"""The flags and the settings file of `assigner solve`."""

import json

import pytest

from assigner.formats.plan import load_plan, save_plan


def solved(assigner, folder, *flags):
    result = assigner("solve", "profile.json", "-o", "new.json", "--force", *flags)
    assert result.exit_code == 0, result.stderr
    return load_plan(folder / "new.json"), result


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_objectives_are_said(assigner, folder, objective):
    """The plan names its objective, and the report says its value."""
    plan, result = solved(assigner, folder, "--objective", objective)
    assert plan.objective == objective
    assert f"{objective}: " in result.stdout


def test_cost_shows_the_frontier(assigner, folder):
    """With prices, the plans that no other beats stand in a table, the chosen one marked."""
    plan, result = solved(assigner, folder, "--objective", "cost", "--price", "worker:0=3", "--price", "worker:1=1")
    assert plan.objective == "cost"
    assert "cost against step time" in result.stdout
    assert "per 1000 samples" in result.stdout
    slow = assigner("solve", "profile.json", "-o", "x.json", "--objective", "cost", "--max-step", "1e-9",
                    "--price", "worker:0=3", "--price", "worker:1=1")  # fmt: skip
    assert slow.exit_code == 3
    assert "--max-step" in slow.stderr


def test_hints_reach_the_plan(assigner, folder):
    """Hints on the line bind, and are stored with the settings."""
    asked = "--order", "worker:1,worker:0", "--max-replicas", "1"
    order = [stage.worker for stage in solved(assigner, folder, *asked)[0].stages]
    assert order == sorted(order, reverse=True)
    first, second, *_ = load_plan(folder / "new.json").partitions
    plan, _ = solved(assigner, folder, "--apart", f"{first},{second}", "--never-remat", "*", "--max-workers", "2")
    assert plan.placement[first] != plan.placement[second]
    assert plan.solver.options["max_workers"] == 2
    assert not any(stage.rematerialise for stage in plan.stages)


@pytest.mark.long
def test_a_partial_plan_is_completed(assigner, folder):
    """--complete keeps what the file says and places the rest."""
    plan, _ = solved(assigner, folder, "--max-replicas", "1")
    from dataclasses import replace

    kept = plan.partitions[0]
    stage = replace(plan.stages[0], sole_worker="worker:1/cpu", partitions=(kept,), rematerialise=())
    part = replace(plan, stages=(stage,))
    save_plan(part, folder / "part.json")
    whole, _ = solved(assigner, folder, "--complete", "part.json")
    assert whole.placement[kept] == "worker:1/cpu"
    assert set(whole.partitions) == set(plan.partitions)


def test_a_partial_plan_that_does_not_fit_is_named(assigner, folder, equal):
    """With its file and stage, and no search begins."""
    save_plan(equal, folder / "part.json")
    part = json.loads((folder / "part.json").read_text())
    part["stages"][0]["partitions"][0] = "nobody"
    (folder / "part.json").write_text(json.dumps(part))
    result = assigner("solve", "profile.json", "-o", "new.json", "--complete", "part.json")
    assert result.exit_code == 5
    assert "part.json: stages[0]: the plan names 'nobody', which the profile has not" in result.stderr
    assert not (folder / "new.json").exists()


@pytest.mark.long
def test_settings_come_from_a_file_below_environment_and_flags(assigner, folder, monkeypatch):
    """The [solve] table sets what neither a flag nor the environment does."""
    first = solved(assigner, folder)[0].partitions[0]
    (folder / "settings.toml").write_text(
        f'[solve]\ngap = 0.05\nmicro-batches = 1\nseed = 3\nsolver = "cbc"\npin = {{ "{first}" = "worker:1" }}\n'
        'reserve = ["worker:0=1MiB"]\n'
    )
    monkeypatch.setenv("ASSIGNER_SEED", "4")
    plan, _ = solved(assigner, folder, "--config", "settings.toml", "--solver", "highs")
    found = plan.solver.options
    assert (found["gap"], found["micro_batches"], found["seed"], found["solver"]) == (0.05, 1, 4, "highs")
    assert plan.placement[first] == "worker:1/cpu"


@pytest.mark.long
def test_pyproject_counts_without_a_config(assigner, folder):
    """[tool.assigner.solve] of the folder's pyproject.toml is the settings file where none is named."""
    (folder / "pyproject.toml").write_text("[tool.assigner.solve]\ngap = 0.25\n")
    assert solved(assigner, folder)[0].solver.options["gap"] == 0.25


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("[solve]\ngapp = 1\n", 5, "did you mean gap"),
        ("gap = 1\n", 5, "[solve]"),
        ("[solve\n", 5, "not TOML"),
        ("[solve]\ngap = 7\n", 2, "gap"),
        ('[solve]\nmicro_batches = "many"\n', 2, "solve.micro_batches: 'many'"),
        ("[solve]\ngap = 2020-01-01\n", 5, "not allowed"),
    ],
)
def test_wrong_settings_files_are_told(assigner, folder, text, code, said):
    """A wrong key, value or syntax ends with its exit code and a next step."""
    (folder / "settings.toml").write_text(text)
    result = assigner("solve", "profile.json", "-o", "new.json", "--config", "settings.toml")
    assert result.exit_code == code, result.stderr
    assert said in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) <= 3


def test_a_missing_settings_file_is_a_usage_error(assigner):
    """What cannot be read is named."""
    result = assigner("solve", "profile.json", "-o", "new.json", "--config", "nowhere.toml")
    assert result.exit_code == 2
    assert "nowhere.toml" in result.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--reserve", "worker:0=lots"), "2GiB"),
        (("--reserve", "worker:0"), "NAME=VALUE"),
        (("--price", "worker:0=cheap"), "price per hour"),
        (("--price", "worker:9=1"), "worker:9"),
        (("--max-step", "1"), "objective cost"),
        (("--baseline", "magic"), "proportional"),
        (("--max-workers", "0"), "--max-workers: 0"),
        (("--always-remat", "p", "--never-remat", "p"), "--never-remat"),
    ],
)
def test_wrong_flags_are_told(assigner, flags, said):
    """Each is a usage error that names what is allowed."""
    result = assigner("solve", "profile.json", "-o", "new.json", *flags)
    assert result.exit_code == 2, result.stderr
    assert said in result.stderr
    assert len(result.stderr.splitlines()) <= 3


@pytest.mark.long
def test_robust_says_how_sure_the_plan_is(assigner, folder):
    """--robust solves at the slow end and tells how often the plan stays near the best."""
    plan, result = solved(assigner, folder, "--robust", "--time-limit", "5", "--micro-batches", "2")
    assert plan.solver.options["robust"] is True
    assert "robustness" in result.stdout


def test_json_has_only_the_plan(assigner):
    """With --json the plan is one object on stdout, whatever was asked for."""
    result = assigner("solve", "profile.json", "--json", "--objective", "throughput")
    assert json.loads(result.stdout)["objective"] == "throughput"


@pytest.mark.long
def test_lists_and_texts_both_do_in_a_settings_file(assigner, folder):
    """An order may be a list, a flag that repeats a single text."""
    (folder / "settings.toml").write_text('[solve]\norder = ["worker:1", "worker:0"]\nnever-remat = "p0"\n')
    plan, _ = solved(assigner, folder, "--config", "settings.toml")
    assert plan.solver.options["order"] == ["worker:1", "worker:0"]
    assert plan.solver.options["rematerialise"] == {"p0": "never"}


def test_only_the_workers_in_use_need_a_price(assigner, folder):
    """A worker that is left out may have no price."""
    plan, _ = solved(assigner, folder, "--objective", "cost", "--only", "worker:0", "--price", "worker:0=1")
    assert plan.workers == ("worker:0/cpu",)
    assert plan.solver.options["objective"] == "cost"


def test_help_names_every_baseline(assigner):
    from assigner.solver.baselines import TITLES

    text = " ".join(assigner("solve", "--help").stdout.replace("\u2502", " ").split())
    listed = text.split("placement as the plan instead: ")[1].split(".")[0]
    assert listed.replace(" or ", ", ").split(", ") == [*TITLES]


def test_a_worker_without_links_is_told(assigner, folder):
    from dataclasses import replace

    from assigner.formats.profile import load_profile, save_profile

    profile = load_profile(folder / "profile.json")
    lost = profile.workers[-1].name
    links = tuple(link for link in profile.links if lost not in (link.source, link.target))
    save_profile(replace(profile, links=links), folder / "lost.json")
    result = assigner("solve", "lost.json", "-o", "new.json")
    assert f"{lost} has no links to and from another worker" in result.stderr


def test_numbers_of_micro_batches_that_are_left_out_are_told(assigner, folder):
    """Whose sizes the line of two noisy measurements would have for nothing; one that is asked for is looked at."""
    from dataclasses import replace

    from assigner.formats.profile import load_profile, save_profile

    profile = load_profile(folder / "profile.json")
    stretched = tuple(
        replace(each, micro_batch={1: 4, 4: 8}[each.micro_batch], forward_s={1: 1e-3, 4: 3e-3}[each.micro_batch],
                backward_s={1: 2e-3, 4: 6e-3}[each.micro_batch])
        for each in profile.measurements
    )  # fmt: skip
    save_profile(replace(profile, measurements=stretched), folder / "noisy.json")
    result = assigner("solve", "noisy.json", "-o", "new.json", "--schedule", "gpipe", "--max-replicas", "1")
    assert "no plan is looked for with 4, 8 micro-batches: these are smaller than what was measured" in result.stderr
    asked = assigner("solve", "noisy.json", "-o", "new.json", "--micro-batches", "8", "--force")
    assert "no plan is looked for" not in asked.stderr
