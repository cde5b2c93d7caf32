"""Values of the line: plain ones as they are, the others as typer converts them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from assigner_cli.help import Command
from typer.testing import CliRunner


@pytest.fixture
def taken():
    """What a command with one of each kind gets: `taken("--number", "3")`."""
    app, found = typer.Typer(), {}

    @app.command(cls=Command)
    def command(
        paths: Annotated[list[Path] | None, typer.Argument()] = None,
        *,
        text: str | None = None,
        path: Path = Path("default"),
        many: Annotated[list[str] | None, typer.Option()] = None,
        number: Annotated[int, typer.Option(min=1)] = 7,
        share: float | None = None,
        choice: Literal["a", "b"] = "a",
        switch: Annotated[bool, typer.Option("--switch")] = False,
    ) -> None:
        found.update(locals())

    def call(*args):
        result = CliRunner().invoke(app, list(args))
        assert result.exit_code == 0, result.output
        return {name: found[name] for name in ("text", "path", "many", "number", "share", "choice", "switch", "paths")}

    return call


def test_defaults_stay_as_they_are(taken):
    """Nothing on the line: each default, with its own type; several of nothing is nothing."""
    found = taken()
    assert not found.pop("many")
    assert not found.pop("paths")
    assert found == {"text": None, "path": Path("default"), "number": 7, "share": None, "choice": "a", "switch": False}


def test_values_have_the_types_that_the_command_names(taken):
    """Texts, paths, numbers, choices and lists of them."""
    line = "x y --text 7 --path p --many 1 --many 2 --number 3 --share .5 --choice b --switch"
    assert taken(*line.split()) == {
        "paths": [Path("x"), Path("y")], "text": "7", "path": Path("p"), "many": ["1", "2"], "number": 3,
        "share": 0.5, "choice": "b", "switch": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "line", [["--number", "0"], ["--number", "x"], ["--share", "x"], ["--choice", "c"], ["--path", "a\0b"]]
)
def test_what_is_no_value_is_a_usage_error(taken, line):
    """Numbers, choices and paths are checked as typer checks them."""
    with pytest.raises(AssertionError, match="Invalid value"):
        taken(*line)
