"""The loss of a step, on the rank that makes the model's output: once for each micro-batch, or once over the batch.

A loss may have a memory (a running average, a count), so it is called once and no more. Where the last partition is
rematerialised its first forward calls none; the recompute does, as it needs the loss's graph. One with a memory must
come in the order of the micro-batches: it is called behind the first forward, on leaves whose gradients wait for the
recompute. Whether it has one is seen at its first call, and at each step's losses that are called late: a memory that
begins there is refused once if they came in another order.

    M = 2, GPipe                     F0    F1    B1    B0
    graph kept                       l0    l1
    rematerialised                               l1    l0
    rematerialised, with a memory    l0    l1

The loss of a micro-batch may be a constant, as where none of its rows is labelled: nothing of it has a gradient then,
and its backward runs nothing. Over the whole batch one must have some: `results` refuses.

A loss that mixes rows (contrastive, in-batch negatives) is another one for parts of a batch. Over the batch it is
computed when the last micro-batch's forward has made its outputs; it works on leaves, and their gradients wait for the
backwards of the micro-batches, which start from the outputs with them:

    over the batch           o0    o1, loss(o0 o1), its gradients g0 g1    g1    g0
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.machine.generators import GeneratorStates
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.vocabulary import vocabulary_of
from assigner.model.marking import Value
from assigner.runtime.batch.microbatch import MicroBatch
from assigner.runtime.batch.variants import SINGLE_ROWS
from assigner.runtime.forward.heldtensors import HeldTensor, is_strided, on_copies
from assigner.runtime.forward.pythonvalues import has_user_code
from assigner.runtime.forward.randomness import DeviceStates, backward_seed, partition_seed, seed_device, seed_python
from assigner.runtime.messages.staging import copied_to
from assigner.runtime.step.lossgradients import GraphWantedError, LossGraph, Origin
from assigner.runtime.step.outputs import Part, join
from assigner.runtime.step.results import StepMetrics, exact_sum, without_values
from assigner.schedule.orders import warm_up

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload
    from assigner.runtime.batch.variants import VariantGroup
    from assigner.runtime.step.outputs import BatchOutputs


class _When(Enum):
    """When the loss is called of outputs that will be made again, by what its calls have shown so far."""

    UNKNOWN = "behind the first forward, and it is seen whether it keeps something"
    EARLY = "behind the first forward, for it keeps something from call to call"
    LATE = "in the recompute: it keeps nothing, which each step sees"
    WITHIN = "in the recompute: it takes gradients within the last partition's graph"


@dataclass(slots=True)
class _CutLoss:
    """The loss of one micro-batch of a step.

    Args:
        was_seen: Its outputs were, for what is made of them beside the loss.
        on_leaves: It is computed on leaves, and the micro-batch's backward starts from the outputs.
        part: Over the batch, until all are there: the leaves, and what the outputs are made of.
        gradients: Those of the outputs, for the backward; None: not yet, or no more.
        drawn: Where a backward of its own has left the generators.
        held: The loss's own tensors as its call has left them, for its backward.
    """

    cut: MicroBatch
    was_seen: bool
    on_leaves: bool = False
    part: tuple[list[Any], list[set[Value]]] | None = None
    gradients: list[torch.Tensor | None] | None = None
    drawn: tuple[DeviceStates, GeneratorStates] | None = None
    held: Sequence[HeldTensor] = ()


class StepLoss:
    """What follows the last partition's forward in every step.

    Without `training` no gradients are wanted, and no forward runs twice.

    Attributes:
        words: What is called here of the user's.
    """

    def __init__(self, workload: Workload, graph: PartitionGraph, device: torch.device, *, training: bool) -> None:
        self._workload, self._graph, self._device, self._training = workload, graph, device, training
        self._when = _When.UNKNOWN
        self._written: list[torch.Tensor] | None = None  # in place, by the loss; None: none was called
        self._is_users = (
            has_user_code(workload.loss)
            if isinstance(workload.loss, torch.nn.Module)
            else not (getattr(workload.loss, "__module__", None) or "").startswith("torch.")
        )
        self._metrics = StepMetrics(workload.metrics or {}, device)
        self.words = "the loss and the metrics" if workload.metrics else "the loss"
        for each in (workload.loss, *(workload.metrics or {}).values()):
            if isinstance(each, torch.nn.Module):  # its class weights, which no training script leaves on the CPU
                each.to(device)
        self.begin((), (), factor=1.0)

    @functools.cached_property
    def _looks(self) -> bool:
        """Whether the loss's code may ask for a tensor's gradient, or for its node in a graph."""
        if not self._is_users:
            return False
        words = vocabulary_of((), others=[self._workload.loss])
        return words.names is None or words.gradients or "grad_fn" in words.names

    def begin(
        self,
        micro_batches: Sequence[MicroBatch],
        places: Sequence[int],
        *,
        factor: float,
        number: int = 0,
        outputs: BatchOutputs | None = None,
        finished: Sequence[MicroBatch] = (),
    ) -> None:
        """A step comes next; what an unfinished one left is dropped.

        Of the micro-batches this rank runs the last partition for those that are `finished`.
        """
        was_seen = outputs is None and not self._workload.metrics  # nothing else is made of them
        self._cuts = {n: _CutLoss(cut, was_seen) for n, cut in zip(places, micro_batches, strict=True)}
        self._over_batch = self._workload.loss_over == "batch" and len(micro_batches) > 1
        self._factor, self._number, self._finished = factor, number, finished
        self._values: dict[int, torch.Tensor] = {}  # of the losses, by micro-batch, as they were called
        self._differentiable = 0  # of these losses
        self._before: Memento | None = None
        self._kept = outputs
        self._metrics.begin()

    @property
    def _is_early(self) -> bool:
        return self._when in (_When.UNKNOWN, _When.EARLY)

    def gradients(self, place: int) -> list[torch.Tensor | None]:
        """Of what `of` gave for a micro-batch: its backward starts with them, and they are let go.

        An output that the loss does not read has none: a Function of the user's would make zeros of nothing.
        """
        one = self._cuts[place]
        if not one.on_leaves:
            return [self._gradient()]
        found, one.gradients = one.gradients, None
        assert found is not None
        return found

    def go_on(self, place: int) -> None:
        """Have the generators be where the backward of a micro-batch's loss has left them, if it ran by itself."""
        one = self._cuts[place]
        for each in one.drawn or ():
            each.put_back()
        one.drawn = None

    def _gradient(self) -> torch.Tensor:
        """The loss's own; in float64, which autograd casts to the loss's type."""
        return torch.full((), self._factor, dtype=torch.float64, device=self._device)

    def numbers(self) -> list[float]:
        """What the step's result is made of, of the micro-batches that end here; see `results`."""
        values = [*self._values.values()]
        alike = len({(each.dtype, each.device) for each in values}) == 1
        numbers = torch.stack(values).tolist() if alike else map(float, values)  # a GPU is waited for once
        loss, weight = exact_sum(numbers), exact_sum(cut.amount for cut in self._finished)
        return [loss, self._differentiable, weight, *self._metrics.numbers()]

    def of(self, outputs: Sequence[Any], place: int, *, runs_again: bool, origin: Origin) -> tuple[torch.Tensor, ...]:
        """What the backward of a micro-batch starts from: its loss, or its outputs where their gradients are known.

        Args:
            outputs: What the last partition returned, copied where others have it too.
            place: The micro-batch's number in the batch.
            runs_again: This forward keeps no graph, and will run again before its backward.
            origin: Of what the outputs were made.

        Raises:
            UsageError: the loss is no single number, or is over the batch and an output has no rows.
        """
        one = self._cuts[place]
        if not one.was_seen:
            self._see(outputs, place, one)
        if self._kept is not None and self._kept.alone:
            return (torch.zeros((), device=self._device),)
        if self._over_batch:
            self._keep_part(outputs, one, origin)
            return _tensors(outputs)
        if runs_again:
            if self._is_early and len(self._cuts) > 1:
                self._ahead(outputs, place, one, origin)
            return (torch.zeros((), device=self._device),)
        if one.on_leaves:
            return _tensors(outputs)
        if not one.cut.weight:  # it may be 0 / 0
            return (torch.zeros((), device=self._device),)
        if not self._is_early and self._before is None and self._is_users:
            self._before = Memento((), [self._workload.loss])
        value = self._with_a_graph(outputs, place, one, origin) * one.cut.weight
        self._values[place] = value.detach()
        if self._before is not None and len(self._values) == sum(1 for each in self._finished if each.weight):
            self._check_order(self._before)
        return (value,)

    def _with_a_graph(self, outputs: Sequence[Any], place: int, one: _CutLoss, origin: Origin) -> torch.Tensor:
        """The loss of a micro-batch, whose graph may have saved tensors that the next one's writes in place.

        Each call works on copies of them, and the backward finds them as its own call left them: see `held`.
        """
        is_first = self._training and self._is_users and len(self._cuts) > 1 and self._written is None
        memory = Memento((), [self._workload.loss]) if is_first else None
        if self._written:
            on_copies(self._written)
        own = LossGraph(origin, outputs, weight=one.cut.weight, looks=self._looks)
        value = self._value(self._graph.rebuild_output(outputs), one.cut.targets, place, own)
        if memory is not None:
            self._written = [*filter(is_strided, memory.moved())]
        if self._written:
            one.held = [HeldTensor.of(each) for each in self._written]
        return value

    def held(self, place: int) -> Sequence[HeldTensor]:
        """The loss's own tensors as the call for a micro-batch left them, for its backward."""
        return self._cuts[place].held

    def _check_order(self, before: Memento) -> None:
        """All losses of a step are called: see whether a memory has begun among those that were called late."""
        if not before.has_changed():
            return
        is_within, in_order = self._when is _When.WITHIN, [*self._values] == sorted(self._values)
        if not is_within:
            self._when = _When.EARLY
        if is_within and not in_order:  # it may well have kept something from its first call on, behind such a gradient
            raise self._takes_and_keeps()
        if not in_order:
            raise UsageError(
                "Workload.loss begins to keep something from call to call in a step that has called it for"
                f" micro-batches {', '.join(map(str, self._values))} in this order, as partition"
                f" {self._graph.last.name!r} is rematerialised",
                hint="have it keep something from its first call on, as a count of its calls; or"
                f" assigner.partition(..., rematerialise='never') for {self._graph.last.name!r}, or one micro-batch",
            )

    def _see(self, outputs: Sequence[Any], place: int, one: _CutLoss) -> None:
        """What is made of outputs beside the loss, once, and before the loss may write there."""
        one.was_seen, cut = True, one.cut
        if self._kept is not None:
            self._kept.keep(self._graph, outputs, place, cut)
            if self._kept.alone:
                return
        if self._workload.metrics and not self._over_batch:
            self._measure(self._graph.rebuild_output(outputs), cut.targets, cut.weight, place)

    def _measure(self, output: Any, targets: Any, weight: float, place: int) -> None:
        if self._workload.metrics:
            seed = partition_seed(self._workload.seed, self._number, "the metrics", place)
            self._metrics.see(output, _given(targets, self._device, copied=True), weight, seed)

    def _value(self, output: Any, targets: Any, place: int, own: LossGraph) -> torch.Tensor:
        """The user's loss; what it draws from Python's and NumPy's generators is the same under every plan."""
        if self._is_users:
            seed_python(partition_seed(self._workload.seed, self._number, "the loss", place))
        try:
            given = _given(targets, self._device, copied=self._is_users)
            if self._is_users:
                own.add_batch(targets, given)
                value = own.call(self._workload.compute_loss, output, given)
            else:
                value = self._workload.compute_loss(output, given)
        except RuntimeError as error:
            if "same device" in str(error):
                raise UsageError(
                    f"the loss computes with a tensor that is not where the outputs are, on {self._device}: {error}",
                    hint="which worker computes it is for the plan to say: move what the loss holds there,"
                    " `weight.to(outputs.device)`; or give it as an nn.Module with buffers",
                ) from error
            if wants_graph(error):
                raise GraphlessEvaluationError from error
            if re.search(r"\bmeta\b", str(error)) is None:
                raise
            raise without_values("the loss") from error
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise without_values("the loss")
        found = one_number(value)
        self._differentiable += found.requires_grad
        return found

    def _keep_part(self, outputs: Sequence[Any], one: _CutLoss, origin: Origin) -> None:
        """Keep a micro-batch's outputs for the loss over the batch; its backward starts from them."""
        if not one.on_leaves:
            one.on_leaves = True
            made_of = origin.made_of() if self._is_users and self._training else []
            one.part = [self._leaf(output) for output in outputs], made_of
            if all(each.part is not None for each in self._cuts.values()):
                self._over_the_batch(origin)

    def _ahead(self, outputs: Sequence[Any], place: int, one: _CutLoss, origin: Origin) -> None:
        """Compute the loss of outputs that will be made again, in the order of the micro-batches; learn if it must."""
        cut = one.cut
        if not cut.weight:
            return
        memory = Memento((), [self._workload.loss]) if self._when is _When.UNKNOWN else None
        leaves = {id(output): self._leaf(output) for output in outputs}  # one that is there twice is one
        copies = {key: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for key, leaf in leaves.items()}
        made = [copies[id(output)] for output in outputs]  # a loss may write there
        own = LossGraph(
            origin,
            made,
            elsewhere="",
            weight=cut.weight,
            looks=self._looks,
            leaves=[[leaves[id(output)] for output in outputs]],
            made_of=lambda: [origin.made_of()],
        )
        try:
            value = self._value(self._graph.rebuild_output(made), cut.targets, place, own) * cut.weight
        except GraphWantedError:
            self._wait(memory)
            return
        self._values[place] = value.detach()
        seed = backward_seed(self._workload.seed, self._number, self._graph.last.name, place)
        seed_device(seed, self._device)
        if self._is_users:
            seed_python(seed)  # as where it is one backward with the last partition's: that goes on from there
        self._differentiate(value)
        if self._is_users:
            one.drawn = DeviceStates.now(self._device), GeneratorStates.now()
        tensors = _tensors(outputs)
        first = {id(output): n for n, output in reversed(list(enumerate(tensors)))}
        one.on_leaves = True
        one.gradients = [
            leaves[id(output)].grad if first[id(output)] == n else None for n, output in enumerate(tensors)
        ]
        if memory is not None:
            self._when = _When.EARLY if memory.has_changed() else _When.LATE

    def _wait(self, memory: Memento | None) -> None:
        """The loss takes gradients within the last partition's graph: have it called where there is that.

        `memory`: what it had before it was called; None: it is known to keep something.

        Raises:
            UsageError: what it has kept by now cannot be taken back.
        """
        if memory is None or memory.moved():
            raise self._takes_and_keeps()
        memory.restore()
        self._when = _When.WITHIN

    def _takes_and_keeps(self) -> UsageError:
        """It takes gradients, and must be called last to first; and it keeps something, and must be called in order."""
        name = self._graph.last.name
        return UsageError(
            "Workload.loss takes gradients of what the model returns by what it returns, or looks at their graph, and"
            " keeps something from call to call (a count, a list, a generator), while partition"
            f" {name!r} is rematerialised",
            hint=f"assigner.partition(..., rematerialise='never') for {name!r}; or one micro-batch",
        )

    def _differentiate(self, value: torch.Tensor) -> None:
        if value.requires_grad:
            with torch.autocast(self._device.type, enabled=False):
                torch.autograd.backward([value], [self._gradient()])

    def _leaf(self, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        return output.detach().requires_grad_(self._training and output.requires_grad)

    def _over_the_batch(self, origin: Origin) -> None:
        """Compute the loss of all outputs, and the gradients that each micro-batch's backward starts from."""
        output, first = self._graph.output, min(self._cuts)
        every = [self._cuts[place] for place in sorted(self._cuts)]
        kept = [one.part for one in every if one.part is not None]  # of all of them
        for one in every:
            one.part = None
        parts = [
            Part(output, output.filled(made), one.cut.rows, one.cut.weight)
            for one, (made, _) in zip(every, kept, strict=True)
        ]
        for index in output.made:
            leaf = parts[0].leaves[index]
            has_rows = parts[0].rows_dimension(index) is not None or output.unjoinable[index]
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not has_rows:
                raise UsageError(
                    f"the loss is over the whole batch, and an output of shape {tuple(leaf.shape)} has no rows to join"
                    " the micro-batches' along",
                    hint="return it for each row; or use one micro-batch (solve with --micro-batches 1)",
                )
        with torch.set_grad_enabled(self._training):
            whole = join(parts)
            joined = pytree.tree_unflatten(whole, output.structure)
            targets = every[0].cut.targets  # those of the whole batch
            self._measure(joined, targets, 1.0, first)
            # not from where the last of the micro-batches has left it: which that is, is for the plan to say
            seed_device(partition_seed(self._workload.seed, self._number, "the loss", first), self._device)
            own = LossGraph(
                origin,
                [whole[index] for index in output.made],
                elsewhere="graphs of micro-batches that it does not see, for it is over the batch",
                looks=self._looks,
                leaves=[made for made, _ in kept],
                made_of=lambda: [made_of for _, made_of in kept],
            )
            value = self._value(joined, targets, first, own)
        self._values[first] = value.detach()
        self._differentiate(value)
        for one, (leaves, _) in zip(every, kept, strict=True):
            one.gradients = [leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor)]


