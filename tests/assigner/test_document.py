"""Reading and writing documents: what is wrong is named with its place, and nothing half-written is left."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from assigner.errors import FormatError, UsageError
from assigner.formats.document import (
    Count,
    Name,
    Range,
    Share,
    UnknownFieldWarning,
    decode,
    encode,
    read,
    schema,
    write,
)


@dataclass(frozen=True)
class Leaf:
    name: str
    share: Share = 0.0


@dataclass(frozen=True)
class Tree:
    kind: Literal["tree"]
    format_version: str
    size: Count
    weight: Annotated[float, Range(0, 10)]
    leaves: tuple[Leaf, ...]
    note: str | None = None


GOOD = {
    "kind": "tree", "format_version": "1.0", "size": 2, "weight": 1.5, "leaves": [{"name": "a", "share": 0.5}],
    "later": "a field of a later minor version",
}  # fmt: skip


def test_round_trip_keeps_every_value() -> None:
    """What is decoded, encoded and decoded again is the same, and unknown fields are kept out."""
    tree = decode(Tree, GOOD)
    assert tree == Tree("tree", "1.0", 2, 1.5, (Leaf("a", 0.5),))
    assert "later" not in encode(tree)
    assert decode(Tree, encode(tree)) == tree


@pytest.mark.parametrize(
    ("change", "place", "allowed"),
    [
        ({"size": 0}, "size", "1 or more"),
        ({"size": 1.5}, "size", "a whole number"),
        ({"size": True}, "size", "a whole number"),
        ({"size": "2"}, "size", "a whole number"),
        ({"weight": float("nan")}, "weight", "a finite number"),
        ({"weight": float("inf")}, "weight", "a finite number"),
        ({"weight": 10**400}, "weight", "a finite number"),
        ({"size": 10**400}, "size", "a whole number"),
        ({"weight": -0.1}, "weight", "0 to 10"),
        ({"weight": 11}, "weight", "at most 10"),
        ({"leaves": {}}, "leaves", "a list"),
        ({"leaves": [3]}, "leaves[0]", "an object"),
        ({"leaves": [{"name": 3}]}, "leaves[0].name", "text"),
        ({"leaves": [{"name": "a", "share": 1.01}]}, "leaves[0].share", "at most 1"),
        ({"leaves": [{}]}, "leaves[0].name", "missing"),
        ({"kind": "bush"}, "kind", '"tree"'),
        ({"note": 3}, "note", "text"),
    ],
)
def test_an_error_names_place_and_what_is_allowed(change: dict, place: str, allowed: str) -> None:
    """A wrong value is refused with its path in the document and what may stand there."""
    with pytest.raises(FormatError) as error:
        decode(Tree, GOOD | change)
    assert error.value.message.startswith(place)
    assert allowed in error.value.message


def test_reading_names_the_file(tmp_path) -> None:
    """Each way in which a file can be broken is told with the file's name, and exits with 5; a missing one with 2."""
    path = tmp_path / "tree.json"
    texts = {
        json.dumps(GOOD)[:40]: "not JSON",
        "[]": "an object",
        json.dumps(GOOD | {"kind": "plan"}): "kind",
        json.dumps(GOOD | {"format_version": "2.0"}): "2.0 is not known",
        json.dumps(GOOD | {"format_version": 1}): "format_version",
        '{"kind": "tree", "kind": "tree"}': "twice",
        json.dumps(GOOD | {"size": 7}).replace('"size": 7', f'"size": 1{"0" * 400}'): "size: 1000.* a whole number",
        json.dumps(GOOD | {"size": 7}).replace('"size": 7', f'"size": 1{"0" * 9000}'): "a number in it cannot be read",
    }
    for text, message in texts.items():
        path.write_text(text)
        with pytest.raises(FormatError, match=message) as error:
            read(path, Tree, name="tree", versions=("1.0",))
        assert str(path) in error.value.message
        assert error.value.exit_code == 5
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="UTF-8"):
        read(path, Tree, name="tree", versions=("1.0",))
    with pytest.raises(UsageError, match="No such file") as missing:
        read(tmp_path / "none.json", Tree, name="tree", versions=("1.0",))
    assert missing.value.exit_code == 2


