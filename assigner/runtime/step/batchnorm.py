"""BatchNorm's running statistics as of the whole batch, though each micro-batch is normalised by its own.

Plain BatchNorm would move its running values at every micro-batch. Here each micro-batch leaves its mean, variance and
count aside, and the step's end merges them and moves the running values once, as one forward of the whole batch does.
Where several workers share the partition, each gets the figures of all before the merge, so that all move their running
values alike. A step that fails leaves the running values as they were.

There is no second pass over the data: the module's own forward runs on a twin that shares its weights, has momentum 1,
and whose running values are the place where the micro-batch's figures belong. A recompute writes the same figures into
the same place again, so it does not count. They are merged, and moved into the running values:

    N = sum n_m      mean = sum n_m mean_m / N      M2 = sum (n_m - 1) var_m + n_m (mean_m - mean)^2
    running_mean <- (1 - a) running_mean + a mean        running_var <- (1 - a) running_var + a M2 / (N - 1)

Sources: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979; deferred
until the step's end as in Kim et al., torchgpipe, 2020 (arXiv 2004.09910), which passes over the data once more.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from assigner.errors import AssignerError, UsageError
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.mutation import storage_of
from assigner.model.deferred.ownership import coded_classes
from assigner.runtime.forward.randomness import kept_generators
from assigner.runtime.stages.replicas import one_worker, sharers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from assigner.runtime.ranks.workergroups import WorkerGroup

BatchNorm = Literal["deferred", "micro_batch"]

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
_OF_TWINS = frozenset(("training", "momentum", "forward", "_buffers", *_RUNNING))
_MICRO_BATCH = "use batch_norm='micro_batch': each micro-batch then moves them, as a batch of its own would"


class DeferredStatistics:
    """The running statistics of some partitions' BatchNorm modules. Those that keep none are left alone.

    Args:
        modules: The partitions; their modules are the pipeline's own copies.
        choice: "deferred"; with "micro_batch" every BatchNorm stays as torch made it.
        groups: Of the partitions that other workers hold too, those workers.

    Attributes:
        partitions: Those that have such modules, by name.

    Raises:
        UsageError: `choice` is none of the two, or a module cannot run in a pipeline.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], choice: BatchNorm, groups: Mapping[str, WorkerGroup] | None = None
    ) -> None:
        if choice not in get_args(BatchNorm):
            raise UsageError(f"batch_norm={choice!r} is not allowed", hint=f"one of {', '.join(get_args(BatchNorm))}")
        self.partitions: dict[str, PartitionNorms] = {}
        self._shared: dict[WorkerGroup, list[DeferredNorm]] = defaultdict(list)
        turns = itertools.count()
        for partition, held in modules.items():
            found = {name: each for name, each in held.named_modules() if isinstance(each, _BatchNorm)}
            group = (groups or {}).get(partition)
            for name, each in found.items():
                _check(name, each, choice)
                if group is not None and choice == "micro_batch" and each.track_running_stats:
                    raise UsageError(
                        f"{sharers(partition, group.workers)}, and with batch_norm='micro_batch' every micro-batch"
                        f" moves the running statistics of {name}: each of them would see its own alone",
                        hint=f"use batch_norm='deferred', or {one_worker(partition)}",
                    )
            deferred = {
                name: each
                for name, each in found.items()
                if choice == "deferred" and each.track_running_stats and each.running_mean is not None
            }
            if deferred:
                self.partitions[partition] = PartitionNorms(partition, deferred, turns)
                if group is not None:
                    self._shared[group] += self.partitions[partition].norms

    @torch.no_grad()
    def exchange(self, micro_batches: int) -> None:
        """A step's forwards have run, of so many micro-batches on all workers: have each worker know of all of them.

        Raises:
            LostConnectionError: a worker that shares a partition is gone.
        """
        for group, norms in self._shared.items():
            calls = group.largest(torch.tensor([len(norm.calls) for norm in norms], device=group.device))
            packed = []
            for norm, count in zip(norms, calls.tolist(), strict=True):
                norm.have_calls(count)
                packed.append(norm.packed(micro_batches))
            total = group.add_up(torch.cat([rows.flatten() for rows in packed])).wait()
            parts = torch.split(total, [rows.numel() for rows in packed])
            for norm, rows, part in zip(norms, packed, parts, strict=True):
                norm.unpack(part.view_as(rows))

    @torch.no_grad()
    def commit(self) -> None:
        """A step's forwards have run: move the running values, once for each call that a forward makes."""
        norms = [each for some in self.partitions.values() for each in some.norms]
        storages = [each.storages(twins=False) for each in norms]
        holders = Counter(itertools.chain.from_iterable(storages))
        shared = [each for each, held in zip(norms, storages, strict=True) if any(holders[n] > 1 for n in held)]
        alone = [each.calls for each in norms if each not in shared]
        for calls in itertools.zip_longest(*alone):
            _move_together(filter(None, calls))
        one_by_one = [call for each in shared for call in each.calls]
        for call in sorted(one_by_one, key=lambda each: math.inf if each.turn is None else each.turn):
            _move_together([call])
        self.forget()

    def forget(self) -> None:
        """The step is over, or has failed: the running values stay as they are."""
        if used := [tensor for norms in self.partitions.values() for tensor in norms.forget()]:
            torch._foreach_zero_(used)


