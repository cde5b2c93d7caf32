"""One partition at work: forward, recompute and backward of a micro-batch, as an autograd island.

What a partition reads are leaves of its own little graph; their gradients add up over all its readers on this worker,
and go to the partition that made the value. A rematerialised micro-batch keeps no graph, only what it read and the
state of its modules then, and runs its forward again right before its backward. Its first forward has gradients on, as
the second one: a model may ask.

A backward may come in two parts (splitbackward.py). A recompute belongs to the first of them that needs a graph. What
waits for a backward, be it a graph or what a forward starts from again, is among the rank's graphs (graphs.py).

Once what is listed here is known, a partition whose graph is kept, and comes back as a whole, is run by joined.py: with
its neighbours, or by itself. All else is run here.

What the first passes of a partition show, so that later ones cost less:

    what                          shown by                          from then on
    state.was_watched             the first forward, each of its    forwards run unwatched, but where code names .grad;
                                  operations looked at              counts of changes tell what they write beside that
    state.writes, state._loose    any forward that writes more:     parameters and buffers, and other attributes, that
                                  `end` returns it as late          are copied where a graph or a recompute needs them
    state._silent less ._plain    its modules; the first forward    buffers that BatchNorm may move uncounted: copied
                                  (which others it gives them to)   as if every forward wrote them
    _is_plain                     the first graph that is kept      whether `joins` may hang it on its neighbours'
    _draws                        the first forward, where no code  Python's and NumPy's generators are left unseeded
                                  of the user's own can draw later
    moves_values                  the first forward                 a graph whose hooks may run code keeps its values
    was_watched_back              the first backward of a graph     Python values are compared behind a backward only
                                                                    where a forward has registered hooks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.machine.generators import GeneratorStates
from assigner.model.deferred.mutation import GradientUses, Writes, storage_of
from assigner.model.marking import PartitionGraph, PartitionModule, Piece, Value
from assigner.model.marking.casting import casting
from assigner.model.marking.writing import StepStores
from assigner.model.singleprocess import as_single_process
from assigner.runtime.forward.attributes import let_go
from assigner.runtime.forward.compiling import Forward
from assigner.runtime.forward.heldtensors import apart_from
from assigner.runtime.forward.nodes import are_made_here, code_so_far, count_code, edge_of, hooks_so_far, nodes_so_far
from assigner.runtime.forward.pythonvalues import has_user_code
from assigner.runtime.forward.randomness import backward_seed, partition_seed, seed_device, seed_python
from assigner.runtime.forward.splitbackward import input_part
from assigner.runtime.forward.state import ForwardStart, LateWrites, PartitionState
from assigner.runtime.step.batchnorm import PartitionNorms
from assigner.runtime.step.graphs import (
    NOTHING,
    ForwardPlace,
    Graph,
    Graphs,
    Postponed,
    ReadValue,
    check_hooks,
    check_unchanged,
    facts_of,
    in_words,
    overwritten_error,
    unchanged_by_backward,
    written_in_words,
)

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge


Finish = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], int, bool], tuple[torch.Tensor, ...]]
"""Makes what a backward starts from, the last partition's loss, or what has its gradients without one: of what the
module returned, copied where others have it too, of that itself, of the micro-batch's number, and of whether this
forward will run again."""


@dataclass
class PartitionRunner:
    """Runs one partition."""

    graph: PartitionGraph
    piece: Piece
    module: PartitionModule
    device: torch.device
    state: PartitionState  # what its forwards change beside their outputs
    rematerialise: bool = False  # keep no graph, run the forward again before the backward
    finish: Finish | None = None
    # has the generators go on behind what the loss of a micro-batch has drawn in a backward of its own
    go_on: Callable[[int], None] | None = None
    run: Forward | None = None  # the module's forward, compiled; None: it is not
    keep_last: bool = False  # the step's last micro-batch keeps its graph all the same
    statistics: PartitionNorms | None = None  # of its BatchNorm modules, where they are deferred
    stores: StepStores = field(default_factory=StepStores)  # what the rank's forwards store once a step
    graphs: Graphs = field(default_factory=dict)  # of the rank
    shared: tuple[bool, ...] = ()  # of the values that it reads, which others read too; empty: none of them
    # what the rank's forwards have made in this step that others still read
    handed_on: Callable[[], Iterable[torch.Tensor]] = tuple
    _draws: bool | None = None
    _is_plain: bool | None = None
    was_watched_back: bool = False
    moves_values: bool = False

    def __post_init__(self) -> None:
        piece, values = self.piece, self.graph.values
        self.gradients = self.graph.output_gradients(piece)  # which of its outputs get one back
        # what others may read of them; what the last partition makes is the model's output
        self.makes = [Value(piece.name, n) for n in range(len(self.gradients) if self.finish is None else 0)]
        self._differentiates = any(value.partition and values[value].gradient for value in piece.reads)
        count_code()
        # nobody hooks into a partition itself, and its __call__ takes time
        self._call: Forward = self.run or self.module.forward
        if self.run is not None and self.statistics is not None:
            self.statistics.run_eagerly()
        self.read_values = tuple(map(ReadValue, self.piece.reads, self.shared or (False,) * len(self.piece.reads)))
        has_code = has_user_code(self.module)
        # cuDNN's dropout between layers has a generator of its own, which nothing seeds anew
        self._seeds_no_dropout = self.device.type == "cuda" and any(
            isinstance(each, torch.nn.RNNBase) and each.dropout and each.num_layers > 1
            for each in self.module.modules()
        )
        # of what it keeps, in any forward; a compiled one would not run compiled while that is seen
        words = self.graph.deferred.vocabulary
        self._uses_gradients = has_code and self.run is None and words.gradients
        # even an empty context is a tenth of a small partition's time
        self._is_bare = self.piece.autocast is None and not (self._seeds_no_dropout or self._uses_gradients)
        self.is_users = self.finish is not None or has_code
        self.key, self.at = (self.piece.name,), f"partition {self.piece.name!r}"
        # code that can draw may begin to at any time, as stochastic depth whose rate begins at 0; a loss has its own
        self._draws = True if has_code and words.draws else None
        self._may_draw = words.draws or self.finish is not None  # in a backward, which is the loss's too

    def recomputes(self, place: ForwardPlace) -> bool:
        """The forward runs again before this backward, and needs what it read."""
        return self.rematerialise and not (self.keep_last and place.last)

    @property
    def is_settled(self) -> bool:
        """Whether `joins` depends on nothing more that its first forwards show."""
        return self.state.was_watched and self._is_plain is not None

    def joins(self, place: ForwardPlace) -> bool:
        """Whether this forward's graph may be one with its neighbours'.

        It is kept, its backward finds all tensors of the partition as they are then, and the first graph was plain:
        this thread made all of its nodes, by whose order a backward is known to have left a partition, and no hook of
        the forward's own runs where it comes to one. A compiled forward would be compiled again for what has a graph.
        """
        is_plain = self._is_plain and self.state.was_watched and self.run is None
        return bool(is_plain) and not self.recomputes(place) and not self.state.is_written()

    def forward(
        self, place: ForwardPlace, reads: Sequence[torch.Tensor], sizes: Sequence[Any]
    ) -> tuple[torch.Tensor, ...]:
        """Run the forward of one micro-batch; in the block of one process, for it is the user's code that runs.

        Args:
            place: Which micro-batch.
            reads: The values of `piece.reads`: leaves, which get their gradients in `.grad`.
            sizes: The numbers of `piece.sizes`.

        Returns:
            The outputs; where a graph of them is kept, they belong to it, and else they require a gradient as if.
        """
        self.stores.enter(first=place.micro_batch == 0)
        if not torch.is_grad_enabled():
            before, outputs = [facts_of(each) for each in reads], self.call(place, reads, sizes)
            if self.is_users:
                outputs = self.state.lent(outputs)
            outputs = self.finished(outputs, place, reads)
            check_unchanged(self.piece, self.read_values, reads, before)
            return tuple(map(_apart, outputs))
        runs_again, hooks, code = self.recomputes(place), hooks_so_far(), code_so_far()
        before = [facts_of(each) for each in reads]
        first = nodes_so_far() if self._is_plain is None else 0
        start = self.state.begin(runs_again=runs_again)
        if self.state.was_watched:
            outputs = self.call(place, reads, sizes)
            late = self.state.end(start)
        else:
            outputs, late = self._watched(start, place, reads, sizes)
        if late is not None:
            self.overwrite(late)
        # what it started from is lost where it was not known to write that, or has made objects that stay
        runs_again = runs_again and late is None and not self.state.has_made(start)
        outputs = self.finished(outputs, place, reads, runs_again=runs_again)
        check_unchanged(self.piece, self.read_values, reads, before, runs_again=runs_again)
        is_hooked = hooks_so_far() != hooks
        if is_hooked:
            check_hooks(self.piece, reads)
        if runs_again:
            self.graphs[self.key, place.micro_batch] = Graph([], [], start=start)
            if self.is_users:
                let_go(self.state.tensors.modules)
            return tuple(map(_apart, self.state.handed_on(outputs)))
        held = [] if place.is_alone else self.state.left()
        graph = Graph(self.roots(outputs), held, is_hooked, draws=is_hooked or code_so_far() != code)
        if self._is_plain is None and (self.finish is None or any(graph.roots)):  # a loss may be a constant this time
            self._is_plain = not is_hooked and are_made_here(graph.roots, range(first, nodes_so_far()))
        if self.moves_values and not place.is_alone and graph.draws:
            graph.values.append(self.state.values.now())
        self.graphs[self.key, place.micro_batch] = graph
        return self.state.handed_on(outputs)

    def overwrite(self, late: LateWrites) -> None:
        """A forward wrote tensors without copies of them, and earlier micro-batches may be under way.

        A graph that has saved one of them is noticed by torch in its backward; one that has not needs none.

        Raises:
            UsageError: one of them runs its forward again, and so reads it; or torch would not notice; or it is
                itself what others read.
        """
        kept = [graph for (names, _), graph in self.graphs.items() if self.piece.name in names]
        name = self.state.tensors.name_of((late.tensors + late.loose)[0])
        storages = {storage_of(each) for each in late.tensors}
        is_read = storages and any(storage_of(each) in storages for each in self.handed_on())
        if is_read or any(each.start.needs(late) if each.start else late.uncounted for each in kept):
            raise overwritten_error(self.piece.name, name)
        for each in kept:
            each.overwritten = self.piece.name, name

    def backward(
        self,
        place: ForwardPlace,
        output_gradients: Sequence[torch.Tensor | None],
        reads: Sequence[torch.Tensor] = (),
        sizes: Sequence[Any] = (),
        *,
        split: bool = False,
    ) -> None:
        """Run the backward of one micro-batch; gradients land in the parameters and in the leaves that were read.

        Args:
            place: As in the forward.
            output_gradients: For each output its gradient; None: nobody used it (the loss has none and needs none).
            reads: As in the forward; only one that recomputes looks at them, and one that is put off keeps them.
            sizes: Likewise.
            split: Its input part alone: what was read has its gradients then, and `backward_weight` does the rest.
        """
        key = self.key, place.micro_batch
        graph = self.graphs.pop(key, None)
        if graph is not None and split and not self._differentiates:
            graph.rest = Postponed(output_gradients, reads, sizes)
            self.graphs[key] = graph
        elif graph is not None and graph.start is None:
            with graph.as_left():
                self._differentiate(place, graph, output_gradients, split=split)
        elif self.finish is not None or any(gradient is not None for gradient in output_gradients):
            assert graph is not None
            assert graph.start is not None
            with self.state.again(graph.start), as_single_process():
                self.stores.enter(first=place.micro_batch == 0)
                hooks, code, before = hooks_so_far(), code_so_far(), [facts_of(each) for each in reads]
                outputs = self.finished(self.call(place, reads, sizes), place, reads)
                check_unchanged(self.piece, self.read_values, reads, before, runs_again=True)
                held = self.state.left() if split else []
                is_hooked = hooks_so_far() != hooks
                graph = Graph(self.roots(outputs), held, is_hooked, draws=is_hooked or code_so_far() != code)
                self._differentiate(place, graph, output_gradients, split=split, is_checked=True)

    def backward_weight(self, place: ForwardPlace) -> None:
        """Run the weight part, behind the input part; all parameters have their gradients then."""
        graph = self.graphs.get((self.key, place.micro_batch))
        if graph is None or graph.rest is None:
            return
        if isinstance(graph.rest, Postponed):
            self.backward(place, *graph.rest)
            return
        del self.graphs[self.key, place.micro_batch]
        checked = [(self, False)] if self.is_checked(place, graph) else []
        unchanged = unchanged_by_backward(checked, self.state)
        with as_single_process(), graph.as_left(), unchanged, in_words(graph.overwritten):
            if graph.draws:
                self.seed_backward(place)
            graph.rest.run()

    def waiting(self, place: ForwardPlace) -> tuple[list[torch.Tensor], bool]:
        """The tensors that the weight part of a backward needs, as far as the input part knows of them.

        Returns:
            They, and whether the whole graph is there too.
        """
        graph = self.graphs.get((self.key, place.micro_batch))
        if graph is None or graph.rest is None:
            return [], False
        if isinstance(graph.rest, Postponed):
            return [each for each in graph.rest.output_gradients if each is not None], graph.start is None
        return graph.rest.tensors(), bool(graph.rest.edges)

    def is_checked(self, place: ForwardPlace, graph: Graph) -> bool:
        """Whether to look if a backward changes the partition's tensors: where that would be lost."""
        return bool(graph.held) or (self.is_users and not place.is_alone)  # others lie before it

    def shows_values(self, graph: Graph, output_gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether to look if a backward changes Python values too: the first, and each that runs a forward's hooks.

        That of a constant loss, or behind one, runs nothing.
        """
        if not self.is_users or not graph.given(output_gradients)[0]:
            return False
        is_first, self.was_watched_back = not self.was_watched_back, True
        return is_first or graph.is_hooked

    def _differentiate(
        self,
        place: ForwardPlace,
        graph: Graph,
        output_gradients: Sequence[torch.Tensor | None],
        *,
        split: bool,
        is_checked: bool = False,
    ) -> None:
        """A backward, or its input part; `is_checked`: whatever it changes of the partition is looked at."""
        is_checked = is_checked or self.is_checked(place, graph)
        checked = [(self, self.shows_values(graph, output_gradients))] if is_checked else []
        with unchanged_by_backward(checked, self.state):
            if graph.draws:
                self.seed_backward(place)
                if self.go_on is not None:
                    self.go_on(place.micro_batch)
            if not split:
                graph.differentiate(output_gradients, [self], place.micro_batch)
                return
            roots, gradients = graph.given(output_gradients)
            if not roots:
                return
            with as_single_process(), in_words(graph.overwritten):
                graph.rest = input_part(roots, gradients, is_hooked=graph.is_hooked)
            graph.roots = []
            self.graphs[self.key, place.micro_batch] = graph

    def forget(self) -> None:
        """Drop what is kept of a step that was not finished."""
        self.graphs.clear()

    def _watched(
        self, start: ForwardStart, place: ForwardPlace, reads: Sequence[torch.Tensor], sizes: Sequence[Any]
    ) -> tuple[tuple[torch.Tensor, ...], LateWrites | None]:
        """The first forward, and what it is seen to write; a compiled one would not run compiled while it is seen."""
        if self.run is not None:
            return (outputs := self.call(place, reads, sizes)), self.state.end(start)
        gradients, values = self.state.tensors.gradients(), self.state.values.now() if self.is_users else None
        with Writes() as writes, GradientUses() as asked:
            outputs = self.call(place, reads, sizes)
        self.moves_values = values is not None and values.has_changed(ignoring="tensors")
        self._check_gradients(asked, place, reads)
        if self.statistics is not None:
            self.statistics.check_used(writes.used)
        if self.rematerialise and self.state.tensors.gradients() != gradients:
            raise UsageError(
                f"the forward of partition {self.piece.name!r} adds to its own parameters' gradients (.backward()), and"
                " would do so again when it is recomputed",
                hint="assigner.partition(..., rematerialise='never'); or take gradients with torch.autograd.grad",
            )
        late = self.state.end(start, writes.storages, writes.used - writes.normed)
        if values is not None:
            self.state.note_loose([each for each in values.tensors if storage_of(each) in writes.storages])
        return outputs, late

    def _is_alone(self, place: ForwardPlace) -> bool:
        """Nothing of the partition runs between this forward and its backward, which finds all as this has left it."""
        return place.is_alone and not self.recomputes(place)

    def _check_gradients(self, asked: GradientUses, place: ForwardPlace, reads: Sequence[torch.Tensor]) -> None:
        """Look at whose gradients a forward has used: what others have left there depends on which backwards came.

        Raises:
            UsageError: that of a tensor which its modules hold, and several forwards are under way, or it runs again.
        """
        if not asked.found or self._is_alone(place):
            return
        others = [each for each in asked.earlier() if not any(each is read for read in reads)]
        if used := [*filter(self.state.tensors.holds, asked.found), *others]:
            raise UsageError(
                f"the forward of partition {self.piece.name!r} reads or sets the gradient of"
                f" {self.state.tensors.name_of(used[0])} (.grad): which micro-batches have added to it by then depends"
                " on the plan",
                hint="keep what it needs in a buffer that the forward writes; or use one micro-batch (solve with"
                " --micro-batches 1) and assigner.partition(..., rematerialise='never')",
            )

    def seed(self, place: ForwardPlace) -> int:
        """Of this partition's draws in a forward."""
        return partition_seed(place.seed, place.step, self.piece.name, place.micro_batch)

    def seed_backward(self, place: ForwardPlace) -> None:
        """This partition's backward comes next, in which code may draw that is not torch's own."""
        seed = backward_seed(place.seed, place.step, self.piece.name, place.micro_batch)
        seed_device(seed, self.device)
        if self._may_draw:
            seed_python(seed)

    def call(
        self, place: ForwardPlace, reads: Sequence[torch.Tensor], sizes: Sequence[Any], seed: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The module's forward; only the user's code draws from Python's and NumPy's generators, if it was seen to.

        `seed` is what `self.seed` gives; None: nobody has asked.
        """
        seed = self.seed(place) if seed is None else seed
        seed_device(seed, self.device)
        before: GeneratorStates | None = None
        if self.is_users and self._draws is not False:
            seed_python(seed)
            before = GeneratorStates.now() if self._draws is None else None
        if self.statistics is not None:
            self.statistics.begin(place.micro_batch)
        try:
            outputs: tuple[torch.Tensor, ...] = (
                self._call(*reads, *sizes) if self._is_bare else self._called(place, reads, sizes)
            )
        except RuntimeError as error:
            if (told := written_in_words(error, self.piece, reads)) is not error:
                raise told from error
            raise
        if self.statistics is not None:
            self.statistics.end()
        if before is not None:
            self._draws = self.rematerialise or GeneratorStates.now() != before
        return outputs

    def _called(
        self, place: ForwardPlace, reads: Sequence[torch.Tensor], sizes: Sequence[Any]
    ) -> tuple[torch.Tensor, ...]:
        no_dropout = torch.backends.cudnn.flags(enabled=False) if self._seeds_no_dropout else NOTHING
        is_seen = self._uses_gradients and self.state.was_watched and torch.is_grad_enabled()
        asked = GradientUses() if is_seen and not self._is_alone(place) else None
        try:
            with no_dropout, casting(self.piece.autocast, self.device.type), asked or NOTHING:
                outputs: tuple[torch.Tensor, ...] = self._call(*reads, *sizes)
        except Exception:  # a forward that finds no gradient may fail
            if asked is not None:
                self._check_gradients(asked, place, reads)
            raise
        if asked is not None:
            self._check_gradients(asked, place, reads)
        return outputs

    def finished(
        self,
        outputs: tuple[torch.Tensor, ...],
        place: ForwardPlace,
        reads: Sequence[torch.Tensor],
        *,
        runs_again: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """What backward starts from, made of what the module returned."""
        if self.finish is None:
            return outputs
        given = apart_from(reads, outputs)  # a loss may write to what is only handed on
        with casting(self.piece.autocast, self.device.type):
            return self.finish(given, outputs, place.micro_batch, runs_again)

    def roots(self, outputs: Sequence[torch.Tensor]) -> list[GradientEdge | None]:
        """Where backward starts, without the outputs' own memory: that is free once they are sent."""
        if self.finish is not None:
            return [edge_of(output) if output.requires_grad else None for output in outputs]
        pairs = zip(outputs, self.gradients, strict=True)
        return [edge_of(output) if is_wanted and output.requires_grad else None for output, is_wanted in pairs]


def _apart(output: torch.Tensor) -> torch.Tensor:
    """An output without its graph: what reads it must find as in a plain forward whether it requires a gradient."""
    return output.detach().requires_grad_(output.requires_grad)
