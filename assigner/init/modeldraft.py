"""A model named by a new user, looked at without memory behind its tensors: the draft of its workload.

What is named is a class, or a function that builds one, imported as a workload file would.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import keyword
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from assigner.errors import UsageError
from assigner.init.inputs import Trial, try_inputs
from assigner.init.text import RESERVED, Code, Draft, MarkPattern
from assigner.model.deferred import DeferredModel
from assigner.model.marking.marks import matches
from assigner.model.members import parameters
from assigner.usercode import parse_call, user_code

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_SMALL: tuple[dict[str, Any], ...] = (
    {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    {"num_hidden_layers": 4},
    {},
)
"""What makes a transformers model small enough to try things out; the first with which it runs is taken."""

_FORM = "write package.module:Class, FILE.py:Class, or FILE.py:Class(width=64)"
_LINE = 160  # of a hint; longer signatures help nobody

LEAST_SHARE = 0.01
"""Of the model's parameters: what is smaller goes with a neighbour."""

Called = Mapping[str, frozenset[str]]
"""The modules whose forward is called, by name, each with those whose results lie behind what it is given."""


@dataclass(frozen=True)
class NamedModel:
    """What `MODEL` names: a class or function, with its arguments, and the code that imports it, which has no body yet.

    It is `called` so in the workload file, where its own name has another use.
    """

    name: str
    called: str
    make: Callable[..., Any]
    arguments: Mapping[str, Any]
    code: Code


def draft_of_model(model: str, folder: Path) -> Draft:
    """Build what `model` names on the meta device, and look at what it takes, gives and is made of.

    Args:
        model: `package.module:Class`, `FILE.py:Class`, either with `(width=64)` behind it; a function will do.
        folder: Where the workload file will be: the file must be there, and packages are looked for there too.

    Raises:
        UsageError: `model` has another form, cannot be imported, or makes no nn.Module.
    """
    named = _find_model(model, folder)
    made_by = f"assigner init {shlex.quote(model)}"
    _check_keywords(named)
    missing = _missing(named)
    if missing:
        gap = (
            f"{named.name} needs {', '.join(map(str, missing))}: give values in `model`, and then the rest of the file"
        )
        body = (
            f"# {named.name} needs values in the place of the dots.",
            f"return {named.called}({_dots(missing, named)})",
        )
        return Draft(named.name, made_by, replace(named.code, body=body), gaps=(gap,))
    built = _first_that_runs(named)
    return _draft(named, made_by, *built)


def _config_class(named: NamedModel) -> type | None:
    """A transformers model is made from a config of its own class."""
    found = getattr(named.make, "config_class", None)
    return found if isinstance(found, type) and not named.arguments else None


def _signature(named: NamedModel) -> inspect.Signature | None:
    """What the class or function takes; None: some written in C do not tell."""
    try:
        return inspect.signature(named.make)
    except (TypeError, ValueError):
        return None


def _check_keywords(named: NamedModel) -> None:
    """A UsageError where the class or function does not take a keyword that was given."""
    signature = _signature(named)
    parameters = () if signature is None else signature.parameters.values()
    if signature is None or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for name in named.arguments:
        if name not in known:
            close = [f"did you mean {each}? " for each in difflib.get_close_matches(name, known, n=1)]
            raise UsageError(
                f"{named.name} takes no {name!r}",
                hint=f"{''.join(close)}it takes {', '.join(known) if known else 'no arguments by name'}",
            )


def _missing(named: NamedModel) -> list[inspect.Parameter]:
    """Arguments without a default that were not given, as they are declared."""
    signature = _signature(named)
    if signature is None or _config_class(named) is not None:
        return []
    return [
        each
        for each in signature.parameters.values()
        if each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name not in named.arguments
    ]


def _dots(missing: list[inspect.Parameter], named: NamedModel) -> str:
    places = ["..." for each in missing if each.kind is each.POSITIONAL_ONLY]
    words = [f"{each.name}=..." for each in missing if each.kind is not each.POSITIONAL_ONLY]
    return ", ".join([*places, *_words(named), *words])


def _words(named: NamedModel) -> list[str]:
    return [f"{name}={value!r}" for name, value in named.arguments.items()]


