"""JSON documents as frozen dataclasses: one declaration decodes, checks, encodes and describes.

A format is a tree of frozen dataclasses. Their annotations say what a field may hold; `decode` checks a
parsed document against them, `schema` writes the same rules as a JSON Schema, so the two cannot differ.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import re
import types
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from assigner.errors import FormatError
from assigner.files import put, read_text
from assigner.formats.terms import MOST_ROWS
from assigner.formatting import LONGEST, meant, printable
from assigner.machine.launchedrank import launched_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

_NAME, _LEFT_OUT = "name", "left out"

LARGEST = 1e18
"""The largest number of a file: more than any time in seconds, memory in bytes or price is, and sums and products of
some of them are finite."""
DERIVED = "derived"
"""What `show --json` and `solve --json` add to a plan, which is a file of one all the same."""
_LEAST = 1e-200
"""What is nearer to 0 is no figure of anything, and read as 0: quotients by it may not be finite."""
_EXACT = 2**53
_DEEPEST = 20
"""Objects and lists in each other, in a field that may hold anything."""


class UnknownFieldWarning(UserWarning):
    """A file has a field that its format has not, and that is no later one's: a name is misspelt."""


@dataclasses.dataclass(frozen=True)
class Range:
    """What a number may be, in an annotation: `Annotated[int, Range(1)]`."""

    low: float = 0
    high: float = LARGEST

    def __str__(self) -> str:
        return f"{self.low:g} or more" if self.high >= MOST_ROWS else f"{self.low:g} to {self.high:g}"


@dataclasses.dataclass(frozen=True)
class SingleLine:
    """A text that people read in a row of a table, in an annotation: `Annotated[str, SingleLine()]`.

    It has no control characters, no line breaks, and nothing that turns the direction of what follows: such a name
    could move a terminal's cursor or write a row that is not there. And it is no longer than a path may be.
    """

    banned: str = "[\\u0000-\\u001f\\u007f-\\u009f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
    longest: int = 4096


Name = Annotated[str, SingleLine()]
Count = Annotated[int, Range(1, MOST_ROWS)]
Threads = Annotated[int, Range(1, 65_536)]
Share = Annotated[float, Range(0, 1)]


def now() -> str:
    """The present time as files have it: `2026-03-01T12:00:00Z`."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shown(value: object) -> str:
    """A value as it stands in a message: its JSON, cut where it is long."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        return f"a nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _bad(path: str, value: object, allowed: str) -> FormatError:
    return FormatError(f"{path or 'document'}: {shown(value)} is not allowed; expected {allowed}")


def _number(value: Any, *, whole: bool, limits: Range, path: str) -> Any:
    name = "a whole number" if whole else "a finite number"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _is_finite(value) or (whole and value != int(value)):
        raise _bad(path, value, name)
    if not limits.low <= value <= limits.high:
        raise _bad(path, value, f"{name}, {f'at most {limits.high:g}' if value > limits.high else limits}")
    if whole:
        return int(value)
    if abs(value) < _LEAST and limits.low == 0:
        return 0
    return float(value) if abs(value) > _EXACT else value  # a whole number that no int64 may hold


def _is_finite(value: float) -> bool:
    """True for a number that a float can hold: JSON's whole numbers may have any number of digits."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def left_out(value: Any, *, name: str | None = None) -> dict[str, Any]:
    """The `metadata` of a field that is not written where it has this value, and has it where it is not there.

    `name` is the field's in the document; None: its own.
    """
    return {_LEFT_OUT: value, **({} if name is None else {_NAME: name})}


def name_of(field: dataclasses.Field[Any]) -> str:
    """A field's name in the document."""
    return str(field.metadata.get(_NAME, field.name))


@functools.cache
def _fields(kind: type) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """By name in the document: what a field may hold, and the field."""
    hints = get_type_hints(kind, include_extras=True)
    return {name_of(field): (hints[field.name], field) for field in dataclasses.fields(kind)}


def required(field: dataclasses.Field[Any]) -> bool:
    """Whether a document must have the field."""
    return (
        field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and _LEFT_OUT not in field.metadata
    )


@functools.cache
def _taken_apart(hint: Any) -> tuple[Any, bool, Range | SingleLine, Any, bool]:
    """The type that a hint asks for, whether None is allowed, its limits, its origin, and whether it is a record."""
    optional = get_origin(hint) in (Union, types.UnionType)
    limits: Range | SingleLine = Range()
    if optional:  # a field holds one type, or that type and None
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        limits = next((note for note in notes if isinstance(note, Range | SingleLine)), limits)
    return hint, optional, limits, get_origin(hint), dataclasses.is_dataclass(hint)


def decode(hint: Any, value: Any, path: str = "") -> Any:
    """A parsed JSON value as the type `hint`, every number and every field checked.

    Args:
        hint: A frozen dataclass, or the annotation of one of its fields.
        value: What `json.loads` gave.
        path: Where the value stands in its document, for the error.

    Raises:
        FormatError: naming the path, the value and what is allowed there.
    """
    hint, optional, limits, origin, is_record = _taken_apart(hint)
    if value is None and optional:
        return None
    if is_record:
        return _decode_record(hint, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise _bad(path, value, "a list")
        item = get_args(hint)[0]
        return tuple(decode(item, each, f"{path}[{n}]") for n, each in enumerate(value))
    if origin is Literal:
        if value not in get_args(hint):
            raise _bad(path, value, " or ".join(map(shown, get_args(hint))))
        return value
    if isinstance(limits, Range) and (hint is float or hint is int):
        return _number(value, whole=hint is int, limits=limits, path=path)
    expected, name = (
        (dict, "an object") if origin is dict else (hint, {str: "text", bool: "true or false"}.get(hint, ""))
    )
    if not isinstance(value, expected):
        raise _bad(path, value, name)
    if isinstance(limits, SingleLine) and isinstance(value, str):
        _check_line(value, limits, path)
    elif origin is dict and get_args(hint)[1] is not Any:
        name, item = get_args(hint)
        value = {decode(name, key, path): decode(item, each, f"{path}[{key}]") for key, each in value.items()}
    else:
        _check_plain(value, path)
    return value


def _check_line(value: str, limits: SingleLine, path: str) -> None:
    if re.search(limits.banned, value):
        raise _bad(path, value, "text of printable characters in one line")
    if len(value) > limits.longest:
        raise _bad(path, value, f"at most {limits.longest:,} characters")


def _check_plain(value: Any, path: str, depth: int = 0) -> None:
    """What a field holds that may hold anything: it can be written again and printed as JSON."""
    if isinstance(value, dict | list):
        if depth == _DEEPEST:
            raise FormatError(f"{path}: nested too deeply")
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in pairs:
            _check_plain(name, path, depth)
            _check_plain(each, f"{path}.{name}" if isinstance(value, dict) else f"{path}[{name}]", depth + 1)
    elif isinstance(value, str):
        if re.search("[\ud800-\udfff]", value):
            raise _bad(path, value, "text in Unicode")
    elif isinstance(value, int | float) and not (_is_finite(value) and abs(value) <= LARGEST):
        raise _bad(path, value, f"a finite number, at most {LARGEST:g}")


def _decode_record(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _bad(path, value, "an object")
    found = {}
    for name, (hint, field) in _fields(kind).items():
        inner = f"{path}.{name}" if path else name
        if name in value:
            found[field.name] = decode(hint, value[name], inner)
        elif required(field):
            raise FormatError(f"{inner}: missing")
        elif _LEFT_OUT in field.metadata:
            found[field.name] = field.metadata[_LEFT_OUT]
    return kind(**found)


def encode(value: Any) -> Any:
    """The JSON form of a document: records as objects, tuples as lists, defaults written out but for `left_out`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {name: (getattr(value, field.name), field) for name, (_, field) in _fields(type(value)).items()}
        return {
            name: encode(each)
            for name, (each, field) in held.items()
            if _LEFT_OUT not in field.metadata or each != field.metadata[_LEFT_OUT]
        }
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return encode(value._asdict())
    if isinstance(value, tuple | list):
        return [encode(each) for each in value]
    if isinstance(value, dict):
        return {name: encode(each) for name, each in value.items()}
    return value


def schema(hint: Any) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what `decode` accepts for `hint`."""
    hint, optional, limits, origin, is_record = _taken_apart(hint)
    rule: dict[str, Any]
    if is_record:
        fields = _fields(hint)
        rule = {
            "type": "object",
            "properties": {name: schema(inner) for name, (inner, _) in fields.items()},
            "required": [name for name, (_, field) in fields.items() if required(field)],
        }
    elif origin is tuple:
        rule = {"type": "array", "items": schema(get_args(hint)[0])}
    elif origin is Literal:
        rule = {"enum": list(get_args(hint))}
    elif origin is dict and get_args(hint)[1] is not Any:
        rule = {"type": "object", "additionalProperties": schema(get_args(hint)[1])}
    elif isinstance(limits, SingleLine):
        rule = {"type": "string", "maxLength": limits.longest, "not": {"pattern": limits.banned}}
    elif hint is float or hint is int:
        rule = {"type": "integer" if hint is int else "number", "minimum": limits.low, "maximum": limits.high}
    else:
        rule = {"type": {str: "string", bool: "boolean"}.get(hint, "object")}
    return {"anyOf": [rule, {"type": "null"}]} if optional else rule


@functools.cache
def _holds_records(hint: Any) -> bool:
    hint, _, _, origin, is_record = _taken_apart(hint)
    return is_record or (origin is tuple and _holds_records(get_args(hint)[0]))


def unknown_fields(hint: Any, value: Any, path: str = "") -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """What a parsed document has that is no field of `hint`, which `decode` leaves out.

    Yields the path, the name that is its end, and the names of the fields that there are. What has another form than
    `hint` is for `decode` to refuse.
    """
    hint, _, _, origin, is_record = _taken_apart(hint)
    if is_record and isinstance(value, dict):
        fields, begin = _fields(hint), f"{path}." if path else ""
        yield from ((f"{begin}{name}", name, tuple(fields)) for name in value if name not in fields)
        for name, (inner, _) in fields.items():
            if _holds_records(inner):
                yield from unknown_fields(inner, value.get(name), f"{begin}{name}")
    elif origin is tuple and isinstance(value, list) and _holds_records(hint):
        for n, each in enumerate(value):
            yield from unknown_fields(get_args(hint)[0], each, f"{path}[{n}]")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise FormatError(f"the field {twice!r} stands twice in one object")
    return found


def read(path: Path, kind: type[T], *, name: str, versions: Sequence[str]) -> T:
    """Load and check one file, of a kind that its `kind` names and of a major format version that this program reads.

    Args:
        path: Where it is.
        kind: What it holds.
        name: The kind's, in the file and in messages.
        versions: The newest minor version of each major one that this program reads. In a file of none that is newer,
            fields that there are not are a mistake: an UnknownFieldWarning says so, once for the file.

    Raises:
        UsageError: the file is not there or cannot be read.
        FormatError: it is not what it should be; the message starts with the file's name.
    """
    text = read_text(path, hint=f"is this the path of a {name} file?")
    document = parse_json(text, path, name=name)
    try:
        is_known = _check_head(document, name=name, versions=versions)
        found: T = _of_version(decode(kind, document), document["format_version"])
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error
    if is_known and launched_rank() in (None, 0):
        _tell_unknown([each for each in unknown_fields(kind, document) if each[0] != DERIVED], path, name)
    return found


def _tell_unknown(unknown: Sequence[tuple[str, str, Sequence[str]]], path: Path, name: str) -> None:
    if unknown:
        (where, field, known), *others = unknown
        more = f"; so is {others[0][0]}" if others else ""
        more += f", and {len(others) - 1} more" if len(others) > 1 else ""
        told = f"{path}: {where} is no field of a {name}, and is left out ({meant(field, known, 'there are')}){more}"
        warnings.warn(printable(told, most=LONGEST), UnknownFieldWarning, stacklevel=4)  # where it is loaded


def parse_json(text: str, path: Path, *, name: str, hint: str | None = None) -> Any:
    """What a file's text says as JSON; `hint` says what to do where it is none, else to mend it or to write it again.

    Raises:
        FormatError: it is none, or a field stands twice, or it is deeper or has longer numbers than Python reads.
    """
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        again = "mend that place, or write the file again with the command that made it"
        if text.strip() and error.pos >= len(text.rstrip()):
            again = "the file was cut off: write it again with the command that made it"
        if path.suffix == ".py":
            again = f"give a {name} in its place; assigner profile {path}:workload -o profile.json begins with Python"
        raise FormatError(
            f"{path}: not JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}",
            hint=hint or again,
        ) from error
    except RecursionError as error:
        raise FormatError(f"{path}: nested too deeply to be a {name}") from error
    except FormatError as error:
        raise FormatError(f"{path}: {error.message}", hint=error.hint) from error
    except ValueError as error:  # of a number with more digits than Python reads
        why = str(error).partition(";")[0]
        raise FormatError(f"{path}: a number in it cannot be read: {why}") from error


def other_kind(document: Any, expected: str) -> str:
    """What is wrong with a file of another kind than the expected ones; no kind is written in a timeline."""
    if isinstance(document, dict) and "traceEvents" in document:
        return f"a timeline for ui.perfetto.dev, which no command of assigner reads; expected {expected}"
    kind = document.get("kind") if isinstance(document, dict) else None
    return f"kind: {shown(kind)} is not allowed; expected {expected}"


def _check_head(document: Any, *, name: str, versions: Sequence[str]) -> bool:
    """Whether all fields of the document's version are known; raise FormatError unless its major version is."""
    if not isinstance(document, dict):
        raise _bad("", document, "an object")
    if document.get("kind") != name:
        raise FormatError(other_kind(document, repr(name)), hint=f"this command reads a {name} here")
    version = document.get("format_version")
    parts = version.split(".") if isinstance(version, str) else []
    if len(parts) != 2 or not all(re.fullmatch("[0-9]{1,4}", part) for part in parts):
        raise _bad("format_version", version, f'text such as "{versions[0]}"')
    newest = {major: int(minor) for major, _, minor in (each.partition(".") for each in versions)}
    minor = newest.get(str(int(parts[0])))
    if minor is None:
        raise FormatError(
            f"format_version: {version} is not known; this program reads {' and '.join(f'{n}.x' for n in newest)}",
            hint="use the assigner release that wrote the file, or write it again",
        )
    return int(parts[1]) <= minor


def _of_version(found: Any, version: str) -> Any:
    """What was decoded, unless it holds what a reader of the version that its file names would not know of."""
    if int(found.format_version.partition(".")[0]) > int(version.partition(".")[0]):
        raise FormatError(
            f"format_version: {version} is not allowed; the file holds what came with {found.format_version}",
            hint=f'write "{found.format_version}" there',
        )
    return found


def write(path: Path, document: Any, *, force: bool) -> None:
    """Write a document as JSON; errors as `put`."""
    put(path, (json.dumps(encode(document), indent=1, allow_nan=False) + "\n").encode(), force=force)


def check_unique(names: Sequence[str], path: str) -> None:
    """Raise FormatError if a name stands twice; `path` has `{}` where the position goes."""
    seen: set[str] = set()
    for position, name in enumerate(names):
        if name in seen:
            raise FormatError(f"{path.format(position)}: {name!r} is there already; names are unique")
        seen.add(name)
