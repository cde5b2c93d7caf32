"""One step of one rank: its part of the program, action by action, with tensors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.marking import PartitionGraph, Value
from assigner.runtime.microbatch import MicroBatch
from assigner.runtime.partition import PartitionRunner, Place
from assigner.runtime.transport import Message, Transport
from assigner.schedule import Action, Kind, Payload, Program, Route

if TYPE_CHECKING:
    from torch import fx

    from assigner.runtime.membership import Membership
    from assigner.runtime.recorder import Recorder, Span
    from assigner.workload import Workload

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
_AHEAD = 2  # the receives of so many forwards and backwards to come are posted

Key = tuple[Value, int]


@dataclass
class _Step:
    """What a step holds between its actions.

    Args:
        number: The batch's number in training.
        micro_batches: The batch, cut.
        leaves: The values that partitions of this rank read, by value and micro-batch; their gradients are in `.grad`.
        readers: How many backwards of this rank still need a leaf.
        gradients: Gradients that came from other ranks.
        outbox: What the last forward made for others.
        losses: The weighted losses of the micro-batches, where the last partition runs.
    """

    number: int
    micro_batches: Sequence[MicroBatch]
    leaves: dict[Key, torch.Tensor] = field(default_factory=dict)
    readers: Counter[Key] = field(default_factory=Counter)
    gradients: dict[Key, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    outbox: dict[Key, torch.Tensor] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)


class Executor:
    """Runs the actions of one worker.

    Args:
        graph: The model's partitions.
        modules: The forwards of this worker's partitions, in its order.
        member: This process in the run: it carries the messages, and knows what is being done.
        workload: The loss and the seed.
        rematerialise: The partitions that keep no graph and run their forward again.

    Attributes:
        recorder: Notes what is done, while a trace is made.
    """

    def __init__(
        self,
        graph: PartitionGraph,
        modules: Mapping[str, fx.GraphModule],
        member: Membership,
        workload: Workload,
        *,
        rematerialise: Container[str],
    ) -> None:
        self.graph, self.member = graph, member
        self.loss, self.seed = workload.loss, workload.seed
        self.device = member.device
        self.runners = {
            name: self._runner(name, module, rematerialise=name in rematerialise) for name, module in modules.items()
        }
        self.local_readers = Counter(value for name in modules for value in graph.piece[name].reads)
        self.recorder: Recorder | None = None
        self.step: _Step | None = None

    def _runner(self, name: str, module: fx.GraphModule, *, rematerialise: bool) -> PartitionRunner:
        piece = self.graph.piece[name]
        gradients = self.graph.output_gradients(piece)
        finish = self._weighted_loss if piece is self.graph.last else None
        return PartitionRunner(piece, module, self.device, rematerialise, gradients, finish)

    @property
    def transport(self) -> Transport:
        """To the other ranks; only asked for where there are some."""
        assert self.member.transport is not None
        return self.member.transport

    def run(self, program: Program, micro_batches: Sequence[MicroBatch], number: int) -> float:
        """Run forwards and backwards of one step; gradients add up in the parameters.

        Returns:
            The step's loss where the last partition runs, else 0.
        """
        self.step = _Step(number, micro_batches)
        actions = [action for action in program.actions.get(self.member.name, ()) if action.micro_batch >= 0]
        ahead = self._post_ahead(actions)
        next(ahead, None)
        for action in actions:
            if action.kind in _COMPUTE:
                next(ahead, None)
            self._act(program, action)
        loss, self.step = math.fsum(map(float, self.step.losses)), None
        return loss

    def _post_ahead(self, actions: Sequence[Action]) -> Iterator[None]:
        """Post the receives of the first forwards and backwards; then, at each one, those of one more.

        So a message travels while its receiver computes, and its memory exists no longer than that takes.
        """
        computed = 0
        for action in actions:
            if action.kind is Kind.RECEIVE:
                self._post(action)
            elif action.kind in _COMPUTE:
                computed += 1
                if computed >= _AHEAD:
                    yield

    def exchange_ties(
        self, program: Program, gradient_of: Mapping[int, torch.Tensor]
    ) -> dict[int, list[tuple[str, torch.Tensor]]]:
        """Send this worker's gradients of shared parameters and receive the others'.

        Args:
            program: The step's program.
            gradient_of: The gradient of each tie, by its number.

        Returns:
            tie -> (worker, gradient) of every holder, this one too, in the order of the workers' names.
        """
        found = {number: [(self.member.name, gradient)] for number, gradient in gradient_of.items()}
        routes = [
            action for action in program.actions.get(self.member.name, ()) if action.route and action.micro_batch < 0
        ]
        for action in routes:
            assert action.route is not None
            self.member.at = f"the exchange of shared parameter {self.graph.ties[action.route.output].parameter!r}"
            message, mine = Message(action.route, -1), gradient_of[action.route.output]
            span = None if self.recorder is None else self.recorder.begin(action)
            if action.kind is Kind.SEND:
                self.transport.send(message, mine, span)
            else:
                self.transport.post(message, tuple(mine.shape), mine.dtype)
                found[action.route.output].append((action.route.source, self.transport.receive(message, span)))
        return {number: sorted(gradients, key=lambda pair: pair[0]) for number, gradients in found.items()}

    def update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """The program's last action."""
        self.member.at = "the optimizer's update"
        span = None if self.recorder is None else self.recorder.begin(Action(Kind.UPDATE, -1, -1))
        if optimizer is not None:
            optimizer.step()
        if self.recorder is not None and span is not None:
            self.recorder.end(span)

    def forget(self) -> None:
        """Drop what an unfinished step holds."""
        self.step = None
        for runner in self.runners.values():
            runner.forget()

    def _weighted_loss(self, outputs: Sequence[torch.Tensor], micro_batch: int) -> tuple[torch.Tensor, ...]:
        """The weighted loss of one micro-batch, from what the last partition returned."""
        cut = self._stepped.micro_batches[micro_batch]
        value = self.loss(self.graph.rebuild_output(outputs), _to_device(cut.targets, self.device))
        if not isinstance(value, torch.Tensor) or value.dim():
            given = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise UsageError(f"Workload.loss gave {given}", hint="return a tensor with one number and no dimension")
        return (value * cut.weight,)

    def _act(self, program: Program, action: Action) -> None:
        held = () if action.stage < 0 else program.plan.stages[action.stage].partitions
        span = None if self.recorder is None else self.recorder.begin(action)
        if action.kind is Kind.FORWARD:
            self._stepped.outbox.clear()
            for name in held:
                self._forward(self.runners[name], action.micro_batch)
        elif action.kind is Kind.BACKWARD:
            self._stepped.outbox.clear()
            for name in reversed(held):
                self._backward(self.runners[name], action.micro_batch)
        elif action.kind is Kind.SEND:
            self._send(action, span)
        else:
            self._receive(action, span)
        if self.recorder is not None and span is not None and action.kind in _COMPUTE:
            self.recorder.end(span)

    @property
    def _stepped(self) -> _Step:
        assert self.step is not None
        return self.step

    def _place(self, micro_batch: int) -> Place:
        return Place(self.seed, self._stepped.number, micro_batch)

    def _inputs(self, runner: PartitionRunner, micro_batch: int) -> tuple[list[torch.Tensor], list[Any]]:
        """The values that a partition reads, and its numbers."""
        step, inputs = self._stepped, self._stepped.micro_batches[micro_batch].inputs
        reads = [
            step.leaves[value, micro_batch] if value.partition else inputs[value.index].to(self.device)
            for value in runner.piece.reads
        ]
        return reads, [size.evaluate(inputs) for size in runner.piece.sizes]

    def _forward(self, runner: PartitionRunner, micro_batch: int) -> None:
        name = runner.piece.name
        self.member.at = f"forward of partition {name!r}, micro-batch {micro_batch}"
        outputs = runner.forward(self._place(micro_batch), *self._inputs(runner, micro_batch))
        if runner.finish is not None:
            self._stepped.losses.append(outputs[0])
            return
        for index, output in enumerate(outputs):
            value = Value(name, index)
            self._stepped.outbox[value, micro_batch] = output
            if self.local_readers[value]:
                self._keep(value, micro_batch, output)

    def _keep(self, value: Value, micro_batch: int, tensor: torch.Tensor) -> None:
        """Make a value a leaf that partitions of this rank read."""
        leaf = tensor.detach().requires_grad_(self.graph.values[value].gradient)
        self._stepped.leaves[value, micro_batch] = leaf
        self._stepped.readers[value, micro_batch] = self.local_readers[value]

    def _backward(self, runner: PartitionRunner, micro_batch: int) -> None:
        piece = runner.piece
        self.member.at = f"backward of partition {piece.name!r}, micro-batch {micro_batch}"
        gradients = [
            None if runner.finish else self._gradient(Value(piece.name, index), micro_batch)
            for index in range(len(runner.gradients))
        ]
        reads, sizes = self._inputs(runner, micro_batch) if runner.rematerialise else ([], [])
        runner.backward(self._place(micro_batch), reads, sizes, gradients)
        for value in piece.reads:
            if value.partition:
                self._stepped.readers[value, micro_batch] -= 1
                if not self._stepped.readers[value, micro_batch] and not self.graph.values[value].gradient:
                    del self._stepped.leaves[value, micro_batch]

    def _gradient(self, value: Value, micro_batch: int) -> torch.Tensor | None:
        """The gradient of a value that this rank made: of its readers here, and of those elsewhere."""
        if not self.graph.values[value].gradient:
            return None
        leaf = self._stepped.leaves.pop((value, micro_batch), None)
        parts = [] if leaf is None or leaf.grad is None else [leaf.grad]
        parts += self._stepped.gradients.pop((value, micro_batch), [])
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _send(self, action: Action, span: Span | None) -> None:
        assert action.route is not None
        route, micro_batch = action.route, action.micro_batch
        value = Value(route.partition, route.output)
        self.member.at = f"the send of {_what(route)}, micro-batch {micro_batch}"
        if route.payload is Payload.GRADIENT:
            leaf = self._stepped.leaves.pop((value, micro_batch))
            tensor = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        else:
            tensor = self._stepped.outbox[value, micro_batch]
            self._check_shape(value, micro_batch, tensor)
        self.transport.send(Message(route, micro_batch), tensor, span)

    def _check_shape(self, value: Value, micro_batch: int, tensor: torch.Tensor) -> None:
        """The receiver works the shape out by itself: a value of another shape must not leave."""
        expected = self.graph.values[value].sizes(self._stepped.micro_batches[micro_batch].inputs)
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"output {value.index} of partition {value.partition!r} has shape {tuple(tensor.shape)};"
                f" the captured forward says {expected}"
            )

    def _post(self, action: Action) -> None:
        assert action.route is not None
        route = action.route
        self.member.at = f"getting ready for {_what(route)} from {route.source}, micro-batch {action.micro_batch}"
        shape = self.graph.values[Value(route.partition, route.output)]
        inputs = self._stepped.micro_batches[action.micro_batch].inputs
        self.transport.post(Message(route, action.micro_batch), shape.sizes(inputs), shape.dtype)

    def _receive(self, action: Action, span: Span | None) -> None:
        assert action.route is not None
        route, micro_batch = action.route, action.micro_batch
        self.member.at = f"the receive of {_what(route)} from {route.source}, micro-batch {micro_batch}"
        tensor = self.transport.receive(Message(route, micro_batch), span)
        value = Value(route.partition, route.output)
        if route.payload is Payload.GRADIENT:
            self._stepped.gradients[value, micro_batch].append(tensor)
        else:
            self._keep(value, micro_batch, tensor)


def _what(route: Route) -> str:
    kind = "the gradient of output" if route.payload is Payload.GRADIENT else "output"
    return f"{kind} {route.output} of partition {route.partition!r}"


def _to_device(tree: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)
