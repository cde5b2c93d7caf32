"""The command group: every error leaves through here, as one to three lines and an exit code.

Typer brings its own click and pays no heed to exit codes on exceptions, so both are caught here: the library's errors
and bugs around a command, and typer's own usage errors around everything.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from assigner.errors import AssignerError, FormatError, NoPlanError, UsageError
from assigner.files import room_hint
from assigner.formatting import printable
from assigner.launch.failurereport import hand_over, report_of
from assigner.launch.stopping import SignalledExit
from assigner.machine.launchedrank import launched_rank
from assigner.usercode import user_trace

from . import completion, console
from .configuration import named_by_origin, origin
from .console import Settings, configure, explain, fail, settings
from .help import Helped
from .signals import raised

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_NO_TEMPORARY = "No usable temporary directory"  # tempfile's words, whatever its folders lack: they may be full
_WAITING = ("run", "bench", "profile", "lab")  # for processes; in other commands C code may hold up a signal
_ANYWHERE = ("-q", "--quiet", "-v", "--verbose", "--no-color")


class Commands(Helped, TyperGroup):
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
        for name in ("stdout", "stderr"):  # closed by whoever started this: Python has None for it
            if getattr(sys, name) is None:
                setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the end
        if (shell := os.environ.get(completion.VARIABLE)) in completion.SCRIPTS:
            console.show_text(completion.answer(self, shell))
            sys.exit(0)
        given, shell = _without_shell(list(sys.argv[1:] if args is None else args))
        given = _global_first(given)
        configure(Settings())
        if "--no-color" in given[: _end_of_options(given)]:
            os.environ["NO_COLOR"] = "1"  # rich and typer's help read it
        try:
            code = super().main(
                given or ["--help"], prog_name, complete_var, False, windows_expand_args, obj=shell, **extra
            )  # fmt: skip
        except typer.TyperException as error:
            _fail_usage(error)
            code = error.exit_code
        except typer.Abort:
            fail("stopped", None)
            code = INTERRUPTED
        except AssignerError as error:  # of a flag of all commands
            _trace(error)
            fail(error.message, error.hint)
            code = error.exit_code
        except OSError as error:  # of help and the like; those of a command are told below
            code = _fail_writing(error)
        sys.exit(_flushed(code if isinstance(code, int) else 0))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; from here on signals are exceptions."""
        found = super().resolve_command(ctx, args)
        waits = found[0] in _WAITING and launched_rank() is None
        ctx.with_resource(raised(("SIGINT", "SIGTERM") if waits else ("SIGINT",)))
        ctx.with_resource(console.warnings_told())
        return found

    def invoke(self, ctx: Any) -> Any:
        """Run the command; turn what it raises into a message and an exit code."""
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException, BrokenPipeError):
            raise
        except AssignerError as error:
            if hand_over(report_of(error)):
                raise typer.Exit(error.exit_code) from error
            _trace(error)
            fail(named_by_origin(ctx, error.message), error.hint or _next_step(ctx, error))
            if isinstance(error, NoPlanError) and not as_json:
                from assigner.report.whatif import ways_out_report

                explain(ways_out_report(error))
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            fail("interrupted", None)
            raise typer.Exit(INTERRUPTED) from error
        except SignalledExit as error:
            fail(f"ended by {error.name}, and what it had started with it", None)
            raise
        except Exception as error:
            if isinstance(error, OSError) and (error.errno in _UNWRITABLE or _NO_TEMPORARY in str(error)):
                raise typer.Exit(_fail_writing(error)) from error
            if hand_over(report_of(error)):
                raise typer.Exit(1) from error
            hint = "report it with what is above" if settings().verbose else "-v shows where; please report it"
            _trace(error)
            fail(f"a bug in assigner: {type(error).__name__}: {error}", hint)
            raise typer.Exit(1) from error


