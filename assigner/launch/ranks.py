"""Start a command on the ranks of a run: torchrun's own launcher, with its failures told in one line.

torchrun ends a run when a rank fails. One that ends with exit code 0 is done, as far as it knows; the others may wait
for it to come: so its agent here also tells the run of such ranks, which the others then find out. And it tells which
are not stopped: a rank cannot tell so itself while C code keeps Python's lock.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig

from assigner.errors import FormatError, UsageError, WorkerError
from assigner.launch.failurereport import (
    LEFT,
    LEFT_HINT,
    VARIABLE,
    ended_hint,
    first_report,
    has_mark,
    how_it_ended,
    listening,
    report_name,
)
from assigner.launch.launcherwatch import is_left_behind, own_mark
from assigner.launch.limitedstore import limited
from assigner.launch.seal import clean, secret
from assigner.launch.shutdown import MEETING_S, HostFailure, OtherHosts, leaving_together, tell_done, vouch
from assigner.launch.sockets import Connections
from assigner.launch.steptimes import StepTimes, handed_over
from assigner.launch.stopping import SignalledExit, SignalPassing
from assigner.location import rank_name
from assigner.machine.kernel import process_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup


HASH_SEED = "PYTHONHASHSEED"
_HEEDED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_LOOK_S = 0.1
_VOUCH_S = 5.0
_TOUCH_S = 3600.0  # a cleaner waits for days


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a run are.

    Args:
        ranks: Ranks on this host.
        nodes: Hosts of the run.
        node: This host's number among them.
        address: Address of host 0; of no use with one host.
        port: Its port.
    """

    ranks: int
    nodes: int = 1
    node: int = 0
    address: str = ""
    port: int = 29500


class RanksAgent(LocalElasticAgent):
    """Starts a command once per rank of this host, and waits for all of them.

    The hosts meet at the run's store, with JSON; torchrun's other ways to meet unpickle what stands there. No logs are
    kept: the ranks write to this process's own outputs.

    Attributes:
        done: The ranks of this host that have ended with exit code 0.
        ended: Those that were ended here, since another one had failed or a signal came.
        passing: Of signals to the ranks.
    """

    def __init__(
        self,
        command: Sequence[str],
        layout: Layout,
        others: OtherHosts,
        causes: Path,
        notice: Callable[[str], None],
    ) -> None:
        no_logs = DefaultLogsSpecs(log_dir=os.devnull)
        store, nodes, ranks = others.store, layout.nodes, layout.ranks
        config = LaunchConfig(nodes, nodes, ranks, logs_specs=no_logs)  # what torchrun derives from GPUs
        super().__init__(
            WorkerSpec(
                role="ranks",
                local_world_size=ranks,
                entrypoint=command[0],
                args=tuple(command[1:]),
                rdzv_handler=StaticTCPRendezvous(store.host, store.port, layout.node, nodes, "assigner", MEETING_S),
                max_restarts=0,
                monitor_interval=_LOOK_S,
                numa_options=config.numa_options,
            ),
            no_logs,
        )
        self._others, self._causes, self._touches_at = others, causes, 0.0
        self.done: set[int] = set()
        self.ended: set[int] = set()
        self._run_store = store
        self._vouched, self._vouches_at = 0, 0.0
        self.passing = SignalPassing(
            causes, is_running=self._is_running, is_failing=lambda: others.failure is not None, notice=notice
        )

    def start(self) -> None:
        """Start the ranks, and wait until all have ended.

        Raises:
            ChildFailedError: one failed; the others have been ended.
            SignalException: a signal ended them; or they have not ended in time after one that they were passed.
        """
        with self.passing.kept_back():
            result = self.run()
        if result.is_failed():
            raise ChildFailedError("a rank", result.failures)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        context.close = functools.partial(self._end, worker_group, context, context.close)
        self.passing.begin()  # torch's own handlers are there now
        return started

    def _invoke_run(self, *role: Any) -> RunResult:
        try:
            found: RunResult = super()._invoke_run(*role)
        except SignalException as error:  # before the ranks are ended: others miss them at once
            if self._others.failure is None:
                ranks = [each.global_rank for each in self.get_worker_group().workers]
                self._others.tell_signal(error.sigval.name, ranks)
            raise
        return found

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if (overdue := self.passing.overdue) is not None:
            raise SignalException("the ranks have not ended in time", sigval=overdue)
        self._note_done(worker_group)
        self._vouch(worker_group)
        self._touch()
        found: RunResult = super()._monitor_workers(worker_group)
        return found

    def _end(self, group: WorkerGroup, context: Any, close: Callable[..., None], *words: Any, **more: Any) -> None:
        """End what is left of the ranks, as torch does; SIGKILL ends one that is stopped, and is no cause.

        torch would wait for half a minute until such a one takes its SIGTERM.
        """
        for each in group.workers:
            handler = context.subprocess_handlers.get(each.local_rank)
            if handler is not None and handler.proc.poll() is None:
                self.ended.add(each.global_rank)
                if (process_facts(handler.proc.pid) or "?")[0] == "T":
                    handler.proc.kill()
        close(*words, **more)

    def _is_running(self, process: int) -> bool:
        started: Any = self._pcontext
        handlers = started.subprocess_handlers.values() if isinstance(started, SubprocessContext) else ()
        return any(each.proc.pid == process and each.proc.poll() is None for each in handlers)

    def _note_done(self, worker_group: WorkerGroup) -> None:
        started: Any = self._pcontext
        assert isinstance(started, SubprocessContext), "the command is a program"
        for worker in worker_group.workers:
            rank = worker.global_rank
            if rank not in self.done and started.subprocess_handlers[worker.local_rank].proc.poll() == 0:
                self.done.add(rank)
                with suppress(DistError), limited(self._run_store) as store:  # host 0 is gone: nobody hears it
                    tell_done(store, rank)

    def _touch(self) -> None:
        """No cleaner of temporary files (systemd-tmpfiles) shall take what is handed over for something left behind."""
        if time.monotonic() < self._touches_at:
            return
        self._touches_at = time.monotonic() + _TOUCH_S
        with suppress(OSError):  # it is gone already, which is told at the end
            for path in (self._causes, *self._causes.iterdir()):
                os.utime(path)

    def _vouch(self, worker_group: WorkerGroup) -> None:
        """Tell of the ranks that run; what is traced is stopped by a debugger alone, and goes on."""
        if time.monotonic() < self._vouches_at:
            return
        self._vouched, self._vouches_at = self._vouched + 1, time.monotonic() + _VOUCH_S
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        try:
            with limited(self._run_store) as store:
                for worker in worker_group.workers:
                    facts = process_facts(handlers[worker.local_rank].proc.pid)
                    if facts and facts[0] not in "TZX":
                        vouch(store, worker.global_rank, self._vouched)
        except DistError:  # each call would hold up the look at the ranks
            self._vouches_at = math.inf


