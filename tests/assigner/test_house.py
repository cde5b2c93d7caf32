"""The package as a house: one class name, one meaning, and imports that point downwards."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FLOORS = {
    "foundation": "errors formatting files location samples usercode version settings",
    "machine": "machine",
    "formats": "formats",
    "schedule": "schedule",
    "solver": "solver",
    "validation": "validation",
    "export": "export",
    "launch": "launch",
    "lab": "lab",
    "report": "report",
    "model": "model init",
    "runtime": "runtime",
    "profiler": "profiler",
    "verification": "verification",
    "bench": "bench",
    "assigner": "__init__",
    "cli": "cli",
    "__main__": "__main__",
}
"""The packages from bottom to top, each with what stands directly in `assigner/` and belongs to it. What is imported
lies on a lower floor, or on the same one."""
STOREYS = {
    "runtime": "recording failures messages ranks forward stages update batch step checkpoints .",
    "solver": "limits problem ilp methods baselines fleet pipelines free search orders why . robust",
}
"""Floors that are packages of packages, from bottom to top; `.`: what stands directly in them."""
UPWARDS = {
    ("assigner/formats/screen.py", "report"): "print(plan) draws what `assigner show` draws; imported when it prints",
}
"""Imports that point upwards all the same, each with its reason: module, and the floor that it reaches for."""


class Import(NamedTuple):
    """One module imports another one, wherever in its text."""

    module: str
    line: int
    floor: str
    target: str


@functools.cache
def _modules() -> dict[str, ast.Module]:
    """Every module of the product, parsed, by its file."""
    files = sorted([*ROOT.glob("assigner/**/*.py"), *ROOT.glob("cli/**/*.py")])
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def _defined_twice() -> dict[str, list[str]]:
    """Class names that several modules define, or one defines several times, each with the modules."""
    homes = defaultdict(list)
    for module, tree in _modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_one_class_name_has_one_meaning():
    """No class name is defined twice, private ones and those inside of functions included."""
    assert _defined_twice() == {}


def _floor(file: str) -> str:
    """The floor that a module belongs to, by its file."""
    package, name = Path(file).with_suffix("").parts[:2]
    if package == "cli":
        return "cli"
    floors = [floor for floor, members in FLOORS.items() if name in members.split()]
    assert len(floors) == 1, f"{file} stands on {floors or 'no floor'}: FLOORS says where it belongs"
    return floors[0]


def _file(name: str) -> str | None:
    """The file of a module of the product; None: no module is called so."""
    place = name.replace(".", "/").replace("assigner_cli", "cli", 1)
    return next((file for file in (f"{place}.py", f"{place}/__init__.py") if file in _modules()), None)


@functools.cache
def _imports() -> tuple[Import, ...]:
    """All imports of one of the product's modules by another one, in functions and for type checkers too."""
    return tuple(_read())


