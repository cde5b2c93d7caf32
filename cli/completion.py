"""Completion of the line in bash, zsh and fish: commands, flags, and what a flag or an argument takes.

The shell's function hands over the line up to the cursor and gets one candidate a line, with a description behind a
tab. No candidate means a file: the shell completes those better than a program can.

    _ASSIGNER_COMPLETE=bash _ASSIGNER_LINE='assigner solve profile.json --pin p0=wo' assigner   ->   worker:0/cpu

bash breaks words at `=` and `:` and replaces what follows the last of them alone, so it gets no more than that.
"""

from __future__ import annotations

import ast
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer.core import TyperArgument

from assigner.errors import AssignerError, UsageError
from assigner.files import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from assigner.formats.profile import Profile


VARIABLE = "_ASSIGNER_COMPLETE"
_LINE, _BREAKS = "_ASSIGNER_LINE", "_ASSIGNER_BREAKS"
_OF_SHELLS = ("--install-completion", "--show-completion")

SCRIPTS = {
    "bash": """\
_assigner() {
    local IFS=$'\\n' candidate
    COMPREPLY=($(_ASSIGNER_COMPLETE=bash _ASSIGNER_LINE="${COMP_LINE:0:COMP_POINT}" \\
        _ASSIGNER_BREAKS="$COMP_WORDBREAKS" "$1" 2>/dev/null))
    for candidate in "${COMPREPLY[@]}"; do
        [[ $candidate == *[=:] ]] && compopt -o nospace
    done
}
complete -o default -F _assigner assigner
""",
    "zsh": """\
#compdef assigner
_assigner() {
    local line shown=() values=()
    for line in "${(@f)$(_ASSIGNER_COMPLETE=zsh _ASSIGNER_LINE="${words[1,CURRENT]}" "$words[1]" 2>/dev/null)}"; do
        [[ -n $line ]] || continue
        values+=("${line%%$'\\t'*}")
        shown+=("${line//$'\\t'/  -- }")
    done
    if (( ! $#values )); then
        _files
    elif [[ $values[1] == *[=:] ]]; then
        compadd -S '' -l -d shown -a values
    else
        compadd -l -d shown -a values
    fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _assigner "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _assigner assigner
fi
""",
    "fish": """\
function __assigner
    set -l found (_ASSIGNER_COMPLETE=fish _ASSIGNER_LINE=(commandline -cp) assigner 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command assigner --no-files --arguments '(__assigner)'
""",
}


def answer(group: Any, shell: str) -> str:
    """What the function of a shell, one of `SCRIPTS`, reads."""
    line = os.environ.get(_LINE, "")
    words = _words(line)[1:]
    word = words.pop() if words and not line[-1:].isspace() else ""
    found = candidates(group, words, word)
    if shell != "bash":
        return "".join(f"{value}\t{text}\n" if text else f"{value}\n" for value, text in found)
    broken = max((word.rfind(sign) for sign in os.environ.get(_BREAKS, "=:") if sign in "=:"), default=-1) + 1
    return "".join(f"{value[broken:]}\n" for value, _ in found)


def candidates(group: Any, words: list[str], word: str) -> list[tuple[str, str]]:
    """What may stand at the cursor, each with a description; nothing: a file.

    `group` is of all commands; `words` are complete, without the program's name, and `word` is what there is at the
    cursor.
    """
    if "--" in words:
        return []
    if words and words[-1] in _OF_SHELLS:
        return _beginning(word, ((name, "") for name in SCRIPTS))
    words = _without_switches(group, words)
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", "")
    if equals:
        return [(f"{flag}={found}", text) for found, text in candidates(group, [*words, flag], value)]
    context, command = group.make_context("assigner", [], resilient_parsing=True), group
    at = next((n for n, each in enumerate(words) if not each.startswith("-")), None)
    if at is not None:
        command = group.get_command(context, words[at])
        if command is None:
            return []
        words = [*words[:at], *words[at + 1 :]]
    waiting = _waiting(command, context, words[-1] if words else "")
    if at is not None:
        context = command.make_context(
            command.name, words if waiting is None else words[:-1], parent=context, resilient_parsing=True
        )
    offered = _offered(command, context, word) if waiting is None else _values(waiting, context, word)
    return _beginning(word, offered)


def _without_switches(group: Any, words: list[str]) -> list[str]:
    """The words without flags of all commands, which may stand anywhere and take nothing."""
    switches = {flag for param in group.params if getattr(param, "is_flag", False) for flag in param.opts}
    return [word for word in words if word not in switches]


def _waiting(command: Any, context: Any, last: str) -> Any:
    """The option that the last complete word names and that has no value yet."""
    for param in command.get_params(context):
        if not isinstance(param, TyperArgument) and last in param.opts and not param.is_flag:
            return param
    return None