def launch(
    command: Sequence[str],
    layout: Layout,
    environment: Mapping[str, str],
    *,
    notice: Callable[[str], None] = lambda _text: None,
    on_unused: Callable[[], None] = lambda: None,
) -> StepTimes | None:
    """Run a command once per rank of this host, and wait for all of them.

    Texts have the same hashes in all of them, by PYTHONHASHSEED: the user's own, or 0. Signals that ranks note (see
    `stopping`) are passed on to them, and they have their time to end in order.

    Args:
        command: Program and arguments.
        layout: Where the ranks are.
        environment: Variables to set besides this process's own.
        notice: Says a line about that.
        on_unused: Called where all has ended well, and no process of this host has made a pipeline.

    Returns:
        How long the steps of the run took; None: it made none under a plan, or another host has rank 0.

    Raises:
        RankFailedError: a rank failed; the first one is named, with what it has handed over. What else it has to say
            is on stderr already.
        WorkerError: the hosts did not meet, or lost each other: the port is taken, or host 0 does not answer; or the
            ranks took longer to end after a signal than they had asked for.
        KeyboardInterrupt: Ctrl-C; the ranks have ended.
        SignalledExit: another signal; the same.
    """
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _remove_left_behind()
    causes = Path(tempfile.mkdtemp(prefix=f"{_causes_begin()}{own_mark()}-"))
    given = os.environ.get(HASH_SEED, "")
    # sets of texts have one order on all ranks and hosts; "" and "random" have Python draw a seed in each process
    hash_seed = {HASH_SEED: "0" if given in ("", "random") else given}
    environment = {**_inside(layout), **hash_seed, **_heeded(), **environment, VARIABLE: listening(causes)}
    kept = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        meeting = leaving_together(nodes=layout.nodes, node=layout.node, address=layout.address, port=layout.port)
        with closing(Connections()), meeting as others:
            agent = RanksAgent(command, layout, others, causes, notice)
            try:
                agent.start()
            except SignalException as error:
                if others.failure is None:
                    others.stay()
                raise _ended_by_signal(error, others, agent.passing) from error
            except ChildFailedError as error:
                others.close()  # the ranks of this host have ended
                failed = _rank_failed(error, causes, agent.done, agent.ended)
                others.tell(failed.failure)
                raise failed from error
        if causes.is_dir() and not has_mark(causes):
            on_unused()
        if (caught := first_report(causes)) is not None:  # the ranks were silent for this one to say it
            notice(f"warning: all ranks ended well, and the script had caught an error that ended its run: {caught}")
        return handed_over(causes)
    except DistError as error:
        said = str(error).partition("\n")[0]  # below it stand C++ frames
        raise WorkerError(
            f"the hosts cannot meet at {layout.address}:{layout.port}: {said}",
            hint="host 0 must be up and reachable there, and the port free on it (--master-addr, --master-port)",
        ) from error
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _leave_named(causes)


def _leave_named(causes: Path) -> None:
    """Remove what the ranks have handed over, but for a traceback that the error names."""
    if not any(causes.glob("*.txt")):
        shutil.rmtree(causes, ignore_errors=True)
        return
    for path in causes.iterdir():
        if path.suffix != ".txt":
            path.unlink(missing_ok=True)


