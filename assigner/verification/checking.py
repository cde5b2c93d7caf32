"""Is a model that is cut into partitions still the model that the user wrote? Two steps of both, side by side."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch

from assigner.cgroup import free_memory
from assigner.errors import UsageError
from assigner.profile import Verification
from assigner.verification.comparing import differences
from assigner.verification.draws import seed_modules
from assigner.verification.locating import find_beginning
from assigner.verification.partitions import Partitions, capture_ahead
from assigner.verification.plain import PlainModel
from assigner.verification.refusal import refusal
from assigner.verification.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from assigner.marking import PartitionGraph
    from assigner.verification.comparing import Difference, Moment
    from assigner.verification.observing import Item
    from assigner.workload import Workload

_ROWS = 5
_COPIES = 4  # of the parameters, while a side trains: they, their gradients, and two of the optimizer's state
_MOST_THREADS = 512

Result = Literal["equal", "uncertain"]


def check_model(workload: Workload, graph: PartitionGraph) -> Verification:
    """Train the plain model and the captured partitions for two small steps, and evaluate both.

    In this process and on the CPU, with five rows in two micro-batches, with and without rematerialisation. The
    partitions are run as workers of their own: they share no object and no tensor, each has an optimizer of its own,
    and values pass between them as copies. Batches of other sizes are tried where the model takes no five rows.
    torch's settings and all generators are as before when it returns.

    Args:
        workload: What to check; its `compile` is left aside.
        graph: Its partitions.

    Raises:
        MarkingError: a value differs by more than rounding explains; the message says which, and where it begins.
        UsageError: the plain model itself fails, at any size that was tried; the message has its line.
    """
    began = time.perf_counter()
    workload = replace(workload, compile=None)
    sizes = list(dict.fromkeys([(_ROWS, 2), (workload.batch_size, 2), (workload.batch_size, 1)]))
    with _few_threads(len(graph.pieces)):
        for rows, micro_batches in sizes:
            check = _Check(Task(workload, graph, rows, min(rows, micro_batches)))
            try:
                verdict = check.run()
            except UsageError:
                if (rows, micro_batches) == sizes[-1] or not check.unfit:
                    raise
            else:
                return replace(verdict, seconds=time.perf_counter() - began)
    raise AssertionError("the last size returns or raises")


@contextlib.contextmanager
def _few_threads(workers: int) -> Iterator[None]:
    """Torch has compute threads for each thread that computes: not more of them than a machine can bear."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, _MOST_THREADS // workers)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Check:
    """The check with batches of one size.

    Args:
        task: What to train on.

    Attributes:
        unfit: The plain model fails with batches of this size, or cannot be captured for them.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._plain: PlainModel | None = None
        self._captured = False
        self._evaluates = True

    @property
    def unfit(self) -> bool:
        return not self._captured or (self._plain is not None and self._plain.failed)

    def run(self) -> Verification:
        """Compare.

        Raises:
            MarkingError: a value differs.
            UsageError: the plain model fails.
        """
        task = self._task
        cautions = list(self._capture())
        kept, recomputed = self._compared()
        result: Result = "equal"
        exact = not kept and not recomputed
        kept, recomputed = self._above_noise([kept, recomputed])
        if kept or recomputed:
            result, caution = self._explained(kept or recomputed, recomputes=not kept)
            cautions.append(caution)
        if self._evaluates and result == "equal":
            cautions += self._of_cutting()
        return Verification(
            result=result, exact=exact, partitions=len(task.graph.pieces), rows=task.rows,
            micro_batches=task.micro_batches, trained=task.trains, cautions=tuple(cautions),
        )  # fmt: skip

    def _capture(self) -> Iterator[str]:
        """Capture what the steps need; what cannot be evaluated can be trained all the same."""
        refused = capture_ahead(self._task)
        self._captured, self._evaluates = True, refused is None
        if refused is not None:
            yield f"it cannot be evaluated: {refused}"

    def _model(self) -> PlainModel:
        self._plain = PlainModel(self._task)
        return self._plain

    def _differences(self, plain: PlainModel, others: Sequence[PlainModel | Partitions]) -> list[list[Difference]]:
        return differences(self._task, plain, others, evaluates=self._evaluates)

    def _compared(self) -> tuple[list[Difference], list[Difference]]:
        """What differs without and with rematerialisation; the plain model runs once where memory is ample."""
        task = self._task
        choices = (False, True) if task.trains else (False,)
        at_once = (len(choices) + 1) * _side_bytes(task) < free_memory() / 2
        found: list[list[Difference]] = []
        for group in [choices] if at_once else [(each,) for each in choices]:
            plain = self._model()
            found += self._differences(plain, [Partitions(task, recomputes=each) for each in group])
        return found[0], found[1] if task.trains else []

    def _above_noise(self, found: Sequence[list[Difference]]) -> list[list[Difference]]:
        """Those differences that rounding does not explain; how far it goes is measured where it may matter."""
        above = [[each for each in some if each.counts()] for some in found]
        if not any(above):
            return above
        (moved,) = self._differences(self._model(), [PlainModel(self._task, nudged=True)])
        noise: Mapping[tuple[Moment, Item], float] = {(each.moment, each.item): each.largest for each in moved}
        return [[each for each in some if each.counts(noise.get((each.moment, each.item)))] for some in above]

    def _explained(self, found: Sequence[Difference], *, recomputes: bool) -> tuple[Result, str]:
        """The result and a caution, where the plain model does not always give the same.

        Raises:
            MarkingError: it does.
        """
        task = self._task
        (again,) = self._differences(self._model(), [PlainModel(task)])
        if first := next((each for each in again if each.counts()), None):
            return "uncertain", (
                f"the plain model differs from itself in two equal runs, {first.moment}: {first.item}; what it computes"
                " cannot be compared"
            )
        (drawn,) = self._differences(self._model(), [PlainModel(task, generators=3)])
        if any(each.counts() for each in drawn):
            plain, cut = self._model(), Partitions(task, recomputes=recomputes)
            for side in (plain, cut):
                seed_modules(side.submodules(), task.graph.marks)
            (found,) = self._above_noise(self._differences(plain, [cut]))
            if not found:
                return "equal", (
                    "marked modules draw from Python's or NumPy's generator: a run draws other numbers there than a"
                    " plain loop; with the same numbers the two are equal"
                )
        begins = find_beginning(task, self._model(), Partitions(task, recomputes=recomputes), found)
        raise refusal(found[0], only_recomputed=recomputes, begins=begins)

    def _of_cutting(self) -> Iterator[str]:
        """What micro-batches change by themselves."""
        plain = self._plain
        assert plain is not None
        if self._task.micro_batches < 2:
            return
        if plain.per_micro_batch:
            names = sorted(plain.per_micro_batch)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield (
                f"buffer {names[0]!r}{more} moves with every micro-batch: with several it moves as often in a step;"
                " a plan with one micro-batch moves it once"
            )
        if self._task.workload.loss is not None:
            parts, whole = plain.eval_loss, plain.whole_loss()
            if not math.isclose(parts, whole, rel_tol=math.sqrt(plain.epsilon), abs_tol=plain.epsilon):
                yield (
                    f"the loss of a batch, {whole:.6g}, is not the weighted mean of its micro-batches' losses,"
                    f" {parts:.6g}: the number of micro-batches changes what is trained; the loss mixes rows, or"
                    " Workload.weight does not say what it divides by; one micro-batch is always exact"
                )


def _side_bytes(task: Task) -> int:
    """Bytes that one side has while it trains, without activations: those of so few rows count little beside."""
    parameters = {id(each): each for each in task.graph.deferred.model.parameters()}.values()
    return sum(each.nbytes for each in parameters) * _COPIES
