"""A rank in its run: who it is, what it shares with the others, and how it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from assigner.launch.stopping import GRACE_S, SIGNALS
from assigner.runtime.callcomparison import LEAVING
from assigner.runtime.packedvalues import PackedValue, broadcast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.launch.steptimes import StepClock
    from assigner.runtime.installation import Installation
    from assigner.runtime.membership import Membership


class Participant:
    """What `Pipeline` offers of the run itself."""

    _member: Membership
    _installed: Installation
    _clock: StepClock

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._member.rank

    @property
    def worker(self) -> str | None:
        """This rank's worker, `worker:1/cpu`; None: the plan leaves this rank out."""
        return self._member.worker

    @property
    def partitions(self) -> tuple[str, ...]:
        """Names of the partitions that this rank holds."""
        return self._installed.share.partitions

    def _compare(self, call: str, at: str, *, shown: str = "") -> None:
        """All ranks make this call, or every one of them is told which does not; see `SameCall.check`."""
        with self._member.guarded(at):
            self._installed.same.check(call, shown)

    def share(self, value: Any = None, source: int = 0) -> Any:
        """A value of one rank, on every rank: what only that one knows decides what all of them do.

            if pipeline.share(clock.left() < 60 if pipeline.rank == 0 else None):
                break

        Args:
            value: On rank `source` plain values, tensors, or lists, tuples and dicts of these; ignored on the others.
            source: The rank whose value it is.

        Returns:
            The value of rank `source`, a copy on every rank; tensors are on the CPU.

        Raises:
            UsageError: it holds something else, on every rank alike; or there is no such rank.
            WorkerError: another rank failed; the message has its error.
        """
        self._member.check_rank(source)
        at = f"sharing a value of worker:{source}"
        self._compare(f"share(source={source})", at)
        packed = self._member.agree(at, lambda: PackedValue.of(value, "value") if self.rank == source else None)
        with self._member.guarded(at):
            return broadcast(self._member, source, packed).value

    def stop_requested(self, *, signals: Sequence[str] = SIGNALS, grace_s: float = GRACE_S) -> bool:
        """Whether a signal has asked any rank to stop: the same answer on every rank, at the same step.

            for batch in batches:
                pipeline.step(batch)
                if pipeline.stop_requested():
                    break

        From the first call on, until the pipeline is closed, a first signal is noted instead of ending the process.
        The same one again, more than 2 s later, ends it as usual. What the script has made of a signal itself is called
        too; one that is ignored stays ignored. `assigner run` passes signals on and waits for its ranks to end.

        Args:
            signals: Their names; the same in every call.
            grace_s: How long `assigner run` waits for the ranks to end after a signal, in seconds.

        Raises:
            UsageError: there is no such signal; other arguments than in the first call; or the first call is not made
                in the main thread.
            WorkerError: another rank failed; the message has its error.
        """
        signals = (signals,) if isinstance(signals, str) else tuple(signals)
        self._compare(f"stop_requested(signals={signals}, grace_s={grace_s})", "the question whether to stop")
        return self._member.stop_requested(signals, grace_s)

    def close(self) -> None:
        """Leave the run, together with the other ranks; one that has failed leaves alone. A `with` block does it."""
        if self.rank == 0:
            self._clock.hand_over()
        self._member.close(check=lambda: self._installed.same.check(LEAVING))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._member.fail("the training script", error)
        self.close()