def _check(name: str, module: _BatchNorm, choice: BatchNorm) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise UsageError(
            f"{name} is a SyncBatchNorm: it would wait for the ranks that hold other partitions",
            hint="use BatchNorm; with batch_norm='deferred' its running statistics are those of the whole batch",
        )
    if choice == "deferred" and "forward" in module.__dict__:
        raise UsageError(
            f"{name} has a forward of its own set on the object: its statistics cannot be deferred",
            hint="override forward in a class, or use batch_norm='micro_batch'",
        )


@dataclass(slots=True)
class BatchFigures:
    """What one call saw of one micro-batch: mean and unbiased variance of each channel, and values in a channel."""

    mean: torch.Tensor
    variance: torch.Tensor
    count: int = 0


def merged(parts: Sequence[Sequence[BatchFigures]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mean and unbiased variance of all values, from those of parts, of several modules that have as many parts.

    They are computed as one: an operation takes longer than the figures of a module are worth.
    """
    columns = [*zip(*parts, strict=True)]
    means = torch.stack([torch.cat([each.mean for each in column]) for column in columns]).double()
    variances = torch.stack([torch.cat([each.variance for each in column]) for column in columns]).double()
    sizes = [len(each[0].mean) for each in parts]
    counts = means.new_tensor([[each.count for each in column] for column in columns])
    counts = counts.repeat_interleave(counts.new_tensor(sizes, dtype=torch.long), dim=1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    squares = ((counts - 1) * variances + counts * (means - mean).square()).sum(0)
    return [*zip(torch.split(mean, sizes), torch.split(squares / (total - 1), sizes), strict=True)]


@dataclass(eq=False)
class _NormCall:
    """A call of a module in its forwards: the first of each, or the second, ..."""

    module: _BatchNorm  # the pipeline's own copy of it
    twin: _BatchNorm  # what runs this call
    seen: dict[int, BatchFigures] = field(default_factory=dict)  # what it has seen, by micro-batch
    now: BatchFigures = field(init=False)  # likewise, of the micro-batch that runs
    turn: int | None = None  # when it came first in this step, among the calls of all modules; None: it has not run
    momentum: float | None = None  # that of the module then, by which running values move

    def begin(self, micro_batch: int) -> None:
        """Have the twin write where this micro-batch's figures belong."""
        self.now = self.figures(micro_batch)
        self.twin._buffers["running_mean"], self.twin._buffers["running_var"] = self.now.mean, self.now.variance

    def figures(self, micro_batch: int) -> BatchFigures:
        """The place of a micro-batch's."""
        if micro_batch not in self.seen:
            mean, variance = self.module.running_mean, self.module.running_var
            assert mean is not None
            assert variance is not None
            mean, variance = (  # by shape: a forward may be watched for what it reads
                torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in (mean, variance)
            )
            self.seen[micro_batch] = BatchFigures(mean, variance)
        return self.seen[micro_batch]


Move = tuple[_BatchNorm, torch.Tensor, torch.Tensor]
"""A module, and the mean and variance of a batch."""


def _move_together(calls: Iterable[_NormCall]) -> None:
    """Move the running values of modules, each of which has its own, by what one call of each has seen."""
    alike = defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[_NormCall, list[BatchFigures]]]](list)
    for call in calls:
        if found := [figures for _, figures in sorted(call.seen.items()) if figures.count]:
            alike[len(found), found[0].mean.dtype, found[0].mean.device].append((call, found))
    together = defaultdict[tuple[float | None, torch.device], list[Move]](list)
    for some in alike.values():
        for (call, _), (mean, variance) in zip(some, merged([found for _, found in some]), strict=True):
            # else it has run on other workers alone
            momentum = call.module.momentum if call.turn is None else call.momentum
            together[momentum, mean.device].append((call.module, mean, variance))
    for (momentum, _), moves in together.items():
        move(moves, momentum)


