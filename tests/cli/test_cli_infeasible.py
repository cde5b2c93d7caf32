"""A problem without a plan: error, hint and table on stderr, exit code 3."""

import json

import pytest


@pytest.fixture
def tiny(folder):
    """A profile whose workers hold one partition each, of six."""
    document = json.loads((folder / "profile.json").read_text())
    for worker in document["workers"]:
        worker["memory_bytes"] = 1e7
    (folder / "tiny.json").write_text(json.dumps(document))
    return "tiny.json"


@pytest.mark.long
def test_table_of_ways_out_below_error_and_hint(assigner, folder, tiny):
    """The hint is the table's first row; nothing is written, and nothing is on stdout."""
    result = assigner("solve", tiny, "-o", "new.json", columns=100)
    error, hint, blank, title, header, _, *rows = result.stderr.splitlines()
    assert result.exit_code == 3
    assert error.startswith("error: ")
    assert (blank, title) == ("", "with one of these changes there is a plan, with this step or a shorter one")
    assert header.split()[:2] == ["what", "changes"]
    assert 1 <= len(rows) <= 6
    assert hint.removeprefix("hint: ").partition(":")[0] in rows[0]
    assert result.stdout == ""
    assert not (folder / "new.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("flag", ["--json", "-q"])
def test_json_and_quiet_leave_error_and_hint(assigner, tiny, flag):
    """As with any other error, there are two lines."""
    result = assigner("solve", tiny, "-o", "new.json", flag)
    assert result.exit_code == 3
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "hint"]
    assert result.stdout == ""
