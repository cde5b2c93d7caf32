"""Flags made of what an options class declares (`assigner.settings`): a command asks for `Given[SolveOptions]`."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

import typer

from assigner.errors import UsageError
from assigner.settings import FieldFlag, declared

from . import completion

T = TypeVar("T")


class Given(Generic[T]):
    """What a line, the environment and a file say of an options class; a call makes the options of it.

    `values` is what the parser made of its flags, by their names as parameters.
    """

    def __init__(self, options: type[T], values: Mapping[str, Any]) -> None:
        self._options, self._values = options, values

    def __call__(self) -> T:
        """The options.

        Raises:
            UsageError: the words of a flag cannot be read, or its value is not allowed.
        """
        found: dict[str, Any] = {}
        before: dict[str, str] = {}
        options: type = self._options
        for each in declared(options):
            value = each.about.form.read(self._values[_parameter(each)], each.flag)
            if each.field in found:  # another flag for the same mapping
                for name in value.keys() & found[each.field].keys():
                    raise UsageError(f"{each.flag}: {name!r} is in {before[each.field]}, too")
                value = {**found[each.field], **value}
            found[each.field], before[each.field] = value, each.flag
        try:
            return self._options(**found)
        except UsageError as error:  # the library calls a field by its name
            for each in declared(options):
                if re.match(rf"{each.field}\b", error.message):
                    raise UsageError(each.flag + error.message[len(each.field) :], hint=error.hint) from error
            raise


def flagged(command: Callable[..., None], *, variables: str = "") -> Callable[..., None]:
    """A command for typer, with the flags of an options class in the place of its parameter `Given[...]`.

    Flags stand by heading, in the order in which the class first names them; below a heading the command's own ones
    stand before or behind those of the class as they do in its signature. `variables` is what the environment's names
    of those that take one value begin with; empty: the command has names for all of its flags.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    asks = next(each for each in own if get_origin(each.annotation) is Given)
    (options,) = get_args(asks.annotation)
    fields = {_parameter(each): _flag(each, variables) for each in declared(options)}
    at = own.index(asks)
    parameters = [*own[:at], *fields.values(), *own[at + 1 :]]
    panels = [None, *dict.fromkeys(each.about.panel for each in declared(options))]
    parameters.sort(key=lambda each: panels.index(_panel(each)) if _panel(each) in panels else len(panels))

    def called(**values: Any) -> None:
        given = {name: values.pop(name) for name in fields}
        command(**values, **{asks.name: Given(options, given)})

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _parameter(each: FieldFlag) -> str:
    return each.flag.lstrip("-").replace("-", "_")


def _flag(each: FieldFlag, variables: str) -> inspect.Parameter:
    about, taken, default = each.about, each.about.form.taken, each.default
    if taken is not None:
        default = None if taken is not str else about.unset or ""
        taken = taken if taken is str else taken | None
    environment: dict[str, Any] = (
        {"envvar": f"{variables}{_parameter(each).upper()}", "show_envvar": False} if variables else {}
    )
    option = typer.Option(
        each.flag,
        metavar=about.metavar,
        help=about.help,
        rich_help_panel=about.panel,
        autocompletion=getattr(completion, about.completes) if about.completes else None,
        min=about.least,
        case_sensitive=False,
        **({} if about.form.taken == list[str] else environment),
    )
    return inspect.Parameter(
        _parameter(each),
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[taken or each.kind, option],
    )


def _panel(parameter: inspect.Parameter) -> str | None:
    notes = getattr(parameter.annotation, "__metadata__", ())
    panel: str | None = next((note.rich_help_panel for note in notes), None)
    return panel
