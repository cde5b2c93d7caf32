"""Ranks forked from one process that has imported torch and captured the usual models: a run costs forks, no imports.

    python tests/forked_ranks.py

Reads runs as lines of JSON from its standard input and answers each, when all of its ranks have ended, with a line of
their exit codes. A run has a process between: it keeps the run's store, as torchrun's agent does, and ends what has not
ended in time. Each rank is a process of its own, which no other run has used: it begins as `python SCRIPT WORDS` would,
and may fail, hang or be killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import shlex
import signal
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


class ForkedRanks:
    """A server, started by the first run; runs come one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        self._server: subprocess.Popen[str] | None = None

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
        if self._server is None:
            environment = {name: each for name, each in os.environ.items() if name not in torchruns(0, 1, 0)}
            self._server = subprocess.Popen(
                [sys.executable, Path(__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**environment, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(run)) + "\n")
        self._server.stdin.flush()
        late = threading.Timer(run.timeout_s + ANSWER_S, self._server.kill)
        late.start()
        answer = self._server.stdout.readline()
        late.cancel()
        assert answer, f"the server of ranks has ended, with {self._server.wait()}"
        codes: list[int] = json.loads(answer)
        return codes

    def close(self) -> None:
        """Let the server end."""
        if self._server is not None:
            try:
                self._server.communicate(timeout=ANSWER_S)
            finally:
                self._server.kill()


@contextlib.contextmanager
def forked_ranks(folder: Path) -> Iterator[ForkedRanks]:
    """A server for as long as it is wanted."""
    made = ForkedRanks(folder)
    try:
        yield made
    finally:
        made.close()


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
    from workloads import captured, diamond, language, skips, towers

    torch.set_num_threads(1)
    gc.set_threshold(*RARELY)
    state = torch.get_rng_state()
    for made in (language(), language(dropout=0.4), skips(), towers(), diamond()):
        captured(made)
    torch.set_rng_state(state)
    gc.freeze()  # ranks share these objects with the server: to collect them at their end would copy them all


def serve() -> None:
    """Answer runs until there are no more."""
    prepare()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            null, answers = os.open(os.devnull, os.O_RDWR), os.dup(1)
            os.dup2(null, 0)
            os.dup2(null, 1)
            codes = launch(Run(**json.loads(line)))
            os.write(answers, f"{json.dumps(codes)}\n".encode())
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status == 0, f"a run's own process has ended with {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    sys.path[1:1] = [str(TESTS), str(TESTS.parent)]
    from forked_ranks import serve as serve_as_a_module  # __main__ will be the scripts'

    serve_as_a_module()
