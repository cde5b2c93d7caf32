"""A derived cluster as the text of a cluster file: each number with a comment that says where it comes from."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assigner.lab.derive import Derived, DerivedField

_WIDTH = 110


def cluster_text(derived: Derived, source: str) -> str:
    """The TOML text.

    Args:
        derived: The hosts.
        source: The command that made them, for the first line.
    """
    notes = [line for note in derived.notes for line in textwrap.wrap(note, _WIDTH)]
    blocks = ["\n".join(f"# {line}" for line in (f"Made by: {source}", *notes))]
    blocks += [_table("[[host]]", host) for host in derived.hosts]
    if derived.rack_link:
        blocks.append(_table("[rack_link]", derived.rack_link))
    return "\n\n".join(blocks) + "\n"


def _table(head: str, fields: dict[str, DerivedField]) -> str:
    lines = [head]
    for name, setting in fields.items():
        comment = f"  # {setting.comment}" if setting.comment else ""
        if setting.value is None:
            lines.append(f"# {name}: {setting.comment}")
        else:
            lines.append(f"{name} = {_toml(setting.value)}{comment}")
    return "\n".join(lines)


def _toml(value: float | str) -> str:
    return json.dumps(value) if isinstance(value, str) else f"{value:.6g}"
