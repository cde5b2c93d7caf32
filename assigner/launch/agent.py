"""torchrun's agent for one host's ranks, which also tells the run of ranks that have ended without an error.

torchrun ends a run when a rank fails. One that ends with exit code 0 is done, as far as it knows; the others may wait
for it to come, which the run's ranks then find out here.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig

from assigner.launch.shutdown import MEETING_S, tell_done

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup

    from assigner.launch.stopping import SignalPassing

_LOOK_S = 0.1


class RanksAgent(LocalElasticAgent):
    """Starts a command once per rank of this host, and waits for all of them.

    The hosts meet at the run's store, with JSON; torchrun's other ways to meet unpickle what stands there. No logs are
    kept: the ranks write to this process's own outputs.

    Args:
        command: Program and arguments.
        ranks: Ranks on this host.
        nodes: Hosts of the run.
        node: This host's number.
        store: The run's.
        passing: Of signals to the ranks; made from whether a process is running.

    Attributes:
        done: The ranks of this host that have ended with exit code 0.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        ranks: int,
        nodes: int,
        node: int,
        store: TCPStore,
        passing: Callable[[Callable[[int], bool]], SignalPassing],
    ) -> None:
        no_logs = DefaultLogsSpecs(log_dir=os.devnull)
        config = LaunchConfig(nodes, nodes, ranks, logs_specs=no_logs)  # what torchrun derives from GPUs
        super().__init__(
            WorkerSpec(
                role="ranks",
                local_world_size=ranks,
                entrypoint=command[0],
                args=tuple(command[1:]),
                rdzv_handler=StaticTCPRendezvous(store.host, store.port, node, nodes, "assigner", MEETING_S),
                max_restarts=0,
                monitor_interval=_LOOK_S,
                numa_options=config.numa_options,
            ),
            no_logs,
        )
        self.done: set[int] = set()
        self._run_store = store
        self.passing = passing(self._is_running)

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
        self.passing.begin()  # torch's own handlers are there now
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if (overdue := self.passing.overdue) is not None:
            raise SignalException("the ranks have not ended in time", sigval=overdue)
        self._note_done(worker_group)
        found: RunResult = super()._monitor_workers(worker_group)
        return found

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
                with suppress(DistError):  # host 0 is gone: nobody is left to hear it
                    tell_done(self._run_store, rank)
