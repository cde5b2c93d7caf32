"""Ranks forked from one process that has imported torch and captured the usual models: a run costs forks, no imports.

    with forked_ranks(SHARED, FOLDER) as ranks: ...

One server is there for all processes of a run of the tests (`shared_server`), with a process for each: that reads runs
as lines of JSON, and answers each, when all of its ranks have ended, with a line of their exit codes. A run has a
process between: it keeps the run's store, as torchrun's agent does, and ends what has not ended in time. Each rank is a
process of its own, which no other run has used: it begins as `python SCRIPT WORDS` would, and may fail, hang or be
killed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

TESTS = Path(__file__).resolve().parent
PORT_BYTES = 8
SOCKET, ERRORS = "socket", "errors"  # in a server's folder
UP = b"up"
ANSWER_S = 300.0  # beyond a run's own time: the server's start, and the run's end
RARELY = 10_000, 20, 20
"""New objects, and younger collections, before garbage is looked for in each of Python's three generations: less often
than by itself, which took a tenth of what collecting tests, and capturing models, takes.
"""


@dataclass(frozen=True)
class Run:
    """What a server is asked for.

    Args:
        script: Its path.
        words: What follows it on the command line.
        variables: Of each process, beside the server's.
        torchrun: Whether the processes are ranks of torchrun: its variables, and a store that outlives them.
        folder: Where they start, and where process N writes `output.N` and `errors.N`.
        timeout_s: When those that are left are killed.
        before: `module:function WORD...` of tests/, called once with the words where the ranks are forked from: what it
            captures all have.
    """

    script: str
    words: list[str]
    variables: list[dict[str, str]]
    torchrun: bool
    folder: str
    timeout_s: float
    before: str


@dataclass(frozen=True)
class End:
    """A process's exit code, negative for a signal, and what it wrote."""

    code: int
    output: str
    errors: str


def cases_of(request: pytest.FixtureRequest, name: str) -> list[str]:
    """The values of a parameter that the tests of the asking file have in this run, each once."""
    calls = [item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(call.params[name] for call in calls if name in call.params))


@contextlib.contextmanager
def shared_server(folder: Path, script: str, environment: dict[str, str]) -> Iterator[None]:
    """A server that all processes of a run of the tests have: the first one starts it; it is `reached` by its folder.

    Each holds an end of the pipe that is the server's standard input, and it ends when nobody does. What it says on
    stderr is kept in its folder, for whom it leaves without an answer.

    Args:
        folder: The same one for all of them.
        script: Called with the socket's number and the folder; it goes on in the background, and says when it `is_up`.
        environment: Of the server.

    Raises:
        AssertionError: it has ended before it was up; with what it said.
    """
    folder.mkdir(exist_ok=True)
    pipe = folder / "users"
    with locked(folder):
        try:
            mine = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it, or it is not there
            for each in (pipe, folder / SOCKET):
                each.unlink(missing_ok=True)
            os.mkfifo(pipe)
            read = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            mine = os.open(pipe, os.O_WRONLY)
            with socket.socket(socket.AF_UNIX) as listening, (folder / ERRORS).open("w") as errors:
                with reached(folder) as address:
                    listening.bind(address)
                listening.listen(64)
                begun = subprocess.run(  # to the end of what is said on stdout: all of its processes have closed it
                    [sys.executable, script, str(listening.fileno()), folder], stdin=read, stdout=subprocess.PIPE,
                    stderr=errors, pass_fds=[listening.fileno()], env=environment, check=False,
                )  # fmt: skip
            os.close(read)
            if begun.stdout != UP:
                os.close(mine)
                raise AssertionError(f"{Path(script).name} ended before it was up: {said_by(folder)}") from None
    try:
        yield
    finally:
        os.close(mine)


def is_up() -> None:
    """Tell who started this server that it answers from now on."""
    os.write(1, UP)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


@contextlib.contextmanager
def reached(folder: Path) -> Iterator[str]:
    """The address of a server's socket, however long the name of its folder is: an address has 107 bytes."""
    number = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{number}/{SOCKET}"
    finally:
        os.close(number)


