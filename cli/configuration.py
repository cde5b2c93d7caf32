"""Settings from a file: the `[solve]` table of a TOML file, below flags and environment.

`--config FILE` names it; otherwise `[tool.assigner.solve]` of a pyproject.toml in this folder counts. A key is a flag's
name without its dashes; a list stands for a flag that may be repeated, a table for its NAME=VALUE.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any

import typer

from assigner.errors import FormatError, UsageError

TABLE = "solve"
_OWN = {"config", "profile", "help"}


def load_configuration(ctx: typer.Context, value: Path | None) -> Path | None:
    """A callback of `--config`: make the file's table the defaults of the command's options.

    Raises:
        UsageError: the file cannot be read, or has no such table.
        FormatError: it is no TOML, or a key is not one of the command's options.
    """
    if ctx.resilient_parsing:
        return value
    table, where = _table(value)
    known = {
        param.name: {option.lstrip("-").replace("-", "_") for option in param.opts}
        for param in ctx.command.params
        if param.name and param.name not in _OWN
    }
    defaults: dict[str, Any] = {}
    for key, given in table.items():
        flag = key.replace("-", "_")
        name = next((name for name, flags in known.items() if flag in flags), None)
        if name is None:
            names = sorted(each for flags in known.values() for each in flags)
            close = difflib.get_close_matches(flag, names, n=1)
            raise FormatError(
                f"{where}: {key!r} is no setting of `assigner solve`",
                hint=f"did you mean {close[0]}?" if close else f"settings: {', '.join(names)}",
            )
        param = next(param for param in ctx.command.params if param.name == name)
        flag_value = _as_flag(given, where=f"{where}.{key}")
        many = isinstance(flag_value, list)
        if getattr(param, "multiple", False):
            defaults[name] = flag_value if many else [flag_value]
        else:
            defaults[name] = ",".join(flag_value) if many else flag_value
    ctx.default_map = {**defaults, **(ctx.default_map or {})}
    return value


def _table(path: Path | None) -> tuple[dict[str, Any], str]:
    """The settings and where they stand; none without a file."""
    if path is None:
        found = Path("pyproject.toml")
        table = _read(found).get("tool", {}).get("assigner", {}).get(TABLE, {}) if found.is_file() else {}
        return table, f"{found}: tool.assigner.{TABLE}"
    document = _read(path)
    if not isinstance(document.get(TABLE), dict):
        raise FormatError(f"{path}: has no [{TABLE}] table", hint=f"write the settings below a line [{TABLE}]")
    return document[TABLE], f"{path}: {TABLE}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is no TOML: {error}", hint="toml.io has the syntax") from error


def _as_flag(given: Any, *, where: str) -> Any:
    """A value as the flag would be written: tables as NAME=VALUE, inner lists with commas."""
    if isinstance(given, dict):
        return [f"{name}={value}" for name, value in given.items()]
    if isinstance(given, list):
        return [",".join(map(str, each)) if isinstance(each, list) else str(each) for each in given]
    if isinstance(given, bool | int | float | str):
        return given if isinstance(given, bool) else str(given)
    raise FormatError(f"{where}: {given!r} is not allowed; expected a number, a text, a list or a table")