@torch.no_grad()
def move(moves: Sequence[Move], momentum: float | None) -> None:
    """Have the running values of modules, no tensor of which is another's, moved as torch's forward does."""
    tracked = [each.num_batches_tracked for each, *_ in moves if each.num_batches_tracked is not None]
    if tracked:
        torch._foreach_add_(tracked, 1)
    if momentum is None:  # the mean of all batches: each module has its own number of them
        for module, mean, variance in moves:
            number = module.num_batches_tracked
            _move_by(0.0 if number is None else 1.0 / float(number), [(module, mean, variance)])
    else:
        _move_by(momentum, moves)


def _move_by(share: float, moves: Sequence[Move]) -> None:
    pairs = [
        (running, new)
        for module, mean, variance in moves
        for running, new in ((module.running_mean, mean), (module.running_var, variance))
        if running is not None
    ]
    running = [each for each, _ in pairs]
    torch._foreach_mul_(running, 1 - share)
    torch._foreach_add_(running, [new.to(each.dtype) for each, new in pairs], alpha=share)


class _ValuesOf(TorchFunctionMode):
    """Counts the values of a channel that torch's batch norm is given: a module's forward may turn or mask its input.

    Args:
        mean: The running mean of the call that counts.

    Attributes:
        count: 0: there was none, as where a mask has kept nothing.
    """

    def __init__(self, mean: torch.Tensor) -> None:
        super().__init__()
        self.mean, self.count = mean, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = kwargs or {}
        if getattr(func, "__name__", "").endswith("batch_norm") and any(
            each is self.mean for each in (*args, *words.values())
        ):
            self.count = _values(args[0] if args else words["input"])
        return func(*args, **words)


def _values(given: torch.Tensor) -> int:
    return given.numel() // given.shape[1] if given.dim() > 1 else 0


class _During(Enum):
    """What a module's call comes in."""

    NO_STEP = "also an evaluation: it does what torch's does"
    STEP = "outside of its partition's forwards, as by a checkpoint in a backward"
    FORWARD = "of its partition, or what a checkpoint runs again in a backward"