def _ways(named: NamedModel) -> Iterator[tuple[Callable[[], nn.Module], tuple[str, ...]]]:
    """Ways to build the model, each with the lines of `model()` that do it."""
    config = _config_class(named)
    if config is None:
        yield lambda: named.make(**named.arguments), (f"return {named.called}({', '.join(_words(named))})",)
        return
    known = config()
    for small in _SMALL:
        wanted = {name: value for name, value in small.items() if hasattr(known, name)}
        always = {"use_cache": False} if hasattr(known, "use_cache") else {}  # a cache is for generating text
        yield (
            lambda words=wanted | always: named.make(config(**words)),  # type: ignore[misc]
            tuple(_config_lines(named, wanted, always)),
        )


def _config_lines(named: NamedModel, wanted: Mapping[str, Any], always: Mapping[str, Any]) -> Iterator[str]:
    if wanted:
        yield "# Small, to try things out: drop what you want as the config has it."
    if words := {**wanted, **always}:
        yield f"config = {named.called}.config_class("
        yield from (f"    {name}={value!r}," for name, value in words.items())
        yield ")"
    else:
        yield f"config = {named.called}.config_class()"
    yield f"return {named.called}(config)"


def _first_that_runs(named: NamedModel) -> tuple[nn.Module, tuple[str, ...], Trial]:
    """The first way under which a forward works; if none does, the last under which the model can be built."""
    built: tuple[nn.Module, tuple[str, ...], Trial] | None = None
    failed: UsageError | None = None
    for make, body in _ways(named):
        try:
            model = DeferredModel(_checked(named, make), seed=0).model
        except UsageError as error:
            failed = failed or error
            continue
        built = model, body, try_inputs(model)
        if built[2].takes:
            break
    if built is None:
        assert failed is not None
        raise failed
    return built


