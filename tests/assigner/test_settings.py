"""One declaration of an option: its check, its record, its flags and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from assigner_cli.given import Given, flagged
from typer.testing import CliRunner

from assigner.errors import UsageError
from assigner.settings import EACH, SHARE, Flag, capacity, check, declared, flags, pairs, recorded, rule, size
from assigner.solver import SolveOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of a command that is nobody's."""

    share: Annotated[float | None, Flag(help="A share.", panel="Some", allowed=SHARE, unset="auto")] = None
    rules: Annotated[
        dict[str, str] | None,
        Flag(help="Never.", panel="Others", flag="--never", form=rule("never")),
        Flag(help="Always.", panel="Others", flag="--always", form=rule("always")),
    ] = None
    sizes: Annotated[dict[str, float] | None, Flag(help="Sizes.", panel="Some", form=pairs("a=2GiB", size))] = None
    names: Annotated[tuple[str, ...], Flag(help="Names.", panel="Some", form=EACH)] = ()
    hidden: int = 3

    def __post_init__(self) -> None:
        check(self)


def called(*words: str) -> list[Options]:
    """The options of a command that was called with these words."""
    found: list[Options] = []

    def command(*, last: bool = False, options: Given[Options]) -> None:
        found.append(options())

    app = typer.Typer()
    app.command()(flagged(command))
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found


def test_a_command_takes_what_the_class_declares():
    """Words become values, two flags give one mapping, and what is not given stays at its default."""
    assert called() == [Options(rules={}, sizes={})]
    words = "--share 0.5 --never a --always b --sizes w=1KiB --names x --names y --last"
    made = Options(share=0.5, rules={"a": "never", "b": "always"}, sizes={"w": 1024.0}, names=("x", "y"))
    assert called(*words.split()) == [made]


def test_one_name_in_two_flags_is_refused():
    """The message names both flags."""
    with pytest.raises(UsageError, match="--always: 'a' is in --never, too"):
        called("--never", "a", "--always", "a")


def test_what_is_not_allowed_is_refused_by_name_and_value():
    """As declared, and nowhere said again."""
    with pytest.raises(UsageError, match=r"share: 1\.5 is not allowed; expected a share, 0 or more and below 1"):
        Options(share=1.5)


def test_records_and_flags_are_of_the_same_fields():
    """What a plan keeps gives the flags that ask for it again; a field without a flag is in neither."""
    assert recorded(Options()) == {"share": "auto", "rules": None, "sizes": None, "names": []}
    asked = Options(share=0.5, rules={"b": "always"}, names=("x",))
    assert [*flags(Options, recorded(asked))] == [("--share", "0.5"), ("--always", "b"), ("--names", "x")]
    assert [*flags(Options, {"sizes": 3, "rules": [], "what": 1})] == []


def test_every_field_of_solve_has_a_flag():
    """And the flags of two fields differ."""
    fields = {each.field for each in declared(SolveOptions)}
    assert fields == set(SolveOptions.__dataclass_fields__)
    names = [each.flag for each in declared(SolveOptions)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "found"), [("0", 0.0), ("2B", 2.0), ("2 b", 2.0), ("1048576", 2.0**20), ("0.5KiB", 512.0)]
)
def test_a_memory_may_be_small_where_that_is_said(text, found):
    """Nothing, a unit, or enough bytes that they can have been meant."""
    assert capacity(text, "--memory") == found


def test_a_small_memory_without_a_unit_is_refused():
    """It was meant to have one."""
    with pytest.raises(UsageError, match="--memory: '2' is 2 bytes") as caught:
        capacity("2", "--memory")
    assert caught.value.hint == "give a unit: 2GiB, or 2B for bytes"