class DeferredNorm:
    """One BatchNorm module, whose forwards go to twins while it trains: one for its first call in a forward, ...

    The module is the pipeline's own copy; `turns` counts the calls of all modules.

    Attributes:
        is_own: Its forward is the user's own.
        calls: Those that its forwards have made, and those of other workers'.
    """

    def __init__(self, module: _BatchNorm, name: str, partition: PartitionNorms, turns: Iterator[int]) -> None:
        self.module, self.name, self._partition, self._turns = module, name, partition, turns
        self.is_own = bool(coded_classes(type(module)))
        self.calls: list[_NormCall] = []
        self._made: dict[int, int] = {}  # how many calls each micro-batch has made
        self.micro_batch = self.called = 0
        self._during = _During.NO_STEP
        self._held: list[torch.Tensor | None] = []  # its running statistics, as the forward has found them
        self._tried: int | None = None  # the micro-batch of a step whose forward was compared
        self._error: Exception | None = None  # what a call of this forward has raised, and the model may have caught
        self.have_calls(1)
        module.__dict__["forward"] = self.forward

    def have_calls(self, count: int) -> None:
        """Have so many calls at least: another worker may have figures of more."""
        while len(self.calls) < count:
            twin = copy.copy(self.module)
            twin._buffers = dict(self.module._buffers)
            twin.training, twin.momentum, twin.num_batches_tracked = True, 1.0, None
            self.calls.append(_NormCall(self.module, twin))
            self.calls[-1].begin(self.micro_batch)

    def begin(self, micro_batch: int) -> None:
        """A forward of this micro-batch comes next; `commit` or `forget` ends the step."""
        self.micro_batch, self.called, self._during = micro_batch, 0, _During.FORWARD
        self._error, self._held = None, self._statistics()
        for call in self.calls:
            call.begin(micro_batch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. What it raises is kept until the partition's has come to its end."""
        counts = self.module.training and self.module.track_running_stats
        if not counts or self._during is _During.NO_STEP:
            self._check_evaluated()
            return type(self.module).forward(self.module, *args, **kwargs)
        try:
            return self._counted(args, kwargs)
        except Exception as error:
            if type(error).__module__ != checkpoint.__name__:  # by which a recompute ends once it has all that it needs
                self._error = error
                if self.called:
                    self.calls[self.called - 1].now.count = 0
            raise

    def _counted(self, args: Any, kwargs: Any) -> Any:
        if self._during is _During.STEP and (micro_batch := self._partition.backward_of) is not None:
            self.begin(micro_batch)  # of a checkpoint in that backward, which calls once more, and counts as in torch
            self.called = self._made.get(micro_batch, 0)
            self._partition.begun.append(self)
        if self._during is _During.STEP and len(self.calls[0].seen) > 1:
            raise UsageError(
                "a BatchNorm runs again in a backward in two parts (torch.utils.checkpoint): which micro-batch's"
                " statistics these are is not known then",
                hint="leave the checkpoint out and have assigner recompute (rematerialise='always'); or"
                " batch_norm='micro_batch'",
            )
        number, self.called = self.called, self.called + 1
        self.have_calls(self.called)
        call = self.calls[number]
        self._keep_momentum(call)
        twin, figures = call.twin, call.now
        if not self.is_own:
            if args or "input" in kwargs:  # first: a checkpoint's recompute may end in that forward, and it counts
                figures.count = _values(args[0] if args else kwargs["input"])
            return type(twin).forward(twin, *args, **kwargs)
        runs = self._tried_out if self._tried in (None, self.micro_batch) and not figures.count else self._as_the_module
        return runs(twin, figures, args, kwargs)

    def _keep_momentum(self, call: _NormCall) -> None:
        """Running values move at the step's end, by what the module's momentum is now: its parent may set it."""
        momentum = self.module.momentum
        if call.turn is None:
            call.turn, call.momentum = next(self._turns), momentum
        elif call.momentum != momentum:
            self._refuse(f"whose momentum is {call.momentum} in one micro-batch and {momentum} in another")

    def _check_evaluated(self) -> None:
        """A forward that has trained the module does not evaluate it behind that: the running values have not moved."""
        if self._during is _During.FORWARD and self.called and not self.module.training:
            self._error = UsageError(
                f"{self.name} is called in eval mode behind a call in training mode of the same forward: its running"
                " statistics are the whole batch's, and move at the step's end",
                hint=_MICRO_BATCH,
            )
            raise self._error

    def _tried_out(self, twin: _BatchNorm, figures: BatchFigures, args: Any, kwargs: Any) -> Any:
        """A forward of the user's own, beside one on a copy that has all that the module has.

        Twins lack some of it: momentum, and the count of batches. So in the first micro-batch of each step both are
        run, and have to give the same, and to move the running values as torch's own forward does.
        """
        if any(True for child in self.module.children() for _ in child.buffers()):
            self._refuse("which has modules with buffers of their own")
        copied = self._copy()
        with (
            _disable_current_modes(),
            torch.no_grad(),
            kept_generators(figures.mean.device, draws=True),
            Memento([("", self.module)]).put_back(),
        ):
            given, words = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            expected = type(copied).forward(copied, *given, **words)
        self._tried = self.micro_batch
        try:
            output = self._as_the_module(twin, figures, args, kwargs)
        except AssignerError:
            raise
        except (TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError):
            self._refuse("whose forward reads or moves its own momentum or num_batches_tracked")
        with _disable_current_modes(), torch.no_grad():
            if not _are_close(pytree.tree_leaves(output), pytree.tree_leaves(expected)):
                self._refuse("whose output depends on its running statistics, momentum or num_batches_tracked")
            moved = self._copy()
            move([(moved, figures.mean, figures.variance)], moved.momentum)
            if not figures.count or not _are_close(list(copied._buffers.values()), list(moved._buffers.values())):
                self._refuse("which moves its running statistics in a way of its own")
        return output

    def _copy(self) -> _BatchNorm:
        copied = copy.copy(self.module)
        copied.__dict__.pop("forward", None)
        with _disable_current_modes(), torch.no_grad():
            copied._buffers = {
                name: None if each is None else each.clone() for name, each in self.module._buffers.items()
            }
        return copied

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self.name} is a {type(self.module).__qualname__}, {what}: running statistics are the whole batch's here,"
            " and move at the step's end",
            hint=_MICRO_BATCH,
        )

    def _as_the_module(self, twin: _BatchNorm, figures: BatchFigures, args: Any, kwargs: Any) -> Any:
        """A forward of the user's own runs on a twin that has what the module has; what it sets there would be lost."""
        spaces = [(vars(self.module), vars(twin)), (self.module._buffers, twin._buffers)]
        for mine, theirs in spaces:
            theirs.update((key, value) for key, value in mine.items() if key not in _OF_TWINS)
        values = _ValuesOf(figures.mean)
        try:
            with values:
                output = type(twin).forward(twin, *args, **kwargs)
        finally:  # also where a checkpoint's recompute ends in here
            figures.count = values.count
        for mine, theirs in spaces:
            changed = [
                key for key, value in theirs.items() if key not in _OF_TWINS and mine.get(key, mine) is not value
            ]
            if changed:
                raise UsageError(
                    f"{self.name}: {type(twin).__qualname__}.forward sets its {changed[0]!r}, and runs on a copy of it:"
                    " its running statistics are the whole batch's",
                    hint=f"keep {changed[0]!r} elsewhere; or {_MICRO_BATCH}",
                )
        return output

    def storages(self, *, twins: bool = True) -> set[int]:
        """Those of the running statistics; `twins`: and of what stands for them while a step runs."""
        modules = (self.module, *(call.twin for call in self.calls if twins))
        held = [each._buffers[key] for each in modules for key in _RUNNING]
        return {storage_of(each) for each in held if each is not None}

    def end(self) -> bool:
        """The forward has run; one that comes without a `begin` is a part of a backward.

        Returns:
            Whether it has left those running statistics in their places that its calls in training are to move.

        Raises:
            UsageError: one of its calls has raised an error, which the model has caught.
        """
        error, self._error = self._error, None
        if isinstance(error, AssignerError):
            raise error
        if error is not None:
            raise UsageError(
                f"{self.name} raises {type(error).__name__} ({error}), which the model catches: its running statistics"
                " are the whole batch's, and whether that call counts is not known",
                hint=_MICRO_BATCH,
            ) from error
        self._during, self._made[self.micro_batch] = _During.STEP, self.called
        return not self.called or all(map(is_, self._statistics(), self._held))

    def _statistics(self) -> list[torch.Tensor | None]:
        return [self.module._buffers[key] for key in _RUNNING]

    def packed(self, micro_batches: int) -> torch.Tensor:
        """The figures of a step's micro-batches, one row for each call and each of them: zeros where there are none."""
        rows = []
        for call, n in itertools.product(self.calls, range(micro_batches)):
            figures = call.figures(n)
            count = figures.mean.new_full((1,), figures.count, dtype=torch.float64)
            row = torch.cat([count, figures.mean.double(), figures.variance.double()])
            rows.append(row if figures.count else torch.zeros_like(row))  # a forward that raised has left some
        return torch.stack(rows)

    def unpack(self, rows: torch.Tensor) -> None:
        """Take over what `packed` gave on all workers together."""
        for call, found in zip(self.calls, rows.view(len(self.calls), -1, rows.shape[1]), strict=True):
            for n, (row, count) in enumerate(zip(found, found[:, 0].tolist(), strict=True)):
                figures = call.figures(n)
                mean, variance = row[1:].chunk(2)
                figures.mean.copy_(mean)
                figures.variance.copy_(variance)
                figures.count = int(count)

    def forget(self) -> list[torch.Tensor]:
        """Leave the running values as they are; what is to be zero: an infinity in there would outlive momentum 1.

        A forward of the user's own that has raised has left figures, too, which nobody has counted.
        """
        found = (figures for call in self.calls for figures in call.seen.values())
        used = [figures for figures in found if figures.count or self._during is not _During.NO_STEP]
        self._during, self._tried, self._made, self._error = _During.NO_STEP, None, {}, None
        for call in self.calls:
            call.turn = None
        for figures in used:
            figures.count = 0
        return [tensor for figures in used for tensor in (figures.mean, figures.variance)]


