"""What a new user names as the model: a class, or a function that builds one, imported as a workload file would."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import keyword
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.init.text import RESERVED
from assigner.usercode import parse_call, user_code

if TYPE_CHECKING:
    from types import ModuleType

_FORM = "write package.module:Class, FILE.py:Class, or FILE.py:Class(width=64)"


@dataclass(frozen=True)
class NamedModel:
    """What `MODEL` names.

    Args:
        name: Of the class or function.
        called: Its name in the workload file, where that has another use for the first one.
        make: The class or function.
        line: Imports it.
        is_local: It was named by its file.
        arguments: Given with it.
        files: Where it is written, and where it is imported from.
    """

    name: str
    called: str
    make: Callable[..., Any]
    line: str
    is_local: bool
    arguments: Mapping[str, Any]
    files: frozenset[Path]


def find_model(model: str, folder: Path) -> NamedModel:
    """Import what `model` names; errors and arguments as `draft_of_model`."""
    where, separator, call = model.rpartition(":")
    if not separator or not where or not call:
        raise UsageError(f"{model!r} names no model", hint=_FORM)
    name, arguments = parse_call(call, model, what="class or function", hint=_FORM)
    path = Path(where) if where.endswith(".py") else None
    if path is not None:
        where = _module_of(path, folder)
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in where.split(".")):
        raise UsageError(f"{where!r} is no name that Python can import", hint=_FORM)
    module = _imported(where, path, name, folder)
    make = getattr(module, name, None)
    if not callable(make):
        raise UsageError(f"{where} has no class or function {name!r}", hint=_FORM)
    called = f"build_{name}" if name in RESERVED else name
    line = f"from {where} import {name}" + (f" as {called}" if called != name else "")
    return NamedModel(name, called, make, line, path is not None, arguments, _files(module, make))


def _module_of(path: Path, folder: Path) -> str:
    """The name under which a file can be imported from the workload file beside it."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file", hint=_FORM)
    if path.resolve().parent != folder.resolve():
        raise UsageError(
            f"{path} is not in the folder of the workload file, {folder}, and could not be imported from there",
            hint=f"-o {path.parent / 'workload.py'}",
        )
    return path.stem


def _imported(where: str, path: Path | None, name: str, folder: Path) -> ModuleType:
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
        if path is not None and "relative import" in str(error.__cause__):
            raise UsageError(error.message, hint=_of_package(path, name)) from error
        raise
    if path is not None and Path(module.__file__ or "").resolve() != path.resolve():
        raise UsageError(
            f"{path}: its name is that of {module.__file__ or 'a module of Python'}, which is imported in its place",
            hint="give the file another name",
        )
    return module


def _of_package(path: Path, name: str) -> str:
    """How to name a model in a file that its package has to be imported for."""
    parts, above = [path.stem], path.resolve().parent
    while True:
        parts.insert(0, above.name)
        above = above.parent
        if not (above / "__init__.py").is_file():
            break
    output = above / "workload.py"
    shown = output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output
    return f"it is part of a package: {'.'.join(parts)}:{name} -o {shown}"


def _files(module: ModuleType, make: Callable[..., Any]) -> frozenset[Path]:
    found = [module.__file__]
    with contextlib.suppress(TypeError, OSError):  # it is written in C
        found.append(inspect.getsourcefile(make))
    return frozenset(Path(file).resolve() for file in found if file)
