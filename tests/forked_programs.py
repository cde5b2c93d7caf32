"""Programs of Python that begin with torch imported: forked, each of them, from one process that has it.

    with forked_programs(SHARED, FOLDER) as bin: ...    bin/python and bin/assigner, in the place of the real ones

To import torch and what it loads takes some seconds of each process, and to import assigner one more. Here one process,
the server, has done that, and nothing else; `import assigner` does again what the package itself does then, by the
program's variables. `bin/python` hands the server words, variables, folder and open files, passes signals on, and ends
as the forked process ends. What `assigner run`, `profile` and `bench` start are children of their own: each has some in
store, forked before it did anything, of which `subprocess.Popen` takes one. PYTHON_EXEC, by which torchrun is told its
ranks' interpreter, is `sys.executable` to all programs: `bin/python` there makes theirs forked ones, too.

Not the same is what a real start would show: flags of the interpreter, what the C library reads of the environment, the
terminal's foreground, which modules are loaded, how often garbage is looked for, and that modules are taken apart at
the end. What is about these starts real processes. Profiles and traces are measured briefly here (brief/).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from brief import measure_briefly
from forked_ranks import ERRORS, RARELY, SOCKET, deserted, end_after, is_up, shared_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LOADED = (
    "numpy", "torch", "torch._dynamo", "torch.export", "torch.fx.experimental.symbolic_shapes", "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent", "torch.nn.parallel", "torch.utils.checkpoint",
    "torch.utils.data", "torch._functorch.aot_autograd", "torch._export.non_strict_utils", "pulp", "highspy",
    "pydantic.types", "rich.console", "rich.table", "typer", "safetensors.torch", "tomllib",
)  # fmt: skip
"""What the programs of assigner import of others."""
OWN = ("assigner", "assigner_cli")
"""Packages of which all modules are imported."""
LAUNCHERS = {"run": 3, "bench": 9, "profile": 3}
"""Commands that start ranks, with how many processes they have in store: those beyond it are real ones.

`bench` starts the ranks of each of its plans anew.
"""

STUB = r"""#!{python} -IS
import json, os, signal, socket, sys
words = [{first!r}, *sys.argv[1:]] if {first!r} else sys.argv[1:]
while words[:1] == ["-u"]:
    words = words[1:]
    os.environ["PYTHONUNBUFFERED"] = "1"
