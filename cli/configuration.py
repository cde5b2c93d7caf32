"""Settings of a command from its table of a TOML file, below flags and the environment.

`--config FILE` names it: the table of a command is `[solve]`, `[profile]` and so on there. Without it, those of
`[tool.assigner]` in a pyproject.toml of this folder count: `[tool.assigner.solve]`. A key is a flag's name without its
dashes; a list stands for a flag that may be repeated, a table for its NAME=VALUE.

What is wrong in a command's own table stops it, and so does what was meant to be its table; of what else stands in the
wrong place a line says that nobody reads it, and so of variables of the environment with our prefix.
"""

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.files import parse_toml, read_text
from assigner.machine.launchedrank import launched_rank

from . import console

_PREFIX = "ASSIGNER_"
OF_RUNS = ("BACKEND", "CAUSES", "HOST", "PLAN", "SECRET", "SHARED_MEMORY", "VERIFICATION")
"""What stands for no flag: launchers, ranks and scripts read it (docs/settings.md says what it means)."""
_OF_TESTS = ("SCREENS", "TEST_RAY_PYTHON", "TEST_STEP")
"""What this project's own tests read."""

TABLES = ("bench", "lab", "profile", "run", "solve")
"""Commands that take settings from a file."""

_OWN = {"config", "help"}
_OF_FOLDER = "pyproject.toml"
_CONTEXT, _WHERE = "assigner.context", "assigner.settings"


def load_configuration(ctx: typer.Context, value: Path | None) -> Path | None:
    """A callback of `--config`: make the file's table the defaults of the command's options.

    Raises:
        UsageError: the file cannot be read.
        FormatError: it is no TOML, or a table, a key or the type of a value is not one that is known.
    """
    if ctx.resilient_parsing:
        return value
    command = str(ctx.command.name)
    options = {param.name: param for param in ctx.command.params if param.name not in _OWN and _flag(param)}
    table, where = _table(value, command, {_flag(param).lstrip("-") for param in options.values()})
    ctx.meta[_WHERE] = {}
    defaults: dict[str, Any] = {}
    for key, given in table.items():
        param = _named(key, options, f"{where}.{key}", command)
        if param.name in defaults:
            before = ctx.meta[_WHERE][param.name].rpartition(".")[2]
            raise FormatError(f"{where}.{key}: {before} stands there too, and is the same setting", hint="keep one")
        defaults[str(param.name)] = _as_flag(given, param, where=f"{where}.{key}")
        ctx.meta[_WHERE][param.name] = f"{where}.{key}"
    ctx.default_map = {**defaults, **(ctx.default_map or {})}
    return value


def remember(ctx: Any) -> None:
    """Note the context of the command that is called, for `named_by_origin`."""
    ctx.meta[_CONTEXT] = ctx


def origin(ctx: Any, param: Any) -> str | None:
    """The variable, or file and key, that an option's value comes from; None: the line, or the option's own default."""
    source = getattr(ctx.get_parameter_source(param.name), "name", None)
    if source == "DEFAULT_MAP":
        return str(ctx.meta.get(_WHERE, {}).get(param.name)) or None
    if source == "ENVIRONMENT":
        return str(param.envvar or f"{ctx.auto_envvar_prefix}_{str(param.name).upper()}")
    return None


def named_by_origin(ctx: Any, message: str) -> str:
    """An error's message in which an option is called as the user has written it: a flag, a variable, a file's key.

    The message may name it as its flag or by its name: `--time-limit`, `time limit`, `time_limit`.
    """
    inner = ctx.meta.get(_CONTEXT)
    for param in [] if inner is None else inner.command.params:
        source = getattr(inner.get_parameter_source(param.name), "name", None)
        if not _flag(param) or source in (None, "DEFAULT"):
            continue
        where = origin(inner, param)
        words = _flag(param).lstrip("-").replace("-", "[-_ ]")
        found = re.search(rf"(?<![\w.-])(?:--)?{words}(?![\w-])", message)
        if found is not None and found.start() == 0 and (where or message[found.end() :].startswith(":")):
            return (where or _flag(param)) + message[found.end() :]
        if found is not None and where is not None:
            return f"{message} ({where})"
    return message


def _flag(param: Any) -> str:
    """An option's long flag; empty: it is an argument."""
    return next((flag for flag in param.opts if flag.startswith("--")), "")


def _named(key: str, options: dict[str, Any], where: str, command: str) -> Any:
    flag = key.replace("_", "-")
    for param in options.values():
        if f"--{flag}" in param.opts:
            return param
    names = sorted(_flag(param).lstrip("-") for param in options.values())
    raise FormatError(
        f"{where}: no setting of `assigner {command}`", hint=fmt.meant(flag, names, "settings", most=len(names))
    )


