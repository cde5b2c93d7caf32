"""One command on every host of a cluster at once, until all have ended, one has failed, or time is up.

Each host gets it with torchrun's flags where they are missing, and with its placeholders filled in.

The first of SIGINT, SIGTERM and SIGHUP ends what is going on with `Interrupted`. From then on, and after `hold`,
signals are only noted; when the block ends, the noted one has the effect that it would have had without us. Where that
effect is a handler that returns, `Interrupted` goes on: the block did not do its work.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from assigner.errors import UsageError, WorkerError
from assigner.lab.hosts import existing
from assigner.lab.missing import require
from assigner.lab.network import INTERFACE, address
from assigner.launch.failurereport import how_it_ended
from assigner.launch.seal import secret
from assigner.launch.stopping import take_signals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from assigner.lab.cgroups import HostGroup
    from assigner.lab.cluster import Cluster

PORT = 29531
GRACE_S = 20.0
_ENDING_S = 10.0  # between SIGTERM and SIGKILL
_TURN_S = 0.05
_CHUNK = 1 << 16
LONGEST = 1 << 20
"""Bytes that wait for the end of their line; more are passed on as a line of their own."""
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_PLACE = ["--nnodes", "{nnodes}", "--node-rank", "{node_rank}"]
_MEET = ["--master-addr", "{master_addr}", "--master-port", "{master_port}"]
_FLAGS = [*_PLACE, "--nproc-per-node", "{nproc}", *_MEET]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_RANKS = [sys.executable, "-m", "assigner_cli.ranks", *_FLAGS, "--"]
_ASSIGNER = [sys.executable, "-m", "assigner_cli"]
_OWN_LAYOUT = ("--nnodes", "--node-rank", "--node_rank", "--standalone", "--rdzv-", "--rdzv_")
_BARE = ("--standalone", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path")  # without a value


def run_on_hosts(
    cluster: Cluster,
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
    port: int = PORT,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
) -> None:
    """Make the cluster, run a command on all of its hosts, and remove the cluster whatever happens.

    Args:
        cluster: The hosts.
        command: Program and arguments; `host_command` says what is added to them.
        timeout_s: How long it may take, in seconds; None: no limit.
        grace_s: What the other hosts get, once one has failed: they tell best by themselves what they miss.
        port: Where the ranks meet, on host 0.
        stdout: Takes what the hosts write there, each line with its host's name in front; None: this process's own.
        stderr: The same for what they write to stderr.

    Raises:
        UsageError: the cluster cannot be made here, or there is no such program.
        WorkerError: a host, or the machine, ran out of memory, a host failed, or one still ran when time was up.
        Interrupted: a signal ended it, and the handler that the signal had before came back.
    """
    whole, base = host_command(command), {**os.environ, **secret()}
    require(cluster)
    out, err = _writer(stdout or sys.stdout), _writer(stderr or sys.stderr)
    with Interruption() as interruption, existing(cluster, interruption, warn=err) as hosts, Relay() as relay:
        running: list[subprocess.Popen[bytes]] = []
        try:
            for n, place in enumerate(places(cluster, port=port)):
                running.append(_start(place.fill(whole), place.environment(base), hosts.entrance(n), place.host))
                for pipe, writer in ((running[n].stdout, out), (running[n].stderr, err)):
                    assert pipe is not None, "both are pipes"
                    relay.add(pipe, f"[{place.host}] ", writer)
            first = _watch(running, relay, timeout_s=timeout_s, grace_s=grace_s)
            late = [n for n, process in enumerate(running) if process.poll() is None]
        except OSError:
            relay.mute()  # the reader of our output has gone
            raise
        finally:
            interruption.hold()
            _end(running, relay)
        codes = [process.returncode for process in running]
        _judge(cluster, hosts.groups, codes, first=first, late=late, timeout_s=timeout_s)


@dataclass(frozen=True)
class HostPlace:
    """Where in a run a host is: the values of the placeholders."""

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


class Interrupted(BaseException):
    """A signal ended the block; it goes through `except Exception` as KeyboardInterrupt does."""


class Interruption:
    """A block in which a signal is an exception. Outside the main thread, which alone gets signals, it does nothing."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._noted: int | None = None
        self._held = False

    def hold(self) -> None:
        """From here on a signal is noted and interrupts nothing."""
        self._held = True

    def _note(self, number: int, _: FrameType | None) -> None:
        first, self._noted = self._noted is None, self._noted or number
        if first and not self._held:
            raise Interrupted

    def __enter__(self) -> Interruption:
        take_signals(_SIGNALS, self._note, self._before)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._noted is not None:
            os.kill(os.getpid(), self._noted)


