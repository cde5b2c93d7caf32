import hashlib
import json
import shlex

import pytest

from assigner.formats.plan import load_plan
from assigner.report.whatif import solve_flags
from assigner.solver import SolveOptions

QUICK = ("--schedule", "gpipe", "--max-replicas", "1", "--no-what-if")
"""Where it is no matter how a plan is searched for."""


@pytest.mark.long
def test_writes_a_plan_that_says_where_it_comes_from(assigner, folder):
    """The plan names its profile with its hash, the time, the version and the settings in effect."""
    result = assigner("solve", "profile.json", "-o", "new.json", "--gap", "0.02")
    assert result.exit_code == 0, result.stderr
    plan = load_plan(folder / "new.json")
    assert plan.profile.path == "profile.json"
    assert plan.profile.sha256 == hashlib.sha256((folder / "profile.json").read_bytes()).hexdigest()
    assert plan.created_at.endswith("Z")
    assert plan.tool_version
    assert plan.solver.options["gap"] == 0.02
    assert plan.solver.options["schedule"] == "auto"


def test_prints_stages_candidates_and_baselines(assigner):
    """What was found stands on stdout, where it was written on stderr, and no progress on a pipe."""
    result = assigner("solve", "profile.json", "-o", "new.json")
    for text in (
        "stage",
        "candidates",
        "chosen",
        "baselines",
        "(best of these)",
        "status: ",
        "limits the plan",
    ):
        assert text in result.stdout
    assert result.stderr == "wrote new.json\n"


def test_json_is_the_plan(assigner, folder):
    """--json prints the plan as -o writes it, and what is derived from it; without -o nothing is written."""
    before = set(folder.iterdir())
    document = json.loads(assigner("solve", "profile.json", "--json", *QUICK).stdout)
    assert set(folder.iterdir()) == before
    assert document["kind"] == "plan"
    both = assigner("solve", "profile.json", "--json", "-o", "new.json", *QUICK)
    document = json.loads(both.stdout)
    assert document.pop("derived")["frontier"] == []
    assert document == json.loads((folder / "new.json").read_text())


def test_printed_json_is_a_plan_file(assigner, folder):
    """What --json prints can be stored and shown."""
    (folder / "new.json").write_text(assigner("solve", "profile.json", "--json", *QUICK).stdout)
    assert assigner("show", "new.json").exit_code == 0


def test_quiet_leaves_the_file_alone_to_speak(assigner, folder):
    """-q prints nothing and writes the plan."""
    result = assigner("solve", "profile.json", "-o", "new.json", "-q", *QUICK)
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 0)
    load_plan(folder / "new.json")


def test_existing_output_is_refused_before_solving(assigner, folder, monkeypatch):
    """Without --force an existing file stops the command before any work; with it the file is replaced."""
    with monkeypatch.context() as patched:
        patched.setattr("assigner.solver.solve", lambda *_, **__: pytest.fail("solved all the same"))
        assert assigner("solve", "profile.json", "-o", "equal.json").exit_code == 2
    before = (folder / "equal.json").read_bytes()
    assert assigner("solve", "profile.json", "-o", "equal.json", "--force", *QUICK).exit_code == 0
    assert (folder / "equal.json").read_bytes() != before


def test_pins_and_micro_batches_reach_the_plan(assigner, folder):
    """A pinned partition is where it was pinned, and the asked number of micro-batches is the plan's."""
    result = assigner(
        "solve", "profile.json", "-o", "new.json", "--micro-batches", "2", "--pin", "p5=worker:1", "--remat", "always"
    )
    assert result.exit_code == 0, result.stderr
    plan = load_plan(folder / "new.json")
    assert plan.micro_batches == 2
    assert plan.placement["p5"] == "worker:1/cpu"
    assert all(stage.rematerialise == stage.partitions for stage in plan.stages)


def test_environment_sets_what_no_flag_does(assigner, folder, monkeypatch):
    """ASSIGNER_SOLVER chooses the solver, and a flag counts for more."""
    monkeypatch.setenv("ASSIGNER_SOLVER", "cbc")
    assert assigner("solve", "profile.json", "-o", "a.json", *QUICK).exit_code == 0
    assert assigner("solve", "profile.json", "-o", "b.json", "--solver", "highs", *QUICK).exit_code == 0
    assert load_plan(folder / "a.json").solver.options["solver"] == "cbc"
    assert load_plan(folder / "b.json").solver.options["solver"] == "highs"


def test_infeasible_is_exit_code_3(assigner, folder):
    """A profile whose partitions fit nowhere ends with 3 and says why; nothing is written."""
    document = json.loads((folder / "profile.json").read_text())
    for worker in document["workers"]:
        worker["memory_bytes"] = 1000
    (folder / "tiny.json").write_text(json.dumps(document))
    result = assigner("solve", "tiny.json", "-o", "new.json")
    assert result.exit_code == 3, result.stderr
    assert result.stdout == ""
    assert [line.partition(":")[0] for line in result.stderr.splitlines()[:2]] == ["error", "hint"]
    assert not (folder / "new.json").exists()


