"""From what was written on the line to the options of a search."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from assigner.errors import UsageError

from .values import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from assigner.profile import Profile

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def micro_batches(text: str) -> int | None:
    """`auto` (None) or a whole number."""
    if text == "auto":
        return None
    if not whole_number(text):
        raise UsageError(f"--micro-batches: {text!r} is not allowed; expected auto or a whole number, 1 or more")
    return int(text)


def pairs(texts: Iterable[str], *, flag: str, example: str) -> dict[str, str]:
    """NAME=VALUE texts as a mapping; a name with two values is an error."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{flag}: {text!r} is not allowed; expected NAME=VALUE", hint=f"{flag} {example}")
        if found.setdefault(name, value) != value:
            raise UsageError(f"{flag}: {name!r} has {found[name]!r} and {value!r}")
    return found


def pair_list(texts: Iterable[str], *, flag: str, example: str) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE texts in their order; a name may have several values."""
    return tuple(pair for text in texts for pair in pairs([text], flag=flag, example=example).items())


def sizes(texts: Iterable[str], *, flag: str) -> dict[str, float]:
    """WORKER=SIZE texts as a mapping to bytes."""
    return {name: size(text, flag=flag) for name, text in pairs(texts, flag=flag, example="worker:0=2GiB").items()}


def unlinked(profile: Profile, only: Sequence[str]) -> Iterator[str]:
    """A line on each worker that may be used and can talk to no other one."""
    used = [w.name for w in profile.workers if not only or any(profile.matches(spec, w) for spec in only)]
    pairs_ = {(link.source, link.target) for link in profile.links}
    for name in used if len(used) > 1 else ():
        if not any((name, other) in pairs_ and (other, name) in pairs_ for other in used):
            yield f"{name} has no links to and from another worker: it can hold the whole model, or nothing"


def groups(texts: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """A,B texts as groups of names."""
    return tuple(names(text) for text in texts)


def names(text: str) -> tuple[str, ...]:
    """A,B as names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def size(text: str, *, flag: str) -> float:
    """Bytes from `2GiB`, `500MB` or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise UsageError(f"{flag}: {text!r} is not allowed; expected bytes as 2GiB, 500MB or 1000000")
    return float(found[1]) * _UNITS[found[2].lower()]


def money(text: str, *, flag: str) -> float:
    """A price per hour."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{flag}: {text!r} is not allowed; expected a price per hour, 0 or more")
    return value