if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect("/proc/self/fd/%d/{socket}" % os.open({shared!r}, os.O_RDONLY))
asked = json.dumps(dict(words=words, folder=os.getcwd(), variables=dict(os.environ))).encode()
socket.send_fds(server, [b"%16d" % len(asked)], [0, 1, 2])
passed_on = [signal.Signals["SIG" + each] for each in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2")]
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
server.sendall(asked)
for each in passed_on:
    signal.signal(each, lambda number, _: server.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
code = server.recv(16)
if not code:
    sys.exit("the server of programs has ended: " + open({shared!r} + "/{errors}").read()[-4000:])
code = int(code)
if code < 0:
    if code != -9: signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextlib.contextmanager
def forked_programs(shared: Path, folder: Path) -> Iterator[Path]:
    """A folder with `python` and `assigner`, for as long as they are wanted; `shared`: the server's own."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with shared_server(shared, __file__, variables):
        words = {"python": sys.executable, "shared": str(shared), "socket": SOCKET, "errors": ERRORS}
        for name, first in (("python", ""), ("assigner", "assigner")):
            stub = folder / name
            stub.write_text(STUB.format(first=first, **words))
            stub.chmod(0o755)
        yield folder


def become(asked: dict[str, Any], files: Sequence[int], *, session: bool) -> None:
    """Make this process a new one, at its beginning."""
    if session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    tempfile.tempdir = None  # this one's variables say where it is
    direct = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the process's own
    sys.stdout = sys.__stdout__ = _written(1, direct=direct, errors="strict")
    sys.stderr = sys.__stderr__ = _written(2, direct=direct, errors="backslashreplace")
    import numpy as np
    import torch

    random.seed()  # the server's state would be the same in all
    np.random.seed()
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _written(file: int, *, direct: bool, errors: str) -> Any:
    made = open(file, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115 - the process's own
    made.reconfigure(line_buffering=os.isatty(file) or file == 2, write_through=direct)
    return made


class Again(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The package `assigner` is imported once more: its own lines run, its modules stay as they are."""

    def __init__(self) -> None:
        self._package = sys.modules.pop("assigner")

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Of that package alone."""
        if fullname != "assigner":
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self._package.__file__, is_package=True)

    def create_module(self, _: ModuleSpec) -> ModuleType:
        """The one that there is; from then on it is imported as any other."""
        sys.meta_path.remove(self)
        self._spec = self._package.__spec__
        return self._package

    def exec_module(self, module: ModuleType) -> None:
        """Run its own lines."""
        module.__spec__ = self._spec
        assert self._spec is not None
        assert self._spec.loader is not None
        self._spec.loader.exec_module(module)


def begin(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    sys.meta_path.insert(0, Again())
    sys.path[0:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    what, *rest = words
    if what == "assigner":
        sys.argv = [str(Path(sys.executable).with_name("assigner")), *rest]
        sys.exit(importlib.import_module("assigner_cli").main())
    if what == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif what == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as the interpreter has it
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(what)))  # noqa: PTH120 - as the interpreter has it
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")


STORE: list[tuple[int, socket.socket]] = []
"""Processes that wait for what they are to be, and the way to tell them."""


def execute_child(self: subprocess.Popen[Any], *given: Any, real: Any) -> None:
    """In the place of `Popen._execute_child`: a process for this interpreter is one that was forked in time.

    Its arguments have names, whose order versions of Python have changed.
    """
    named = inspect.signature(real).bind(self, *given).arguments
    words = [] if isinstance(named["args"], str | bytes) else list(map(os.fspath, named["args"]))
    words = words[1:] if words[:1] == [sys.executable] else []
    words = words[1:] if words[:1] == ["-u"] else words
    plain = named["preexec_fn"] is None and not named["pass_fds"] and not named["shell"]
    if not words or not plain or not STORE or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        real(self, *given)
        return
    self.pid, to = STORE.pop(0)
    asked = {
        "words": words, "folder": os.fspath(named["cwd"] or os.getcwd()),  # noqa: PTH109 - as it is
        "variables": dict(os.environ if named["env"] is None else named["env"]),
        "session": bool(named["start_new_session"]),
    }  # fmt: skip
    inherited = [named["p2cread"], named["c2pwrite"], named["errwrite"]]
    with to:
        send(to, asked, [number if file == -1 else file for number, file in enumerate(inherited)])
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    made: Any = self
    made._child_created = True
    made._close_pipe_fds(*(named[name] for name in pipes))


def send(to: socket.socket, asked: dict[str, Any], files: Sequence[int]) -> None:
    """Hand over what is to be run, and its open files."""
    text = json.dumps(asked).encode()
    socket.send_fds(to, [b"%16d" % len(text)], files)
    to.sendall(text)


def received(of: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What was sent; None: the other end is gone."""
    size, files, _, _ = socket.recv_fds(of, 16, 3)
    if len(size) < 16:
        return None
    text = b""
    while len(text) < int(size):
        more = of.recv(int(size) - len(text))
        if not more:
            return None
        text += more
    return json.loads(text), list(files)


def wait_in_store(told: socket.socket) -> NoReturn:
    """Be the program that this process is told to be; end where the one who tells has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing runs here yet that Ctrl-C could be for
    got = received(told)
    told.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if got is None:
        os._exit(0)
    become(*got, session=got[0]["session"])
    end_after(lambda: begin(got[0]["words"]))


def put_in_store(count: int) -> None:
    """Fork processes that wait for what they are to be; each ends when this one has."""
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            STORE.append((pid, ours))
            continue
        for _, each in STORE:
            each.close()
        STORE.clear()
        ours.close()
        wait_in_store(theirs)
    popen: Any = subprocess.Popen
    popen._execute_child = functools.partialmethod(execute_child, real=popen._execute_child)
    import multiprocessing

    real = multiprocessing.get_context
    multiprocessing.get_context = lambda _=None: real("fork")  # type: ignore[assignment]


def called(words: Sequence[str]) -> str:
    """With which of the commands that start ranks a program is `assigner`; empty: it is not, or with another one."""
    own = words[1:] if words[0] == "assigner" else words[2:] if list(words[:2]) == ["-m", "assigner_cli"] else ()
    return next((each for each in own[:3] if each in LAUNCHERS), "")


class Server:
    """Forks programs until there is nobody left."""

    def __init__(self, listening: socket.socket, folder: Path) -> None:
        self._listening, self._folder = listening, folder
        self._ready = selectors.DefaultSelector()
        self._running: dict[int, socket.socket] = {}
        self._ended, wake = os.pipe()
        for end in (self._ended, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for each in (listening, 0, self._ended):
            self._ready.register(each, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answer until there is nobody left."""
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is self._listening:
                    self._start(self._listening.accept()[0])
                elif key.fileobj == self._ended:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._ended, 4096)
                    self._bury()
                elif key.fileobj == 0:
                    if deserted(self._folder):
                        for pid in self._running:
                            os.kill(pid, signal.SIGKILL)
                        return
                else:
                    self._pass_on(key.data)

    def _start(self, asking: socket.socket) -> None:
        got = received(asking)
        if got is None:
            asking.close()
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._ready.close()
            for each in (asking, self._listening, *self._running.values()):
                each.close()
            os.close(self._ended)
            become(*got, session=True)
            words = got[0]["words"]
            if command := called(words):
                put_in_store(LAUNCHERS[command])
            end_after(lambda: begin(words))
        for file in got[1]:
            os.close(file)
        self._running[pid] = asking
        self._ready.register(asking, selectors.EVENT_READ, pid)

    def _pass_on(self, pid: int) -> None:
        """A signal for a program; where the one who asked was killed: that."""
        try:
            numbers = self._running[pid].recv(64)
        except KeyError:  # buried since the selector saw it
            return
        except ConnectionResetError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            self._ready.unregister(self._running[pid])

    def _bury(self) -> None:
        for pid in list(self._running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                asked = self._running.pop(pid)
                with contextlib.suppress(KeyError):
                    self._ready.unregister(asked)
                with contextlib.suppress(BrokenPipeError), asked:
                    asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def main(listening: int, folder: Path) -> None:
    """Import what takes long, and serve, in the background."""
    import gc

    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(*RARELY)
    for name in LOADED:
        importlib.import_module(name)
    del sys.path[0]  # tests/
    for name in OWN:
        for each in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if not each.name.endswith(".__main__"):
                importlib.import_module(each.name)
    measure_briefly()
    gc.collect()
    gc.freeze()  # programs share these objects with the server: to collect them would copy them all
    is_up()
    Server(socket.socket(fileno=listening), folder).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