class GraphlessEvaluationError(UsageError):
    """A loss that takes gradients was called in an evaluation, which keeps no graph."""

    def __init__(self) -> None:
        super().__init__(
            "Workload.loss takes a gradient in an evaluation too, which runs under torch.no_grad(): there is no graph",
            hint="compute what needs the gradient within `if torch.is_grad_enabled():`",
        )


def wants_graph(error: BaseException | None) -> bool:
    """Whether a loss has raised an error in an evaluation for want of a graph."""
    return isinstance(error, RuntimeError) and not torch.is_grad_enabled() and "not require grad" in str(error)


def check_schedule(workload: Workload, plan: Plan, graph: PartitionGraph) -> None:
    """A loss over the batch needs the forwards of all micro-batches before the first backward.

    Raises:
        UsageError: the plan's schedule starts a backward of the last stage earlier.
    """
    if workload.loss_over != "batch":
        return
    if warm_up(plan, plan.stage_of[graph.last.name]) < plan.micro_batches:
        raise UsageError(
            f"the loss is over the whole batch, and under schedule {plan.schedule} the last stage's backwards begin"
            " before all of its forwards have run",
            hint="solve with --schedule gpipe or interleaved, or with --micro-batches 1",
        )


def check_groups(workload: Workload, groups: Sequence[VariantGroup]) -> None:
    """A loss over the batch needs all micro-batches in one program.

    Raises:
        UsageError: some of them run through another graph of the model than others, and so one after the others.
    """
    if workload.loss_over == "batch" and len(groups) > 1:
        rows = [[each.rows for each in group.micro_batches] for group in groups]
        if any(set(each) == {1} for each in rows):
            raise UsageError(
                "the loss is over the whole batch, which was cut into micro-batches of"
                f" {', '.join(map(str, itertools.chain(*rows)))} rows: one of a single row is computed by itself, and"
                " the loss needs the outputs of all at once",
                hint=SINGLE_ROWS,
            )
        raise UsageError(
            "the loss is over the whole batch, and the model's forward takes another path for some of its micro-batches"
            f" than for others (their rows: {rows[0]} and {rows[1]})",
            hint="give batches whose micro-batches are alike, or use one micro-batch (solve with --micro-batches 1)",
        )


def _tensors(outputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(output for output in outputs if isinstance(output, torch.Tensor))


def one_number(value: Any) -> torch.Tensor:
    """What a loss has given: shape ().

    Raises:
        UsageError: it is something else.
    """
    if isinstance(value, torch.Tensor) and not value.dim():
        return value
    given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise UsageError(
        f"Workload.loss gave {given}",
        hint="return a tensor with one number and no dimension, as the mean over the rows",
    )


def _given(targets: Any, device: torch.device, *, copied: bool) -> Any:
    """Targets where the outputs are; `copied`: what code of the user's writes there stays in its call.

    A micro-batch's are views of the script's own tensors, whose changes torch counts as one.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            there = copied_to(device, tensor)
            copies[id(tensor)] = there.clone() if copied and there is tensor else there
        return copies[id(tensor)]

    return copy(targets) if isinstance(targets, torch.Tensor) else pytree.tree_map_only(torch.Tensor, copy, targets)
