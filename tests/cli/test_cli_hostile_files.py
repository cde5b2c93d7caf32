"""Files that are made to do harm: each is refused in a few words that print as they are, and soon."""

from __future__ import annotations

import json
import os
import re

import pytest

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
RED = "\x1b[31mred\u202e"
ESCAPED = r"\x1b[31mred\u202e"

READERS = [
    "show {}",
    "show equal.json --profile {}",
    "solve {} --json",
    "solve profile.json --json --complete {}",
    "solve profile.json --json --config {}",
    "simulate {} --profile profile.json",
    "simulate equal.json --profile profile.json --against {}",
    "report {} -o page.html",
    "report equal.json --profile profile.json --measured {} -o page.html",
    "compare equal.json {}",
    "compare equal.json solved.json --measured {}",
    "export {} --to dot --profile profile.json",
    "run {} -- true",
    "lab {} -- true",
    "lab --check {}",
    "lab --from {}",
    "lab --from profile.json --here {}",
    "profile --merge profile.json --merge {} -o all.json",
]


@pytest.mark.parametrize("line", READERS)
def test_what_has_no_end_is_not_read(assigner, folder, line):
    """A pipe that nobody writes to, a device, a file of terabytes: no command waits for any of them."""
    os.mkfifo(folder / "pipe.json")
    with (folder / "huge.json").open("wb") as stream:
        stream.truncate(1 << 42)
    for name, words in (
        ("pipe.json", "pipe.json is no regular file"),
        ("/dev/zero", "/dev/zero is no regular file"),
        ("huge.json", "huge.json has more than 1,073,741,824 bytes"),
    ):
        result = assigner(*line.format(name).split())
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert result.stdout == ""


def test_a_profile_that_a_plan_names_is_read_with_an_end_too(assigner, folder, equal):
    """The plan says where its profile is: a file of terabytes there is not hashed to find out whether it is that."""
    document = json.loads((folder / "equal.json").read_text())
    document["profile"] = {"path": "huge.json", "sha256": "0"}
    (folder / "named.json").write_text(json.dumps(document))
    with (folder / "huge.json").open("wb") as stream:
        stream.truncate(1 << 42)
    result = assigner("simulate", "named.json")
    assert result.exit_code == 2
    assert "huge.json has more than" in result.stderr


def test_a_profile_that_no_file_can_be_is_not_there(assigner, folder, equal):
    """The plan says that its profile has a name longer than any system takes."""
    document = json.loads((folder / "equal.json").read_text())
    document["profile"] = {"path": "x" * 300, "sha256": "0"}
    (folder / "named.json").write_text(json.dumps(document))
    assert assigner("show", "named.json").exit_code == 0
    result = assigner("simulate", "named.json")
    assert result.exit_code == 2, result.output
    assert "which is not there" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "line",
    ["solve profile.json -o {}", "simulate equal.json --profile profile.json --trace {}",
     "export equal.json --to dot -o {}", "solve profile.json -o new.json --export-model {}",
     "lab --from profile.json -o {}", "report equal.json -o {}"],
)  # fmt: skip
def test_a_name_that_no_file_can_have_is_refused(assigner, folder, equal, line):
    """More bytes than the system takes: before the work, in its words."""
    result = assigner(*line.format("y" * 300).split())
    assert result.exit_code == 2, result.output
    assert "File name too long" in " ".join(result.stderr.split())


def test_a_folder_among_plans_is_said_to_be_one(assigner, folder, equal):
    """`.` has no name of its own."""
    for line in (("compare", "equal.json", "."), ("compare", "equal.json", ""), ("report", ".", "-o", "new.html")):
        result = assigner(*line)
        assert result.exit_code == 2, result.output
        assert "directory" in result.stderr


@pytest.mark.parametrize("name", ["a\tb.json", "a\nb.json", "a\u202eb.json", "a\u2028b.json", "a\udcffb.json"])
def test_a_profile_that_no_plan_may_name_is_refused_before_the_search(assigner, folder, monkeypatch, name):
    """Its path would be in the plan, and in every table that names it: what to do is said, and nothing is solved."""
    monkeypatch.setattr("assigner_cli.solve._solved", None)
    (folder / name).write_bytes((folder / "profile.json").read_bytes())
    result = assigner("solve", name, "-o", "new.json")
    assert result.exit_code == 2, result.output
    assert "is a path that no plan may name" in result.stderr
    assert "rename the profile, or copy it" in result.stderr


