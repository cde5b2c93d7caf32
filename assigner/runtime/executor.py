"""One step of one rank: its part of the program, action by action, with tensors.

Partitions of a stage that follow each other and keep their graphs are joined: one reads what the other has made, with
its graph, and one backward goes through all of them, as through the plain model. A partition has a graph of its own
that runs its forward again, whose backward comes in parts, or that holds tensors which forwards write:

    stage        p0  p1  p2 (runs again)  p3  p4
    backwards    p4 + p3,  p2,  p1 + p0
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from assigner.model.marking import PartitionGraph, Value
from assigner.model.marking.writing import StepStores
from assigner.runtime.compiling import compiled
from assigner.runtime.headers import Header, post_header, receive_header, send_header
from assigner.runtime.lookahead import posted_ahead
from assigner.runtime.loss import StepLoss
from assigner.runtime.microbatch import MicroBatch
from assigner.runtime.ordering import Message
from assigner.runtime.partition import ForwardPlace, PartitionRunner
from assigner.runtime.randomness import kept_generators, partition_seed, seed_device
from assigner.runtime.ranges import Ranges
from assigner.runtime.reduction import Reduction
from assigner.runtime.separability import is_known
from assigner.runtime.staging import copied_to
from assigner.runtime.staterows import kept
from assigner.schedule.orders import LETTERS, ActionKind, reduced_within
from assigner.schedule.program import Action, Payload, Program, Route, Step

if TYPE_CHECKING:
    from torch import fx

    from assigner.model.workload import Workload
    from assigner.runtime.batchnorm import DeferredStatistics
    from assigner.runtime.membership import Membership
    from assigner.runtime.outputs import BatchOutputs
    from assigner.runtime.recorder import RecordedSpan, Recorder
    from assigner.runtime.recurrence import Made
    from assigner.runtime.remat import Rematerialisation
    from assigner.runtime.state import PartitionState
    from assigner.runtime.transport import Transport

_COMPUTE = frozenset(LETTERS)

Key = tuple[Value, int]


@dataclass(frozen=True)
class _Neighbours:
    """Partitions of a stage that are joined, in the stage's order.

    Args:
        names: They; one alone is joined with none.
        readers: How many of them read a value of another one, with its graph.
    """

    names: tuple[str, ...]
    readers: Counter[Value]


@dataclass
class _Step:
    """What a step holds between its actions.

    Args:
        number: The batch's number in training.
        micro_batches: The batch, cut.
        places: Their numbers in the whole batch.
        leaves: The values that partitions of this rank read, by value and micro-batch; their gradients are in `.grad`.
        readers: How many backwards of this rank still need a leaf.
        gradients: Gradients that came from other ranks.
        outbox: What the last forward made for others.
        joined: By stage and micro-batch, the stage's partitions as its forward has joined them.
        reduction: Adds up the gradients of stages that several workers share; None: not before the step's end.
        shapes: Of what this rank has sent, where shapes depend on data; the gradients have the same.
    """

    number: int
    micro_batches: Sequence[MicroBatch]
    places: Sequence[int]
    leaves: dict[Key, torch.Tensor] = field(default_factory=dict)
    readers: Counter[Key] = field(default_factory=Counter)
    gradients: dict[Key, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    outbox: dict[Key, torch.Tensor] = field(default_factory=dict)
    joined: dict[tuple[int, int], list[_Neighbours]] = field(default_factory=dict)
    shapes: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    reduction: Reduction | None = None


class Executor:
    """Runs the actions of one worker.

    Args:
        graph: The model's partitions.
        modules: The forwards of this worker's partitions, in its order.
        member: This process in the run: it carries the messages, and knows what is being done.
        workload: The loss and the seed.
        remat: What keeps no graph and runs its forward again.
        statistics: Of BatchNorm modules.
        states: What forwards change beside their outputs, by partition; None: nothing is trained.
        carried: The values that are state of the next batch.

    Attributes:
        made: The state that the last batch's forwards made for the next batch.
        recorder: Notes what is done, while a trace is made.
        stores: What the forwards store once a step.
        trains: There are backwards.
    """

    trains = True

    def __init__(
        self,
        graph: PartitionGraph,
        modules: Mapping[str, fx.GraphModule],
        member: Membership,
        workload: Workload,
        *,
        remat: Rematerialisation,
        statistics: DeferredStatistics,
        states: Mapping[str, PartitionState] | None = None,
        carried: frozenset[Value] = frozenset(),
    ) -> None:
        self.graph, self.member = graph, member
        self.carried = carried
        self.made: Made = {}
        self.seed, self.device = workload.seed, member.device
        self.loss = StepLoss(workload, graph, self.device, training=self.trains)
        self.statistics = statistics
        self.states, self.stores = states or {}, StepStores()
        self.runners = {name: self._runner(module, name, remat, workload) for name, module in modules.items()}
        self.recorder: Recorder | None = None
        self.step: _Step | None = None
        self._learnt: Program | None = None
        self._readers: Counter[Key] = Counter()
        self._finished: set[int] = set()
        self._reducing: frozenset[Step] = frozenset()
        self._in_parts: frozenset[tuple[int, int]] = frozenset()
        self._sent: frozenset[Key] = frozenset()
        self._neighbours: dict[tuple[str, ...], _Neighbours] = {}

    def _runner(
        self, module: fx.GraphModule, name: str, remat: Rematerialisation, workload: Workload
    ) -> PartitionRunner:
        piece = self.graph.piece[name]
        gradients = self.graph.output_gradients(piece)
        finish = self._finish if piece is self.graph.last else None
        differentiates = any(value.partition and self.graph.values[value].gradient for value in piece.reads)
        return PartitionRunner(
            piece, module, self.device, name in remat.partitions, gradients, finish,
            run=compiled(module, name, workload.compile), keep_last=remat.keeps_last, statistics=self.statistics,
            state=self.states.get(name), stores=self.stores, differentiates=differentiates,
        )  # fmt: skip

    @property
    def transport(self) -> Transport:
        """To the other ranks; only asked for where there are some."""
        assert self.member.transport is not None
        return self.member.transport

    def run(
        self,
        program: Program,
        micro_batches: Sequence[MicroBatch],
        number: int,
        *,
        places: Sequence[int] | None = None,
        loss_factor: float = 1.0,
        outputs: BatchOutputs | None = None,
        reduction: Reduction | None = None,
    ) -> list[float]:
        """Run forwards and backwards of one step; gradients add up in the parameters.

        Args:
            program: What to do.
            micro_batches: The batch, cut, or some of it.
            number: The batch's number in training.
            places: Numbers of these micro-batches in the whole batch; None: they are all of it.
            loss_factor: What the loss's gradient is multiplied by.
            outputs: Where the model's outputs are kept; None: nobody wants them.
            reduction: Adds up the gradients of stages that several workers share; None: not before the step's end.

        Returns:
            Loss, weight and metrics of the micro-batches that this rank runs the last partition for; see
            `assigner.runtime.results`.
        """
        places = range(len(micro_batches)) if places is None else places
        self.step = _Step(number, micro_batches, places, reduction=reduction)
        self.made = {}
        actions = [
            action
            for action in program.actions.get(self.member.name, ())
            if action.micro_batch >= 0 or action.kind is ActionKind.REDUCE
        ]
        self._learn(program, actions)
        finished = [micro_batches[m] for m in sorted(self._finished)]
        self.loss.begin(micro_batches, places, factor=loss_factor, outputs=outputs, finished=finished)
        if self.member.transport is not None:
            self.transport.begin(program)
        ahead = self._post_ahead(actions, posted_ahead(self.graph, program, self.member.name, micro_batches))
        next(ahead, None)
        ranges = Ranges(program.plan.stages)
        for action in actions:
            if action.kind in _COMPUTE:
                next(ahead, None)
            if ranges.active:
                with ranges.of(action):
                    self._act(program, action)
            else:
                self._act(program, action)
        self.step = None
        return self.loss.numbers()

    def _learn(self, program: Program, actions: Sequence[Action]) -> None:
        """See what this rank runs of a program: of a stage that several workers share, some micro-batches."""
        if program is self._learnt:
            return
        self._learnt = program
        runs = [
            (name, action.micro_batch)
            for action in actions
            if action.kind is ActionKind.FORWARD
            for name in program.plan.stages[action.stage].partitions
        ]
        self._readers = Counter((value, m) for name, m in runs for value in self.graph.piece[name].reads)
        self._finished = {m for name, m in runs if name == self.graph.last.name}
        self._in_parts = frozenset(
            (action.stage, action.micro_batch) for action in actions if action.kind is ActionKind.BACKWARD_INPUT
        )
        self._sent = frozenset(
            (Value(action.route.partition, action.route.output), action.micro_batch)
            for action in actions
            if action.route is not None and action.kind is ActionKind.SEND
        )
        self._reducing = reduced_within(
            (action.kind, action.stage, action.micro_batch) for action in actions if action.route is None
        )

    def _post_ahead(self, actions: Sequence[Action], ahead: int) -> Iterator[None]:
        """Post the receives of the first forwards and backwards; then, at each one, those of one more.

        So a message travels while its receiver computes, and its memory exists no longer than that takes.
        """
        computed = 0
        for action in actions:
            if action.kind is ActionKind.RECEIVE:
                assert action.route is not None
                for message in self.transport.due(Message(action.route, action.micro_batch)):
                    self._post(message)
            elif action.kind in _COMPUTE:
                computed += 1
                if computed >= ahead:
                    yield

    def exchange_ties(
        self, program: Program, parameters: Mapping[int, torch.Tensor], gradients: Mapping[int, torch.Tensor]
    ) -> dict[int, list[torch.Tensor]]:
        """Send this worker's gradients of shared parameters and receive the others'.

        Args:
            program: The step's program.
            parameters: The parameter of each tie, by its number.
            gradients: Its gradient, where it has one.

        Returns:
            tie -> the gradients of all holders that have one, this one too, in the order of the workers' names.
        """
        found = {number: {self.member.name: gradients.get(number)} for number in parameters}
        routes = [
            action for action in program.actions.get(self.member.name, ()) if action.route and action.micro_batch < 0
        ]
        ranges = Ranges(program.plan.stages)
        for action in routes:
            assert action.route is not None
            self.member.at = f"the exchange of shared parameter {self.graph.ties[action.route.output].parameter!r}"
            message, tie = Message(action.route, -1), action.route.output
            span = None if self.recorder is None else self.recorder.begin(action)
            with ranges.of(action):
                if action.kind is ActionKind.SEND:
                    self._send_gradient(message, gradients.get(tie), parameters[tie], span)
                else:
                    for each in self.transport.due(message):
                        like = parameters[each.route.output]
                        self.transport.post(each, tuple(like.shape), like.dtype)
                    found[tie][action.route.source] = self.transport.receive_gradient(message, span)
        return {
            number: [gradient for _, gradient in sorted(of_worker.items()) if gradient is not None]
            for number, of_worker in found.items()
        }

    def _send_gradient(
        self, message: Message, gradient: torch.Tensor | None, like: torch.Tensor, span: RecordedSpan | None
    ) -> None:
        """Send the gradient of a tensor, or that there is none."""
        if gradient is None:
            self.transport.send_missing(message, like, span)
        else:
            self.transport.send(message, gradient, span)

    def update(self, optimizer: torch.optim.Optimizer | None, number: int) -> None:
        """The program's last action.

        Args:
            optimizer: None: nothing is applied.
            number: The update's number, by which an optimizer draws: workers that share a parameter draw the same.
        """
        self.member.at = "the optimizer's update"
        action = Action(ActionKind.UPDATE, -1, -1)
        span = None if self.recorder is None else self.recorder.begin(action)
        if optimizer is not None:
            with Ranges(()).of(action), contextlib.ExitStack() as kept:
                if not is_known(optimizer):  # torch's own draw nothing
                    kept.enter_context(kept_generators(self.device))
                    seed_device(partition_seed(self.seed, number, "the update", -1), self.device)
                optimizer.step()
        if self.recorder is not None and span is not None:
            self.recorder.end(span)

    def forget(self) -> None:
        """Drop what an unfinished step holds."""
        self.step = None
        self.loss.begin((), (), factor=1.0)
        self.statistics.forget()
        self.stores.forget()
        for runner in self.runners.values():
            runner.forget()

    def _finish(self, outputs: Sequence[Any], place: int, runs_again: bool) -> tuple[torch.Tensor, ...]:
        """What the last partition's backward starts from, made of what it returned."""
        self._hand_on(self.graph.last.name, outputs, place)
        return self.loss.of(outputs, place, runs_again=runs_again)

    def _act(self, program: Program, action: Action) -> None:
        held = () if action.stage < 0 else program.plan.stages[action.stage].partitions
        if action.kind is ActionKind.REDUCE:
            self._begin_sums(action.stage)
            return
        span = None if self.recorder is None else self.recorder.begin(action)
        if action.kind is ActionKind.FORWARD:
            self._forwards(action, held)
        elif action.kind in _COMPUTE:
            self._backwards(action, held)
        elif action.kind is ActionKind.SEND:
            self._send(action, span)
        else:
            self._receive(action, span)
        if self.recorder is not None and span is not None and action.kind in _COMPUTE:
            self.recorder.end(span)

    @property
    def _stepped(self) -> _Step:
        assert self.step is not None
        return self.step

    def _place(self, micro_batch: int) -> ForwardPlace:
        step = self._stepped
        return ForwardPlace(
            self.seed, step.number, step.places[micro_batch], micro_batch == len(step.micro_batches) - 1
        )

    def _joined(self, action: Action, held: Sequence[str]) -> list[_Neighbours]:
        """A stage's partitions, those together whose graphs are one."""
        place, found = self._place(action.micro_batch), list[list[str]]()
        can_join = self.trains and (action.stage, action.micro_batch) not in self._in_parts
        was_joining = False
        for name in held:
            joins = can_join and self.runners[name].joins(place)
            if joins and was_joining:
                found[-1].append(name)
            else:
                found.append([name])
            was_joining = joins
        return [self._neighbours_of(tuple(names)) for names in found]

    def _neighbours_of(self, names: tuple[str, ...]) -> _Neighbours:
        if names not in self._neighbours:
            reads = [value for name in names for value in self.graph.piece[name].reads]
            within = [value for value in reads if value.partition in names and self.graph.values[value].gradient]
            self._neighbours[names] = _Neighbours(names, Counter(within))
        return self._neighbours[names]

    def _forwards(self, action: Action, held: Sequence[str]) -> None:
        """Those of a stage's partitions."""
        step = self._stepped
        step.outbox.clear()
        step.joined[action.stage, action.micro_batch] = joined = self._joined(action, held)
        for neighbours in joined:
            made: dict[Value, torch.Tensor] = {}
            for name in neighbours.names:
                self._forward(self.runners[name], action.micro_batch, neighbours, made)

    def _inputs(
        self, runner: PartitionRunner, micro_batch: int, made: Mapping[Value, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """The values that a partition reads, and its numbers; `made`: by those that it is joined with."""
        step = self._stepped
        inputs = step.micro_batches[micro_batch].inputs
        reads = [
            copied_to(self.device, inputs[value.index])
            if not value.partition
            else made[value]
            if value in made
            else step.leaves[value, micro_batch]
            for value in runner.piece.reads
        ]
        return reads, [size.evaluate(inputs) for size in runner.piece.sizes]

    def _forward(
        self, runner: PartitionRunner, micro_batch: int, neighbours: _Neighbours, made: dict[Value, torch.Tensor]
    ) -> None:
        """One partition's; what it makes for those that it is joined with goes to `made`."""
        name = runner.piece.name
        self.member.at = f"forward of partition {name!r}, micro-batch {micro_batch}"
        outputs = runner.forward(self._place(micro_batch), *self._inputs(runner, micro_batch, made))
        if runner.finish is not None:
            return
        step = self._stepped
        self._hand_on(name, outputs, step.places[micro_batch])
        for index, output in enumerate(outputs):
            key = value, _ = Value(name, index), micro_batch
            within = neighbours.readers[value]
            if within:
                made[value] = output
            if key in self._sent:
                step.outbox[key] = output.detach()
            if self._readers[key] > within:
                self._keep(value, micro_batch, output)

    def _hand_on(self, partition: str, outputs: Sequence[Any], place: int) -> None:
        """Keep what is state of the next batch, as a micro-batch's first forward made it."""
        for value in self.carried:
            if value.partition == partition and (value, place) not in self.made:
                self.made[value, place] = kept(outputs[value.index])

    def _keep(self, value: Value, micro_batch: int, tensor: torch.Tensor) -> None:
        """Make a value a leaf that partitions of this rank read."""
        step, key = self._stepped, (value, micro_batch)
        step.leaves[key] = tensor.detach().requires_grad_(self.graph.values[value].gradient)
        step.readers[key] = self._readers[key]

    def _backwards(self, action: Action, held: Sequence[str]) -> None:
        """Those of a stage's partitions, or a part of them."""
        step = self._stepped
        step.outbox.clear()
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            joined = [self._neighbours_of((name,)) for name in held]
        else:
            joined = step.joined.pop((action.stage, action.micro_batch))
        reducing = (action.kind, action.stage, action.micro_batch) in self._reducing
        for neighbours in reversed(joined):
            if action.kind is ActionKind.BACKWARD_WEIGHT:
                self._backward_weight(self.runners[neighbours.names[0]], action.micro_batch)
            else:
                self._backward(action, neighbours, reducing=reducing)
            if reducing and neighbours is not joined[0]:
                # what is left has to wait for no backward, and lets messages go first
                self._begin_sums(action.stage, behind=neighbours.names[0])

    def _backward(self, action: Action, neighbours: _Neighbours, *, reducing: bool) -> None:
        """A backward through partitions that are joined, or the input part of one's.

        Args:
            action: Of the stage.
            neighbours: The partitions.
            reducing: Sums begin within it. On one device alone do nodes run in one thread, and in the order of their
                partitions; elsewhere they wait for the last of these.
        """
        micro_batch, place = action.micro_batch, self._place(action.micro_batch)
        whole = action.kind is ActionKind.BACKWARD
        first, *others = (self.runners[name] for name in neighbours.names)
        behind = dict(pairwise(neighbours.names))

        def note(name: str) -> None:
            if reducing and name in behind and self.device.type == "cpu":
                self._begin_sums(action.stage, behind=behind[name])
            part = "" if whole else "input part of the "
            self.member.at = f"{part}backward of partition {name!r}, micro-batch {micro_batch}"

        note(neighbours.names[-1])
        graphs = [runner.join(place, self._output_gradients(runner, micro_batch)) for runner in reversed(others)]
        reads, sizes = self._inputs(first, micro_batch, {}) if first.recomputes(place) else ([], [])
        first.backward(
            place, reads, sizes, self._output_gradients(first, micro_batch), split=not whole, joined=graphs, note=note
        )
        step = self._stepped
        for value in (value for runner in (first, *others) for value in runner.piece.reads):
            if value.partition and not self.graph.values[value].gradient:  # else it goes with its gradient
                key = value, micro_batch
                step.readers[key] -= 1
                if not step.readers[key]:
                    del step.leaves[key]

    def _output_gradients(self, runner: PartitionRunner, micro_batch: int) -> list[torch.Tensor | None]:
        """Of a partition's outputs, from where it is not joined with their readers."""
        if runner.finish is not None:
            return [self.loss.gradient() for _ in runner.gradients]
        return [self._gradient(Value(runner.piece.name, n), micro_batch) for n in range(len(runner.gradients))]

    def _backward_weight(self, runner: PartitionRunner, micro_batch: int) -> None:
        self.member.at = f"weight part of the backward of partition {runner.piece.name!r}, micro-batch {micro_batch}"
        runner.backward_weight(self._place(micro_batch))

    def _begin_sums(self, stage: int, *, behind: str | None = None) -> None:
        """Begin to add up gradients of a shared stage: all, or those to which the rest of a backward does not add."""
        if self._stepped.reduction is not None:
            self.member.at = f"the sum of the gradients of stage {stage} over its workers"
            self._stepped.reduction.begin(stage, self.recorder, behind=behind)

    def _gradient(self, value: Value, micro_batch: int) -> torch.Tensor | None:
        """The gradient of a value that this rank made: of its readers here, and of those elsewhere."""
        if not self.graph.values[value].gradient:
            return None
        step, key = self._stepped, (value, micro_batch)
        leaf = step.leaves.pop(key, None)
        parts = [] if leaf is None or leaf.grad is None else [leaf.grad]
        parts += step.gradients.pop(key, ())
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _send(self, action: Action, span: RecordedSpan | None) -> None:
        assert action.route is not None
        route, micro_batch = action.route, action.micro_batch
        value = Value(route.partition, route.output)
        self.member.at = f"the send of {_what(route)}, micro-batch {micro_batch}"
        if route.payload is Payload.GRADIENT:
            leaf = self._stepped.leaves.pop((value, micro_batch))
            self._send_gradient(Message(route, micro_batch), leaf.grad, leaf, span)
            return
        tensor = self._stepped.outbox[value, micro_batch]
        self._check_shape(value, micro_batch, tensor)
        if route.payload is Payload.ACTIVATION and self.graph.values[value].shape is None:
            self._stepped.shapes[value, micro_batch] = tuple(tensor.shape)
            send_header(self.transport, Message(route, micro_batch), Header(tuple(tensor.shape)))
        self.transport.send(Message(route, micro_batch), tensor, span)

    def _check_shape(self, value: Value, micro_batch: int, tensor: torch.Tensor) -> None:
        """The receiver works the shape out by itself: a value of another shape must not leave."""
        expected = self.graph.values[value].sizes(self._stepped.micro_batches[micro_batch].inputs)
        if expected is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"output {value.index} of partition {value.partition!r} has shape {tuple(tensor.shape)};"
                f" the captured forward says {expected}"
            )

    def _post(self, message: Message) -> None:
        route = message.route
        self.member.at = f"getting ready for {_what(route)} from {route.source}, micro-batch {message.micro_batch}"
        shape = self.graph.values[Value(route.partition, route.output)]
        sizes = shape.sizes(self._stepped.micro_batches[message.micro_batch].inputs)
        if sizes is not None:
            self.transport.post(message, sizes, shape.dtype)
        elif route.payload is Payload.ACTIVATION:
            post_header(self.transport, message)

    def _receive(self, action: Action, span: RecordedSpan | None) -> None:
        assert action.route is not None
        route, micro_batch = action.route, action.micro_batch
        self.member.at = f"the receive of {_what(route)} from {route.source}, micro-batch {micro_batch}"
        message, value = Message(route, micro_batch), Value(route.partition, route.output)
        shape = self.graph.values[value]
        if shape.shape is None:
            known = self._stepped.shapes.get((value, micro_batch))
            self.transport.post(message, known or receive_header(self.transport, message).shape, shape.dtype)
        if route.payload is not Payload.GRADIENT:
            self._keep(value, micro_batch, shape.laid_out(self.transport.receive(message, span)))
        elif (gradient := self.transport.receive_gradient(message, span)) is not None:
            self._stepped.gradients[value, micro_batch].append(gradient)


def _what(route: Route) -> str:
    kind = "the gradient of output" if route.payload is Payload.GRADIENT else "output"
    return f"{kind} {route.output} of partition {route.partition!r}"