def said_by(folder: Path) -> str:
    """The end of what a server has said on stderr."""
    return (folder / ERRORS).read_text(encoding="utf-8", errors="replace")[-4000:] or "it said nothing"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody comes to a server, and none ends, meanwhile."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def deserted(folder: Path) -> bool:
    """Whether nobody holds the other end of a server's standard input any more; that is closed then."""
    with locked(folder):
        try:
            os.read(0, 1)  # nothing is ever written
        except BlockingIOError:
            return False
        os.close(0)
        return True


class ForkedRanks:
    """A connection to the server; runs come one after another."""

    def __init__(self, folder: Path, shared: Path, server: socket.socket) -> None:
        self._folder, self._shared, self._runs = folder, shared, 0
        self._server, self._answers = server, server.makefile()

    def found(self, script: str, folder: Path, *words: str, ranks: int, before: str = "") -> list[Any]:
        """What each rank of a script has written to FOLDER/RANK.json, FOLDER being the script's first word."""
        self.run(script, folder, *words, ranks=ranks, before=before)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]

    def run(
        self, script: str, *words: str | Path, ranks: int = 0, timeout_s: float = 1800.0, before: str = ""
    ) -> list[End]:
        """Run a script of tests/runs to its good end.

        Args:
            script: Its name.
            words: What follows it on the command line.
            ranks: So many ranks, as of torchrun; 0: one process that is no rank.
            timeout_s: The longest it may take.
            before: See `Run`.

        Raises:
            AssertionError: a process has ended with another code than 0, or not in time; with what all wrote.
        """
        ends = self.ended(
            script, *words, variables=[{}] * max(ranks, 1), torchrun=ranks > 0, timeout_s=timeout_s, before=before
        )
        said = "\n".join(f"{n} ended with {end.code}\n{end.errors[-4000:]}" for n, end in enumerate(ends))
        assert not any(end.code for end in ends), f"{script} {' '.join(map(str, words))}\n{said}"
        return ends

    def ended(
        self,
        script: str,
        *words: str | Path,
        variables: Sequence[dict[str, str]],
        torchrun: bool = False,
        timeout_s: float = 1800.0,
        before: str = "",
    ) -> list[End]:
        """Run a script of tests/runs in a process for each set of variables, to whatever end."""
        self._runs += 1
        place = self._folder / f"{self._runs} {Path(script).stem}"
        place.mkdir()
        named = [str(TESTS / "runs" / script), [str(each) for each in words]]
        codes = self._ask(Run(*named, list(variables), torchrun, str(place), timeout_s, before))  # type: ignore[arg-type]
        written = [[(place / f"{name}.{n}").read_text() for name in ("output", "errors")] for n in range(len(codes))]
        return [End(code, *texts) for code, texts in zip(codes, written, strict=True)]

    def _ask(self, run: Run) -> list[int]:
        self._server.settimeout(run.timeout_s + ANSWER_S)
        self._server.sendall(json.dumps(asdict(run)).encode() + b"\n")
        answer = self._answers.readline()
        assert answer, f"the server of ranks has ended: {said_by(self._shared)}"
        codes: list[int] = json.loads(answer)
        return codes


@contextlib.contextmanager
def forked_ranks(shared: Path, folder: Path) -> Iterator[ForkedRanks]:
    """A server for as long as it is wanted.

    Args:
        shared: The server's own folder.
        folder: Where runs leave what they write.
    """
    environment = {name: each for name, each in os.environ.items() if name not in torchruns(0, 1, 0)}
    with (
        shared_server(shared, __file__, {**environment, "OMP_NUM_THREADS": "1"}),
        socket.socket(socket.AF_UNIX) as server,
    ):
        with reached(shared) as address:
            server.connect(address)
        made = ForkedRanks(folder, shared, server)
        with made._answers:
            yield made


