"""The command as each host gets it: torchrun's flags added where they are missing, placeholders filled in."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assigner.errors import UsageError
from assigner.lab.network import INTERFACE, address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.lab.cluster import Cluster

_PLACE = ["--nnodes", "{nnodes}", "--node-rank", "{node_rank}"]
_MEET = ["--master-addr", "{master_addr}", "--master-port", "{master_port}"]
_FLAGS = [*_PLACE, "--nproc-per-node", "{nproc}", *_MEET]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_RANKS = [sys.executable, "-m", "assigner_cli.ranks", *_FLAGS, "--"]
_ASSIGNER = [sys.executable, "-m", "assigner_cli"]
_OWN_LAYOUT = ("--nnodes", "--node-rank", "--node_rank", "--standalone", "--rdzv-", "--rdzv_")
_BARE = ("--standalone", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path")  # without a value


@dataclass(frozen=True)
class HostPlace:
    """Where in a run a host is: the values of the placeholders.

    Args:
        nnodes: Hosts of the run.
        node_rank: This host's number.
        nproc: Its processes.
        master_addr: Address of host 0.
        master_port: Its port.
        host: This host's name.
    """

    nnodes: int
    node_rank: int
    nproc: int
    master_addr: str
    master_port: int
    host: str

    def fill(self, command: Sequence[str]) -> list[str]:
        """The command with `{nnodes}`, `{node_rank}`, ... filled in; other braces stay."""
        filled = list(command)
        for name, value in vars(self).items():
            filled = [word.replace(f"{{{name}}}", str(value)) for word in filled]
        return filled

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the host's command: `base`, and where it is."""
        values = {name.upper(): str(value) for name, value in vars(self).items() if name != "host"}
        interface = {f"{library}_SOCKET_IFNAME": INTERFACE for library in ("GLOO", "TP", "NCCL")}
        return {
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # as `launch` has it for its ranks: also where torchrun starts them
            **base,
            **values,
            **interface,
            "LAB_HOST": self.host,
            "ASSIGNER_HOST": self.host,
            "PYTHONUNBUFFERED": "1",
            "PATH": search_path(base),
        }


def places(cluster: Cluster, *, port: int) -> list[HostPlace]:
    """The place of each host of a cluster in a run."""
    return [
        HostPlace(len(cluster.host), n, host.nproc, address(0), port, host.name) for n, host in enumerate(cluster.host)
    ]


def search_path(environment: Mapping[str, str]) -> str:
    """Where programs are looked for: beside the running interpreter first, which is a virtual environment's bin."""
    return f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"


def host_command(command: Sequence[str]) -> list[str]:
    """A command with what starts it on a host's ranks, as placeholders; others are given back as they are.

        assigner profile W -o P    once per rank
        S.py ...                   once per rank, with the running Python
        assigner run PLAN -- S     assigner run FLAGS PLAN -- S
        assigner bench PLAN ...    assigner bench FLAGS PLAN ...
        torchrun S                 torchrun FLAGS S

    A command that says itself where it is (`--nnodes`) keeps its own flags; its script's flags do not count.

    Raises:
        UsageError: no such program.
    """
    if not command:
        raise UsageError("no command to run on the hosts", hint="assigner lab CLUSTER.toml -- COMMAND")
    program, *words = command
    options = words[: words.index("--")] if "--" in words else words
    name = Path(program).name
    flags = _before_script(options) if name == "torchrun" else options
    settled = any(word.startswith(_OWN_LAYOUT) for word in flags)
    if name == "assigner":
        return _assigner(words, settled=settled)
    if name == "torchrun":
        return [*_TORCHRUN, *([] if settled else _FLAGS), *words]
    if name.endswith(".py"):
        if not Path(program).is_file():
            raise UsageError(f"{program}: no such file", hint="paths count from this folder on every host")
        return [*_RANKS, sys.executable, "-u", *command]
    if shutil.which(program, path=search_path(os.environ)) is None:
        raise UsageError(f"{program}: no such program", hint="a script starts with its .py file, a program is on PATH")
    return list(command)


def _assigner(words: list[str], *, settled: bool) -> list[str]:
    verb = next((n for n, word in enumerate(words) if not word.startswith("-")), None)
    if verb is not None and words[verb] == "profile":
        return [*_RANKS, *_ASSIGNER, *words]
    if verb is not None and words[verb] in ("run", "bench") and not settled:
        words = [*words[: verb + 1], *_PLACE, "--ranks", "{nproc}", *_MEET, *words[verb + 1 :]]
    return [*_ASSIGNER, *words]


def _before_script(words: list[str]) -> list[str]:
    """The words of torchrun itself: those before the first that is neither a flag nor a flag's value."""
    follows_flag = False
    for n, word in enumerate(words):
        is_flag = word.startswith("-")
        if not is_flag and not follows_flag:
            return words[:n]
        follows_flag = is_flag and "=" not in word and word not in _BARE
    return words
