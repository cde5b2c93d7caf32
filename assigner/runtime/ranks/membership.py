"""A pipeline as a member of its run: this process's rank and worker, the messages to the others, and one end for all.

Whatever a rank does for the run stands in a `guarded` block: a failure in it is told to every rank, and a failure
elsewhere comes out of it as that other rank's error.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from assigner import formatting as fmt
from assigner.errors import AssignerError, FormatError, InfeasibleError, UsageError
from assigner.launch.failurereport import leave_mark, words_of
from assigner.launch.stopping import StopSignals
from assigner.location import rank_of
from assigner.machine.cgroup import memory_pool
from assigner.runtime.failures.callrecord import CallSums, ToldCall
from assigner.runtime.failures.questions import called
from assigner.runtime.messages.sending import LostConnectionError
from assigner.runtime.messages.transport import Transport
from assigner.runtime.ranks.process import compare_plans, set_threads, worker_device
from assigner.runtime.ranks.run import ProcessRun
from assigner.runtime.ranks.workergroups import WorkerGroups
from assigner.runtime.recording.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import WorkerPrediction
    from assigner.formats.terms import Backend
    from assigner.runtime.failures.callrecord import CallRecord, TreeSums
    from assigner.runtime.ranks.workergroups import WorkerGroup


T = TypeVar("T")

_REFUSALS: dict[str, type[AssignerError]] = {each.__name__: each for each in (UsageError, FormatError, InfeasibleError)}
"""What may be refused so that the run goes on: see `Membership.agree`."""


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Where a script is in `torch.inference_mode`, have the block, or a method, as under `torch.no_grad`.

    A tensor that inference mode makes can be trained nowhere any more: a plan's weights, or a buffer that is loaded.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    else:
        yield


class Membership:
    """One rank's part in a run. Every rank makes one, and calls the same methods in the same order.

    Attributes:
        worker: Its worker, `worker:1/cpu`; None: the plan leaves this rank out.
        groups: Those of this rank with others that share a stage of the plan, or a parameter, by their workers.
        at: What is being done, for errors: in words, or what has words for it once it is asked.
        number: Which pipeline of the run it is, from 1 on, the same on every rank.
        calls: The last calls of all pipelines that were compared with those of other ranks, which may ask for them.
        on_leaving: Called first when this process leaves the run, or drops a call that has failed.

    Raises:
        UsageError: fewer ranks than the plan needs, or a device that this rank has not.
    """

    def __init__(self, plan: Plan, *, timeout_s: float, backend: Backend | None = None) -> None:
        self.at: object = "the start"
        self.on_leaving: Callable[[], None] | None = None
        self.transport: Transport | None = None
        self.groups: Mapping[tuple[str, ...], WorkerGroup] = {}
        self._groups: WorkerGroups | None = None
        self._left, self._settled = "", False
        self._stop: StopSignals | None = None
        self.worker: str | None = None
        self.device: torch.device
        self._run = ProcessRun.joined(plan, timeout_s, backend)
        self.timeout = timedelta(seconds=timeout_s)
        self.rank, self.number = (0, 1) if self._run is None else (self._run.rank, self._run.add(self))
        self.calls: deque[CallSums] = deque(maxlen=2) if self._run is None else self._run.calls
        refusal: UsageError | None = None
        with self.guarded("taking its place in the run"):
            if self._run is not None:
                self.begin_call((ToldCall.now("Pipeline()", ""),))
                try:
                    compare_plans(plan)
                except UsageError as error:  # on every rank
                    refusal = error
            if refusal is None:
                self.take_place(plan)
            if refusal is None and self._run is not None:
                self.transport = Transport.opened(plan.workers, self.device, timeout_s=timeout_s, backend=backend)
                direct = self.transport.direct
                reached = frozenset[int]() if direct is None else direct.ranks
                self._groups = WorkerGroups(self.rank, self.device, reached, timeout_s=timeout_s)
                self._open_groups(plan)
        if refusal is not None:
            self.close()
            raise refusal
        leave_mark()

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """A block that makes this rank's share of the plan: what fails in it ends the run.

        A plan that does not fit is refused on every rank: they give up their parts together, and other pipelines of
        theirs go on.
        """
        try:
            yield
        except InfeasibleError:
            self.close()
            raise
        except BaseException as error:
            self.fail("the making of a pipeline", error)
            raise
        self.settle()

    def place(self, plan: Plan) -> tuple[str | None, torch.device]:
        """The worker that a plan has for this rank, and its device.

        Raises:
            UsageError: this rank has no such device, or computes on another one already.
        """
        mine = [worker for worker in plan.workers if rank_of(worker) == self.rank]
        worker = mine[0] if mine else None
        device = worker_device(worker)
        if self.transport is not None and worker is not None and device != self.device:
            raise UsageError(
                f"the plan has {worker} for a rank that computes on {self.device}",
                hint="a rank keeps its device during a run: save a checkpoint, and load it under the other plan",
            )
        return worker, device

    def take_place(self, plan: Plan) -> None:
        """Be the worker that a plan has for this rank, on its device and with its threads; errors as `place`.

        Until `settle` is called its share is half built, and a failure ends the run.
        """
        self._settled = False
        self.worker, device = self.place(plan)
        if self.transport is None:
            self.device = device
        set_threads(plan, self.worker)
        if self._run is not None:
            self._run.watch.worker = self.name
        self._open_groups(plan)

    def check_memory(self, plan: Plan, *, given_back: int) -> None:
        """Refuse a plan whose predicted peak is more than a worker has, before any of it is built; the run goes on.

        Ranks that take their memory from one pool need all of their peaks of it.

        Args:
            plan: What is to run; one without a prediction passes.
            given_back: Bytes that this process holds now and will not hold then.

        Raises:
            InfeasibleError: it is, on every rank.
        """
        at = "the check of the memory"
        predicted = plan.predicted_workers
        with self.guarded(at):
            mine = predicted.get(self.place(plan)[0] or "")
            needed = mine.peak_bytes if mine else 0.0
            pool = memory_pool() if self.device.type == "cpu" else None
            here = (needed, free_bytes(self.device), given_back, -1.0 - self.rank if pool is None else pool)
            told = self.numbers_of_all(here)
        self.agree(at, lambda: check_room(predicted, told))

    def settle(self) -> None:
        """This rank has its share of the plan: a call that fails on the only rank of a run leaves that as it is.

        Its script may catch the error and go on; among several, others may be in the middle of the same call.
        """
        self._settled = self.world == 1

    def _open_groups(self, plan: Plan) -> None:
        if self._groups is not None:
            self.groups = self._groups.open(stage.workers for stage in plan.stages)

    def open_groups(self, sets: Iterable[tuple[str, ...]]) -> None:
        """Open groups of workers that share parameters over several stages; through the host: they compare alone."""
        if self._groups is not None:
            self.groups = {**self._groups.open(sets, direct=False), **self.groups}

    def before_sums(self) -> None:
        """Where a group of this rank adds up through NCCL, wait until everything sent has left: see `reduction`."""
        if self.transport is not None and any(group.direct for group in self.groups.values()):
            self.transport.flush()

    def check_rank(self, rank: int | None) -> None:
        """Refuse a rank that the run has not; None passes."""
        if rank is not None and not 0 <= rank < self.world:
            raise UsageError(
                f"there is no rank {rank}: the run has {self.world}", hint=f"0 to {self.world - 1}, or None for all"
            )

    @property
    def world(self) -> int:
        """How many ranks the run has."""
        return len(self.ranks)

    def agree(self, at: str, attempt: Callable[[], T]) -> T:
        """Make an attempt on every rank; one that is refused on any rank is raised on all of them; the run goes on.

        Returns:
            What this rank's attempt gave; those of the others have ended too.

        Raises:
            UsageError, FormatError, InfeasibleError: this rank's own, or that of the first rank that refused.
        """
        refusal: AssignerError | None = None
        with self.guarded(at):
            try:
                made = attempt()
            except tuple(_REFUSALS.values()) as error:
                refusal = error
            refused = self.numbers(float(refusal is not None))
            first = next((rank for rank, number in enumerate(refused) if number), None)
            if first is None:
                return made
            kind = next((name for name, each in _REFUSALS.items() if isinstance(refusal, each)), "")
            mine = refusal and [kind, refusal.message, refusal.hint]
            kind, message, hint = json.loads(self.text_from(first, json.dumps(mine)))
        raise refusal or _REFUSALS.get(kind, UsageError)(f"worker:{first}: {message}", hint=hint)

    def told(self, value: Any) -> list[Any]:
        """Every rank's value, plain as JSON has it, in the ranks' order, on every rank."""
        text = json.dumps(value)
        return [json.loads(self.text_from(rank, text)) for rank in self.ranks]

    def text_from(self, rank: int, text: str) -> str:
        """One rank's text, which is not empty, on every rank; what this one has sent has left when it returns."""
        if self.transport is None:
            return text
        if rank != self.rank:
            return self.transport.get(rank).decode()
        for other in self.others:
            self.transport.put(text.encode(), other)
        self.transport.flush()
        return text

    @property
    def _is_fork(self) -> bool:
        """Whether this is a fork of the process that has joined the run: its messages would be among that one's."""
        return self._run is not None and self._run.process != os.getpid()

    @property
    def name(self) -> str:
        """This rank in messages."""
        return self.worker or f"worker:{self.rank}"

    @contextlib.contextmanager
    def guarded(self, at: str) -> Iterator[None]:
        """Tell every rank of a failure in the block, and learn of theirs.

        Raises:
            WorkerError: another rank failed; the message has its error.
            UsageError: this process has left the run, or is a fork of the one that is in it.
        """
        if why := self._why_left:
            raise UsageError(f"this pipeline has left its run: {why}", hint="make a new one")
        if self._is_fork and self.world > 1:
            raise UsageError(
                f"this process is a fork of {self.name}, which alone has its part in the run",
                hint="have the rank itself make the call; a fork may use what it was handed, as tensors",
            )
        self.at = at
        before = None if self._run is None else self._run.begin(self)
        try:
            yield
        except LostConnectionError as error:
            assert self._run is not None
            failure = self._run.lost(error, str(self.at))
            raise failure.to_error(traced=not self._run.watch.printed) from None  # the cause says it all
        except BaseException as error:
            if not self._settled:
                self.fail(str(self.at), error)
            elif self.on_leaving is not None:
                _noted(str(self.at), error, self.name)
                self.on_leaving()
            raise
        finally:
            if self._run is not None:
                self._run.rest(before)

    @property
    def _why_left(self) -> str:
        """Why this pipeline is in its run no more; empty: it is."""
        return self._left or ("" if self._run is None else self._run.why)

    def blame(self, rank: int, error: UsageError) -> None:
        """Tell the others of an error that a rank has made, though this one has found it."""
        if self._run is not None:
            error.add_note(f"made by worker:{rank}")
            self._run.watch.report(str(self.at), error, f"worker:{rank}")

    def fail(self, at: str, error: BaseException) -> None:
        """This rank failed: tell the others, and leave the run, with all other pipelines.

        On the only rank of a run these go on: nobody is in the middle of a call of theirs.
        """
        if self._why_left or self._is_fork:
            return
        at = _noted(at, error, self.name)
        if self._run is None or (self.world == 1 and self._run.is_shared):
            self._leave(f"it failed in {at}: {words_of(error)}")
        else:
            self._run.fail(at, error)

    def number_from(self, rank: int, number: float) -> float:
        """One rank's number, on every rank; what this one has sent has left when it returns."""
        return self.numbers_of({rank: [number]})[rank][0]

    def numbers_of(self, given: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        """As `tensors_of`, of numbers: as many everywhere."""
        held = {rank: torch.tensor(each, dtype=torch.float64, device="cpu") for rank, each in given.items()}
        return {rank: each.tolist() for rank, each in self.tensors_of(held).items()}

    def tensors_of(self, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Some ranks' small CPU tensors, on every rank, in the order given; what this one has sent has left behind it.

        Args:
            given: By rank, the same ranks and shapes everywhere; the values of others do not count.
        """
        held = dict(given)
        if self.transport is not None:
            for target in self.others if self.rank in held else ():  # first: nobody waits for another one's send
                self.transport.put_tensor(held[self.rank], target)
            for rank in (each for each in given if each != self.rank):
                held[rank] = self.transport.get_tensor(rank, tuple(held[rank].shape), held[rank].dtype)
            self.transport.flush()
        return held

    def begin_call(
        self, calls: tuple[ToldCall, ...], inputs: TreeSums | None = None, targets: TreeSums | None = None
    ) -> CallSums:
        """A comparison of which other ranks can ask from now on: what this one calls, or makes; rank 0 calls it too.

        Raises:
            UsageError: rank 0 calls a method of another pipeline.
        """
        before = self.calls[-1].number if self.calls else 0
        sums = CallSums(before + 1, calls, inputs, targets)
        self.calls.append(sums)
        if self._run is not None:
            self._run.take_turn(self, sums)
        return sums

    def ask_calls(self, number: int) -> dict[int, tuple[CallRecord, ...]]:
        """The last calls that the other ranks have compared, or are about to; of those that answer within seconds."""
        return {} if self._run is None else called(self._run.watch.store, self.others, number)

    def numbers(self, number: float) -> list[float]:
        """Every rank's number, in the ranks' order, on every rank; this rank's has left when it returns."""
        return [found for (found,) in self.numbers_of_all([number])]

    def numbers_of_all(self, mine: Sequence[float]) -> list[list[float]]:
        """As `numbers`, of several of each rank: as many everywhere."""
        return [*self.numbers_of(dict.fromkeys(self.ranks, mine)).values()]

    @property
    def ranks(self) -> range:
        """All ranks of the run."""
        return range(1 if self._run is None else self._run.ranks)

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in self.ranks if rank != self.rank]

    def stop_requested(self, signals: Sequence[str], grace_s: float) -> bool:
        """Whether one of the signals has come to any rank; see `Pipeline`. The first call has each rank note them.

        Raises:
            UsageError: signals that cannot be noted, or others than in the first call.
        """
        at = "the question whether to stop"
        if self._stop is None:
            self._stop = self.agree(at, lambda: StopSignals(signals, grace_s))
            try:
                self.agree(at, self._stop.install)
            except UsageError:
                self._stop.close()
                self._stop = None
                raise
        if (self._stop.names, self._stop.grace_s) != (tuple(signals), grace_s):
            raise UsageError(
                f"stop_requested was first called with signals={self._stop.names}, grace_s={self._stop.grace_s:g}",
                hint="they count until the end: give the same in every call",
            )
        with self.guarded(at):
            return any(self.numbers(float(self._stop.requested)))

    def close(self, *, check: Callable[[], None] | None = None) -> None:
        """Leave the run, together with the other ranks; one that has failed leaves alone."""
        if self._is_fork:
            return  # its rank is in the run, over the same connections
        goodbye: Callable[[], None] | None = None
        if self._run is not None and self._run.ends_together and not self._why_left:
            with self.guarded("the end of the run"):
                if check is not None:
                    check()
                self._run.meet()
            goodbye = self._run.farewell()
        self._leave("it was closed")
        if goodbye is not None:
            goodbye()  # the rank that hosts the job's store must not be gone before the others are done

    def _leave(self, why: str) -> None:
        if self._run is not None:
            self._run.leave(self, why)
        else:
            with self.leaving(why, failed=False):
                pass

    @contextlib.contextmanager
    def leaving(self, why: str, *, failed: bool) -> Iterator[None]:
        """Drop an unfinished step, and behind the block stop this pipeline's threads and leave the groups of its own.

        Where the run has failed, what is under way through NCCL ends.
        """
        if failed and self.transport is not None and self.transport.direct is not None:
            self.transport.direct.abort()
        if failed and self._groups is not None:
            self._groups.hang_up()
        if self._stop is not None:
            self._stop.close()
        if self.on_leaving is not None:
            self.on_leaving()
        yield
        if self.transport is not None:
            self._left = why
            self.transport.close(failed=failed)
        if self._groups is not None:
            self._groups.close()
            self.groups = {}


def check_room(predicted: Mapping[str, WorkerPrediction], told: Sequence[Sequence[float]]) -> None:
    """Refuse a plan of which a worker needs more than its capacity, or the ranks of one pool more than that has left.

    Args:
        predicted: The plan's prediction of each worker.
        told: Of each rank, in bytes: its peak, what is free, what it will have given back; and its pool of memory.

    Raises:
        InfeasibleError: it does not fit.
    """
    off = "check_memory=False tries it all the same"
    for each in predicted.values():
        if not each.fits:
            raise InfeasibleError(
                f"{each.worker}: the plan needs {fmt.size(each.peak_bytes)} at its peak, and the worker has"
                f" {fmt.size(each.capacity_bytes)} for it",
                hint=f"assigner solve finds a plan that fits; {off}",
            )
    for pool in {each[3]: None for each in told}:  # in the order of ranks
        peaks, free, given = zip(*(each[:3] for each in told if each[3] == pool), strict=True)
        if sum(peaks) > (left := min(free) + sum(given)):
            names = [f"worker:{rank}" for rank, each in enumerate(told) if each[3] == pool and each[0]]
            when = "their peaks" if len(names) > 1 else "its peak"
            raise InfeasibleError(
                f"{' and '.join(names)}: the plan needs {fmt.size(sum(peaks))} at {when}, and {fmt.size(left)} are free"
                " there now",
                hint=f"free memory there, or profile and solve again; {off}",
            )


def _noted(at: str, error: BaseException, name: str) -> str:
    """Where an error came up first: what its note says, or this, which it gets as its note."""
    begin, end = "in ", f" on {name}"
    for note in getattr(error, "__notes__", ()):
        if note.startswith(begin) and note.endswith(end):
            return str(note.removeprefix(begin).removesuffix(end))
    error.add_note(f"{begin}{at}{end}")
    return at