def _offered(command: Any, context: Any, word: str) -> Iterable[tuple[str, str]]:
    """Flags, commands, or values of the next argument."""
    options = [param for param in command.get_params(context) if not isinstance(param, TyperArgument)]
    if word.startswith("-"):
        return _flags([*options, *(context.parent.command.params if context.parent else [])], word)
    if hasattr(command, "commands"):
        return [(name, (each.help or "").partition("\n")[0]) for name, each in command.commands.items()]
    for param in command.get_params(context):
        if isinstance(param, TyperArgument) and (param.nargs == -1 or context.params.get(param.name) is None):
            return _values(param, context, word)
    return []


def _flags(options: Iterable[Any], word: str) -> Iterator[tuple[str, str]]:
    """Long flags; the short ones where nothing else begins as the word does."""
    for param in options:
        for flag in param.opts:
            if flag.startswith("--") or not word.startswith("--"):
                yield flag, (param.help or "").replace("\\[", "[")


def _values(param: Any, context: Any, word: str) -> list[tuple[str, str]]:
    try:
        return [(str(item.value), item.help or "") for item in param.shell_complete(context, word) if item.value]
    except AssignerError:  # the file on the line cannot be read: there is nothing to offer
        return []


def _beginning(word: str, offered: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(value, " ".join(text.split())) for value, text in offered if value.startswith(word)]


def _words(line: str) -> list[str]:
    """The line's words; a quote that is still open counts as closed at its end."""
    for closing in ("", "'", '"', "\\"):
        try:
            return shlex.split(line + closing)
        except ValueError:
            continue
    return line.split()


def script(shell: str | None) -> str:
    """The shell's function; of the shell that runs, where none is named."""
    return SCRIPTS[_checked(shell)]


def _checked(shell: str | None) -> str:
    """A shell that completion is made for.

    Raises:
        UsageError: it is another one.
    """
    name = this_shell() if shell is None else shell
    if name not in SCRIPTS:
        raise UsageError(
            f"no completion for {name or 'this shell, which is unknown'}",
            hint=f"name one: --show-completion {' | '.join(SCRIPTS)}",
        )
    return name


def this_shell() -> str:
    """The shell that this program was started from; empty: it cannot be told."""
    import shellingham

    try:
        return str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        return Path(os.environ.get("SHELL", "")).name


def install(shell: str | None) -> list[Path]:
    """Write the shell's function where the shell finds it; give the files that were written or changed."""
    shell = _checked(shell)
    home = Path.home()
    if shell == "fish":
        place = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "assigner.fish"
        return [_written(place, SCRIPTS[shell])]
    place = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "assigner" / f"completion.{shell}"
    start = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    line = f"source {shlex.quote(str(place))}"
    before = start.read_text(encoding="utf-8", errors="replace") if start.is_file() else ""
    changed = [_written(place, SCRIPTS[shell])]
    if line not in before.splitlines():
        gap = "" if not before or before.endswith("\n") else "\n"
        changed.append(_written(start, f"{gap}{line}\n", mode="a"))  # never anything but a line more: it is theirs
    return changed


def _written(path: Path, text: str, mode: Literal["w", "a"] = "w") -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="--show-completion prints it to put elsewhere"
        ) from error
    return path


def partitions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Partitions; behind a comma the next one."""
    return _after_comma(incomplete, _profile(ctx).order)


def workers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Workers; behind a comma the next one."""
    return _after_comma(incomplete, tuple(_profile(ctx).worker))


def amounts(ctx: typer.Context, incomplete: str) -> list[str]:
    """Workers with the `=` that stands before an amount."""
    return [] if "=" in incomplete else [f"{name}=" for name in _profile(ctx).worker]


def pins(ctx: typer.Context, incomplete: str) -> list[str]:
    """Partitions up to the `=`, workers behind it."""
    partition, equals, _ = incomplete.partition("=")
    found = _profile(ctx)
    return [f"{partition}={name}" for name in found.worker] if equals else [f"{name}=" for name in found.order]


def functions(incomplete: str) -> list[str]:
    """Functions of a workload's file, once its name is complete; the file is read and not run."""
    file, colon, _ = incomplete.partition(":")
    if not colon:
        return []
    try:
        tree = ast.parse(read_text(Path(file), hint=""))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    found = (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    return [f"{file}:{name}" for name in found if not name.startswith("_")]


def _profile(ctx: typer.Context) -> Profile:
    """The profile that is already on the line.

    Raises:
        AssignerError: there is none, or it cannot be read.
    """
    from assigner.formats.profile import load_profile

    return load_profile(Path(ctx.params.get("profile") or ""))


def _after_comma(incomplete: str, names: tuple[str, ...]) -> list[str]:
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names if name not in before.split(",")]


WORKLOAD = typer.Argument(
    metavar="WORKLOAD", autocompletion=functions, help="FILE.py:FUNCTION, or FILE.py:FUNCTION(width=512)."
)