def _writer(stream: IO[str]) -> Callable[[str], None]:
    """Writes whole lines to a stream at once, so that those of the hosts do not mix.

    What the stream cannot encode becomes a question mark: a host's words do not end a run.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(text: str) -> None:
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()

    return write


def _start(
    command: list[str], environment: dict[str, str], entrance: Callable[[], None], host: str
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603 - what the user asks for
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=entrance,  # noqa: PLW1509 - this process has no other threads of its own
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error if isinstance(error, OSError) else "it could not enter the host's control groups and namespaces"
        raise UsageError(
            f"{command[0]} cannot be started on host {host}: {reason}", hint="assigner lab --check"
        ) from error


def _watch(
    running: list[subprocess.Popen[bytes]], relay: Relay, *, timeout_s: float | None, grace_s: float
) -> int | None:
    """Wait for all, or for time to be up; the number of the first host that failed, if any."""
    first, until = None, time.monotonic() + (timeout_s if timeout_s is not None else float("inf"))
    while any(process.poll() is None for process in running) and time.monotonic() < until:
        relay.pump(_TURN_S)
        if first is None:
            first = next((n for n, process in enumerate(running) if process.poll()), None)
            if first is not None:
                until = min(until, time.monotonic() + grace_s)
    return first if first is not None else next((n for n, process in enumerate(running) if process.poll()), None)


def _end(running: list[subprocess.Popen[bytes]], relay: Relay) -> None:
    """End what still runs, and pass on what was said last."""
    _signal(running, signal.SIGTERM)
    until = time.monotonic() + _ENDING_S
    while any(process.poll() is None for process in running) and time.monotonic() < until:
        relay.pump(_TURN_S)
    _signal(running, signal.SIGKILL)
    relay.drain(1.0)
    for process in running:
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _signal(running: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, number)


def _judge(
    cluster: Cluster, groups: Sequence[HostGroup], codes: list[int], *, first: int | None, late: list[int],
    timeout_s: float | None,
) -> None:  # fmt: skip
    """Raise what went wrong: the cause, where it is known, before its effects."""
    if first is None and not late:
        return
    names = [host.name for host in cluster.host]
    killed = [n for n, group in enumerate(groups) if group.memory_kills()]
    at_limit = next((n for n in killed if groups[n].reached_limit()), None)
    if at_limit is not None:
        host = cluster.host[at_limit]
        raise WorkerError(
            f"host {host.name} was out of memory: limit {host.memory_mib:g} MiB; the kernel killed a process there",
            hint="a plan that needs less of it, or a larger memory_mib",
        )
    if killed:
        raise WorkerError(
            f"this machine ran out of memory: the kernel killed a process of host {names[killed[0]]}, which was below"
            " its own limit",
            hint="limits that are less together than the machine's free memory, or fewer other programs",
        )
    if first is None:
        raise WorkerError(
            f"stopped after {timeout_s:g} s; still running: {', '.join(names[n] for n in late)}",
            hint="--timeout gives more time",
        )
    raise WorkerError(
        f"host {names[first]} {how_it_ended(codes[first])}", hint="what it said last is above, behind its name"
    )


@dataclass
class _Source:
    prefix: str
    write: Callable[[str], None]
    rest: bytes = b""


class Relay:
    """Reads any number of pipes at once, and says what they give line by line, each with its host's name in front."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._muted = False

    def mute(self) -> None:
        """Read on, and say nothing more."""
        self._muted = True

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def add(self, pipe: IO[bytes], prefix: str, write: Callable[[str], None]) -> None:
        """Read a pipe from now on; `write` gets its complete lines with `prefix` in front."""
        self._selector.register(pipe, selectors.EVENT_READ, _Source(prefix, write))

    def pump(self, seconds: float) -> None:
        """Pass on what there is; wait for it up to `seconds`."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            chunk = os.read(key.fd, _CHUNK)
            if not chunk:
                self._end(key)
                continue
            source: _Source = key.data
            *lines, source.rest = (source.rest + chunk).split(b"\n")
            if len(source.rest) > LONGEST:
                lines, source.rest = [*lines, source.rest], b""
            self._say(source, lines)

    def drain(self, seconds: float) -> None:
        """Read to the end of all pipes, for up to `seconds`: a process left over may hold one open."""
        deadline = time.monotonic() + seconds
        while self._selector.get_map() and time.monotonic() < deadline:
            self.pump(0.05)
        for key in list(self._selector.get_map().values()):
            self._end(key)

    def _end(self, key: selectors.SelectorKey) -> None:
        source: _Source = key.data
        self._selector.unregister(key.fileobj)
        if source.rest:
            self._say(source, [source.rest])
            source.rest = b""

    def _say(self, source: _Source, lines: list[bytes]) -> None:
        if lines and not self._muted:
            source.write("".join(f"{source.prefix}{line.decode(errors='replace')}\n" for line in lines))
