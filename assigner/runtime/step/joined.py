"""Partitions of a stage that keep one graph: each reads what those in front of it have made, with its graph.

One forward calls them one after the other, and one backward goes through all of them, as through the plain model. What
stands around a forward and a backward is done once for all, and only what others read is looked at: Python between
kernels finds cold caches, and takes several times as long as by itself.

    stage        p0  p1  p2 (runs again)  p3  p4
    islands      p0 + p1,  p2,  p3 + p4           an island has a graph of its own
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from assigner.model.marking.gradients import check_asked
from assigner.runtime.forward.nodes import code_so_far, edge_of, hooks_so_far, is_leaf
from assigner.runtime.forward.state import LateWrites, PartitionState
from assigner.runtime.step.graphs import (
    NOTHING,
    ForwardPlace,
    Graph,
    ReadValue,
    Watched,
    check_hooks,
    check_unchanged,
    facts_of,
    unchanged_by_backward,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch.autograd.graph import Node

    from assigner.model.marking import Value
    from assigner.model.marking.domain import Size
    from assigner.runtime.step.partition import PartitionRunner


class Output(NamedTuple):
    """An output that others read."""

    value: Value
    gradient: bool  # one comes back for it
    joined: int  # so many partitions that its maker is joined with read it, with its graph
    asked: bool  # code behind it looks whether it requires a gradient


class Island(NamedTuple):
    """Partitions of a stage with one graph: one alone, or those that are joined."""

    names: tuple[str, ...]  # in the stage's order
    runner: PartitionRunner | JoinedPartitions
    reads: Sequence[Value]  # inputs of the model, and values of other partitions than these
    sizes: Sequence[Size]
    outputs: Sequence[Output]  # what others read of what they make; the last partition makes the model's output besides
    without_gradient: Sequence[Value]  # what each of them reads of others and gives no gradient back for


def island(
    runners: Sequence[PartitionRunner],
    *,
    joins: bool,
    carried: Collection[Value] = (),
    entered: Callable[[str], None] | None = None,
) -> Island:
    """Have partitions run as one.

    Args:
        runners: Theirs, in the stage's order.
        joins: Whether they have one graph together; there is one of them at most where not.
        carried: Values that are state of the next batch.
        entered: Called with the name of each that a forward or a backward comes to; None: nobody wants to know.
    """
    names, graph = tuple([each.piece.name for each in runners]), runners[0].graph
    reads = [value for each in runners for value in each.piece.reads if value.partition not in names]
    elsewhere = {value for piece in graph.pieces if piece.name not in names for value in piece.reads} | set(carried)
    outputs = list[Output]()
    for each in runners:
        within = {value: sum(value in other.piece.reads for other in runners) for value in each.makes}
        outputs += [
            Output(value, graph.values[value].gradient, within[value], graph.values[value].asked)
            for value in each.makes
            if not joins or value in elsewhere
        ]
    without_gradient = [value for value in reads if value.partition and not graph.values[value].gradient]
    sizes = tuple([size for each in runners for size in each.piece.sizes])
    once = tuple(dict.fromkeys(reads))
    runner: PartitionRunner | JoinedPartitions = runners[0]
    if joins:
        runner = JoinedPartitions(runners, once, outputs, entered)
    return Island(names, runner, once, sizes, outputs, without_gradient)


class _InTurn(NamedTuple):
    """One of the forwards that follow each other; values lie in places among those that are there by then."""

    runner: PartitionRunner
    reads: tuple[int, ...]  # the places of what it reads
    sizes: slice  # likewise of its numbers
    lent: tuple[int, ...]  # of what it reads from elsewhere, or others read elsewhere too
    watched: tuple[ReadValue, ...]  # these
    makes: slice  # the places of what it makes
    cut: tuple[int, ...]  # of what of that has no gradient though its graph may say so
    asked: tuple[int, ...]  # numbers of its outputs that code behind them looks at


class JoinedPartitions:
    """Runs partitions that are joined, as `PartitionRunner` runs one. All of them have run alone before.

    Arguments are those of `island`, and what it has made of them; `reads` are each there once.

    Attributes:
        at: Which of them is being run, in words.
        is_spent: One of them writes a tensor: they are not joined any more.
    """

    def __init__(
        self,
        runners: Sequence[PartitionRunner],
        reads: Sequence[Value],
        outputs: Sequence[Output],
        entered: Callable[[str], None] | None = None,
    ) -> None:
        self._runners, self._entered = runners, entered
        self._names = tuple([each.piece.name for each in runners])
        self.state = PartitionState.of_all([each.state for each in runners])
        self._all = f"partitions {self._names[0]!r} to {self._names[-1]!r}" if len(runners) > 1 else runners[0].at
        self.at, self.is_spent = self._all, False
        self._graphs = runners[0].graphs
        self._ending = next((each for each in runners if each.finish is not None), None)
        self._users = [each for each in runners if each.is_users]
        self._moving = [each for each in runners if each.moves_values]
        self._place: ForwardPlace | None = None  # of the backward that is under way, where code in it may draw
        self._first = 0  # the partition to which it has come
        self._unseen = list[Watched]()  # how users' partitions are watched once each was looked at wholly
        place = {value: n for n, value in enumerate(reads)}
        self._calls = self._in_turn(place, {each.value for each in outputs})
        self._outputs = [(place[each.value], each.gradient) for each in outputs]

    def _in_turn(self, place: dict[Value, int], elsewhere: Collection[Value]) -> list[_InTurn]:
        """The forwards; `place` learns where the values that they make lie."""
        found, sizes, values = list[_InTurn](), 0, self._runners[0].graph.values
        for each in self._runners:
            piece = each.piece
            reads = tuple([place[value] for value in piece.reads])
            watched = [ReadValue(value, value in elsewhere or is_shared) for value, is_shared in each.read_values]
            watched = [each for each in watched if each.value in elsewhere or each.value.partition not in self._names]
            lent = tuple([place[value] for value, _ in watched])
            place.update([(value, len(place) + n) for n, value in enumerate(each.makes)])
            makes = slice(len(place) - len(each.makes), len(place))
            cut = tuple([place[value] for value in each.makes if not values[value].gradient])
            asked = tuple([n for n, value in enumerate(each.makes) if values[value].asked])
            numbers = slice(sizes, sizes + len(piece.sizes))
            found.append(_InTurn(each, reads, numbers, lent, tuple(watched), makes, cut, asked))
            sizes = numbers.stop
        return found

    def forward(self, place: ForwardPlace, reads: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        """Run the forwards of one micro-batch; arguments as of a partition alone.

        Returns:
            What others read, then what the backward of the loss starts from, where the model's last partition is one
            of these.
        """
        values, code, first = list(reads), code_so_far(), hooks_so_far()
        ended: tuple[torch.Tensor, ...] = ()
        seeds = [each.seed(place) for each in self._runners]  # one after the other: between kernels each takes longer
        start, hooks = self.state.begin(runs_again=False), first
        self._runners[0].stores.enter(first=place.micro_batch == 0)
        entered = self._entered
        # for the same reason as little as can be stands around a call
        for (runner, reading, numbers, lent, watched, _, cut, asked), seed in zip(self._calls, seeds, strict=True):
            self.at = runner.at
            if entered is not None:
                entered(runner.piece.name)
            before = [facts_of(values[n]) for n in lent] if lent else []
            read = [values[n] for n in reading]
            outputs = runner.call(place, read, sizes[numbers], seed)
            if runner.finish is None:
                values += outputs
            else:  # in a stage's order others may come behind it, which it does not read
                ended = runner.finished(outputs, place, read)
            if (now := hooks_so_far()) != hooks:
                hooks = now
                check_hooks(runner.piece, read)
            if lent:
                check_unchanged(runner.piece, watched, [values[n] for n in lent], before)
            for n in asked:
                check_asked(runner.piece.name, outputs[n], gradient=runner.gradients[n], sent=False)
            for n in cut:
                values[n] = values[n].detach()
        late, is_hooked = self.state.end(start), hooks != first
        made = [values[n] for n, _ in self._outputs]
        pairs = zip(made, self._outputs, strict=True)
        roots = [edge_of(each) if gradient and each.requires_grad else None for each, (_, gradient) in pairs]
        if self._ending is not None:
            made += ended
            roots += self._ending.roots(ended)
        graph = Graph(roots, [], is_hooked, draws=is_hooked or code_so_far() != code)
        if self._entered is not None or graph.draws or torch.is_anomaly_enabled():
            graph.entries = self._entries(values, ended)
        if late is not None:
            self._end_late(late, graph, place)
            made[: len(self._outputs)] = self.state.handed_on(tuple(made[: len(self._outputs)]))
        if self._moving and not place.is_alone and graph.draws:
            graph.values = [each.state.values.now() for each in self._moving]
        self._graphs[self._names, place.micro_batch] = graph
        return made

    def _entries(self, values: Sequence[torch.Tensor], ended: Sequence[torch.Tensor]) -> list[set[Node]]:
        """Where a backward comes into each partition; `ended`: what the model's last has made."""
        found = []
        for call in self._calls:
            made = values[call.makes] if call.runner.finish is None else ended
            found.append({root.node for root in call.runner.roots(made) if root is not None})
        return found

    def _end_late(self, late: LateWrites, graph: Graph, place: ForwardPlace) -> None:
        """A forward wrote tensors that nobody knew to be written."""
        self.is_spent = True
        for each in self._runners:
            mine = each.state.late_of(late)
            if mine.tensors:
                each.overwrite(mine)
        if not place.is_alone:
            graph.held = [held for each in self._runners for held in each.state.left()]

    def backward(self, place: ForwardPlace, output_gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the backward of one micro-batch through all of them; gradients are those of what `forward` gave.

        torch's engine takes the nodes of one device from the last that was made to the first, and lets leaves go first:
        where it comes to the outputs of a partition, all that lies behind is done.
        """
        graph = self._graphs.pop((self._names, place.micro_batch))
        self.at = self._all
        if graph.entries:
            self._place, self._first = place if graph.draws else None, len(graph.entries)
            self._come(len(graph.entries) - 1)
            for n, nodes in reversed([*enumerate(graph.entries[:-1])]):
                for node in nodes:  # what only gives on is entered with what it reads
                    if not is_leaf(node):
                        node.register_prehook(functools.partial(self._come, n))
        watched = self._watched(graph, place, output_gradients)
        with graph.as_left(), unchanged_by_backward(watched, self.state) if watched else NOTHING:
            graph.differentiate(output_gradients, self._runners, place.micro_batch)

    def _come(self, number: int, _: Any = None) -> None:
        """As a node's hook, which goes with the graph whose only backward this is.

        A partition is entered once, though it may have made several nodes at which others come to it.
        """
        if number < self._first:
            self._first, runner = number, self._runners[number]
            self.at = runner.at
            if self._entered is not None:
                self._entered(runner.piece.name)
            if self._place is not None:
                runner.seed_backward(self._place)

    def _watched(
        self, graph: Graph, place: ForwardPlace, output_gradients: Sequence[torch.Tensor | None]
    ) -> list[Watched]:
        """Those to look at if the backward changes them."""
        if not (graph.held or graph.is_hooked or place.is_alone) and (self._unseen or not self._users):
            return self._unseen
        checked = [each for each in self._runners if each.is_checked(place, graph)]
        found = [(each, each.shows_values(graph, output_gradients)) for each in checked]
        were_seen = all(each.was_watched_back for each in self._users)
        if found and were_seen and not any(shows_values for _, shows_values in found):
            self._unseen = [(each, False) for each in self._users]
        return found