def _checked(named: NamedModel, make: Callable[[], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with user_code(f"{named.name}({', '.join(_words(named)) or '...'})", hint=_hint(named)):
            made = make()
        if not isinstance(made, nn.Module):
            raise UsageError(
                f"{named.name} gave {type(made).__name__}", hint="name a class or function of an nn.Module"
            )
        return made

    return build


def _hint(named: NamedModel) -> str:
    """What the class or function takes, where it says it in a line."""
    signature = _signature(named)
    takes, trace = f"{named.name}{signature}", "-v shows the whole traceback"
    return trace if signature is None or len(takes) > _LINE else f"it is {takes}; {trace}"


def _draft(named: NamedModel, made_by: str, model: nn.Module, body: tuple[str, ...], trial: Trial) -> Draft:
    marks = propose(model, trial.called)
    children = isinstance(model, nn.Sequential)
    gaps = []
    if not trial.takes:
        gaps.append("what the model takes could not be guessed: write `batch` and `loss`")
    elif trial.gives is None:
        gaps.append("what the loss is computed from could not be guessed: write `loss`, and the targets in `batch`")
    if not marks and not children:
        gaps.append("no repeated modules were found: name partitions in `marks`")
    gaps += _not_rows_first(model)
    return Draft(
        notes=() if children else tuple(_notes(model, trial)),
        name=named.name,
        made_by=made_by,
        code=replace(named.code, body=body),
        takes=trial.takes if trial.gives is not None else (),
        keywords=trial.keywords,
        gives=trial.gives,
        marks=() if children else marks,
        children=children,
        gaps=tuple(gaps),
    )


def _notes(model: nn.Module, trial: Trial) -> Iterator[str]:
    """What the file says nothing of: heads that are not called, modules without a partition, other outputs."""
    unused, small, again = not_proposed(model, trial.called)
    if unused:
        yield f"{', '.join(unused)}: not called with these inputs, so in no partition, and not trained"
    if small:
        yield f"{', '.join(small)}: few of the parameters, so with a neighbour, in no partition of its own"
    if again:
        yield f"{', '.join(again)}: called again with what others make of its results, so in no partition of its own"
    if trial.gives is not None and trial.others:
        others = ", ".join(f"outputs{each.access}" for each in trial.others)
        yield f"the loss takes outputs{trial.gives.access} alone: {others} of the model's outputs have no part in it"


def _not_rows_first(model: nn.Module) -> Iterator[str]:
    """Attention and recurrent layers of torch take the rows second unless they are told otherwise."""
    for name, module in model.named_modules():
        if getattr(module, "batch_first", True) is False:
            yield f"{name or 'the model'} has batch_first=False: its rows come second, and in the batch here first"
            return


def _find_model(model: str, folder: Path) -> NamedModel:
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
    lines = (f"from {where} import {name}" + (f" as {called}" if called != name else ""),)
    imports, local = (lines, ()) if path is None else ((), lines)
    return NamedModel(name, called, make, arguments, Code(imports, local, files=_files(module, make)))


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


def propose(model: nn.Module, called: Called | None = None) -> tuple[MarkPattern, ...]:
    """Patterns of partitions, in the model's order.

    Args:
        model: May lie on the meta device.
        called: What a forward calls; None: not known.

    A list of modules, or a Sequential that repeats a class, gives one partition an item (`layers.*`), wherever it lies.
    What lies beside them and holds a hundredth of the parameters is a partition of its own. In a model that repeats
    nothing each module with a matrix or a kernel is one: a convolution computes much with few parameters. What is
    called again with what another one has made of its results is none: one worker would have to run both.
    """
    marks = _large(model, called)
    names = {name: mark for name, _ in model.named_modules() for mark in marks if matches(mark.pattern, name)}
    behind = {name: (called or {}).get(name, frozenset()) for name in names}
    circles = {
        names[name] for name in names if name in behind[name]
        and any(name in behind[other] for other in behind[name] & names.keys() - {name})
    }  # fmt: skip
    return tuple(mark for mark in marks if mark not in circles)


def not_proposed(model: nn.Module, called: Called | None = None) -> tuple[list[str], list[str], list[str]]:
    """Modules with a matrix that `propose` gives no partition of their own.

    Returns:
        Those not called, those too small, and those called again with what others have made of their results.
    """
    large = [mark.pattern for mark in _large(model, called)]
    names = dict(model.named_modules())  # of a module that several names lead to the first one
    others = [(mark, first) for mark, first in _visit(model, "", _has_matrix)
              if mark.pattern not in large and first in names]  # fmt: skip
    unused = [mark.pattern for mark, first in others if called is not None and first not in called]
    kept = {mark.pattern for mark in propose(model, called)}
    small = [mark.pattern for mark, _ in others if mark.pattern not in unused]
    return unused, small, [each for each in large if each not in kept]


def _large(model: nn.Module, called: Called | None) -> list[MarkPattern]:
    """Patterns of what is repeated or large enough, and called."""
    total = sum(parameter.numel() for parameter in parameters(model)) or 1
    repeats = any(map(_is_repeated, model.modules()))
    found = _visit(model, "", lambda each: _parameters(each) >= LEAST_SHARE * total if repeats else _has_matrix(each))
    names = dict(model.named_modules()) if called is None else called
    return [mark for mark, first in found if first in names]


def _visit(module: nn.Module, prefix: str, counts: Callable[[nn.Module], bool]) -> Iterator[tuple[MarkPattern, str]]:
    """Marks, each with the name of the first module that it names."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_repeated(child):
            first = next(name for name, _ in child.named_children())
            yield MarkPattern(f"{path}.*", len(_items(child))), f"{path}.{first}"
        elif not _has_forward(child) or any(map(_is_repeated, child.modules())):
            yield from _visit(child, f"{path}.", counts)
        elif counts(child):
            yield MarkPattern(path, 1), path


def _is_repeated(module: nn.Module) -> bool:
    """True for a container whose items are alike and are called one by one."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    items = _items(module)
    classes = Counter(type(each) for each in items if _parameters(each))
    return all(map(_has_forward, items)) and bool(classes) and classes.most_common(1)[0][1] > 1


def _items(module: nn.Module) -> list[nn.Module]:
    """The modules of a container, one that it has twice both times; some places may hold None."""
    return [each for each in module._modules.values() if each is not None]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in parameters(module))


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in parameters(module))
