"""Launchers that are killed: what they have started ends with them, and leaves nothing in the temporary folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from free_ports import free_ports
from workloads import make_plan, skips

from assigner import save_plan

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc"),
]

ASSIGNER = [sys.executable, "-m", "assigner_cli"]
ENDLESS = """
import os, time
from pathlib import Path
def workload():
    Path({folder!r}, os.environ.get("RANK", "check")).write_text(str(os.getpid()))
    time.sleep({seconds})
    raise SystemExit("nobody has ended this")
"""


def command(kind: str, root: Path, folder: Path, programs: Path) -> tuple[list[str], list[str]]:
    """What is started, and the names of the files that its processes write their ids to.

    What every run of the tests has is forked; the others are processes from their start.
    """
    forked = str(programs / "assigner")
    ranks = ["0", "1"]
    script = [str(root / "tests" / "runs" / "leaving.py"), str(folder)]
    if kind == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script], ranks
    if kind in ("run", "run through a shell"):
        made = skips()
        plan = make_plan(made, [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])])
        save_plan(plan, folder / "plan.json")
        shell = ["sh", "-c", f"{sys.executable} {' '.join(script)}; exit $?"]
        run = ["run", str(folder / "plan.json"), "--"]
        return [forked, *run, *script] if kind == "run" else [*ASSIGNER, *run, *shell], ranks
    (folder / "endless.py").write_text(ENDLESS.format(folder=str(folder), seconds=3600))
    entry = [f"{folder / 'endless.py'}:workload", "-o", str(folder / "profile.json")]
    if kind == "profile's check":
        return [forked, "profile", *entry], ["check"]
    (folder / "ranks.py").write_text(
        "import sys\nfrom assigner.launch.ranks import Layout, launch\n"
        f"launch({[*ASSIGNER, 'profile', *entry, '--no-check']!r}, Layout(2), {{}})\n"
    )
    return [sys.executable, str(folder / "ranks.py")], ranks


def is_alive(process: int) -> bool:
    """Whether it is there, and not only unburied."""
    try:
        with open(f"/proc/{process}/stat") as file:  # noqa: PTH123 - no file of a folder
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: object, what: str) -> None:
    """End a hang, no more."""
    until = time.monotonic() + 600
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, what
        time.sleep(0.1)


LONG = ("run through a shell", "torchrun", "profile's ranks")


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["run", "profile's check", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in LONG)]
)
def test_what_a_killed_launcher_has_started_ends(root: Path, programs: Path, tmp_path: Path, kind: str) -> None:
    """Ranks that train without end, and measurements that stay in the user's code, find their launcher gone."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words, names = command(kind, root, tmp_path, programs)
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    found: list[int] = []
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(words, stdout=said, stderr=said, env=environment, start_new_session=True)
    try:
        files = [tmp_path / name for name in names]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), (tmp_path / "said").read_text())
        found = [int(file.read_text()) for file in files]
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not any(map(is_alive, found)), f"{kind}: still there")
    finally:
        launcher.kill()
        launcher.wait()
        for process in filter(is_alive, found):
            os.kill(process, signal.SIGKILL)
    if kind != "torchrun":  # it makes a folder for logs of its own, which it leaves after every run
        wait_until(lambda: not list(temporary.glob("*")), str(list(temporary.glob("*"))))


@pytest.mark.long
def test_a_run_leaves_nothing_in_the_temporary_folder(root: Path, programs: Path, tmp_path: Path) -> None:
    """Neither one that goes well, nor the next one of what a killed one could not remove."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = (
        "import os, sys\nfrom assigner.launch.ranks import Layout, launch\n"
        "launch([sys.executable, '-c', sys.argv[1]], Layout(2), {})\n"
    )
    kill = "import os, signal; os.environ['RANK'] == '0' and os.kill(os.getppid(), signal.SIGKILL)"
    environment = {**os.environ, "TMPDIR": str(temporary)}
    for script, left in ((kill, 1), ("pass", 0)):
        words = [programs / "python", "-c", code, script]
        done = subprocess.run(words, env=environment, cwd=root, check=False, timeout=600)
        assert (done.returncode == 0) is (script == "pass")
        assert len(list(temporary.iterdir())) == left


@pytest.mark.long
@pytest.mark.parametrize("host", [1, pytest.param(0, marks=pytest.mark.sweep)])
def test_a_signal_to_one_hosts_launcher_is_told_on_the_other(
    root: Path, programs: Path, tmp_path: Path, host: int
) -> None:
    """Its ranks, its host and the signal; that its rank was gone, cut off or stuck would send people elsewhere."""
    words, names = command("run", root, tmp_path, programs)
    hosts = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0]), "--node-rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ASSIGNER_SECRET": "of the run"}
    launchers = [
        subprocess.Popen([*words[:3], *hosts, node, *words[3:]], stderr=subprocess.PIPE, text=True, env=environment)
        for node in ("0", "1")
    ]
    try:
        files = [tmp_path / name for name in names]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "no step")
        launchers[host].terminate()
        said = [launcher.communicate(timeout=600)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert launchers[host].returncode == 143
    assert "error: ended by SIGTERM" in said[host]
    told = rf"error: worker:{host}\S* .*was ended with its launcher, on \S+, by SIGTERM"
    assert re.search(told, said[1 - host]), said[1 - host]