def _table(path: Path | None, command: str, flags: set[str]) -> tuple[dict[str, Any], str]:
    """A command's settings and where they stand; none without a file. `flags`: what the command has of them."""
    found = settings_file(path)
    if found is None:
        return {}, _OF_FOLDER
    place, text = f"{found}: ", read_text(found, hint="give the path of a TOML file")
    try:
        document = parse_toml(text)
    except FormatError as error:
        raise FormatError(f"{found}: {error.message}", hint="toml.io has the syntax") from error
    tools = _inner(document, "tool", f"{found}: ") if path is None or "tool" in document else {}
    if path is None or "assigner" in tools:
        document, place = _inner(tools, "assigner", f"{found}: tool."), f"{found}: tool.assigner."
    elif not document.keys() & set(TABLES):
        tables = [name for name, each in document.items() if isinstance(each, dict)]
        place = f"{place}{tables[0]}" if tables else str(path)
        hint = fmt.meant(tables[0] if tables else command, TABLES, "tables")
        raise FormatError(f"{place}: no table of settings", hint=hint if tables else f"write them below [{command}]")
    for name, table in document.items():
        if name in TABLES and isinstance(table, dict):
            continue
        hint = f"settings stand in a table: [{name}]" if name in TABLES else fmt.meant(name, TABLES, "tables")
        is_own = command in (name, *difflib.get_close_matches(name, TABLES, n=1)) or name.replace("_", "-") in flags
        if is_own:
            raise FormatError(f"{place}{name}: no table of settings", hint=hint)
        if speaks_for_all():
            console.notice(f"warning: {place}{name}: no table of settings, so nobody reads it ({hint})")
    return document.get(command, {}), f"{place}{command}"


def _inner(document: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The table of a name, empty where there is none."""
    found = document.get(name, {})
    if not isinstance(found, dict):
        raise FormatError(f"{where}{name}: {_shown(found)} is no table", hint="write [tool.assigner.solve]")
    return found


def settings_file(given: Path | None) -> Path | None:
    """The file that settings come from: the one that is given, or this folder's pyproject.toml where there is one."""
    return given or (Path(_OF_FOLDER) if Path(_OF_FOLDER).is_file() else None)


def _as_flag(given: Any, param: Any, *, where: str) -> Any:
    """A value as the option takes it: tables as NAME=VALUE, a list for an option that takes several or A,B."""
    many, switch = bool(getattr(param, "multiple", False)), bool(getattr(param, "is_flag", False))
    if switch and not isinstance(given, bool):
        raise FormatError(f"{where}: {_shown(given)} is not allowed", hint="it is a switch: true or false")
    if switch:
        return given
    if isinstance(given, dict) and many:
        return [f"{name}={_text(value, where=f'{where}.{name}')}" for name, value in given.items()]
    if isinstance(given, list):
        texts = [",".join(map(str, each)) if isinstance(each, list) else _text(each, where=where) for each in given]
        return texts if many else ",".join(texts)
    return [_text(given, where=where)] if many else _text(given, where=where)


def _text(given: Any, *, where: str) -> str:
    if isinstance(given, int | float | str) and not isinstance(given, bool):
        return str(given)
    raise FormatError(
        f"{where}: {_shown(given)} is not allowed; expected a number or a text", hint="write it as the flag takes it"
    )


def _shown(given: Any) -> str:
    return {True: "true", False: "false"}[given] if isinstance(given, bool) else str(given)


def of_flags(group: Any) -> Iterator[tuple[str, Any, str | None]]:
    """Every flag of every command: the command's name, the flag, and its variable; None: it has none."""
    for name, command in group.commands.items():
        prefix = command.context_settings.get("auto_envvar_prefix")
        for param in command.params:
            if param.param_type_name != "argument":
                yield name, param, param.envvar or (f"{prefix}_{param.name.upper()}" if prefix else None)


def speaks_for_all() -> bool:
    """Whether this process is the one of a run's that says what concerns all of them."""
    return f"{_PREFIX}CAUSES" not in os.environ and launched_rank() in (None, 0)


def warn_of_unknown(group: Any) -> None:
    """Say which variables with our prefix nobody reads, and what may have been meant."""
    there = sorted(name.removeprefix(_PREFIX) for name in os.environ if name.startswith(_PREFIX))
    if not there:
        return
    flags = list(of_flags(group))
    read = {variable.removeprefix(_PREFIX) for _, _, variable in flags if variable} | {*OF_RUNS}
    found = [f"{_PREFIX}{name}{_meant(name, flags, read)}" for name in there if name not in read | {*_OF_TESTS}]
    if found and speaks_for_all():
        console.notice(f"warning: assigner reads no variable of this name: {', '.join(found)}")


def _meant(name: str, flags: list[tuple[str, Any, str | None]], read: set[str]) -> str:
    """What a variable that is not read was meant to be, in brackets; empty: it is like none. Names without prefix."""
    for command, param, variable in flags:
        if variable is None and name in (param.name.upper(), f"{command}_{param.name}".upper()):
            return f" ({max(param.opts, key=len)} of {command} has none)"
    short = name.removeprefix("SOLVE_")  # whose variables have no command in their names
    close = [short] if short in read else difflib.get_close_matches(name, sorted(read), n=1)
    return f" (did you mean {_PREFIX}{close[0]}?)" if close else ""
