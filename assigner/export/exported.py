"""What an export is: a text for another tool, and what that tool does otherwise than the plan says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exported:
    """One plan in another tool's form.

    Args:
        text: What goes into the file.
        data: The same as a JSON value; of a format that is not JSON, the text.
        notes: What the format cannot say, or the tool does otherwise; each a sentence.
    """

    text: str
    data: Any
    notes: tuple[str, ...] = ()


def as_json(data: Any, notes: tuple[str, ...] = ()) -> Exported:
    """An export whose text is JSON: lists of lists and objects with one entry a line."""
    return Exported(_lines(data) + "\n", data, notes)


def _lines(data: Any) -> str:
    if isinstance(data, dict):
        rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items()]
        return "{\n" + ",\n".join(f"  {row}" for row in rows) + "\n}"
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in data) + "\n]"
