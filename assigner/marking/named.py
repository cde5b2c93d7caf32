"""What a new user names as the model: a class, or a function that builds one, imported as a workload file would."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assigner.errors import UsageError
from assigner.usercode import user_code

_FORM = "write package.module:Class, FILE.py:Class, or FILE.py:Class(width=64)"


@dataclass(frozen=True)
class NamedModel:
    """What `MODEL` names: a class or a function, the line that imports it, and the arguments given with it."""

    name: str
    make: Callable[..., Any]
    line: str
    is_local: bool
    arguments: Mapping[str, Any]


def find_model(model: str, folder: Path) -> NamedModel:
    """Import what `model` names; errors and arguments as `survey`."""
    where, separator, call = model.rpartition(":")
    if not separator or not where or not call:
        raise UsageError(f"{model!r} names no model", hint=_FORM)
    name, arguments = _parsed(call, model)
    is_local = where.endswith(".py")
    if is_local:
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"{path}: no such file", hint=_FORM)
        if path.resolve().parent != folder.resolve():
            raise UsageError(
                f"{path} is not in the folder of the workload file, {folder}, and could not be imported from there",
                hint=f"-o {path.parent / 'workload.py'}",
            )
        where = path.stem
    if not all(part.isidentifier() for part in where.split(".")):
        raise UsageError(f"{where!r} is no name that Python can import", hint=_FORM)
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    try:
        with user_code(f"import of {where}"):
            module = importlib.import_module(where)
    except UsageError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise UsageError(
                f"cannot import {where}: {error.__cause__}", hint="is it installed in this environment?"
            ) from error
        raise
    make = getattr(module, name, None)
    if not callable(make):
        raise UsageError(f"{where} has no class or function {name!r}", hint=_FORM)
    return NamedModel(name, make, f"from {where} import {name}", is_local, arguments)


def _parsed(call: str, model: str) -> tuple[str, dict[str, Any]]:
    """`Class` or `Class(width=64)`: keywords with plain literals, as in an entry of a workload."""
    try:
        node = ast.parse(call, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {str(word.arg): ast.literal_eval(word.value) for word in node.keywords if word.arg}
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{model!r}: {call!r} cannot be read", hint=_FORM) from error
    raise UsageError(f"{model!r}: {call!r} is no class or function", hint=_FORM)
