"""Help on one screen: what a command does, its flags in panels, and how it is called.

Flags and what they take stand in one column that is as wide in every panel, so that texts line up down the page. Lines
end at 100 columns on a wider terminal, at 80 where there is none.

Texts and paths of the line are taken as they are, without the schema library that typer converts every value with:
loading it takes longer than most commands need for all of their work. Numbers and choices that are given still go its
way, for its checks; a default needs none.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand

from . import console
from .configuration import remember

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.text import Text

WIDEST, NARROWEST, PIPED = 100, 40, 80
EVERYWHERE = "Everywhere"
_FLAGS_WIDTH = 32
_EXAMPLES_INDENT = 2
_PLAIN = {str: str, Path: Path, list[str]: str, list[Path]: Path}


class Helped:
    """What prints its help as we do: a command, or the group of all."""

    def get_help_option(self, ctx: Any) -> Any:
        """--help, as a switch that is off; its own default is None, which has to be converted."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - printed, as typer does it
        """Print the help."""
        show_help(self, ctx)


class Command(Helped, TyperCommand):
    """A command that takes its values plainly, and knows where its settings come from."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        params: list[Any] = self.params
        for param in params:
            plain = Plain(param)
            param.get_runtime_param = lambda plain=plain: plain

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the line."""
        remember(ctx)
        return list(super().parse_args(ctx, args))


class Plain:
    """Takes the place of what typer converts the values of one option or argument with."""

    def __init__(self, param: Any) -> None:
        self._make, self._default = _PLAIN.get(param.type_descriptor.annotation), param.default
        self._typers = param.get_runtime_param

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value as the command gets it."""
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if type(value) is type(self._default) and value == self._default:
            return value
        texts = list(value) if several and not isinstance(value, str) else [value]
        if self._make is None or any(not isinstance(text, str) or "\0" in text for text in texts):
            return self._typers().coerce(value, param=param, ctx=ctx)
        made = [self._make(text) for text in texts]
        return made if several else made[0]


def show_help(command: Any, ctx: Any) -> None:
    """Print the help of a command, or of the group of all, to stdout."""
    from rich.text import Text

    out = console.stdout()
    out.width = PIPED if out.width == console.UNLIMITED else max(NARROWEST, min(out.width, WIDEST))
    out.print()
    out.print(Text.assemble((" Usage: ", "bold"), _usage(command, ctx)), soft_wrap=True)
    for paragraph in (command.help or "").split("\n\n"):  # however the docstring breaks its lines
        out.print()
        for line in textwrap.wrap(_plain(" ".join(paragraph.split())), out.width - 2):
            out.print(Text(f" {line}"), soft_wrap=True)
    out.print()
    panels = _panels(command, ctx)
    widest = max(len(flags) for rows in panels.values() for flags, _ in rows)
    for title, rows in panels.items():
        out.print(_panel(title, rows, width=min(widest, _FLAGS_WIDTH)))
    _print_examples(out, command.epilog or "")


def _usage(command: Any, ctx: Any) -> str:
    pieces = ["[FLAGS]"]
    for param in command.get_params(ctx):
        if isinstance(param, TyperArgument):
            name = _takes(param, ctx)
            repeats = "" if param.nargs == 1 or name.endswith("...") else "..."
            pieces.append(f"{name}{repeats}" if param.required else f"[{name}{repeats}]")
    if hasattr(command, "commands"):
        pieces.append("COMMAND ...")
    return f"{ctx.command_path} {' '.join(pieces)}"


def _plain(text: str) -> str:
    """A text without the escapes that typer's own help needs."""
    return text.replace("\\[", "[")


def _panels(command: Any, ctx: Any) -> dict[str, list[tuple[Text, Text]]]:
    """Rows of flags by panel, in the order in which panels are first named."""
    from rich.text import Text

    found: dict[str, list[tuple[Text, Text]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        named = "Arguments" if isinstance(param, TyperArgument) else "Options"
        found.setdefault(param.rich_help_panel or named, []).append(_row(param, ctx))
    for name, each in getattr(command, "commands", {}).items():
        row = Text(name, "bold cyan"), Text((each.help or "").partition("\n")[0])
        found.setdefault(each.rich_help_panel or "Commands", []).append(row)
    if ctx.parent is not None:
        shared = [param for param in ctx.parent.command.params if param.name in ("quiet", "verbose", "no_color")]
        found[EVERYWHERE] = [_row(param, ctx.parent) for param in shared]
    return {title: rows for title, rows in found.items() if rows}


def _row(param: Any, ctx: Any) -> tuple[Text, Text]:
    from rich.text import Text

    is_argument, takes = isinstance(param, TyperArgument), _takes(param, ctx)
    text = Text(_plain(param.help or ""))
    notes = [_default(param), "required" if param.required and not is_argument else ""]
    if param.metavar is None and (choices := _choices(param, ctx)):
        notes.insert(0, f"one of {', '.join(choices)}")
    if any(notes):
        text.append(f" [{'; '.join(note for note in notes if note)}]", "dim")
    if is_argument:
        return Text(takes, "bold yellow"), text
    short = [flag for flag in param.opts if not flag.startswith("--")]
    long = [flag for flag in param.opts if flag.startswith("--")]
    head = Text(", ".join(short) + ", " if short else "    ", "bold green")
    head.append(", ".join(long), "bold cyan")
    if not param.is_flag or param.metavar:
        head.append(f" {takes}", "yellow")
    return head, text


def _takes(param: Any, ctx: Any) -> str:
    """What stands for the value."""
    if param.metavar is not None:
        return str(param.metavar)
    if isinstance(param, TyperArgument):
        return str(param.name).upper()
    if _choices(param, ctx):
        return str(param.opts[0]).lstrip("-").replace("-", "_").upper()
    kind = str(param.display_type(ctx))
    return "N" if "int" in kind else "NUMBER" if "float" in kind else "TEXT"


def _choices(param: Any, ctx: Any) -> list[str]:
    """The values of a flag that takes one of a few."""
    kind = str(param.display_type(ctx)).strip("<>")
    return kind.split("|") if "|" in kind else []


def _default(param: Any) -> str:
    value = param.default
    if param.show_default is False or value is None or isinstance(value, bool) or value == "":
        return ""
    return f"default: {value:g}" if isinstance(value, float) else f"default: {value}"


def _panel(title: str, rows: list[tuple[Text, Text]], *, width: int) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=width if any("--" in flags.plain for flags, _ in rows) else None)
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(*row)
    return Panel(table, title=title, title_align="left", border_style="dim", padding=(0, 1))


def _print_examples(out: Any, lines: str) -> None:
    """Examples as they are typed; one that is too long goes on behind a backslash, so that it can be copied."""
    from rich.text import Text

    if lines:
        out.print()
        out.print(Text(" Examples", "bold"))
    for line in lines.splitlines():
        for number, part in enumerate(_broken(line, out.width - 2 * _EXAMPLES_INDENT - 4)):
            indent = " " * (_EXAMPLES_INDENT if number == 0 else 2 * _EXAMPLES_INDENT + 2)
            out.print(Text(indent + part, "cyan"), soft_wrap=True)
    out.print()


def _broken(line: str, width: int) -> Iterator[str]:
    """A command on several lines; a flag stays with what follows it."""
    held = ""
    for part in re.split(r" (?=-)", line):
        if held and len(held) + 1 + len(part) > width:
            yield f"{held} \\"
            held = part
        else:
            held = f"{held} {part}" if held else part
    yield held
