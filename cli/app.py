"""All commands of `assigner`, with the flags that they share."""

import re
from collections.abc import Callable
from typing import Annotated

import typer

from . import console
from .bench import bench_command
from .check import check_command
from .compare import compare_command
from .configuration import warn_of_unknown
from .doctor import doctor_command
from .export import export_command
from .given import flagged
from .group import Commands
from .help import Command
from .init import init_command
from .lab import lab_command
from .profile import profile_command
from .report import report_command
from .run import run_command
from .schedule import schedule_command
from .schema import schema_command
from .show import show_command
from .simulate import simulate_command
from .solve import solve_command

COMPLETION = "Completion"
PLAN, LOOK, MACHINE = "Make a plan and run it", "Look at profiles and plans", "This program and this machine"

app = typer.Typer(
    name="assigner",
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from assigner.version import __version__

        console.show_text(f"assigner {__version__}\n")
        raise typer.Exit


def _show_completion(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        from .completion import script

        console.show_text(script(ctx.obj))
        raise typer.Exit


def _install_completion(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        from .completion import install

        for path in install(ctx.obj):
            console.notice(f"wrote {path}")
        console.notice("it works in the next shell that you open")
        raise typer.Exit


@app.callback(epilog="assigner solve profile.json -o plan.json\nassigner show plan.json")
def _main(
    ctx: typer.Context,
    *,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All rows, and where errors come from.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours; NO_COLOR=1 does the same.")] = False,  # noqa: ARG001 - read before parsing
    version: Annotated[  # noqa: ARG001 - its callback answers
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    install_completion: Annotated[  # noqa: ARG001 - its callback answers
        bool,
        typer.Option(
            "--install-completion", callback=_install_completion, is_eager=True, metavar="[SHELL]",
            rich_help_panel=COMPLETION, help="Complete flags, files, partitions and workers in bash, zsh or fish.",
        ),
    ] = False,
    show_completion: Annotated[  # noqa: ARG001 - its callback answers
        bool,
        typer.Option(
            "--show-completion", callback=_show_completion, is_eager=True, metavar="[SHELL]",
            rich_help_panel=COMPLETION, help="Print what --install-completion would write.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Profile, place and train a PyTorch model across workers that are not alike."""
    console.configure(console.Settings(quiet=quiet, verbose=verbose))
    warn_of_unknown(ctx.command)


_EXAMPLES = """
assigner init
assigner init torchvision.models:resnet50 -o resnet.py
assigner init transformers:GPT2LMHeadModel -o gpt2.py
assigner init 'net.py:Net(width=64)'
assigner check examples/gpt.py:workload
assigner check model.py:workload --mark 'blocks.*'
assigner profile examples/gpt.py:workload -o profile.json --workers 2
torchrun --nnodes 3 ... -m assigner_cli profile model.py:workload -o profile.json --mark 'blocks.*'
assigner profile model.py:workload -o profile.json --workers 2 --only 'blocks.*' --only links
assigner profile --merge here.json --merge there.json -o all.json
assigner solve profile.json -o plan.json
assigner solve profile.json -o plan.json --micro-batches 8 --pin embed=worker:0
assigner run plan.json -- examples/train.py --steps 50
assigner bench equal.json solved.json
assigner bench solved.json --steps 50 --rounds 1 --traces traces
assigner lab examples/clusters/mixed3.toml -- assigner profile examples/gpt.py:workload -o profile.json
assigner lab examples/clusters/mixed3.toml -- assigner run plan.json -- examples/train.py
assigner lab --from profile.json -o cluster.toml
assigner lab --check
assigner show profile.json
assigner show plan.json -v
assigner compare equal.json solved.json
assigner compare equal.json solved.json --measured equal.trace.json --measured solved.trace.json
assigner compare --md old.json new.json
assigner simulate plan.json --trace step.json.gz
assigner simulate plan.json --against trace.json --trace both.json.gz
assigner simulate plan.json --against trace.json --calibrate corrected.json
assigner schedule plan.json
assigner schedule plan.json --list -o listed.json
assigner schedule plan.json --orders mine.json -o edited.json
assigner report plan.json -o report.html
assigner report equal.json plan.json -o report.html --measured trace.json
assigner export plan.json --to dot | dot -Tsvg -o plan.svg
assigner export plan.json --to device-map --workload model.py:workload -o device_map.json
assigner export plan.json --to pipelining-schedule -o schedule.csv
assigner schema plan > plan.schema.json
assigner doctor
assigner doctor --json
"""
"""Each stands below the help of the command that it names first."""

_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    PLAN: {
        "init": init_command,
        "check": check_command,
        "profile": flagged(profile_command),
        "solve": flagged(solve_command, variables="ASSIGNER_"),
        "run": run_command,
        "bench": bench_command,
        "lab": lab_command,
    },
    LOOK: {
        "show": show_command,
        "compare": compare_command,
        "simulate": simulate_command,
        "schedule": schedule_command,
        "report": report_command,
        "export": export_command,
    },
    MACHINE: {
        "schema": schema_command,
        "doctor": doctor_command,
    },
}
_WITHOUT_VARIABLES = ("solve", "show", "compare", "schema", "doctor")
"""Commands whose flags have no variables of their own, as ASSIGNER_PROFILE_THREADS; those of solve are shorter."""


def _named(example: str) -> str:
    """The first command in a line."""
    return re.split(r"assigner(?:_cli)? ", example, maxsplit=1)[1].split()[0]


for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(
            _name,
            cls=Command,
            context_settings=None
            if _name in _WITHOUT_VARIABLES
            else {"auto_envvar_prefix": f"ASSIGNER_{_name.upper()}"},
            rich_help_panel=_panel,
            epilog="\n".join(line for line in _EXAMPLES.strip().split("\n") if _named(line) == _name),
        )(_command)
