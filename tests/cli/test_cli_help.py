import pytest
from assigner_cli.app import app
from typer.main import get_command

COMMANDS = get_command(app).commands


def test_no_arguments_is_help(assigner):
    """`assigner` alone shows its help and every command in it."""
    result = assigner()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_first_line_is_short_and_an_example_stands_in_help(assigner, name):
    """Each command's first line has under 60 characters, and its help shows how it is called."""
    first = COMMANDS[name].help.splitlines()[0]
    assert 0 < len(first) < 60
    result = assigner(name, "--help", columns=100)
    assert result.exit_code == 0
    assert f"assigner {name}" in result.stdout.split("Examples")[1]


@pytest.mark.parametrize("columns", [1, 3, 7])
def test_a_terminal_narrower_than_any_has_help(assigner, columns):
    """Help is as wide as its words need; the terminal breaks its lines."""
    for line in (("--help",), ("solve", "--help")):
        result = assigner(*line, columns=columns)
        assert result.exit_code == 0, result.output
        assert "Usage: assigner" in result.stdout