def _read() -> Iterator[Import]:
    for module, tree in _modules().items():
        package = Path(module).with_suffix("").parts[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
                home = ".".join(filter(None, (base, node.module)))
                names = [each if _file(each := f"{home}.{alias.name}") else home for alias in node.names]
            else:
                continue
            for name in names:
                target = _file(name)
                if target is not None and target != module:
                    yield Import(module, node.lineno, _floor(target), target)


def test_every_module_stands_on_one_floor():
    """No module is left out of the map, and the map names none that is not there."""
    floors = {_floor(module) for module in _modules()}
    assert floors == set(FLOORS)
    there = {Path(module).with_suffix("").parts[1] for module in _modules() if module.startswith("assigner/")}
    named = [name for floor, members in FLOORS.items() if floor != "cli" for name in members.split()]
    assert sorted(named) == sorted(there)


def test_imports_point_downwards():
    """What a module imports, in a function or for type checkers too, is on its own floor or below."""
    rank = list(FLOORS)
    upwards = [each for each in _imports() if rank.index(each.floor) > rank.index(_floor(each.module))]
    assert [each for each in upwards if (each.module, each.floor) not in UPWARDS] == []
    assert {(each.module, each.floor) for each in upwards} == set(UPWARDS), "an exception is no longer needed"


def _storey(file: str, floor: str) -> int:
    """Where a module stands in a floor of several packages: modules that stand directly in it, highest."""
    storeys, (_, _, inner, *rest) = STOREYS[floor].split(), Path(file).parts
    return storeys.index(inner if rest else ".")


@pytest.mark.slow
@pytest.mark.parametrize("floor", STOREYS)
def test_imports_within_a_floor_point_downwards(floor):
    """In a package of packages too, those in functions and for type checkers included."""
    inside = f"assigner/{floor}/"
    within = [each for each in _imports() if each.module.startswith(inside) and each.target.startswith(inside)]
    assert len(within) > 100
    assert [each for each in within if _storey(each.target, floor) > _storey(each.module, floor)] == []
    assert {Path(each).parts[2] for each in _modules() if each.startswith(inside) and each.count("/") > 2} == set(
        STOREYS[floor].split()
    ) - {"."}


def test_imports_are_found_wherever_they_stand():
    """The test sees relative imports, imports in functions, and those for type checkers."""
    found = {(each.module, each.target) for each in _imports()}
    assert ("cli/check.py", "cli/options.py") in found
    assert ("assigner/formats/screen.py", "assigner/report/sheet.py") in found
    assert ("assigner/schedule/criticalpath.py", "assigner/schedule/simulate.py") in found


def test_the_drawn_house_is_the_checked_one():
    """CONTRIBUTING.md draws every floor with what belongs to it, from the top down."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text.partition("    assigner/\n")[2].partition("    tests/")[0]
    lines = re.findall(r"^ {6}(\w.*?)(?:  |$)", text, re.MULTILINE)
    drawn = [_floor(f"assigner/{name}.py") for line in lines for name in re.findall(r"\w+", line)]
    assert list(dict.fromkeys(drawn)) == [floor for floor in reversed(FLOORS) if floor not in ("cli", "__main__")]
    assert len(drawn) == sum(len(members.split()) for members in FLOORS.values()) - 2


def test_files_that_contributing_names_are_there():
    """What a change touches, and where answers are."""
    text = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## Where to look")[2]
        .partition("## Habits")[0]
    )
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert len(named) > 30
    assert {each for each in named if not (ROOT / each).exists() and not (ROOT / "assigner" / each).exists()} == set()


@pytest.mark.parametrize(
    "package",
    [
        "formats",
        "init",
        "lab",
        "launch",
        "machine",
        "model",
        "model/deferred",
        "model/marking",
        "profiler",
        "runtime",
        "schedule",
        "validation",
        "verification",
        *(f"{floor}/{storey}" for floor in STOREYS for storey in STOREYS[floor].replace(" .", "").split()),
    ],
)
def test_maps_name_every_module(package):
    """The docstring of a package says of each of its modules what it is for."""
    words = set(re.findall(r"\w+", ast.get_docstring(_modules()[f"assigner/{package}/__init__.py"]) or ""))
    modules = {Path(each).stem for each in _modules() if str(Path(each).parent) == f"assigner/{package}"}
    assert modules - words == {"__init__"}


MADE_SOMEWHERE = {
    "tensor",
    "zeros",
    "ones",
    "empty",
    "empty_strided",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "randperm",
    "linspace",
}
RUNS_TENSORS = ("assigner/runtime/", "assigner/profiler/", "assigner/verification/", "assigner/model/")


def test_tensors_are_made_on_a_device_that_is_named():
    """A script may have set another default device (`torch.set_default_device`), and gloo takes those of a CPU."""
    unnamed = [
        f"{module}:{node.lineno} torch.{node.func.attr}"
        for module, tree in _modules().items()
        if module.startswith(RUNS_TENSORS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in MADE_SOMEWHERE
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert unnamed == []


def test_modules_of_the_tests_have_names_of_their_own():
    """pytest and the scripts of runs/ import them by name alone, from several folders: one name, one module."""
    files = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name != "conftest.py":
            files[path.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_what_is_installed_is_every_package():
    """A package that pyproject.toml does not name would be missing wherever the program is not run from its folder."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "assigner").rglob("__init__.py")}
    assert sorted(named) == sorted(found | {"assigner_cli"})