def become(run: Run, n: int) -> None:
    """Make this process the n-th of a run, at its beginning."""
    os.chdir(run.folder)
    for number, name in ((1, "output"), (2, "errors")):
        file = os.open(f"{name}.{n}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(run.variables[n])
    random.seed()  # the server's state would be the same in all
    sys.argv = [run.script, *run.words]
    sys.path[0] = str(Path(run.script).parent)


def end_after(program: Callable[[], object]) -> NoReturn:
    """Run a program and end this process as an interpreter does, but for taking the modules of torch apart.

    That takes a quarter of a second a rank. What is raised ends the process as ever.
    """
    code: object = 0
    try:
        program()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            raise
    threading._shutdown()  # type: ignore[attr-defined] - waits for threads, as an interpreter's end does first
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code) & 0xFF)


def torchruns(n: int, count: int, port: int) -> dict[str, str]:
    """The variables of its n-th rank."""
    numbers = {"RANK": n, "LOCAL_RANK": n, "GROUP_RANK": 0, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in {**numbers, **words, "TORCHELASTIC_RESTART_COUNT": 0}.items()}


def launch(run: Run) -> list[int]:
    """Fork a run's processes, keep their store, and wait for them: their exit codes; -9 for those that were late.

    In such a process this does not return: it ends as an interpreter does at the end of a script.
    """
    from torch.distributed import TCPStore

    if run.before:
        import torch

        state = torch.get_rng_state()
        function, *words = shlex.split(run.before)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*words)
        torch.set_rng_state(state)
        gc.freeze()
    left: dict[int, int] = {}
    told, tell = os.pipe()
    for n in range(len(run.variables)):
        pid = os.fork()
        if pid == 0:
            os.close(tell)
            become(run, n)
            port = int(os.read(told, PORT_BYTES))
            os.close(told)
            if run.torchrun:
                os.environ.update(torchruns(n, len(run.variables), port))
            end_after(lambda: runpy.run_path(run.script, run_name="__main__"))
        left[pid] = n
    # only now: it has threads, of which a fork keeps none
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=run.timeout_s))
    os.write(tell, f"{store.port:{PORT_BYTES}d}".encode() * len(left))
    codes: dict[int, int] = {}
    end = time.monotonic() + run.timeout_s
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > end:
            for each in left:
                os.kill(each, signal.SIGKILL)
            end += ANSWER_S
        elif not pid:
            time.sleep(0.02)
    return [codes[n] for n in range(len(run.variables))]


def prepare() -> None:
    """Import and capture what runs need, as if they had done it: the random numbers of a rank begin as always."""
    import torch
    from brief import measure_briefly
    from workloads import captured, diamond, language, skips, towers

    torch.set_num_threads(1)
    gc.set_threshold(*RARELY)
    state = torch.get_rng_state()
    for made in (language(), language(dropout=0.4), skips(), towers(), diamond()):
        captured(made)
    torch.set_rng_state(state)
    measure_briefly()
    gc.freeze()  # ranks share these objects with the server: to collect them at their end would copy them all


def serve(listening: socket.socket, folder: Path) -> None:
    """Fork a process for each connection, until there is nobody left."""
    prepare()
    is_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those processes
    with selectors.DefaultSelector() as ready:
        for each in (listening, 0):
            ready.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj == 0:
                    if deserted(folder):
                        return
                    continue
                asking, _ = listening.accept()
                if os.fork() == 0:
                    ready.close()
                    listening.close()
                    os.dup2(1, 0)  # neither is anything
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    answer(asking)
                    os._exit(0)
                asking.close()


def answer(asking: socket.socket) -> None:
    """Do the runs of one connection, until there are no more."""
    with asking.makefile() as lines:
        for line in lines:
            child = os.fork()
            if child == 0:
                codes = launch(Run(**json.loads(line)))
                asking.sendall(f"{json.dumps(codes)}\n".encode())
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            assert status == 0, f"a run's own process has ended with {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    sys.path[1:1] = [str(TESTS), str(TESTS.parent)]
    from forked_ranks import serve as serve_as_a_module  # __main__ will be the scripts'

    serve_as_a_module(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
