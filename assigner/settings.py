"""Settings as fields of a frozen dataclass: one declaration gives the check, the flag with its help, and the record.

    gap: Annotated[float | None, Flag(help="Stop when optimal to within this share.", allowed=SHARE)] = None

Several settings of one field are several flags, which give parts of one mapping.

`check` refuses what a field does not allow, `recorded` is what a plan's file keeps, and `flags` are the flags that ask
for it again. The command line makes its options of the same declarations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from assigner.errors import UsageError

_LONGEST = 60
"""Characters of a value in a message."""
_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What a value may be beyond its type, in words for people and as a test; of a mapping, each of its values."""

    words: str
    test: Callable[[Any], bool]


def whole(low: int, high: int) -> Allowed:
    """Whole numbers from `low` to `high`."""
    return Allowed(f"a whole number, {low} to {high}", lambda value: isinstance(value, int) and low <= value <= high)


_LEAST_CAPACITY = 2**20
SECONDS = Allowed("a finite number of seconds, more than 0", lambda value: 0 < value < math.inf)
SHARE = Allowed("a share, 0 or more and below 1", lambda value: 0 <= value < 1)
BYTES = Allowed("bytes, 0 or more", lambda value: 0 <= value < math.inf)
MONEY = Allowed("money per hour, 0 or more", lambda value: 0 <= value < math.inf)


def one_of(*values: str) -> Allowed:
    """Some texts."""
    return Allowed(" or ".join(values), lambda value: value in values)


@dataclasses.dataclass(frozen=True)
class Form:
    """How a value stands on a command line."""

    # what a parser makes of the words: `str`, `list[str]` for a flag that may be repeated; None: the field's own type
    taken: Any
    read: Callable[[Any, str], Any]  # the value from what was taken, and the flag's name; raises UsageError
    # the words of the flag, each a flag of its own, that give a recorded value; none for a value of a kind that is not
    # known
    write: Callable[[Any], Iterable[str]]


def _texts(value: Any) -> list[str]:
    return [str(value)] if isinstance(value, str | int | float) else []