class PartitionNorms:
    """The BatchNorm modules of one partition whose running statistics are deferred.

    Attributes:
        norms: Each of them.
        backward_of: The micro-batch whose backward runs, in which a checkpoint may call them once more; None: none.
        begun: Those that this backward has called.
    """

    def __init__(self, partition: str, modules: Mapping[str, _BatchNorm], turns: Iterator[int]) -> None:
        self.partition = partition
        self.norms = [DeferredNorm(each, name, self, turns) for name, each in modules.items()]
        self.backward_of: int | None = None
        self.begun: list[DeferredNorm] = []

    def run_eagerly(self) -> None:
        """The partition is compiled, but for BatchNorms with forwards of the user's own."""
        for norm in self.norms:
            if norm.is_own:  # it could not be tried out there
                norm.module.__dict__["forward"] = torch.compiler.disable(norm.forward)  # type: ignore[no-untyped-call]

    def begin(self, micro_batch: int) -> None:
        """A forward of this micro-batch comes next, or its recompute."""
        for norm in self.norms:
            norm.begin(micro_batch)

    def end(self, begun: Sequence[DeferredNorm] | None = None) -> None:
        """That forward has run, or a backward that has begun some of them.

        Raises:
            UsageError: it has put other tensors in the places of running statistics.
        """
        for norm in self.norms if begun is None else begun:
            if not norm.end():
                self._refuse("assigns", norm)

    def end_backward(self) -> None:
        """The backward that `backward_of` names has run; errors as `end`."""
        begun, self.begun, self.backward_of = self.begun, [], None
        self.end(begun)

    def check_used(self, storages: Collection[int]) -> None:
        """A forward has given these storages to operations that are no BatchNorm's.

        Raises:
            UsageError: running statistics are among them.
        """
        for norm in self.norms:
            if not norm.storages().isdisjoint(storages):
                self._refuse("uses", norm)

    def _refuse(self, does: str, norm: DeferredNorm) -> NoReturn:
        raise UsageError(
            f"the forward of partition {self.partition!r} {does} the running statistics of {norm.name}, which are the"
            " whole batch's: they are known at the end",
            hint=_MICRO_BATCH,
        )

    def forget(self) -> list[torch.Tensor]:
        """As `DeferredNorm.forget`, of all of them."""
        self.backward_of, self.begun = None, []
        return [tensor for norm in self.norms for tensor in norm.forget()]


def _are_close(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(_is_close, some, others))


def _is_close(one: Any, other: Any) -> bool:
    """Equal but for rounding, by the root of the type's precision; of what is no tensor the same class is enough."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    allowed = math.sqrt(torch.finfo(one.dtype).eps)
    return torch.allclose(one.double(), other.double(), rtol=allowed, atol=allowed, equal_nan=True)
