"""The command group: every error leaves through here, as one to three lines and an exit code.

Typer brings its own click and pays no heed to exit codes on exceptions, so both are caught here: the library's errors
and bugs around a command, and typer's own usage errors around everything.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from assigner.errors import AssignerError, InfeasibleError

from .console import Settings, configure, explain, fail, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
_ANYWHERE = ("-q", "--quiet", "-v", "--verbose", "--no-color")


class Commands(TyperGroup):
    """A group whose commands may raise `AssignerError`."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: ARG002 - the exit is always made here
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Parse and run; the process ends with the exit code of what happened."""
        given = _global_first(list(sys.argv[1:] if args is None else args))
        configure(Settings())
        if "--no-color" in given[: _end_of_options(given)]:
            os.environ["NO_COLOR"] = "1"  # rich and typer's help read it
        try:
            code = super().main(
                given or ["--help"], prog_name, complete_var, False, windows_expand_args, **extra
            )  # fmt: skip
        except typer.TyperException as error:
            _fail_usage(error)
            code = error.exit_code
        except typer.Abort:
            fail("stopped", None)
            code = INTERRUPTED
        sys.exit(_flushed(code if isinstance(code, int) else 0))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; turn what it raises into a message and an exit code."""
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
            raise
        except AssignerError as error:
            _trace()
            fail(error.message, error.hint)
            if isinstance(error, InfeasibleError) and not as_json:
                from assigner.report.infeasible import ways_out_report

                explain(ways_out_report(error))
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            fail("interrupted", None)
            raise typer.Exit(INTERRUPTED) from error
        except Exception as error:
            hint = "report it with what is above" if settings().verbose else "-v shows where; please report it"
            _trace()
            fail(f"a bug in assigner: {type(error).__name__}: {error}", hint)
            raise typer.Exit(1) from error


def _flushed(code: int) -> int:
    """Write out what is left; a reader that has gone (`| head`) is no error of ours to print."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return 1
    return code


def _trace() -> None:
    if settings().verbose:
        traceback.print_exc(file=sys.stderr)


def _end_of_options(args: Sequence[str]) -> int:
    return args.index("--") if "--" in args else len(args)


def _global_first(args: list[str]) -> list[str]:
    """The global flags moved to the front: they may stand behind the command as well, up to a `--`."""
    end = _end_of_options(args)
    flags = [arg for arg in args[:end] if arg in _ANYWHERE]
    return [*flags, *(arg for arg in args[:end] if arg not in _ANYWHERE), *args[end:]]


def _fail_usage(error: typer.TyperException) -> None:
    """Typer's own errors in the form of ours."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "assigner"
    message = error.format_message().replace("Value error, ", "").replace("Input should", "it should").rstrip(".")
    found = getattr(error.__cause__, "errors", None)  # pydantic's, behind typer's; it knows the value
    if found is not None and repr(found()[0]["input"]) not in message:
        message += f"; found {found()[0]['input']!r}"
    fail(message[:1].lower() + message[1:], f"{command} --help lists what it takes")
