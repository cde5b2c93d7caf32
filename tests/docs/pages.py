"""The code blocks of README.md and docs/, with what the page says about each.

A block is a fenced one. HTML comments right above it say how it is to be taken:

    <!-- not run: WHY -->          it is not executed; its `assigner` commands must still be ones that exist
    <!-- exits with 3 -->          the exit code of its last command, where it is not 0
    <!-- as measured -->           of its output only lines of words without figures are compared
    <!-- shown: WHY -->            a text that is neither a command nor its output

A comment `<!-- run first: bash` (or `python`), with code up to `-->`, is a block that a reader does not see.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("console", "python", "bash", "toml", "json", "text", "csv")


@dataclass(frozen=True)
class Command:
    """A line behind `$ ` with its continuations joined, the output that the page shows below it, and its own lines."""

    text: str
    output: tuple[str, ...]
    typed: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        page: The file, from the repository's folder.
        line: Of its fence, from 1.
        language: The first word behind the fence.
        code: What is in it.
        title: The file that it is.
        notes: The comments right above it.
        hidden: Whether it stands in a comment.
    """

    page: str
    line: int
    language: str
    code: str
    title: str = ""
    notes: tuple[str, ...] = ()
    hidden: bool = field(default=False)

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page}:{self.line}"

    def note(self, key: str) -> str | None:
        """What the note that begins with `key` says behind it."""
        return next((note[len(key) :].strip(": ") for note in self.notes if note.startswith(key)), None)

    @property
    def commands(self) -> tuple[Command, ...]:
        """The commands of a console block."""
        found: list[Command] = []
        lines = iter(self.code.splitlines())
        for line in lines:
            if line.startswith("$ "):
                text, typed = line[2:], [line]
                while text.endswith("\\"):
                    typed.append(next(lines))
                    text = text[:-1] + typed[-1].strip()
                found.append(Command(text, (), tuple(typed)))
            elif not found:
                raise AssertionError(f"{self.place}: output without a command: {line!r}")
            else:
                last = found.pop()
                found.append(Command(last.text, (*last.output, line), last.typed))
        return tuple(found)


def page_names() -> list[str]:
    """The pages, from the repository's folder."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", *docs]


def read_page(name: str, root: Path = ROOT) -> list[Block]:
    """All blocks of a page, in order."""
    found: list[Block] = []
    notes: list[str] = []
    for token in MarkdownIt().parse((root / name).read_text(encoding="utf-8")):
        if token.level > 0 or token.map is None:
            continue
        line = token.map[0] + 1
        if token.type == "html_block":
            for comment in re.findall(r"<!--(.*?)-->", token.content, flags=re.DOTALL):
                hidden = re.match(r"\s*run first: (\w+)\n(.*)", comment, flags=re.DOTALL)
                if hidden:
                    found.append(Block(name, line, hidden[1], hidden[2], hidden=True))
                else:
                    notes.append(" ".join(comment.split()))
            continue
        if token.type == "fence":
            language, _, rest = token.info.strip().partition(" ")
            title = re.search(r'title="([^"]*)"', rest)
            found.append(Block(name, line, language, token.content, title[1] if title else "", tuple(notes)))
        notes = []
    return found