TOMLS = {
    "deep": "a = " + "[" * 100_000,
    "tables": "a = " + "{a = " * 100_000,
    "digits": "a = " + "9" * 5000,
    "key": f'"{ESCAPED}" = 1\n["{ESCAPED}"]\nx = 1',
    "inner": f'[solve]\n"{ESCAPED}" = 1\n',
    "field": f'[[host]]\nname = "a"\n"{ESCAPED}" = 1\n',
    "value": f'[solve]\npin = {{"{ESCAPED}" = ["{ESCAPED}"]}}\n',
    "switch": f'[solve]\nrobust = "{ESCAPED}"\n',
    "name": f'[[host]]\nname = "{ESCAPED}"\n',
    "long": f'"{"k" * 100_000}" = 1\n[solve]\n"{"k" * 100_000}" = 1\n',
    "long value": f'[solve]\nrobust = "{"k" * 100_000}"\n',
    "long name": f'[[host]]\nname = "{"k" * 100_000}"\n',
    "steering": f"a = {RED}",
}


@pytest.mark.parametrize("name", TOMLS)
@pytest.mark.parametrize("line", ["solve profile.json --json --config odd.toml", "lab odd.toml -- true"])
def test_toml_of_any_depth_and_length_is_refused_in_plain_words(assigner, folder, name, line):
    """Nesting, numbers of thousands of digits, keys and values that hold control characters or never end."""
    text = TOMLS[name].replace(ESCAPED, r"\u001b[31mred\u202e")
    (folder / "odd.toml").write_text(text)
    result = assigner(*line.split())
    assert result.exit_code in (2, 5), result.output[:2000]
    assert sum(text.startswith("error: ") for text in result.stderr.splitlines()) == 1
    assert not STEERING.search(result.stderr)
    assert len(result.stderr) < 5000


@pytest.mark.parametrize(
    "why", [RED, "out of memory\nerror: all is lost\r", "x" * 100_000], ids=["steering", "lines", "long"]
)
@pytest.mark.parametrize(
    "line",
    [
        "solve bad.json --json --time-limit 1",
        "solve bad.json --json --baseline equal",
        "simulate equal.json --profile bad.json",
    ],
)
def test_why_a_partition_was_not_measured_is_told_in_plain_words(assigner, folder, why, line):
    """The reason in the file may be any text: it is told escaped, in one line, and not to its end."""
    document = json.loads((folder / "profile.json").read_text())
    for each in document["measurements"]:
        each["infeasible"] = why
    (folder / "bad.json").write_text(json.dumps(document))
    result = assigner(*line.split())
    assert result.exit_code in (3, 5), result.output[:2000]
    assert not STEERING.search(result.stderr)
    assert len(result.stderr) < 5000
    assert sum(text.startswith("error: ") for text in result.stderr.splitlines()) == 1


def test_a_bug_and_its_traceback_are_told_in_plain_words(assigner, monkeypatch):
    """Whatever an exception says, the terminal stays as it is."""

    def explode(_):
        raise RuntimeError(RED + "x" * 100_000)

    monkeypatch.setattr("assigner.formats.plan.load_plan", explode)
    result = assigner("show", "solved.json")
    assert result.exit_code == 1
    assert ESCAPED in result.stderr
    assert len(result.stderr) < 5000
    assert not STEERING.search(assigner("show", "solved.json", "-v").stderr)


def test_what_the_line_says_is_quoted_in_plain_words(assigner):
    """Typer quotes arguments, flags and values: those, too, come from somewhere."""
    for args in ([RED], ["show", RED], [f"--{RED}"], ["solve", "profile.json", "--json", "--schedule", RED]):
        result = assigner(*args)
        assert result.exit_code == 2
        assert not STEERING.search(result.stderr)


@pytest.mark.parametrize(
    "line",
    [
        "solve profile.json --json --micro-batches {}",
        "compare equal.json solved.json --baseline {}",
        "simulate equal.json --against equal.json --step {}",
    ],
)
def test_a_flag_of_thousands_of_digits_is_a_wrong_use(assigner, line):
    """Python reads no such number; nobody meant one."""
    result = assigner(*line.format("9" * 5000).split())
    assert result.exit_code == 2, result.stderr
    assert len(result.stderr) < 5000


def test_the_most_micro_batches_are_refused_at_once(assigner, folder):
    """A thousand million of them would be simulated one by one: in a plan, in a trace, and asked for."""
    most = 10**9
    profile = json.loads((folder / "profile.json").read_text())
    profile["workload"]["batch_size"] = most
    (folder / "big.json").write_text(json.dumps(profile))
    plan = json.loads((folder / "equal.json").read_text())
    plan["workload"]["batch_size"] = plan["micro_batches"] = most
    plan["micro_batch_size"] = 1
    (folder / "bomb.json").write_text(json.dumps(plan))
    for code, line in (
        (5, "simulate bomb.json --profile big.json"),
        (5, "show bomb.json"),
        (5, "run bomb.json -- true"),
        (5, "compare equal.json bomb.json"),
        (2, f"solve big.json --json --micro-batches {most}"),
        (2, f"solve profile.json --json --batch-size {10**30}"),
    ):
        result = assigner(*line.split())
        assert result.exit_code == code, result.output
        assert "00000000" in result.stderr