def test_a_later_minor_version_is_read(tmp_path) -> None:
    """Any minor version of a known major is accepted."""
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(GOOD | {"format_version": "1.7"}))
    assert read(path, Tree, name="tree", versions=("1.0",)).size == 2


def test_an_existing_file_is_replaced_only_with_force(tmp_path) -> None:
    """Without force an existing file stays as it is; with it the new one is there, and no temporary file is left."""
    path = tmp_path / "tree.json"
    path.write_text("mine")
    tree = decode(Tree, GOOD)
    with pytest.raises(UsageError, match="exists"):
        write(path, tree, force=False)
    assert path.read_text() == "mine"
    write(path, tree, force=True)
    assert json.loads(path.read_text()) == encode(tree)
    assert [each.name for each in tmp_path.iterdir()] == ["tree.json"]


def test_a_write_that_fails_leaves_nothing(tmp_path) -> None:
    """A document that JSON cannot hold is not written, not even in part."""
    path = tmp_path / "tree.json"
    with pytest.raises(ValueError, match="JSON"):
        write(path, Tree("tree", "1.0", 2, float("nan"), ()), force=False)
    assert not list(tmp_path.iterdir())


def test_a_field_that_there_is_not_is_told_of(tmp_path, monkeypatch) -> None:
    """Once for the file, by rank 0 of a run, with its path and the name that is meant; a later version may have it."""
    path = tmp_path / "tree.json"
    good = {name: value for name, value in GOOD.items() if name != "later"}
    wrong = good | {"leaves": [{"name": "a"}, {"name": "b", "shared": 0.5}], "notes": "x", "colour": 3}
    path.write_text(json.dumps(wrong))
    with pytest.warns(UnknownFieldWarning) as told:
        assert read(path, Tree, name="tree", versions=("1.3",)).leaves[1] == Leaf("b")
    assert [str(each.message) for each in told] == [
        f"{path}: notes is no field of a tree, and is left out (did you mean note?); so is colour, and 1 more"
    ]
    path.write_text(json.dumps(good | {"leaves": wrong["leaves"]}))
    with pytest.warns(UnknownFieldWarning, match=r"leaves\[1\]\.shared is no field .* \(did you mean share\?\)$"):
        read(path, Tree, name="tree", versions=("1.3", "2.0"))
    path.write_text(json.dumps(wrong | {"format_version": "1.4"}))
    read(path, Tree, name="tree", versions=("1.3", "2.0"))
    path.write_text(json.dumps(wrong))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    read(path, Tree, name="tree", versions=("1.3",))


def test_the_schema_says_what_decode_checks() -> None:
    """Limits, choices and required fields stand in the JSON Schema."""
    rule = schema(Tree)
    assert rule["required"] == ["kind", "format_version", "size", "weight", "leaves"]
    assert rule["properties"]["size"] == {"type": "integer", "minimum": 1, "maximum": 10**9}
    assert rule["properties"]["weight"] == {"type": "number", "minimum": 0, "maximum": 10}
    assert rule["properties"]["kind"] == {"enum": ["tree"]}
    assert rule["properties"]["leaves"]["items"]["required"] == ["name"]
    assert {"type": "null"} in rule["properties"]["note"]["anyOf"]


@pytest.mark.parametrize("name", ["a\x1b[31mred", "two\nrows", "tab\t", "\x9b2J", "turned\u202e", "\u2028", "\ud800"])
def test_names_are_printable_text_in_one_line(name) -> None:
    """Another one could steer a terminal or write a row: refused with its place, escaped; and so says the schema."""
    with pytest.raises(FormatError) as error:
        decode(tuple[Name, ...], ["fine", name], "partitions")
    assert error.value.message.startswith("partitions[1]: ")
    assert error.value.message.isprintable()
    assert error.value.message.isascii()
    assert re.search(schema(Name)["not"]["pattern"], name)


@pytest.mark.parametrize("name", ["blocks.0", "名前 b", "AMD\u00a0EPYC (0.80 cores)", "<b>", "[red]", "👩\u200d🔬", ""])
def test_names_may_have_any_script(name) -> None:
    """What prints as one line of text is taken as it is."""
    assert decode(Name, name) == name
    assert not re.search(schema(Name)["not"]["pattern"], name)