def _inside(layout: Layout) -> dict[str, str]:
    """What keeps a run to itself: its secret, and on one host the loopback interface, where gloo then listens alone."""
    if layout.nodes > 1:
        return {}  # each host would draw another one
    stays = sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ
    return {**secret(), **({"GLOO_SOCKET_IFNAME": "lo"} if stays else {})}


def _heeded() -> dict[str, str]:
    """The signals that torch's agent takes, by its variable or its default, but for those ignored here (nohup)."""
    names = os.environ.get(_HEEDED, "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
    ignored = {each.name for each in signal.Signals if signal.getsignal(each) is signal.SIG_IGN}
    return {_HEEDED: ",".join(name for name in names if name.strip() not in ignored)}


def _causes_begin() -> str:
    """How the names of such folders begin, where process ids mean the same: containers may share a folder."""
    ids = Path("/proc/self/ns/pid")
    return f"assigner-{ids.stat().st_ino if ids.exists() else 0}-"


def _remove_left_behind() -> None:
    """Remove what the ranks of launchers that were killed have handed over, but for tracebacks that an error names."""
    begin = _causes_begin()
    for folder in Path(tempfile.gettempdir()).glob(f"{begin}*"):
        if is_left_behind(folder.name.removeprefix(begin).rpartition("-")[0]) and not any(folder.glob("*.txt")):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays


def _rank_failed(
    error: ChildFailedError, causes: Path, done: AbstractSet[int], ended: AbstractSet[int] = frozenset()
) -> RankFailedError:
    """The first cause, as the ranks have handed it over; of ranks that could not, how the first one ended.

    Args:
        error: Of the agent.
        causes: Where the ranks have handed over theirs.
        done: The ranks that ended with exit code 0: one that the others have lost did so in the middle of the run.
        ended: Those that their launcher has ended: what the others say of one that was stopped is all that is known.
    """
    cause = first_report(causes)
    rank, failure = error.get_first_failure()
    if cause is not None and not cause.is_own and not cause.trace:  # its process is gone: this one knows how it ended
        lost = rank_name(cause.worker)
        if any(f"worker:{each}" == lost for each in done):
            return RankFailedError(HostFailure(lost, LEFT), 0, hint=LEFT_HINT)
        told = {each for each, one in error.failures.items() if (causes / report_name(one.pid)).exists()}  # is there
        gone = next((each for each in error.failures if f"worker:{each}" == lost and each not in ended | told), None)
        rank, failure, cause = (rank, failure, cause) if gone is None else (gone, error.failures[gone], None)
    if cause is None:
        removed = f"{causes}, where ranks tell what went wrong, was removed while they ran: what they print counts"
        ended_so = HostFailure(f"worker:{rank}", how_it_ended(failure.exitcode))
        return RankFailedError(ended_so, failure.exitcode, hint=None if causes.is_dir() else removed)
    worker, _, said = str(cause).partition(": ")  # nobody else: one that repeats it may be the first to end
    codes = {f"worker:{each}": one.exitcode for each, one in error.failures.items()}
    how = how_it_ended(codes[rank_name(worker)]) if rank_name(worker) in codes else "failed"
    hint = None if cause.hint is None else clean(cause.hint)
    if hint is None and cause.trace:
        kept = causes / f"{re.sub(r'[^a-z0-9]+', '-', cause.worker)}.txt"
        kept.write_text(cause.trace, encoding="utf-8")
        hint = f"{kept} has the traceback; -v shows it"
    return RankFailedError(HostFailure(worker, how, said), cause.exit_code, hint=hint, trace=clean(cause.trace))


def _ended_by_signal(error: SignalException, others: OtherHosts, passing: SignalPassing) -> BaseException:
    if others.failure is not None:
        return WorkerError(
            f"{others.failure.worker} {others.failure.how}; the ranks of this host were ended",
            hint="the first error is on the output of its host",
        )
    if passing.overdue is not None:
        return WorkerError(
            f"the ranks had {passing.grace_s:g} s to end after {passing.overdue.name}, and took longer: ended",
            hint="pipeline.stop_requested(grace_s=...) gives them longer",
        )
    if error.sigval == signal.SIGINT:
        return KeyboardInterrupt()
    return SignalledExit(error.sigval)


class RankFailedError(WorkerError):
    """A rank's process ended with another code than 0.

    A rank that says that it was used wrongly (2) or that files do not fit together (5) passes its code on.

    Args:
        failure: The rank, how it ended, and what it has said, which needs no guess at why its process ended.
        rank_exit_code: What its process returned; negative: the signal that killed it.
    """

    def __init__(self, failure: HostFailure, rank_exit_code: int, *, hint: str | None = None, trace: str = "") -> None:
        own = None if failure.said else ended_hint(how_it_ended(rank_exit_code))
        told = f": {failure.said}" if failure.said else f" {failure.how}"
        super().__init__(f"{failure.worker}{told}", hint=hint or own)
        self.failure, self.trace = failure, trace
        if rank_exit_code in (UsageError.exit_code, FormatError.exit_code):
            self.exit_code = rank_exit_code
