"""Is a model that is cut into partitions still the model that the user wrote? Two steps of both, side by side."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from assigner import formatting as fmt
from assigner.errors import UsageError
from assigner.formats.fineness import micro_batch_count
from assigner.formats.profile import Verification
from assigner.machine.cgroup import free_memory
from assigner.machine.generators import kept_python
from assigner.model.deferred.modes import left_in_eval
from assigner.model.marking.modules import batch_norms
from assigner.model.members import parameters
from assigner.runtime.forward.randomness import kept_generators
from assigner.runtime.ranks.process import settle_vector_maths
from assigner.runtime.update.building import StandInParameters, built_optimizer
from assigner.runtime.update.separability import CLOSURE_HINT, closure_words, needs_closure
from assigner.verification.comparing import Moment, differences, differing, refusal
from assigner.verification.exercise import Exercise, seed_modules
from assigner.verification.locating import find_beginning
from assigner.verification.partitions import Partitions, capture_ahead
from assigner.verification.pieces import forward_differences
from assigner.verification.plain import PlainModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload
    from assigner.verification.comparing import Difference, Item, Side

_MICRO_BATCHES = 3  # one of them is neither the first nor the last
_ROWS = 7  # cut into 3, 2 and 2: where the number of rows decides on the graph, a graph's second is the batch's third
_COPIES = 4  # of the parameters, while a side trains: they, their gradients, and two of the optimizer's state
_LEAST_SIDES = 2.5  # the plain model, its partitions, the initial values, and what is made on the way
_MOST_THREADS = 512
_SMALL_RATE = 1e-3  # of the descent in place of an optimizer that needs a closure
_FORWARDS_ALONE = (
    "the model does not fit here twice with its gradients and its optimizer: forwards were compared, and nothing is"
    " known of gradients, updates and rematerialisation; a check on a host with more memory tells"
)


def check_model(workload: Workload, graph: PartitionGraph) -> Verification:
    """Train the plain model and the captured partitions for two small steps, and evaluate both.

    In this process and on the CPU, with seven rows in three micro-batches, with and without rematerialisation. The
    partitions are run as workers of their own: they share no object and no tensor, each has an optimizer of its own,
    and values pass between them as copies. Batches of other sizes are tried where the model takes no seven rows. A
    model that does not fit into memory twice is compared in its forwards alone, one partition at a time.
    torch's settings and all generators are as before when it returns.

    Args:
        workload: What to check; its `compile` is left aside.
        graph: Its partitions.

    Raises:
        MarkingError: a value differs by more than rounding explains; the message says which, and where it begins.
        UsageError: the plain model itself fails, at any size that was tried; the message has its line.
    """
    began = time.perf_counter()
    settle_vector_maths()
    workload = replace(workload, compile=None)
    failed: tuple[int, UsageError] | None = None
    in_pieces = _LEAST_SIDES * _side_bytes(graph) > free_memory()
    few, whole = max(_ROWS, _MICRO_BATCHES * (workload.min_rows or 1)), workload.batch_size
    tried = ((few, _MICRO_BATCHES), (whole, _MICRO_BATCHES), (whole, 2), (whole, 1))
    sizes = list(
        dict.fromkeys((rows, micro_batch_count(rows, n, -(-rows // n), workload.fineness)) for rows, n in tried)
    )
    with _few_threads(len(graph.pieces)), kept_python():
        with kept_generators(torch.device("cpu")):
            mode = left_in_eval(graph.deferred) if workload.optimizer is not None else None
            workload, aside = _without_closure(workload, graph)
            aside += () if mode is None else (mode,)
        for rows, micro_batches in sizes:
            check = _Check(Exercise(workload, graph, rows, micro_batches))
            try:
                verdict = check.run_in_pieces() if in_pieces else check.run()
            except UsageError as error:
                if (rows, micro_batches) == sizes[-1] or not check.unfit:
                    raise
                failed = micro_batches, error
            else:
                if failed is not None and micro_batches == 1 < failed[0]:
                    verdict = replace(verdict, cautions=(*verdict.cautions, _uncut(failed[1])))
                return replace(verdict, cautions=(*aside, *verdict.cautions), seconds=time.perf_counter() - began)
    raise AssertionError("the last size returns or raises")


def _without_closure(workload: Workload, graph: PartitionGraph) -> tuple[Workload, tuple[str, ...]]:
    """The workload with plain descent in place of an optimizer that needs a closure, and the caution that says so.

    Losses and gradients are what such an optimizer is told, and partitions that have an optimizer each cannot have it.
    """
    if workload.loss is None or workload.optimizer is None:
        return workload, ()
    made, _ = built_optimizer(workload, StandInParameters(graph.deferred.model.named_parameters()), {})
    if not needs_closure(made):
        return workload, ()
    caution = f"{closure_words(made)}; compared with SGD in its place; {CLOSURE_HINT}"
    return replace(workload, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_SMALL_RATE)), (caution,)


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

    Attributes:
        unfit: The plain model fails with batches of this size, or cannot be captured for them.
    """

    def __init__(self, exercise: Exercise) -> None:
        self._given = exercise
        self._initial = copy.copy(exercise.graph.deferred)
        self._initial.kept = {}  # while sides are built: beside sides that train, the values would be in the way
        self._exercise = replace(exercise, graph=replace(exercise.graph, deferred=self._initial))
        self._plain: PlainModel | None = None
        self._captured = self._uncertain = False
        self._evaluates, self._unevaluated = True, ""

    @property
    def unfit(self) -> bool:
        return not self._captured or (self._plain is not None and self._plain.failed)

    def run(self) -> Verification:
        """Compare.

        Raises:
            MarkingError: a value differs.
            UsageError: the plain model fails.
        """
        cautions, alone = list(self._capture()), self._alone()
        exercise = self._exercise
        choices = (False, True) if exercise.trains else (False,)
        found = self._beside(*(functools.partial(Partitions, exercise, recomputes=each) for each in choices))
        if self._unevaluated:
            cautions.append(f"it cannot be evaluated: {self._unevaluated}")
        above = [[each for each in some if each.counts()] for some in found]
        if any(above):
            cautions += self._explained(above)
        plain = self._plain
        assert plain is not None
        moving = tuple(piece.name for piece in exercise.graph.pieces if plain.per_micro_batch & {*piece.buffers})
        for what, said in () if self._uncertain else self._of_cutting(plain):
            alone.append(what)
            cautions.append(said)
        return Verification(
            result="uncertain" if self._uncertain else "equal", exact=not any(found),
            partitions=len(exercise.graph.pieces), rows=exercise.rows, micro_batches=exercise.micro_batches,
            trained=exercise.trains, cautions=tuple(cautions), per_micro_batch=tuple(alone), moving=moving,
        )  # fmt: skip

    def run_in_pieces(self) -> Verification:
        """Compare forwards alone, with the memory of one partition at a time; raises as `run`."""
        exercise = self._given
        found = forward_differences(exercise)
        self._captured = True
        if above := [each for each in found if each.counts(each.scale * math.sqrt(each.epsilon))]:
            raise refusal(above[0], only_recomputed=False, begins=None)
        return Verification(
            result="equal", exact=not found, way="pieces", partitions=len(exercise.graph.pieces), rows=exercise.rows,
            micro_batches=exercise.micro_batches, trained=False, cautions=(_FORWARDS_ALONE,),
            per_micro_batch=tuple(self._alone()),
        )  # fmt: skip

    def _capture(self) -> Iterator[str]:
        """Capture what the steps need; what cannot be evaluated can be trained all the same."""
        refused = capture_ahead(self._exercise)
        if names := self._exercise.stored_once():
            self._exercise = self._exercise.whole()
            refused = capture_ahead(self._exercise)
            yield (
                f"the forward writes to {fmt.first_of(names)}, by itself and not by its rows: a run stores that once a"
                " step, as with a whole batch, and a plain loop at every micro-batch; compared in one micro-batch"
            )
        self._captured, self._evaluates = True, refused is None
        if refused is not None:
            yield f"it cannot be evaluated: {refused}"

    def _model(self) -> PlainModel:
        self._plain = None  # the memory of one before the next
        self._plain = PlainModel(self._exercise)
        return self._plain

    def _beside(self, *makers: Callable[[], Side], aligns: bool = True) -> list[list[Difference]]:
        """What differs between the plain model and other sides; it runs once for all where memory is ample."""
        at_once = (len(makers) + 1) * _side_bytes(self._exercise.graph) < free_memory() / 2
        return [
            found
            for group in ([makers] if at_once else [(maker,) for maker in makers])
            for found in self._differences(self._model(), [maker() for maker in group], aligns=aligns)
        ]

    def _differences(self, plain: PlainModel, others: Sequence[Side], *, aligns: bool = True) -> list[list[Difference]]:
        self._initial.kept = {}
        found = differences(self._exercise, plain, others, evaluates=self._evaluates, aligns=aligns)
        self._unevaluated = self._unevaluated or plain.unevaluated
        self._evaluates = self._evaluates and not self._unevaluated
        return found

    def _explained(self, above: Sequence[list[Difference]]) -> Iterator[str]:
        """Why differences above the floor are no reason to refuse the model, as a caution; else a MarkingError."""
        exercise = self._exercise
        again, moved = self._beside(
            functools.partial(PlainModel, exercise), functools.partial(PlainModel, exercise, nudged=True), aligns=False
        )
        if first := next((each for each in again if each.counts()), None):
            self._uncertain = True
            yield (
                f"the model as it is differs from itself in two equal runs: {first.moment}, {first.item};"
                " what it computes cannot be compared"
            )
            return
        noise = {(each.moment, each.item): each.largest for each in moved}
        recomputes, left = _first_left(above, noise)
        if not left:
            return
        (drawn,) = self._beside(functools.partial(PlainModel, exercise, generators=3))
        if any(each.counts() for each in drawn):
            plain, cut = self._model(), Partitions(exercise, recomputes=recomputes)
            for side in (plain, cut):
                seed_modules(side.submodules(), exercise.graph.marks)
            _, left = _first_left(self._differences(plain, [cut]), noise)
            if not left:
                yield (
                    "marked modules draw from Python's or NumPy's generator: a run draws other numbers there than a"
                    " plain loop; with the same numbers the two are equal"
                )
                return
        begins = find_beginning(exercise, self._model(), Partitions(exercise, recomputes=recomputes), left)
        raise refusal(left[0], only_recomputed=recomputes, begins=begins)

    def _alone(self) -> list[str]:
        """What is known to see each micro-batch by itself before anything has run."""
        workload = self._given.workload
        if not self._given.trains or workload.fineness.most(workload.batch_size) == 1:
            return []
        found = batch_norms(self._given.graph.deferred.model)
        return [] if found is None else [found]

    def _of_cutting(self, plain: PlainModel) -> Iterator[tuple[str, str]]:
        """What micro-batches change by themselves: shortly, and what that means."""
        if self._given.micro_batches < 2:
            return
        if plain.per_micro_batch:
            names = fmt.first_of(sorted(plain.per_micro_batch))
            meaning = (
                f"buffer {names} moves"
                " with every micro-batch: with several it moves as often in a step;"
                " a plan with one micro-batch moves it once"
            )
            yield f"buffer {names} moves with each", meaning
        if self._exercise.workload.loss is not None and (found := self._mixed(plain)):
            yield found

    def _mixed(self, plain: PlainModel) -> tuple[str, str] | None:
        """That a batch and its micro-batches do not give one loss and its gradients; None: they do.

        Compared in training mode, then in eval mode, which tells of a model that draws noise in training. A model that
        fails in a way of training that no step has is none to refuse. The last look is at the model as it was built:
        what takes its initial values from the first rows that it sees has had them from a micro-batch before.
        """
        if self._given.trains:
            with contextlib.suppress(UsageError):
                if found := self._exactly_mixed(lambda: plain, training=True):
                    return found
        if self._evaluates and (found := self._exactly_mixed(lambda: plain, training=False)):
            return found
        if self._given.trains and not plain.per_micro_batch:
            with contextlib.suppress(UsageError):
                return self._exactly_mixed(self._model, training=True)
        return None

    def _exactly_mixed(self, made: Callable[[], PlainModel], *, training: bool) -> tuple[str, str] | None:
        """Without autocast, whose rounding would hide what mixed rows make of a loss, if the model can do so."""
        if self._given.epsilon:
            with contextlib.suppress(UsageError):
                return self._of_parts_and_whole(made, self._given.exact(), training=training)
        return self._of_parts_and_whole(made, self._given, training=training)

    def _of_parts_and_whole(
        self, made: Callable[[], PlainModel], given: Exercise, *, training: bool
    ) -> tuple[str, str] | None:
        """Shortly what differs between micro-batches and the whole batch, and what that means.

        Where forwards change or draw something, the two may differ by that: then nothing is known. Gradients may also
        differ by rounding as large as they are, where what adds up to them cancels. `made` gives the model for each
        side: the same one, or one as it was built.
        """

        def figures(side: PlainModel, exercise: Exercise, draws: int = -1) -> Mapping[Item, torch.Tensor | None]:
            return side.figures(exercise, training=training, draws=draws)

        parts = figures(one := made(), given)
        whole = figures(other := made(), given.whole())  # behind the first: a loss may read the model built last
        epsilon = other.epsilon
        near = math.sqrt(epsilon)  # half of the digits
        found = [each for each in _apart(parts, whole) if each.largest > max(near * each.scale, epsilon)]
        if not found:
            return None
        alike = one is other
        before = (parts, whole) if alike else (figures(one, given), figures(other, given.whole()))
        again = (
            *_apart(before[0], figures(one, given)),
            *_apart(before[1], figures(other, given.whole(), draws=-2)),
        )
        if any(each.counts() for each in again):
            return None
        nudged = made()
        nudged.nudge(epsilon)
        noise = {each.item: each.largest for each in _apart(whole, figures(nudged, given.whole()))}
        first = next((each for each in found if each.counts(noise.get(each.item, 0.0))), None)
        if first is None:
            return None
        words = self._mixed_words if alike else _first_words
        return words(first, parts[first.item], whole[first.item])

    def _mixed_words(
        self, found: Difference, parts: torch.Tensor | None, whole: torch.Tensor | None
    ) -> tuple[str, str]:
        summed = self._exercise.workload.reduction == "sum"
        added = "sum" if summed else "weighted mean"
        if found.item.quantity == "gradient":
            short = f"a backward of the model mixes rows ({found.item})"
            return short, (
                f"{found.item} over a batch is off by {found.largest:.3g} from the {added} of its micro-batches',"
                f" whose losses are not off; its largest number is {found.scale:.3g}: the number of micro-batches"
                " changes what is trained; a backward mixes rows, as an Embedding's with scale_grad_by_freq, a"
                " Function's or a hook's may; one micro-batch is exact"
            )
        assert parts is not None
        assert whole is not None
        if self._exercise.workload.loss_over == "batch":
            short = "the model mixes rows"
            return short, (
                f"the loss over the outputs of all micro-batches, {float(parts):.6g}, is not that of the whole batch's,"
                f" {float(whole):.6g}: the number of micro-batches changes what is trained; {short}, as a mean over"
                " them does; one micro-batch is exact"
            )
        off = "the reduction is no sum" if summed else "Workload.weight is off"
        blamed = "its reduction is no sum" if summed else "Workload.weight does not say what it divides by"
        return f"the loss or the model mixes rows, or {off}", (
            f"the loss of a batch, {float(whole):.6g}, is not the {added} of its micro-batches' losses,"
            f" {float(parts):.6g}: the number of micro-batches changes what is trained; the loss or the model mixes"
            f" rows, or {blamed}; loss_over='batch' or one micro-batch is exact"
            f"{'' if summed else ', and of a sum over rows reduction=' + repr('sum')}"
        )


def _first_left(
    found: Sequence[list[Difference]], noise: Mapping[tuple[Moment, Item], float]
) -> tuple[bool, list[Difference]]:
    """The first list in which something is above the noise, and what is; whether it is that of the recomputes."""
    lists = ([each for each in some if each.counts(noise.get((each.moment, each.item), 0.0))] for some in found)
    return next(((bool(recomputes), left) for recomputes, left in enumerate(lists) if left), (False, []))


def _first_words(found: Difference, parts: torch.Tensor | None, whole: torch.Tensor | None) -> tuple[str, str]:
    """That batch and micro-batches differ only where they are the first that a model sees."""
    figures = "" if parts is None or whole is None or parts.dim() else f" ({float(whole):.6g}, {float(parts):.6g})"
    return "the model initialises itself from what it sees first", (
        f"{found.item} of the first batch is not that of its micro-batches{figures}, and later they agree: the model"
        " initialises itself from what it sees first, as Glow's ActNorm, data-dependent weight norm or a codebook does,"
        " and with several micro-batches that is the first of them alone; one micro-batch is exact"
    )


def _apart(ones: Mapping[Item, torch.Tensor | None], twos: Mapping[Item, torch.Tensor | None]) -> Iterator[Difference]:
    """What differs between two computations of the same values."""
    return differing(Moment("step"), ones, ones.get, twos.get)


def _uncut(error: UsageError) -> str:
    """That a model takes no part of a batch, as a caution."""
    return (
        f"with several micro-batches it fails, so it was compared in one: {error.message};"
        " Workload.max_micro_batches=1 keeps plans to one"
    )


def _side_bytes(graph: PartitionGraph) -> int:
    """Bytes that one side has while it trains, without activations: those of so few rows count little beside."""
    return sum(each.nbytes for each in parameters(graph.deferred.model)) * _COPIES