@pytest.mark.long
def test_what_ifs_are_priced_where_that_is_quick_and_where_asked_for(assigner, folder, monkeypatch):
    """A small profile has them on the screen and in the plan, a larger one with --what-if, none with --no-what-if."""
    result = assigner("solve", "profile.json", "-o", "new.json", columns=80)
    assert "what if" in result.stdout
    assert [each.change for each in load_plan(folder / "new.json").what_if].count("worker") == 2
    assigner("solve", "profile.json", "-o", "none.json", *QUICK)
    assert load_plan(folder / "none.json").what_if == ()
    monkeypatch.setattr("assigner.solver.whatif.what_ifs_are_cheap", lambda *_: False)
    assigner("solve", "profile.json", "-o", "large.json", *QUICK[:-1])
    assert load_plan(folder / "large.json").what_if == ()
    assigner("solve", "profile.json", "-o", "asked.json", "--what-if")
    assert load_plan(folder / "asked.json").what_if == load_plan(folder / "new.json").what_if
    monkeypatch.setenv("ASSIGNER_WHAT_IF", "true")
    assigner("solve", "profile.json", "-o", "variable.json", *QUICK[:-1])
    assert load_plan(folder / "variable.json").what_if


@pytest.mark.parametrize("other", [("--robust",), ("--objective", "latency"), ("--baseline", "equal")])
def test_what_ifs_go_with_a_search_for_the_step_time(assigner, other):
    """Asked for beside what has no step time to compare, they are a usage error."""
    result = assigner("solve", "profile.json", "-o", "new.json", "--what-if", *other)
    assert result.exit_code == 2
    assert "--what-if" in result.stderr


@pytest.mark.long
def test_the_screen_fits_80_columns(assigner):
    """No line is longer than the terminal, and no number is broken."""
    result = assigner("solve", "profile.json", "-o", "new.json", "--gap", "0.02", columns=80)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.startswith("asked for: gap 0.02")


def test_every_setting_is_stored_in_the_plan(assigner, folder):
    """Prices, reserves, pins and other hints are in the plan as they were given, a baseline's too."""
    flags = ("--price", "worker:0=2.5", "--reserve", "worker:1=1KiB", "--pin", "p5=worker:1", "--apart", "p0,p5",
             "--max-workers", "2", "--seed", "7", "--no-what-if")  # fmt: skip
    assigner("solve", "profile.json", "-o", "new.json", *flags)
    assigner("solve", "profile.json", "-o", "simple.json", "--baseline", "single", "--price", "worker:0=2.5")
    found = load_plan(folder / "new.json").solver.options
    assert (found["prices"], found["reserve"], found["pins"]) == (
        {"worker:0": 2.5},
        {"worker:1": 1024.0},
        {"p5": "worker:1"},
    )
    assert (found["apart"], found["max_workers"], found["seed"]) == ([["p0", "p5"]], 2, 7)
    simple = load_plan(folder / "simple.json").solver
    assert (simple.name, simple.options["prices"]) == ("best single worker", {"worker:0": 2.5})


def test_the_flags_of_a_plan_ask_for_the_same_again(assigner, folder):
    """What a plan says of its options, written as flags, is read by `solve` as it was."""
    given = shlex.split(
        "--schedule 1f1b --micro-batches 4 --batch-size 8 --max-workers 2 --pin p[01]=worker:0 --together p2,p3"
        " --apart p0,p5 --only worker:0 --only kind1 --order worker:0,worker:1 --always-remat p2 --never-remat p4"
        " --forbid p4=worker:1 --memory worker:0=900MB"
        " --reserve worker:0=2MB --price kind1=0.5 --solver cbc --gap 0.05 --time-limit 9 --seed 3 --remat auto"
    )
    assert assigner("solve", "profile.json", "-o", "one.json", "--no-what-if", *given).exit_code == 0
    one = load_plan(folder / "one.json").solver.options
    again = shlex.split(" ".join(solve_flags(one)))
    assert assigner("solve", "profile.json", "-o", "two.json", "--no-what-if", *again).exit_code == 0
    two = load_plan(folder / "two.json").solver.options
    asked = SolveOptions().record()
    assert {name: one[name] for name in asked} == {name: two[name] for name in asked}
    assert sum(one[name] != asked[name] for name in asked) >= 16


def test_the_integer_program_is_written_and_said_what_of(assigner, folder):
    """Beside the plan; the file is guarded as every output, and what has no integer program is refused before."""
    result = assigner("solve", "profile.json", "-o", "new.json", "--export-model", "model.lp", "--schedule", "gpipe")
    assert result.exit_code == 0, result.stderr
    assert "wrote model.lp: the integer program of gpipe with " in result.stderr
    assert "is the least step time of these plans" in result.stderr
    assert "Minimize" in (folder / "model.lp").read_text()
    for line, said in {
        "--export-model model.lp": "model.lp exists",
        "--export-model profile.json --force": "profile.json is a file that this command reads",
        "--export-model other.json": "both name other.json",
        "--export-model other.txt": ".lp or .mps",
        "--export-model other.lp --objective throughput": "objective throughput",
        "--export-model other.lp --robust": "leave out one of the two",
        "--export-model other.lp --max-replicas 2": "error: no integer program states stages that several",
    }.items():
        result = assigner("solve", "profile.json", "-o", "other.json", *shlex.split(line))
        assert result.exit_code == 2
        assert said in result.stderr
        assert "one worker a stage" not in result.stderr
        assert not (folder / "other.json").exists()


@pytest.mark.parametrize("word", ["1F1B", "1f1b"])
def test_a_schedule_is_known_in_capitals_too(assigner, folder, word):
    """As papers write it."""
    done = assigner("solve", "profile.json", "-o", "new.json", "--schedule", word, "--micro-batches", "4")
    assert done.exit_code == 0, done.output
    assert load_plan(folder / "new.json").schedule == "1f1b"
