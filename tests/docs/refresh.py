"""Write the outputs that pages show anew: python tests/docs/refresh.py [PAGE...]

An output that already agrees with what its command says stays as it is, with its `...`. Where none is shown, none is
added: write `?` below a command to get one.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from pages import ROOT, Block, Command, page_names, read_page
from session import Session, missing_line

_VARIES = (
    (re.compile(r"\((HiGHS|CBC) [^)]*\)"), r"(\1 ...)"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "..."),
)


def _shown(said: list[str]) -> list[str]:
    """An output as a page shows it: what differs from run to run left out, blank lines at its ends too."""
    text = "\n".join(line.rstrip() for line in said).strip("\n")
    for pattern, instead in _VARIES:
        text = pattern.sub(instead, text)
    return text.splitlines()


def _rewritten(block: Block, outputs: list[list[str]]) -> str:
    lines: list[str] = []
    for command, said in zip(block.commands, outputs, strict=True):
        lines += [*command.typed, *(command.output if _agrees(block, command, said) else _shown(said))]
    return "\n".join(lines) + "\n"


def _agrees(block: Block, command: Command, said: list[str]) -> bool:
    if not command.output:
        return True
    if command.output == ("?",):
        return False
    return missing_line(command.output, said, as_measured=block.note("as measured") is not None) is None


def refresh(page: str) -> bool:
    """Run a page and write it back; whether it changed."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    changed = text
    with tempfile.TemporaryDirectory() as folder, Session(Path(folder)) as session:
        for block in read_page(page):
            if block.note("not run") is not None:
                continue
            outputs = session.run(block)
            if block.language == "console" and not block.hidden:
                changed = changed.replace(block.code, _rewritten(block, outputs), 1)
    if changed != text:
        path.write_text(changed, encoding="utf-8")
    return changed != text


if __name__ == "__main__":
    for name in sys.argv[1:] or page_names():
        print(name, "changed" if refresh(name) else "as it was")  # noqa: T201
