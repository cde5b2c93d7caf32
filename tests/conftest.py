"""What several tests need: ranks from one server, and the lab, where this machine has it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from forked_programs import forked_programs
from forked_ranks import RARELY, forked_ranks

from assigner.lab import lacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forked_ranks import ForkedRanks

ROOT = Path(__file__).resolve().parent.parent
FIRST = "test_compiling"
"""A capture that meets `torch.cond` leaves torch 2.13 unable to compile a graph's forward in that process."""

LONGEST = (
    FIRST, "test_page_blocks", "test_foreign_", "test_end_to_end", "test_profile_resume", "test_launchers",
    "test_capture", "test_verification", "test_pipeline_ranks", "test_combinations", "test_variants", "test_scripts",
    "test_replica_ranks", "test_script_objects", "test_memory_limit", "test_attributes", "test_training_ranks",
    "test_profiler_session", "test_device_habits", "test_runtime_benchmark", "test_solver_replicas",
    "test_gpu_benchmark", "test_cli_init", "test_lab_hosts", "test_stopping_ranks",
)  # fmt: skip
"""How the names of files begin that take longest, the longest first: half a minute of a processor or more each."""


def pytest_configure() -> None:
    """One thread for torch, here and in what tests start: where several tests share the processor, threads that wait
    for each other take five times as long. Processes that tests start can be interrupted, also where a shell has
    started the tests in the background.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
    gc.set_threshold(*RARELY)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--sweeps K/N`."""
    parser.addoption(
        "--sweeps", default="1/1", metavar="K/N",
        help="of the tests marked `sweep`, and of the cases of those marked `slow` but each one's first, the Kth of N "
        "parts; each part has as many, drawn by their names",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests marked `slow` all cases but each one's first are `long`; of these, and of the sweeps, one part.

    Modules that start ranks or hosts come first: they wait a lot, and beside them (-n 2) the quick ones fill up.

    Before them come those that take longest: one that begins last would run alone.
    """
    begun, drawn = set[tuple[Path, str]](), set[pytest.Item]()
    for item in items:
        if item.get_closest_marker("sweep"):
            drawn.add(item)
        elif item.get_closest_marker("slow"):
            test = item.path, item.nodeid.partition("[")[0]
            if test in begun:
                item.add_marker(pytest.mark.long)
                drawn.add(item)
            begun.add(test)
    part, parts = map(int, config.getoption("--sweeps").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--sweeps {part}/{parts}: K is from 1 to N")
    left = [item for item in items if item in drawn and zlib.crc32(item.nodeid.encode()) % parts != part - 1]
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]
    slow = {item.path for item in items if item.get_closest_marker("distributed") or item.get_closest_marker("lab")}
    place = {
        path: next((n for n, name in enumerate(LONGEST) if path.name.startswith(name)), len(LONGEST))
        for path in {item.path for item in items}
    }
    items.sort(key=lambda item: (place[item.path], item.path not in slow))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage goes over it again (one takes half a second)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def left_behind() -> Iterator[None]:
    """What a file has left stays, too: each move to another plan collects garbage, and looked through all of it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def busy_machine() -> Iterator[None]:
    """What the tests run beside each other takes nothing from their profiles: none is measured twice, none refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSIGNER_PROFILE_FORCE_BUSY", "1")
        yield


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run of the tests have."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def forked(servers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedRanks]:
    """Ranks for scripts of tests/runs, without a launch for each."""
    with forked_ranks(servers / "ranks", tmp_path_factory.mktemp("forked")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def programs(servers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `python` and `assigner` that need no import of torch."""
    with forked_programs(servers / "programs", tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.fixture(scope="session")
def lab() -> Path:
    """The folder of the cluster files; skips where the lab cannot work."""
    missing = [lack.what for lack in lacks() if lack.feature != "latency"]
    if missing:
        pytest.skip(f"assigner lab cannot work here: {'; '.join(missing)}")
    return ROOT / "examples" / "clusters"


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Open MPI's own launcher on this host: called with the ranks and a command; skips where it is not there."""
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("Open MPI is not here: apt-get install openmpi-bin")

    def run(ranks: int, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        return subprocess.run(
            [program, *as_root, "--oversubscribe", "-n", str(ranks), *map(str, command)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT
