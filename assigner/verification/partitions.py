"""The captured partitions, each on a worker of its own, run by the same code as a real run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from assigner.errors import AssignerError, MarkingError, UsageError
from assigner.model.marking.cut import recut
from assigner.model.marking.domain import input_key
from assigner.runtime.batch.variants import lending_under
from assigner.runtime.forward.remat import Rematerialisation
from assigner.runtime.installation import Installation
from assigner.runtime.passes import without_training
from assigner.runtime.stages.localpartitions import UnreadState
from assigner.runtime.update.rankoptimizer import RankOptimizer
from assigner.runtime.update.scaling import GradientScaling
from assigner.usercode import user_line
from assigner.verification.comparing import HeardLoss, Item
from assigner.verification.exercise import STEPS, ComparableDraws, Exercise, SideGenerators
from assigner.verification.workers import CopyingMembership, Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.formats.plan import Plan

T = TypeVar("T")


@dataclass
class _Seat:
    """One worker: its partition with what runs it, and an optimizer over its parameters."""

    installed: Installation
    optimizer: RankOptimizer

    def train(self, exercise: Exercise, step: int) -> float:
        """Forward and backward of a step; the loss where it is computed."""
        installed, batch = self.installed, exercise.batch(step)
        with installed.member.guarded("the start of a step"):
            program, cuts = installed.begin("step", batch)
            installed.gradients.drop()
            installed.gradients.begin()
            found, _ = installed.training.run(cuts, step)
            installed.gradients.end(program, installed.executor, step)
        rank = installed.member.rank
        return found[rank][0] if rank in found else 0.0

    def update(self) -> None:
        """Apply the gradients, and drop them."""
        with self.installed.member.guarded("an update"):
            good = self.installed.gradients.ready()
            self.installed.executor.update(self.optimizer.local if good else None, 0)
            self.installed.gradients.drop()

    def evaluate(self, exercise: Exercise) -> float:
        """The loss over the first batch in eval mode."""
        self.installed.inference.carried.put(None)
        with self.installed.member.guarded("an evaluation"):
            return self.installed.evaluate("evaluate", exercise.batch(0), STEPS)


class Partitions:
    """The captured side of the comparison.

    Args:
        exercise: What to train on.
        recomputes: Every partition rematerialises.

    Raises:
        MarkingError: a partition failed where the plain model did not.
    """

    def __init__(self, exercise: Exercise, *, recomputes: bool) -> None:
        self._exercise = exercise
        self._generators = SideGenerators(2)
        self._heard = HeardLoss(exercise.own_loss())
        self._loss = 0.0
        plan, self._turns = exercise.plan(recomputes=recomputes), Turns()
        workers = [stage.worker for stage in plan.stages]
        self._members = [CopyingMembership(self._turns, workers, rank) for rank in range(len(workers))]
        with self._generators.in_use():
            seats = self._together([functools.partial(self._seat, member, plan) for member in self._members])
        self._seats = dict(zip((piece.name for piece in exercise.graph.pieces), seats, strict=True))

    def _seat(self, member: CopyingMembership, plan: Plan) -> _Seat:
        exercise, graph = self._exercise, self._exercise.graph
        workload = replace(exercise.workload, loss=self._heard, metrics=None)
        if not exercise.trains:
            workload = without_training(workload)
        scaling = GradientScaling(torch.amp.GradScaler("cpu", enabled=False), None, member)
        installed = Installation(
            workload, plan, graph, member,
            remat=Rematerialisation("plan", plan), batch_norm="deferred", trains=exercise.trains, scaling=scaling,
            unread=UnreadState(graph, member.rank),
        )  # fmt: skip
        model = graph.deferred.model.named_parameters()
        optimizer = RankOptimizer(workload, model, installed.trained)
        return _Seat(installed, optimizer)

    def submodules(self) -> dict[str, torch.nn.Module]:
        """The modules of all partitions, by their names in the model."""
        return {
            name: module
            for seat in self._seats.values()
            for held in seat.installed.share.modules.values()
            for name, module in held.named_modules()
            if name
        }

    def train(self, step: int) -> None:
        """Forward and backward of a step's batch."""
        self._heard.begin(listens=False)
        self._loss = sum(self._run(step, lambda seat: seat.train(self._exercise, step)))

    def update(self) -> None:
        """Apply the gradients, those of each partition by an optimizer of its own, and drop them.

        Raises:
            MarkingError: forwards compute with parameters that are not trained.
        """
        for seat in self._seats.values():
            try:
                seat.installed.share.check_parameters()
            except UsageError as error:
                raise MarkingError(error.message, hint=error.hint) from error
        with self._generators.in_use():
            self._together([seat.update for seat in self._seats.values()])

    def evaluate(self) -> None:
        """The loss over the first batch in eval mode."""
        self._heard.begin(listens=True)
        self._loss = self._run(-1, lambda seat: seat.evaluate(self._exercise))[0]

    def _run(self, step: int, act: Callable[[_Seat], float]) -> list[float]:
        def of(seat: _Seat) -> float:
            with ComparableDraws(step):  # of this thread alone
                return act(seat)

        with self._generators.in_use():
            return self._together([functools.partial(of, seat) for seat in self._seats.values()])

    def _together(self, bodies: list[Callable[[], T]]) -> list[T]:
        try:
            return self._turns.run(bodies)
        except AssignerError:
            raise
        except Exception as error:
            member = next((each for each in self._members if each.failed), self._members[0])
            said = (str(error).strip().splitlines() or [""])[0]
            raise MarkingError(
                f"the model trains as it is, and cut into partitions it fails in {member.at}, at {user_line(error)}:"
                f" {type(error).__name__}: {said}",
                hint="mark a larger module that contains this line",
            ) from error

    def look(self, item: Item) -> torch.Tensor | None:
        """A value as it is now; None: there is none."""
        if item.quantity == "loss":
            return torch.tensor(self._loss, dtype=self._heard.dtype, device="cpu")
        if item.quantity == "output":
            return self._heard.leaves().get(item.name)
        seat, canonical = self._seats[item.partition], self._exercise.graph.canonical
        if item.quantity == "gradient":
            return seat.installed.gradients.named().get(canonical[item.name])
        state, held = seat.installed.share.state(), seat.installed.share.held_by(item.partition)
        name = canonical.get(item.name, item.name)
        return state[name] if name in state else held.get(name)


def capture_ahead(exercise: Exercise) -> str | None:
    """Capture whatever the steps need, so that nothing is captured among them.

    Returns:
        Why the model cannot be cut in eval mode, or not for workers of its partitions' own; None: it can.

    Raises:
        MarkingError: the model cannot be cut for the micro-batches of the steps.
    """
    for step in range(STEPS if exercise.trains else 0):
        for cut in exercise.cut(step):
            if not exercise.graph.domain.admits(input_key(cut.structure, cut.inputs)):
                recut(exercise.graph, cut.structure, cut.inputs, training=True)
    try:
        graphs = [recut(exercise.graph, cut.structure, cut.inputs, training=False) for cut in exercise.cut(0)]
    except MarkingError as error:
        return error.message
    try:
        for graph in graphs:
            lending_under(exercise.plan(recomputes=False), graph, exercise.graph, training=False)
    except MarkingError as error:
        return f"on workers of their own, {error.message}; {error.hint}"
    return None