def _flushed(code: int) -> int:
    """Write out what is left; a reader that has gone (`| head`) is no error of ours to print."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except OSError as error:
        return _fail_writing(error)
    return code


def _fail_writing(error: OSError) -> int:
    """A full disk, a folder that is read-only: what could not be written, and that it was not."""
    _drop_stdout()
    if _NO_TEMPORARY in str(error):
        fail(f"{error.strerror}", "make room in one of these folders, or name another one by TMPDIR")
        return UsageError.exit_code
    what = error.filename or "the result"
    fail(f"cannot write {what}: {error.strerror}", room_hint(error, "write to another place"))
    return UsageError.exit_code


def _drop_stdout() -> None:
    """What stdout still holds goes nowhere: the interpreter flushes once more at its end, and would complain."""
    with suppress(OSError, ValueError):  # a stream of a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _trace(error: BaseException) -> None:
    """Where the error comes from, for a rank's on that rank: the frames of the user's code; with -v all of it."""
    theirs = getattr(error, "trace", "") or getattr(error.__cause__, "trace", "")
    if settings().verbose:
        sys.stderr.write(printable(theirs or "".join(traceback.format_exception(error))))
    else:
        sys.stderr.write(printable(user_trace(theirs)))


def _end_of_options(args: Sequence[str]) -> int:
    return args.index("--") if "--" in args else len(args)


def _global_first(args: list[str]) -> list[str]:
    """The global flags moved to the front: they may stand behind the command as well, up to a `--`."""
    end = _end_of_options(args)
    return [*sorted(args[:end], key=lambda arg: arg not in _ANYWHERE), *args[end:]]


def _next_step(ctx: Any, error: AssignerError) -> str:
    """A hint for an error that has none of its own."""
    command = f"{ctx.command_path} {ctx.invoked_subcommand}"
    if isinstance(error, FormatError) and ctx.invoked_subcommand == "lab":
        return "examples/clusters has cluster files to begin with"
    if isinstance(error, FormatError):
        return "assigner schema profile, plan or trace prints what a file must hold"
    return f"{command} --help lists what it takes"


def _without_shell(args: list[str]) -> tuple[list[str], str | None]:
    """The shell that may stand behind a flag of completion, taken out: typer has no flags that take one or nothing."""
    at = next((n for n, arg in enumerate(args) if arg in ("--install-completion", "--show-completion")), len(args)) + 1
    if at < len(args) and not args[at].startswith("-"):
        return [*args[:at], *args[at + 1 :]], args[at]
    return args, None


def _fail_usage(error: typer.TyperException) -> None:
    """Typer's own errors in the form of ours."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    command = context.command_path if context is not None else "assigner"
    hint = f"{command} --help lists what it takes"
    message = error.format_message().replace("Value error, ", "").replace("Input should", "it should").rstrip(".")
    message = re.sub(r", unable to parse string as an? \w+", "", message)
    found = getattr(error.__cause__, "errors", None)  # pydantic's, behind typer's; it knows the value
    if found is not None and repr(found()[0]["input"]) not in message:
        message += f"; found {found()[0]['input']!r}"
    if context is not None and param is not None and (where := origin(context, param)) is not None:
        message = message.replace(param.get_error_hint(), where)
    if (wrong := getattr(error, "option_name", None)) is not None and context is not None:
        message = f"no such flag: {wrong}"
        flags = [flag for each in context.command.get_params(context) for flag in each.opts]
        bare = [flag.lstrip("-") for flag in (*flags, *_ANYWHERE)]  # dashes make all flags look alike
        close = [f"--{flag}" for flag in difflib.get_close_matches(wrong.lstrip("-"), bare, n=1)]
        hint = f"did you mean {close[0]}? {hint}" if close else hint
    elif message.startswith("No such command"):
        message, _, suggested = message.partition(". Did you mean ")
        hint = f"did you mean {suggested.replace(chr(39), '')} {hint}" if suggested else hint
    fail(message[:1].lower() + message[1:], hint)
