"""All commands of `assigner`, with the flags that they share."""

from typing import Annotated

import typer

from . import console
from .compare import compare_command
from .doctor import doctor_command
from .group import Commands
from .lab import lab_command
from .profile import profile_command
from .run import run_command
from .schema import schema_command
from .show import show_command
from .simulate import simulate_command
from .solve import solve_command

PLAN, LOOK, MACHINE = "Make a plan and run it", "Look at profiles and plans", "This program and this machine"

app = typer.Typer(
    name="assigner",
    cls=Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _examples(*lines: str) -> str:
    return "\n".join(["[bold]Examples[/]", *(f"  [cyan]{line}[/]" for line in lines)])


def _show_version(wanted: bool) -> None:
    if wanted:
        from assigner import __version__

        console.show_text(f"assigner {__version__}\n")
        raise typer.Exit


@app.callback(epilog=_examples("assigner solve profile.json -o plan.json", "assigner show plan.json"))
def _main(
    *,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show where an error comes from.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours; NO_COLOR=1 does the same.")] = False,  # noqa: ARG001 - read before parsing
    version: Annotated[  # noqa: ARG001 - its callback answers
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Profile, place and train a PyTorch model across workers that are not alike."""
    console.configure(console.Settings(quiet=quiet, verbose=verbose))


app.command(
    "profile",
    rich_help_panel=PLAN,
    epilog=_examples(
        "assigner profile examples/gpt.py:workload -o profile.json --workers 2",
        "torchrun --nnodes 3 ... -m assigner_cli profile model.py:workload -o profile.json --mark 'blocks.*'",
        "assigner profile model.py:workload -o profile.json --workers 2 --only 'blocks.*' --only links",
        "assigner profile --merge here.json --merge there.json -o all.json",
    ),
)(profile_command)
app.command(
    "solve",
    rich_help_panel=PLAN,
    epilog=_examples(
        "assigner solve profile.json -o plan.json",
        "assigner solve profile.json -o plan.json --micro-batches 8 --pin embed=worker:0",
    ),
)(solve_command)
app.command(
    "run",
    rich_help_panel=PLAN,
    epilog=_examples("assigner run plan.json -- examples/train.py --steps 50"),
)(run_command)
app.command(
    "lab",
    rich_help_panel=PLAN,
    epilog=_examples(
        "assigner lab examples/clusters/mixed3.toml -- assigner profile examples/gpt.py:workload -o profile.json",
        "assigner lab examples/clusters/mixed3.toml -- assigner run plan.json -- examples/train.py",
        "assigner lab --from profile.json -o cluster.toml",
        "assigner lab --check",
    ),
)(lab_command)
app.command("show", rich_help_panel=LOOK, epilog=_examples("assigner show profile.json", "assigner show plan.json"))(
    show_command
)
app.command(
    "compare",
    rich_help_panel=LOOK,
    epilog=_examples("assigner compare equal.json solved.json", "assigner compare --md old.json new.json"),
)(compare_command)
app.command(
    "simulate",
    rich_help_panel=LOOK,
    epilog=_examples(
        "assigner simulate plan.json --profile profile.json",
        "assigner simulate plan.json --profile profile.json --against trace.json --calibrate corrected.json",
    ),
)(simulate_command)
app.command("schema", rich_help_panel=MACHINE, epilog=_examples("assigner schema plan > plan.schema.json"))(
    schema_command
)
app.command("doctor", rich_help_panel=MACHINE, epilog=_examples("assigner doctor", "assigner doctor --json"))(
    doctor_command
)
