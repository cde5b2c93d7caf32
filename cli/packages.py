"""What `assigner doctor` says of Python, the packages that assigner needs, its solvers, and what else it can use."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assigner.report.doctor import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

ASK_SOLVERS = """
import json, pulp
found = {}
for name, make in (("HiGHS", pulp.HiGHS), ("CBC", pulp.PULP_CBC_CMD)):
    try:
        problem, x = pulp.LpProblem("try", pulp.LpMaximize), pulp.LpVariable("x", 0, 9, "Integer")
        problem += x
        problem += 2 * x <= 5
        problem.solve(make(msg=False))
        found[name] = "" if x.value() == 2 else f"it says {x.value()} where 2 is right"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
"""Has each solver solve a problem of one variable, whose optimum is 2."""

_BOUND = re.compile(r"(>=|<|==)\s*([\d.]+)")


@dataclass(frozen=True)
class _Extra:
    """A package, or a program, that something optional needs."""

    name: str
    use: str
    remedy: str
    program: str = ""


_EXTRAS = (
    _Extra("transformers", "Hugging Face models", "pip install transformers"),
    _Extra("accelerate", "takes what export --to device-map writes", "pip install accelerate"),
    _Extra("torchgpipe", "takes what export --to torchgpipe writes", "pip install torchgpipe"),
    _Extra("Graphviz", "draws what export --to dot writes", "apt-get (or brew) install graphviz", program="dot"),
    _Extra("mpi4py", "carries messages where the backend is mpi", "pip install 'assigner[mpi]'"),
    _Extra("MPI launcher", "another way to start ranks", "apt-get install openmpi-bin", program="mpirun"),
)  # fmt: skip


def installed(package: str) -> str | None:
    """A package's version; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def programs(solvers: dict[str, Any] | None) -> Iterator[Finding]:
    """Python, what assigner cannot do without, and the solvers.

    Args:
        solvers: For each solver why it does not solve, or empty; None: they could not be asked.
    """
    here = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    yield Finding("python", "ok", here, value=platform.python_version())
    yield Finding("assigner", "ok", installed("assigner") or "not installed as a package", value=installed("assigner"))
    uses = {"torch": "profile and run need it", "PuLP": "solve needs it", "HiGHS": "solve needs it"}
    for name, use in uses.items():
        package = {"PuLP": "pulp", "HiGHS": "highspy"}.get(name, name)
        yield _needed(name, package, use, (solvers or {}).get(name, ""))
    yield _cbc((solvers or {}).get("CBC", ""))


def _needed(name: str, package: str, use: str, failure: str) -> Finding:
    found, wanted = installed(package), _wanted(package)
    remedy = f"pip install '{package}{wanted}'"
    if found is None:
        return Finding(name, "missing", f"not installed; {use}", remedy)
    if not _within(found, wanted):
        return Finding(name, "missing", f"{found}, where {wanted} is needed", remedy, found)
    if failure:
        return Finding(
            name, "missing", f"{found} does not work: {failure}", f"pip install --force-reinstall {package}", found
        )
    return Finding(name, "ok", found, value=found)


def _wanted(package: str) -> str:
    """The versions that assigner asks for, as its own metadata has them: `>=2.10,<2.16`."""
    try:
        lines = requires("assigner") or []
    except PackageNotFoundError:  # run from a folder that is not installed
        return ""
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)\s*([^;]*)", line)  # those of extras have a marker behind a `;`
        if match and match[1].lower() == package:
            return ",".join(sorted(match[2].replace(" ", "").split(","), reverse=True))
    return ""


def _within(found: str, wanted: str) -> bool:
    mine = _numbers(found)
    for sign, bound in _BOUND.findall(wanted):
        other = _numbers(bound)
        if not {">=": mine >= other, "<": mine < other, "==": mine[: len(other)] == other}[sign]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    leading = re.match(r"[\d.]+", text)
    return tuple(int(part) for part in leading[0].strip(".").split(".")) if leading else ()


def _cbc(failure: str) -> Finding:
    """CBC comes inside PuLP for the common platforms; elsewhere it is a program on the path."""
    spec = find_spec("pulp")
    places = spec.submodule_search_locations if spec else None
    system = {"linux": "linux", "darwin": "osx", "win32": "win"}.get(sys.platform, sys.platform)
    machine = "arm64" if platform.machine() in ("aarch64", "arm64") and system == "linux" else "i64"
    bundled = [Path(place, "solverdir", "cbc", system, machine, "cbc") for place in places or ()]
    found = next((str(path) for path in bundled if os.access(path, os.X_OK)), None) or shutil.which("cbc")
    if found is None:
        return Finding("CBC", "note", "not found; HiGHS does without", "apt-get install coinor-cbc")
    if failure:
        return Finding(
            "CBC", "note", f"does not work: {failure}; HiGHS does without", "apt-get install coinor-cbc", found
        )
    return Finding("CBC", "ok", "with PuLP" if "solverdir" in found else found, value=found)


def extras() -> Iterator[Finding]:
    """What something optional needs."""
    for extra in _EXTRAS:
        found = shutil.which(extra.program) if extra.program else installed(extra.name)
        if found is None:
            yield Finding(extra.name, "absent", extra.use, extra.remedy, group="optional")
        else:
            yield Finding(extra.name, "ok", f"{found}; {extra.use}", value=found, group="optional")
