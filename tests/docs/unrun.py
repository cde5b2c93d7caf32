"""The commands of pages, run or not, held against the real parsers: `assigner`'s own and torchrun's."""

from __future__ import annotations

import itertools
import re
import shlex

_ANYWHERE = ("-q", "--quiet", "-v", "--verbose", "--no-color")  # they may stand behind the command, too
_SHELL = ("|", "&&", ";", ">", "2>", "&")


def words_of(command: str) -> list[str]:
    """A command's words, with its comment left out and 0 for every variable."""
    return [re.sub(r"\$\w+", "0", word) for word in shlex.split(command, comments=True)]


def check_command(command: str) -> int:
    """Parse each `assigner` and `torchrun` call in a command line; how many there are, scripts of Python's counted too.

    Raises:
        Exception: of the parser, where a flag or a command does not exist.
    """
    words = words_of(command)
    checked = 0
    for place, word in enumerate(words):
        rest = list(itertools.takewhile(lambda each: each not in _SHELL, words[place + 1 :]))
        if word == "assigner" or (word == "assigner_cli" and words[place - 1] == "-m"):
            _parse_assigner(rest)
            checked += 1
        elif word == "python" and rest[:1] and rest[0].endswith(".py"):
            checked += 1  # a launcher of others' starts it: its own flags are not known here
        elif word == "torchrun":
            _parse_torchrun(rest)
            checked += 1
    return checked


def _parse_assigner(words: list[str]) -> None:
    import typer
    from assigner_cli.app import app

    group = typer.main.get_command(app)
    own = list(itertools.takewhile(lambda word: word != "--", words))
    words = [*(word for word in own if word not in _ANYWHERE), *words[len(own) :]]
    context = group.make_context("assigner", list(words))
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
    command.make_context(name, list(rest), parent=context)


def _parse_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    get_args_parser().parse_args(words)