PLAIN = Form(None, lambda value, _flag: value, _texts)
"""A number, a choice, a switch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """What a field is to people."""

    help: str
    panel: str | None = None
    flag: str = ""  # its flag; empty: the field's name
    metavar: str | None = None  # what stands for its value; None: as its type has it
    form: Form = PLAIN  # how its value stands on a line
    # what can stand there: "pins", "workers", "partitions" or "amounts"; empty: nothing that is known
    completes: str = ""
    allowed: Allowed | None = None  # what it may be
    least: int | None = None  # the command line takes no smaller number
    unset: str | None = None  # how None is written


@dataclasses.dataclass(frozen=True)
class FieldFlag:
    """A flag of an options class, with its dashes, and the field that it is of."""

    field: str
    flag: str
    kind: Any
    default: Any
    about: Flag


@functools.cache
def declared(options: type) -> tuple[FieldFlag, ...]:
    """The flags of an options class, in their order; fields that are no settings have none."""
    hints = get_type_hints(options, include_extras=True)
    return tuple(
        FieldFlag(
            each.name,
            about.flag or f"--{each.name.replace('_', '-')}",
            get_args(hints[each.name])[0],
            each.default if each.default_factory is dataclasses.MISSING else each.default_factory(),
            about,
        )
        for each in dataclasses.fields(options)
        for about in getattr(hints[each.name], "__metadata__", ())
        if isinstance(about, Flag)
    )


def check(options: Any) -> None:
    """Refuse what a setting does not allow.

    Raises:
        UsageError: naming the field, the value and what is allowed.
    """
    kind: type = type(options)
    for each in declared(kind):
        value, kinds = getattr(options, each.field), _kinds(each.kind)
        if value is None and type(None) in kinds:
            continue
        if not any(_has_form(kind, value) for kind in kinds):
            words = str(each.kind).replace("collections.abc.", "").replace("typing.", "")
            raise UsageError(f"{each.field}: {_shown(value)} is not allowed; expected {words}")
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        allowed = one_of(*choices) if choices else each.about.allowed
        for part in value.values() if isinstance(value, Mapping) else (value,):
            if allowed is not None and not _passes(allowed, part):
                raise UsageError(f"{each.field}: {_shown(part)} is not allowed; expected {allowed.words}")


def _passes(allowed: Allowed, value: object) -> bool:
    """Whether a value is allowed; one of another kind, which cannot even be compared, is not."""
    try:
        return abs(value) <= sys.float_info.max and allowed.test(value) if type(value) is int else allowed.test(value)
    except TypeError:
        return False


def _has_form(hint: Any, value: object) -> bool:
    """Whether texts, and tuples and mappings of them, are where they must be; what else there is, `Allowed` tells."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _has_form(inner[0], key) and _has_form(inner[1], each) for key, each in value.items()
        )
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        inner = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return len(inner) == len(value) and all(map(_has_form, inner, value))
    return hint is not str or isinstance(value, str)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def recorded(options: Any) -> dict[str, Any]:
    """The settings as JSON has them."""
    kind: type = type(options)
    return {
        each.field: each.about.unset if (value := getattr(options, each.field)) is None else _plain(value)
        for each in declared(kind)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def flags(options: type, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The flags, each with its words, that ask for what a record has and the defaults have not.

    The record is as `recorded` gives it, or what a file has instead: what is not known is left out.
    """
    usual = recorded(options())
    for each in declared(options):
        value = record.get(each.field, usual[each.field])
        if value != usual[each.field]:
            yield from ((each.flag, text) for text in each.about.form.write(value))


# forms


def _lists(value: Any) -> list[list[Any]]:
    return [each for each in value if isinstance(each, list)] if isinstance(value, list) else []


def _names(text: str, flag: str = "") -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if flag and text and not names:
        raise UsageError(f"{flag}: {text!r} names nothing; expected names with commas between them")
    return names


def _joined(value: Any) -> list[str]:
    return [",".join(map(str, value))] if isinstance(value, list) else []


NAMES = Form(str, _names, _joined)
"""`A,B`: names in their order."""
EACH = Form(
    list[str],
    lambda texts, _flag: tuple(texts or ()),
    lambda value: map(str, value) if isinstance(value, list) else (),
)
"""One name each time."""
GROUPS = Form(
    list[str],
    lambda texts, _flag: tuple(_names(text) for text in texts or ()),
    lambda value: [",".join(map(str, group)) for group in _lists(value)],
)
"""`A,B` each time: groups of names."""


def whole_number(text: str) -> int | None:
    """A text of up to 18 decimal digits as a number; None: it is another one, or no number that anything here has."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def count_or(word: str, high: int) -> Form:
    """A word, which is None, or a whole number from 1 to `high`."""

    def read(text: str, flag: str) -> int | None:
        if text == word:
            return None
        number = whole_number(text)
        if not number or number > high:
            raise UsageError(f"{flag}: {text!r} is not allowed; expected {word} or a whole number, 1 to {high}")
        return number

    return Form(str, read, _texts)


def _whole_numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _names(text))
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: expected whole numbers", hint=f"{flag} 4,8") from error


NUMBERS = Form(str, _whole_numbers, _joined)
"""`4,8`: whole numbers."""


def size(text: str, flag: str) -> float:
    """Bytes from `2GiB`, `500MB` or a plain number.

    Raises:
        UsageError: naming the flag and the text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise UsageError(f"{flag}: {text!r} is not allowed; expected bytes as 2GiB, 500MB or 2000000")
    return float(found[1]) * _UNITS[found[2].lower()]


def capacity(text: str, flag: str) -> float:
    """Bytes of a memory as `size` reads them; a small number without a unit was meant to have one, and is refused."""
    found = size(text, flag)
    if 0 < found < _LEAST_CAPACITY and not text.strip()[-1].isalpha():
        raise UsageError(f"{flag}: {text!r} is {found:,.0f} bytes", hint="give a unit: 2GiB, or 2B for bytes")
    return found


def money(text: str, flag: str) -> float:
    """A price per hour; errors as of `size`.

    Raises:
        UsageError: naming the flag and the text.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise UsageError(f"{flag}: {text!r} is not allowed; expected a price per hour, 0 or more")
    return value


def _pairs(texts: Iterable[str], flag: str, example: str) -> dict[str, str]:
    """NAME=VALUE texts as a mapping; a name with two values is an error."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{flag}: {text!r} is not allowed; expected NAME=VALUE", hint=f"{flag} {example}")
        if found.setdefault(name, value) != value:
            raise UsageError(f"{flag}: {name!r} has {found[name]!r} and {value!r}")
    return found


def pairs(example: str, value: Callable[[str, str], Any] = lambda text, _flag: text) -> Form:
    """`NAME=VALUE` each time: a mapping; `value` makes what a name's text stands for of it and the flag."""
    return Form(
        list[str],
        lambda texts, flag: {name: value(text, flag) for name, text in _pairs(texts or (), flag, example).items()},
        lambda found: [f"{key}={each}" for key, each in found.items()] if isinstance(found, dict) else (),
    )


def pair_list(example: str) -> Form:
    """`NAME=VALUE` each time, in their order; a name may have several values."""
    return Form(
        list[str],
        lambda texts, flag: tuple(pair for text in texts or () for pair in _pairs([text], flag, example).items()),
        lambda found: ["=".join(map(str, pair)) for pair in _lists(found)],
    )


def rule(word: str) -> Form:
    """One name each time, which the mapping has with this word."""
    return Form(
        list[str],
        lambda texts, _flag: dict.fromkeys(texts or (), word),
        lambda found: [str(name) for name, each in found.items() if each == word] if isinstance(found, dict) else (),
    )
