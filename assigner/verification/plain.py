"""The model as the user wrote it, trained by an ordinary loop over the same micro-batches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.model.deferred.modes import settle_mode
from assigner.model.marking.casting import casting
from assigner.model.marking.modules import forwards_called
from assigner.model.members import named_buffers, named_parameters, parameters
from assigner.runtime.batch.recurrence import state_of, with_states
from assigner.runtime.step.batchnorm import DeferredStatistics
from assigner.runtime.step.loss import GraphlessEvaluationError, one_number, wants_graph
from assigner.runtime.step.outputs import Part, join
from assigner.runtime.step.results import StepMetrics, exact_sum
from assigner.usercode import user_code
from assigner.verification.comparing import HeardLoss, Item, held_items
from assigner.verification.exercise import ComparableDraws, SideGenerators

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.model.workload import StatePlace
    from assigner.runtime.batch.microbatch import MicroBatch
    from assigner.verification.exercise import Exercise


class PlainModel:
    """The plain side of the comparison.

    Its BatchNorm statistics move as those of a pipeline do, once a step: that difference is meant, and documented.

    Args:
        exercise: What to train on.
        generators: Seed of Python's and NumPy's generators.
        nudged: Every parameter is off by one unit in the last place: what a difference of rounding grows to.

    Attributes:
        model: The model.
        per_micro_batch: Names of the buffers that moved in a later micro-batch of the first step, too.
        failed: It has raised an error.
        unevaluated: In words, why it cannot be evaluated, once that was tried; empty: it can.
        epsilon: The relative step between neighbouring numbers of the narrowest type that the first batch was last
            computed in.

    Raises:
        UsageError: the builder, the optimizer, the forward or the loss failed; the message has its line.
    """

    def __init__(self, exercise: Exercise, *, generators: int = 1, nudged: bool = False) -> None:
        self._exercise, workload = exercise, exercise.workload
        self._generators = SideGenerators(generators)
        with self._generators.in_use():
            torch.manual_seed(workload.seed)
            with user_code("Workload.model"):
                self.model = workload.model()
                settle_mode(self.model)
            if nudged:
                self.nudge(exercise.epsilon)
            self._optimizer = workload.make_optimizer(self.model.named_parameters()) if exercise.trains else None
        self._statistics = DeferredStatistics({"": self.model}, "deferred")
        self._heard = HeardLoss(exercise.own_loss())
        self._metrics = StepMetrics(exercise.own_metrics(), torch.device("cpu"))
        self._loss: float | None = None
        self._autocast = workload.autocast
        self._parameters = dict(named_parameters(self.model, remove_duplicate=False))
        self.per_micro_batch: set[str] = set()
        self.failed, self.unevaluated, self._watches = False, "", True
        self.epsilon = 0.0
        self._states: dict[tuple[bool, int], dict[StatePlace, Any]] = {}

    def train(self, step: int) -> None:
        """Forward and backward of a step's batch, micro-batch by micro-batch."""
        self._drop()
        with self._failing(), self._generators.in_use(), ComparableDraws(step), self._hooks_apart():
            self._loss = self._run(self._exercise.cut(step), trains=True)
        self._watches = False
        self._statistics.commit()

    @contextlib.contextmanager
    def _hooks_apart(self) -> Iterator[None]:
        """Call the hooks of parameters on the gradient of a whole step, as a loop without micro-batches does."""
        hooked = {each: each._backward_hooks for each in parameters(self.model) if each._backward_hooks}
        for parameter in hooked:
            parameter._backward_hooks = None
        try:
            yield
        finally:
            for parameter, hooks in hooked.items():
                parameter._backward_hooks = hooks
        for parameter, hooks in hooked.items():
            for hook in tuple(hooks.values()):
                if parameter.grad is not None and (made := hook(parameter.grad)) is not None:
                    parameter.grad = made

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def update(self) -> None:
        """Apply the gradients, and drop them."""
        assert self._optimizer is not None
        with user_code("the optimizer's step"), self._generators.in_use():
            self._optimizer.step()
        self._drop()

    def _drop(self) -> None:
        for parameter in parameters(self.model):
            parameter.grad = None

    def evaluate(self) -> None:
        """The loss over the first batch in eval mode; one that needs a graph for it has none: see `unevaluated`."""
        try:
            with torch.no_grad():
                self._loss = self._of_first_batch(self._exercise, training=False)
        except GraphlessEvaluationError as error:
            self.failed, self.unevaluated = False, f"{error}: {error.hint}"

    def figures(self, exercise: Exercise, *, training: bool, draws: int = -1) -> dict[Item, torch.Tensor | None]:
        """The loss over the first batch of an exercise, by its micro-batches, and in training mode the gradients.

        In training mode but for what sees other numbers in a micro-batch by design: BatchNorm normalises by its running
        statistics, and dropout keeps everything. Another number in `draws` is another noise.
        """
        self._drop()
        with torch.set_grad_enabled(training):
            self._loss = self._of_first_batch(exercise, training=training, draws=draws)
        items = [Item("loss", exercise.graph.last.name), *held_items(exercise.graph, "gradient")]
        found = {item: self.look(item) for item in (items if training else items[:1])}
        self._drop()
        return found

    def _of_first_batch(self, exercise: Exercise, *, training: bool, draws: int = -1) -> float:
        self._autocast = exercise.workload.autocast
        flags = {module: module.training for module in self.model.modules()}
        if training:
            for module in flags:
                module.training &= not isinstance(module, _BatchNorm)
        else:
            with user_code("the model's eval()"):
                self.model.eval()
        self._states = {key: state for key, state in self._states.items() if key[0]}  # it begins anew
        comparable = ComparableDraws(draws, drops=not training)
        try:
            with self._failing(), self._generators.in_use(), comparable, self._hooks_apart():
                return self._run(exercise.cut(0), trains=False)
        finally:
            self._autocast = self._exercise.workload.autocast
            self.epsilon = max(
                (torch.finfo(each).eps for each in comparable.types if each.is_floating_point), default=0.0
            )
            for module, flag in flags.items():
                module.training = flag

    def _run(self, cuts: Sequence[MicroBatch], *, trains: bool) -> float:
        """The loss over some micro-batches, and its backward if it is trained on."""
        self._heard.begin(listens=not trains)
        over_batch = self._exercise.workload.loss_over == "batch" and len(cuts) > 1
        made, losses = list[Any](), list[float]()
        for place, cut in enumerate(cuts):
            outputs = self._forward(place, cut, trains=trains)
            if over_batch:
                made.append(outputs)
                continue
            self._measure(outputs, cut.targets, cut.weight)
            if cut.weight:
                losses.append(self._lost(outputs, cut.targets, cut.weight))
        if over_batch:
            output = self._exercise.graph.output
            parts = [
                Part(output, pytree.tree_leaves(each), cut.rows, cut.weight)
                for each, cut in zip(made, cuts, strict=True)
            ]
            joined = pytree.tree_unflatten(join(parts), pytree.tree_structure(made[0]))
            self._measure(joined, cuts[0].targets, 1.0)
            losses.append(self._lost(joined, cuts[0].targets, 1.0))
        return exact_sum(losses)

    def _forward(self, place: int, cut: MicroBatch, *, trains: bool) -> Any:
        for norms in self._statistics.partitions.values() if trains else ():
            norms.begin(place)
        watched = named_buffers(self.model) if trains and place and self._watches else ()
        before = {name: buffer.clone() for name, buffer in watched if buffer.layout is torch.strided}
        workload = self._exercise.workload
        inputs, structure = with_states(cut.inputs, cut.structure, self._states.get((trains, place), {}))
        args, kwargs = pytree.tree_unflatten(inputs, structure)
        marked = forwards_called([self.model.get_submodule(name) for name in self._exercise.graph.marks])
        with marked, casting(self._autocast, "cpu"), user_code("the plain model's forward"):
            outputs = self.model(*args, **kwargs)
        self._states[trains, place] = {
            target: state_of(outputs, source) for target, source in (workload.carried or {}).items()
        }
        self.per_micro_batch |= {
            name for name, buffer in named_buffers(self.model) if name in before and not before[name].equal(buffer)
        }
        return outputs

    def _measure(self, outputs: Any, targets: Any, weight: float) -> None:
        """Call the metrics: they are not compared, but what is wrong with one is found."""
        with casting(self._autocast, "cpu"):
            self._metrics.begin()
            self._metrics.see(outputs, targets, weight)

    def _lost(self, outputs: Any, targets: Any, weight: float) -> float:
        """A weighted loss; where gradients are on, its backward is run."""
        try:
            with casting(self._autocast, "cpu"), user_code("Workload.loss"):
                heard = self._heard(outputs, targets)
        except UsageError as error:
            if wants_graph(error.__cause__):
                raise GraphlessEvaluationError from error
            raise
        value = one_number(heard) * weight
        if value.requires_grad:
            with user_code("the plain model's backward"):
                value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    @torch.no_grad()
    def nudge(self, epsilon: float) -> None:
        """Move every parameter by one unit in the last place, up or down; by no less than a relative step."""
        generator = torch.Generator().manual_seed(0)
        for parameter in parameters(self.model):
            if parameter.is_floating_point():
                signs = (
                    torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
                )
                unit = max(epsilon, torch.finfo(parameter.dtype).eps)
                parameter.mul_(1 + signs.to(parameter.dtype) * unit)

    def submodules(self) -> dict[str, torch.nn.Module]:
        """The model's modules by name."""
        return {name: module for name, module in self.model.named_modules() if name}

    def look(self, item: Item) -> torch.Tensor | None:
        """A value as it is now; None: there is none."""
        if item.quantity == "loss":
            return None if self._loss is None else torch.tensor(self._loss, dtype=self._heard.dtype, device="cpu")
        if item.quantity == "output":
            return self._heard.leaves().get(item.name)
        if item.quantity == "gradient":
            return self._parameters[item.name].grad
        found = self._parameters.get(item.name)
        return found if found is not None else dict(named_buffers(self.model, remove_duplicate=False)).get(item.name)

    def outputs(self) -> list[str]:
        """The names of the outputs that were heard last."""
        return list(self._heard.leaves())
