"""`assigner lab`: a small cluster of unlike hosts on this machine, and a command on all of them."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from assigner.errors import FormatError, UsageError

from . import console
from .configuration import settings_file
from .options import Config, Force, Json, written

_RUN, _DERIVE = "A run", "A cluster like a profile's workers"


def lab_command(
    cluster: Annotated[Path | None, typer.Argument(metavar="CLUSTER", help="A cluster file (TOML).")] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND ...",
            help="What every host runs. assigner profile, run and bench, torchrun and SCRIPT.py are started as ranks of"
            " one run. {host}, {node_rank}, {nnodes}, {nproc}, {master_addr} and {master_port} are filled in.",
        ),
    ] = None,
    *,
    check: Annotated[bool, typer.Option("--check", help="Say whether this machine can, and what is missing.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, metavar="S", help="Stop after so many seconds.", rich_help_panel=_RUN)
    ] = None,
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="S", help="What the others get after one host failed.", rich_help_panel=_RUN),
    ] = 20.0,
    master_port: Annotated[
        int,
        typer.Option(min=1, max=65535, metavar="PORT", help="Where the ranks meet, on host 0.", rich_help_panel=_RUN),
    ] = 29531,
    from_profile: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="PROFILE", help="Make a cluster file like its workers.", rich_help_panel=_DERIVE
        ),
    ] = None,
    here: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE",
            help="The same workload measured on this machine: how fast it is.",
            rich_help_panel=_DERIVE,
        ),
    ] = None,
    output: Annotated[
        Path | None, written("CLUSTER", help="The cluster file to write; else stdout.", rich_help_panel=_DERIVE)
    ] = None,
    force: Force = False,
    as_json: Json = False,
    config: Config = None,
) -> None:
    """Run a command on a cluster made on this machine."""
    if from_profile is not None:
        if cluster is not None or check:
            raise UsageError(
                "--from writes a cluster file and runs nothing", hint="give the cluster file to a second call"
            )
        _derive(from_profile, here, output, settings_file(config), force=force)
        return
    if output is not None or here is not None:
        raise UsageError("-o and --here belong to --from", hint="assigner lab CLUSTER.toml -- COMMAND; mind the --")
    if as_json and not check:
        raise UsageError("--json belongs to --check", hint="assigner lab --check --json")
    if check:
        _check(cluster, as_json=as_json)
        return
    if cluster is None:
        raise UsageError("no cluster file", hint="assigner lab examples/clusters/mixed3.toml -- COMMAND")
    _run(cluster, command or [], timeout, grace, master_port)


def _run(path: Path, command: list[str], timeout: float | None, grace: float, port: int) -> None:
    from assigner.lab import Machine, load_cluster, require, run_on_hosts
    from assigner.lab.cluster import strains

    cluster = load_cluster(path)
    require(cluster)
    for strain in strains(cluster, Machine.here()):
        console.notice(f"warning: {strain}")
    run_on_hosts(cluster, command, timeout_s=timeout, grace_s=grace, port=port)


def _check(path: Path | None, *, as_json: bool) -> None:
    """Print what is missing, each with the way to get it; exit code 2 if a lab, or this cluster, cannot be made."""
    from assigner.formats.document import encode
    from assigner.lab import lacks, load_cluster

    cluster = None if path is None else load_cluster(path)
    found = lacks(cluster)
    ready = not found or (cluster is None and all(lack.feature == "latency" for lack in found))
    if as_json:
        console.show_json({"kind": "lab", "ready": ready, "missing": encode(found)})
        if not ready:
            raise typer.Exit(UsageError.exit_code)
        return
    for lack in found:
        console.show_text(f"missing: {lack.what}\n  {lack.remedy}\n")
    if cluster is None and ready:
        console.show_text("ready" + (", for clusters without latency_ms\n" if found else "\n"))
    elif found:
        raise typer.Exit(UsageError.exit_code)
    else:
        console.show_text("ready for this cluster\n")


def _derive(profile: Path, here: Path | None, output: Path | None, settings: Path | None, *, force: bool) -> None:
    from assigner.files import put, refuse_existing
    from assigner.formats.profile import load_profile
    from assigner.lab import Machine, lacks, parse_cluster
    from assigner.lab.cluster import cluster_text
    from assigner.lab.derive import derive

    refuse_existing(output, force=force, reads=[profile, here, settings])
    netem = all(lack.feature != "latency" for lack in lacks())
    found = derive(
        load_profile(profile), Machine.here(), here=None if here is None else load_profile(here), netem=netem
    )
    text = cluster_text(found, shlex.join(["assigner", *sys.argv[1:]]))
    try:
        parse_cluster(text)
    except FormatError as error:
        raise FormatError(
            f"{profile}: no cluster file can be made of it: {error.message}",
            hint=error.hint or "ASSIGNER_HOST names a host when it is measured",
        ) from error
    if output is None:
        console.show_text(text)
        return
    put(output, text.encode(), force=force)
    console.notice(
        f"{len(found.hosts)} hosts written to {output}; 1 s of the profile is {found.scale:.3g} s on them\n"
        f"next: assigner lab {output} -- COMMAND"
    )
