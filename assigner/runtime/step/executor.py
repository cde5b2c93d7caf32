"""One step of one rank: its part of the program, action by action, with tensors.

Partitions of a stage that follow each other and keep their graphs are joined. A partition has a graph of its own that
runs its forward again, whose backward comes in parts, or that holds tensors which forwards write.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from assigner.model.marking import PartitionGraph, PartitionModule, Value
from assigner.model.marking.gradients import check_asked
from assigner.model.marking.writing import StepStores
from assigner.model.singleprocess import StandIns, as_rank, as_single_process
from assigner.runtime.batch.recurrence import Made, kept
from assigner.runtime.forward.compiling import compiled
from assigner.runtime.forward.heldtensors import as_they_were
from assigner.runtime.forward.randomness import kept_generators, partition_seed, seed_device, seed_python
from assigner.runtime.forward.state import PartitionState
from assigner.runtime.messages.staging import copied_to
from assigner.runtime.recording.ranges import is_profiled, range_of
from assigner.runtime.step.graphs import NOTHING, ForwardPlace, Graphs
from assigner.runtime.step.joined import Island, JoinedPartitions, island
from assigner.runtime.step.loss import StepLoss
from assigner.runtime.step.lossgradients import Origin
from assigner.runtime.step.partition import PartitionRunner
from assigner.runtime.step.stepmessages import COMPUTE, Key, StepMessages, StepValues, posted_ahead
from assigner.runtime.update.separability import is_known, step_in_parts
from assigner.schedule.orders import ActionKind, Step, reduced_within
from assigner.schedule.program import Action, Program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from assigner.model.workload import Workload
    from assigner.runtime.batch.microbatch import MicroBatch
    from assigner.runtime.forward.remat import Rematerialisation
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.recording.memory import HeapRoom
    from assigner.runtime.recording.recorder import Recorder
    from assigner.runtime.stages.reduction import Reduction
    from assigner.runtime.step.batchnorm import DeferredStatistics
    from assigner.runtime.step.outputs import BatchOutputs


_BACKWARDS = {
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "input part of the backward",
    ActionKind.BACKWARD_WEIGHT: "weight part of the backward",
}


class _At(NamedTuple):
    """What a worker is doing, in words when somebody asks: the runner knows which partition is being run."""

    what: str
    runner: PartitionRunner | JoinedPartitions
    micro_batch: int
    is_single_row: bool = False

    def __str__(self) -> str:
        told = " of one row (Workload.min_rows=2 allows none)" if self.is_single_row else ""
        return f"{self.what} of {self.runner.at}, micro-batch {self.micro_batch}{told}"


class Training(NamedTuple):
    """What a rank has of its partitions where they are trained; of forwards alone there is none."""

    remat: Rematerialisation  # which of them keep no graph and run their forwards again
    statistics: DeferredStatistics  # of their BatchNorms
    states: Mapping[str, PartitionState]  # what their forwards change beside their outputs, by partition


@dataclass(frozen=True)
class _OwnPart:
    """What a rank runs of a program: of a stage that several workers share, some micro-batches."""

    program: Program | None = None
    actions: tuple[Action, ...] = ()  # of the step's micro-batches, and the sums of gradients
    readers: Counter[Key] = field(default_factory=Counter)  # how many of its partitions read a value
    finished: tuple[int, ...] = ()  # the micro-batches that it runs the last partition for
    in_parts: frozenset[tuple[int, int]] = frozenset()  # stages and micro-batches whose backward comes in parts
    sent: frozenset[Key] = frozenset()
    reducing: frozenset[Step] = frozenset()  # the backwards in which it begins to add up gradients
    summed: frozenset[int] = frozenset()  # the stages of these

    @classmethod
    def of(cls, program: Program, worker: str, graph: PartitionGraph) -> _OwnPart:
        """That of a worker."""
        every = program.actions.get(worker, ())
        actions = tuple([each for each in every if each.micro_batch >= 0 or each.kind is ActionKind.REDUCE])
        runs = [
            (name, each.micro_batch)
            for each in actions
            if each.kind is ActionKind.FORWARD
            for name in program.plan.stages[each.stage].partitions
        ]
        reducing = reduced_within((each.kind, each.stage, each.micro_batch) for each in actions if each.route is None)
        return cls(
            program,
            actions,
            readers=Counter((value, m) for name, m in runs for value in graph.piece[name].reads),
            finished=tuple(sorted({m for name, m in runs if name == graph.last.name})),
            in_parts=frozenset((a.stage, a.micro_batch) for a in actions if a.kind is ActionKind.BACKWARD_INPUT),
            sent=frozenset(
                (Value(each.route.partition, each.route.output), each.micro_batch)
                for each in actions
                if each.route is not None and each.kind is ActionKind.SEND
            ),
            reducing=reducing,
            summed=frozenset(stage for _, stage, _ in reducing),
        )


class Executor:
    """Runs the actions of one worker, with the forwards of its partitions, in its order.

    Without `training` there are forwards alone. `carried`: the values that are state of the next batch; `room`: what
    gives freed memory back between forwards and backwards, where there is little.

    Attributes:
        messages: To and from other ranks.
        made: The state that the last batch's forwards made for the next batch.
        recorder: Notes what is done, while a trace is made.
        stores: What the forwards store once a step.
    """

    def __init__(
        self,
        graph: PartitionGraph,
        modules: Mapping[str, PartitionModule],
        member: Membership,
        workload: Workload,
        *,
        training: Training | None,
        carried: frozenset[Value],
        room: HeapRoom | None,
    ) -> None:
        self.graph, self.member, self.training = graph, member, training
        self.messages = StepMessages(graph, member)
        self.carried, self.room = carried, room
        self.made: Made = {}
        self.seed, self.device = workload.seed, member.device
        self.loss = StepLoss(workload, graph, self.device, training=training is not None)
        self.stores = StepStores()
        self.runners = dict(self._runners(modules, workload))
        self.recorder: Recorder | None = None
        self.step = StepValues()
        self._part = _OwnPart()
        self._islands: dict[tuple[tuple[str, ...], bool, bool], Island] = {}
        self._cuts: dict[tuple[int, bool, bool], list[Island]] = {}
        self._behind: dict[str, tuple[int, str]] = {}
        self._written = {id(each.state.written): each.state.written for each in self.runners.values()}.values()

    def _runners(
        self, modules: Mapping[str, PartitionModule], workload: Workload
    ) -> Iterator[tuple[str, PartitionRunner]]:
        """What runs each partition, by name."""
        graphs: Graphs = {}
        read_by = Counter(value for piece in self.graph.pieces for value in piece.reads)
        training = self.training
        for name, module in modules.items():
            piece = self.graph.piece[name]
            finish, go_on = (self._finish, self.loss.go_on) if piece is self.graph.last else (None, None)
            yield name, PartitionRunner(
                self.graph, piece, module, self.device,
                PartitionState(module) if training is None else training.states[name],
                training is not None and name in training.remat.partitions, finish, go_on,
                run=compiled(module, name, workload.compile),
                keep_last=training is not None and training.remat.keeps_last,
                statistics=None if training is None else training.statistics.partitions.get(name),
                stores=self.stores, graphs=graphs,
                shared=tuple([value in self.carried or read_by[value] > 1 for value in piece.reads]),
                handed_on=self._handed_on,
            )  # fmt: skip

    def run(
        self,
        program: Program,
        micro_batches: Sequence[MicroBatch],
        number: int,
        *,
        places: Sequence[int],
        loss_factor: float = 1.0,
        outputs: BatchOutputs | None = None,
        reduction: Reduction | None = None,
    ) -> list[float]:
        """Run forwards and backwards of one step; gradients add up in the parameters.

        The micro-batches are a batch, cut, or some of it, whose numbers in it are their `places`. Without `outputs` the
        model's are kept nowhere; without `reduction` gradients of shared stages are added up behind the step.

        Returns:
            Loss, weight and metrics of the micro-batches that this rank runs the last partition for; see
            `assigner.runtime.step.results`.
        """
        self.made = {}
        if program is not self._part.program:
            self._part = _OwnPart.of(program, self.member.name, self.graph)
            self._cuts.clear()
        actions = self._part.actions
        self.step = step = StepValues(number, micro_batches, places, self._part.readers, reduction=reduction)
        finished = [micro_batches[m] for m in self._part.finished]
        self.loss.begin(micro_batches, places, factor=loss_factor, number=number, outputs=outputs, finished=finished)
        if self.member.transport is not None:
            self.member.transport.begin(program)
        for each in self._islands.values():
            if isinstance(each.runner, JoinedPartitions):
                each.runner.state.tensors.begin_step()
        count = posted_ahead(self.graph, program, self.member.name, micro_batches)
        ahead = self.messages.post_ahead(actions, count, step)
        next(ahead, None)
        profiled = is_profiled()
        with StandIns():
            for action in actions:
                if action.kind in COMPUTE:
                    next(ahead, None)
                if profiled:
                    with range_of(action, program.plan.stages):
                        self._act(program, action)
                else:
                    self._act(program, action)
        self.step = StepValues()
        return self.loss.numbers()

    def update(
        self,
        optimizer: torch.optim.Optimizer | None,
        number: int,
        around: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """The program's last action.

        Args:
            optimizer: None: nothing is applied.
            number: The update's number, by which an optimizer draws: workers that share a parameter draw the same.
            around: What is around it, as hooks of the script; None: nothing.
        """
        self.member.at = "the optimizer's update"
        action = Action(ActionKind.UPDATE, -1, -1)
        span = None if self.recorder is None else self.recorder.begin(action)
        if optimizer is not None or around is not None:
            with self.room or NOTHING, range_of(action, ()), contextlib.ExitStack() as kept:
                if around is not None or not (optimizer is None or is_known(optimizer)):  # torch's own draw nothing
                    kept.enter_context(kept_generators(self.device))
                    seed = partition_seed(self.seed, number, "the update", -1)
                    seed_device(seed, self.device)
                    seed_python(seed)
                with as_single_process(), around or contextlib.nullcontext():
                    if optimizer is not None:
                        step_in_parts(optimizer, (each.module.parameters() for each in self.runners.values()))
        if self.recorder is not None and span is not None:
            self.recorder.end(span)

    def forget(self) -> None:
        """Drop what an unfinished step holds."""
        self.step = StepValues()
        self._behind = {}
        self.loss.begin((), (), factor=1.0)
        if self.training is not None:
            self.training.statistics.forget()
        self.stores.forget()
        self._islands.clear()
        self._cuts.clear()
        for runner in self.runners.values():
            runner.forget()

    def _finish(
        self, outputs: Sequence[Any], returned: Sequence[Any], place: int, runs_again: bool
    ) -> tuple[torch.Tensor, ...]:
        """What the last partition's backward starts from, made of what it returned."""
        if self.carried:
            self._hand_on(((Value(self.graph.last.name, n), each) for n, each in enumerate(outputs)), place)
        at, self.member.at = self.member.at, f"{self.loss.words}, micro-batch {place}"
        origin = Origin(self.graph, returned, functools.partial(self._came_in, place))
        made = self.loss.of(outputs, place, runs_again=runs_again, origin=origin)
        self.member.at = at
        return made

    def _came_in(self, place: int) -> list[tuple[Value, torch.Tensor]]:
        """What graphs of a micro-batch begin with on this rank: values that partitions read, and the model's inputs."""
        number = self.step.places.index(place)
        inputs = enumerate(self.step.micro_batches[number].inputs)
        values = [(value, leaf) for (value, of), leaf in self.step.leaves.items() if of == number]
        return values + [(Value("", n), each) for n, each in inputs if torch.is_tensor(each)]

    def _act(self, program: Program, action: Action) -> None:
        if action.kind is ActionKind.REDUCE:
            self._begin_sums(action.stage)
            return
        span = None if self.recorder is None else self.recorder.begin(action)
        if action.kind is ActionKind.FORWARD:
            self._forwards(action, program.plan.stages[action.stage].partitions)
        elif action.kind in COMPUTE:
            self._backwards(action)
        elif action.kind is ActionKind.SEND:
            self.messages.send(action, self.step, span)
        else:
            self.messages.receive(action, self.step, span)
        if self.recorder is not None and span is not None and action.kind in COMPUTE:
            self.recorder.end(span)

    def _place(self, micro_batch: int) -> ForwardPlace:
        step = self.step
        return ForwardPlace(
            self.seed, step.number, step.places[micro_batch], micro_batch == len(step.micro_batches) - 1
        )

    def _islands_of(self, action: Action, held: Sequence[str], place: ForwardPlace) -> list[Island]:
        """A stage's partitions, those together whose graphs are one."""
        can_join = self.training is not None and (action.stage, action.micro_batch) not in self._part.in_parts
        key = action.stage, can_join, place.last
        if key in self._cuts and not any(self._written):
            return self._cuts[key]
        found = list[tuple[list[str], bool]]()
        for name in held:
            joins = can_join and self.runners[name].joins(place)
            if joins and found and found[-1][1]:
                found[-1][0].append(name)
            else:
                found.append(([name], joins))
        islands = [self._island(tuple(names), action.stage, joins=joins) for names, joins in found]
        if all(self.runners[name].is_settled for name in held):
            self._cuts[key] = islands
        return islands

    def _island(self, names: tuple[str, ...], stage: int, *, joins: bool) -> Island:
        key = names, joins, stage in self._part.summed
        if key not in self._islands:
            runners = [self.runners[name] for name in names]
            entered = self._entered if stage in self._part.summed else None
            self._islands[key] = island(runners, joins=joins, carried=self.carried, entered=entered)
        return self._islands[key]

    def _forwards(self, action: Action, held: Sequence[str]) -> None:
        step, place = self.step, self._place(action.micro_batch)
        step.outbox.clear()
        step.islands[action.stage, action.micro_batch] = islands = self._islands_of(action, held, place)
        for each in islands:
            with self.room or NOTHING:
                self._forward(each, action.micro_batch, place)

    def _inputs(self, island: Island, micro_batch: int) -> tuple[list[torch.Tensor], list[Any]]:
        step = self.step
        inputs = step.micro_batches[micro_batch].inputs
        reads = [
            step.leaves[value, micro_batch] if value.partition else copied_to(self.device, inputs[value.index])
            for value in island.reads
        ]
        return reads, [size.evaluate(inputs) for size in island.sizes]

    def _forward(self, island: Island, micro_batch: int, place: ForwardPlace) -> None:
        """One island's; what others read of what it makes is kept for them, and for messages."""
        step = self.step
        is_cut = place.micro_batch > 0 or len(step.micro_batches) > 1
        is_single_row = is_cut and step.micro_batches[micro_batch].rows == 1
        self.member.at = _At("forward", island.runner, place.micro_batch, is_single_row)
        reads, sizes = self._inputs(island, micro_batch)
        if self.training is None:  # no backward says when a value has had its last reader
            step.read((value, micro_batch) for value in island.reads if value.partition)
        with as_single_process():
            outputs = island.runner.forward(place, reads, sizes)
        if isinstance(island.runner, JoinedPartitions) and island.runner.is_spent:
            self._islands.clear()  # these are not joined again
            self._cuts.clear()
        if self.carried:
            made = zip([each.value for each in island.outputs], outputs, strict=False)
            self._hand_on(made, place.micro_batch)
        for (value, gradient, joined, asked), output in zip(island.outputs, outputs, strict=False):  # then the loss
            key = value, micro_batch
            is_sent = key in self._part.sent
            if asked and self.training is not None:
                check_asked(value.partition, output, gradient=gradient, sent=is_sent)
            if is_sent:
                step.outbox[key] = output.detach()
            step.keep(key, output, differentiable=gradient and output.requires_grad, joined=joined)

    def _handed_on(self) -> Iterable[torch.Tensor]:
        """What forwards of this step have made, and others still read."""
        return self.step.leaves.values()

    def _hand_on(self, outputs: Iterable[tuple[Value, Any]], place: int) -> None:
        """Keep what is state of the next batch, as a micro-batch's first forward made it."""
        for value, output in outputs:
            if value in self.carried and (value, place) not in self.made:
                self.made[value, place] = kept(output)

    def _backwards(self, action: Action) -> None:
        step, key = self.step, (action.stage, action.micro_batch)
        step.outbox.clear()
        islands = step.islands[key]
        if action.kind is not ActionKind.BACKWARD_INPUT:  # behind that comes the weight part
            del step.islands[key]
        reducing = (action.kind, *key) in self._part.reducing
        for each in reversed(islands):
            self._behind = {name: (action.stage, behind) for name, behind in pairwise(each.names)} if reducing else {}
            with self.room or NOTHING:
                self._backward(action, each)
            self._behind = {}
            if reducing and each is not islands[0]:
                # what is left has to wait for no backward, and lets messages go first
                self._begin_sums(action.stage, behind=each.names[0])

    def _entered(self, name: str) -> None:
        """A backward has come to a partition that is joined: all behind it are done.

        On one device alone do nodes run in one thread, and in the order of their partitions; elsewhere sums wait for
        the last of these.
        """
        if name in self._behind and self.device.type == "cpu":
            at = self.member.at
            with as_rank():
                stage, behind = self._behind[name]
                self._begin_sums(stage, behind=behind)
            self.member.at = at

    def _backward(self, action: Action, island: Island) -> None:
        """A backward through an island, or a part of one's."""
        micro_batch, place = action.micro_batch, self._place(action.micro_batch)
        runner, step = island.runner, self.step
        self.member.at = _At(_BACKWARDS[action.kind], runner, place.micro_batch)
        ends = self.graph.last.name in island.names
        held = self.loss.held(place.micro_batch) if ends else ()  # by its place in the batch
        with as_they_were(held) if held else NOTHING:
            if action.kind is ActionKind.BACKWARD_WEIGHT:
                assert isinstance(runner, PartitionRunner)
                runner.backward_weight(place)
                return
            gradients = [step.gradient((value, micro_batch)) if each else None for value, each, *_ in island.outputs]
            if ends:
                gradients += self.loss.gradients(place.micro_batch)
            if isinstance(runner, JoinedPartitions):
                runner.backward(place, gradients)
            else:
                reads, sizes = self._inputs(island, micro_batch) if runner.recomputes(place) else ([], [])
                is_part = action.kind is ActionKind.BACKWARD_INPUT
                runner.backward(place, gradients, reads, sizes, split=is_part)
        # what has a gradient goes with that
        step.read((value, micro_batch) for value in island.without_gradient)

    def _begin_sums(self, stage: int, *, behind: str | None = None) -> None:
        """Begin to add up gradients of a shared stage: all, or those to which the rest of a backward does not add."""
        if self.step.reduction is not None:
            self.member.at = f"the sum of the gradients of stage {stage} over its workers"
            self.step.reduction.begin(stage, self.recorder, behind=behind)
