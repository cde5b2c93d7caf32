"""Debian's Slurm as a cluster of two hosts on this machine: munged, slurmctld and two slurmd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from free_ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc")
_START_S = 300.0
SECOND = "zz-second"
"""The other host's name, which nobody has to resolve: it is behind the first one's in every list."""

_CONF = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
NodeName={first} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} State=UNKNOWN
NodeName={second} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def lacks() -> str:
    """Why there can be no cluster here; empty: there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"Slurm is not here ({', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge"
    if os.getuid():
        return "only root can start Slurm's daemons here"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return f"this host's name, {socket.gethostname()}, does not resolve: ranks could not meet there"
    return ""


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which srun and salloc find it; the first host is this one's name."""
    first = socket.gethostname()
    conf, key = folder / "slurm.conf", folder / "munge.key"
    (folder / "state").mkdir()
    folder.chmod(0o755)
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    cores = os.cpu_count()
    conf.write_text(
        _CONF.format(folder=folder, first=first, second=SECOND, ports=free_ports(3), cores=cores), encoding="utf-8"
    )
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(conf)}
    begun = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock",
         f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-N", first, "-f", str(conf)],
        ["slurmd", "-D", "-N", SECOND, "-f", str(conf)],
    ]  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in begun:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running.append(subprocess.Popen(command, env=environment, **quiet))
            if command[0] == "munged":
                _wait_until((folder / "munge.sock").exists, "munged")
        _wait_until(lambda: _idle(environment) == 2, "Slurm")
        yield environment
    finally:
        for each in reversed(running):
            each.send_signal(signal.SIGTERM)
            try:
                each.wait(10)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def _idle(environment: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=environment, capture_output=True, text=True, check=False
    )
    return int(done.stdout.strip() or 0)


def _wait_until(is_there: object, name: str) -> None:
    until = time.monotonic() + _START_S
    while not is_there():  # type: ignore[operator]
        assert time.monotonic() < until, f"{name} has not begun"
        time.sleep(0.1)
