"""`assigner init`: a workload file to start from."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from . import console
from .options import Force, written


def init_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="package.module:Class, FILE.py:Class, or either with (width=64) behind it; a function that builds the"
            " model will do. Left out: a small language model, complete.",
        ),
    ] = None,
    *,
    output: Annotated[Path, written("FILE", help="The workload file to write.")] = Path("workload.py"),
    force: Force = False,
) -> None:
    """Write a workload file for a model.

    The model is built without memory to find what it takes and which partitions it could have, and cut there once, so
    that the file works as it is. Its data are made up: put yours there.
    """
    from assigner.errors import UsageError
    from assigner.files import put, refuse_existing
    from assigner.init.text import EXAMPLE, workload_text

    if output.suffix != ".py":
        raise UsageError(f"{output} is no Python file", hint=f"-o {output.stem or 'workload'}.py")
    _refuse_own(output, model, Path((model or "").rpartition(":")[0]))
    refuse_existing(output, force=force)
    if model is None:
        draft = EXAMPLE
    else:
        with console.prints_aside(), console.under_way("looking at the model"):
            from assigner.init.modeldraft import draft_of_model

            draft = draft_of_model(model, output.parent)
        _refuse_own(output, model, *draft.code.files)
    put(output, workload_text(draft, str(output)).encode(), force=force)
    console.notice(f"wrote {output}")
    for note in draft.notes:
        console.notice(f"note: {note}")
    gaps = draft.gaps or (() if model is None else _check(output))
    for gap in gaps:
        console.notice(f"to do: {gap}")
    then = f"assigner profile {shlex.quote(f'{output}:workload')} -o profile.json --workers 2"
    console.notice(f"next: do that in {output}; after it, {then}" if gaps else f"next: {then}")


def _refuse_own(output: Path, model: str | None, *files: Path) -> None:
    """Raise UsageError if the workload file would take the place of the model's."""
    from assigner.errors import UsageError
    from assigner.files import is_same_file

    if model is not None and any(is_same_file(output, file) for file in files):
        raise UsageError(
            f"{output} is the file of {model} itself, which the workload file imports",
            hint=f"-o {output.with_name('workload.py' if output.name != 'workload.py' else 'training.py')}",
        )


def _check(path: Path) -> tuple[str, ...]:
    """Cut the model as the file says, without memory, and say what came of it; what is left to do, if anything is."""
    from assigner import formatting as fmt
    from assigner.errors import UsageError
    from assigner.model.marking import partition_graph
    from assigner.model.workload import load_workload

    try:
        with console.prints_aside(), console.under_way("looking for the model's partitions"):
            graph = partition_graph(load_workload(f"{path}:workload"))
    except UsageError as error:
        return (f"the model cannot be cut at these marks: {error.message}; {error.hint or ''}",)
    names = [piece.name for piece in graph.pieces]
    console.notice(f"it has {fmt.plural(len(names), 'partition')}: {fmt.ranges(names)}")
    return ()
