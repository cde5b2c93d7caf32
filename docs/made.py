"""The parts of the documentation that follow from the program: commands and file formats.

    python docs/made.py      writes them between `<!-- made: NAME -->` and `<!-- end -->` of the pages here

A test compares them with what stands there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

DOCS = Path(__file__).resolve().parent
_MADE = re.compile(r"(<!-- made: (\w+)[^>]*-->\n).*?(<!-- end -->)", flags=re.DOTALL)
_HEAD = {
    "kind": "What the file is.",
    "format_version": "MAJOR.MINOR. A reader takes every minor version of a major that it knows.",
    "created_at": "When, in UTC.",
    "tool_version": "The release of this program that wrote it.",
}


def filled(page: str) -> str:
    """A page with all that is made written anew."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return _MADE.sub(lambda found: f"{found[1]}\n{made(found[2])}\n{found[3]}", text)


def made(name: str) -> str:
    """One made part, in Markdown."""
    parts = {"commands": commands, "settings": settings}
    return parts[name]() if name in parts else file_format(name)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# commands


def commands() -> str:
    """Each command with its arguments, options and examples, as its own help has them."""
    import typer
    from assigner_cli.app import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("assigner", ["doctor"], resilient_parsing=True)
    parts = [_options("Everywhere", [param for param in group.params if param.name != "help"], context)]
    for name, command in group.commands.items():
        parts.append(f"## assigner {name}\n\n{_prose(command.help)}\n")
        panels: dict[str, list[Any]] = {}
        for param in command.params:
            if param.name != "help" and not getattr(param, "hidden", False):
                panel = getattr(param, "rich_help_panel", None)
                title = panel or ("Arguments" if param.param_type_name == "argument" else "Options")
                panels.setdefault(title, []).append(param)
        parts += [_options(title, params, context) for title, params in panels.items()]
        if command.epilog:
            parts.append(_examples(command.epilog))
    return "\n".join(parts)


def settings() -> str:
    """The environment variables that stand for flags, command by command."""
    import typer
    from assigner_cli.app import app
    from assigner_cli.configuration import of_flags

    rows = [_row("command", "flag", "variable"), _row("---", "---", "---")]
    for name, param, variable in of_flags(typer.main.get_command(app)):
        if variable is not None:
            rows.append(_row(f"`{name}`", f"`{max(param.opts, key=len)}`", f"`{variable}`"))
    return "\n".join(rows) + "\n"


def _prose(text: str | None) -> str:
    return _unmarked(inspect.cleandoc(text or ""))


def _unmarked(text: str) -> str:
    """Help text without escapes."""
    return text.replace("\\[", "[")


def _options(title: str, params: list[Any], context: Any) -> str:
    rows = [f"**{title}**\n", _row("", "default", ""), _row("---", "---", "---")]
    rows += [_row(_names(param, context), _default(param), _unmarked(param.help or "")) for param in params]
    return "\n".join(rows) + "\n"


def _names(param: Any, context: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    long, *short = sorted(param.opts, key=len, reverse=True)
    value = "" if param.is_flag else f" {param.metavar or param.display_type(context)}"
    return ", ".join([f"`{long}{value}`", *(f"`{name}`" for name in (*short, *param.secondary_opts))])


def _default(param: Any) -> str:
    value = param.default
    if param.required:
        return "required"
    if callable(value) or value in (None, "", (), []) or getattr(param, "is_flag", False):
        return ""
    return f"`{value}`"


def _examples(epilog: str) -> str:
    lines = [_unmarked(line).strip() for line in epilog.splitlines()]
    shown = "\n".join(f"$ {line}" for line in lines if line and line != "Examples")
    return f"<!-- not run: the help's own examples -->\n```console\n{shown}\n```\n"


# formats


def file_format(kind: str) -> str:
    """Every field of a kind of file, object by object."""
    from assigner.formats import plan, profile, trace
    from assigner.formats.document import name_of

    root = {"profile": profile.Profile, "plan": plan.Plan, "trace": trace.Trace}[kind]
    parts = []
    for where, record in _records(root):
        title = f"`{where}`" if where else f"The {kind}"
        rows = [f"**{title}**\n", _row("field", "type", "left out", "meaning"), _row("---", "---", "---", "---")]
        hints = get_type_hints(record, include_extras=True)
        said = {**(_HEAD if record is root else {}), **_described(record)}
        rows += [
            _row(f"`{name_of(field)}`", _type(hints[field.name]), _left_out(field), said.get(field.name, ""))
            for field in dataclasses.fields(record)
        ]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _records(root: type) -> list[tuple[str, type]]:
    """The root and every object below it, each kind once, with where it stands first."""
    found: list[tuple[str, type]] = [("", root)]
    for where, record in found:
        for name, hint in get_type_hints(record, include_extras=True).items():
            inner, many = _record(hint)
            if inner is not None and inner not in [each for _, each in found]:
                found.append((f"{where}.{name}".strip(".") + ("[]" if many else ""), inner))
    return found


def _record(hint: Any) -> tuple[type | None, bool]:
    """The dataclass in an annotation, and whether it stands in a list."""
    if dataclasses.is_dataclass(hint):
        return hint, False  # type: ignore[return-value]
    for inner in get_args(hint):
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            return inner, getattr(hint, "__origin__", None) is tuple  # type: ignore[return-value]
    return None, False


def _type(hint: Any) -> str:
    from assigner.formats.document import MOST_ROWS, schema

    rule = schema(hint)
    optional = "anyOf" in rule
    rule = rule["anyOf"][0] if optional else rule
    if "enum" in rule:
        text = ", ".join(f"`{value}`" for value in rule["enum"])
    elif rule["type"] == "array":
        text = f"list of {_plural(rule['items'])}"
    else:
        words = {"string": "text", "boolean": "true or false", "integer": "whole number"}
        text = words.get(rule["type"], rule["type"])
        low, high = rule.get("minimum"), rule.get("maximum")
        high = None if high is not None and high >= MOST_ROWS else high  # the page's head says these limits
        if low is not None and (rule["type"] == "integer" or high is not None):
            text += f", {low:g} or more" if high is None else f", {low:g} to {high:g}"
    return text + (", or null" if optional else "")


def _plural(rule: dict[str, Any]) -> str:
    return {"string": "text", "integer": "whole numbers", "number": "numbers"}.get(rule.get("type", ""), "objects")


def _left_out(field: dataclasses.Field[Any]) -> str:
    from assigner.formats.document import required

    if field.name in ("kind", "format_version") or required(field):
        return "required"
    if field.default is dataclasses.MISSING:
        return "null" if field.default_factory is dataclasses.MISSING else "empty"
    value = field.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"`{value:g}`" if isinstance(value, int | float) else f"`{value}`" if value else "empty"


def _described(record: type) -> dict[str, str]:
    """What a class's docstring says of its fields, in its Args section."""
    text = inspect.getdoc(record) or ""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, flags=re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.|\n(?!    \w+: ))*)", section[1] if section else "", flags=re.MULTILINE)
    return {name: re.sub(r"\bNone\b", "null", " ".join(said.split())) for name, said in entries}


if __name__ == "__main__":
    for each in sorted(DOCS.glob("*.md")):
        if _MADE.search(each.read_text(encoding="utf-8")):
            each.write_text(filled(each.name), encoding="utf-8")
