"""One BatchNorm module of a partition, whose micro-batches leave their figures aside until the step's end.

There is no second pass over the data: the module's own forward runs on a twin that shares its weights, has momentum 1,
and whose running values are the place where the micro-batch's figures belong. A recompute writes the same figures into
the same place again, so it does not count. They are merged, and moved into the running values:

    N = sum n_m      mean = sum n_m mean_m / N      M2 = sum (n_m - 1) var_m + n_m (mean_m - mean)^2
    running_mean <- (1 - a) running_mean + a mean        running_var <- (1 - a) running_var + a M2 / (N - 1)

Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from assigner.errors import AssignerError, UsageError
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.mutation import storage_of
from assigner.runtime.forward.randomness import kept_generators

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
_OF_TWINS = frozenset(("training", "momentum", "forward", "_buffers", *_RUNNING))
MICRO_BATCH = "use batch_norm='micro_batch': each micro-batch then moves them, as a batch of its own would"
"""The way out, as the hint of an error."""


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


Move = tuple[_BatchNorm, torch.Tensor, torch.Tensor]
"""A module, and the mean and variance of a batch."""


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
        made = func(*args, **words)
        if getattr(func, "__name__", "").endswith("batch_norm") and any(
            each is self.mean for each in (*args, *words.values())
        ):
            self.count = _values(args[0] if args else words["input"])
        return made


def _values(given: torch.Tensor) -> int:
    return given.numel() // given.shape[1]


class DeferredNorm:
    """One BatchNorm module, whose forwards go to twins while it trains: one for its first call in a forward, ...

    Args:
        module: The pipeline's own copy of it.
        name: In the model.
        partition: Whose it is.
        turns: Counts the calls of all modules.
    """

    def __init__(self, module: _BatchNorm, name: str, partition: PartitionNorms, turns: Iterator[int]) -> None:
        self.module, self.name, self._partition, self._turns = module, name, partition, turns
        self._is_own = not type(module).__module__.startswith("torch.")
        self.twins: list[_BatchNorm] = []
        self.seen: list[dict[int, BatchFigures]] = []  # for each twin, by micro-batch
        self.now: list[BatchFigures] = []  # for each twin, of the micro-batch that runs
        self.momenta: list[float | None] = []  # for each call of a forward in this step
        self.turns: list[int] = []  # likewise, when it came first
        self.calls: dict[int, int] = {}  # how many each micro-batch has made
        self.micro_batch = self.called = 0
        self.recording = self.under_way = False
        self._held: list[torch.Tensor | None] = []  # its running statistics, as the forward has found them
        self._tried: int | None = None  # the micro-batch of a step whose forward was compared
        self._add_twin()
        module.__dict__["forward"] = self.forward

    def run_eagerly(self) -> None:
        """Leave a forward of the user's own out of what is compiled around it: it could not be tried out there."""
        if self._is_own:
            self.module.__dict__["forward"] = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]

    def _add_twin(self) -> None:
        twin = copy.copy(self.module)
        twin._buffers = dict(self.module._buffers)
        twin.training, twin.momentum, twin.num_batches_tracked = True, 1.0, None
        self.twins.append(twin)
        self.seen.append({})
        self._point()

    def begin(self, micro_batch: int) -> None:
        """A forward of this micro-batch comes next; `commit` or `forget` ends the step."""
        self.micro_batch, self.called, self.recording, self.under_way = micro_batch, 0, True, True
        self._held = self._statistics()
        self._point()

    def _point(self) -> None:
        """Have the twins write where this micro-batch's figures belong."""
        micro_batch = self.micro_batch
        self.now = [self._figures(seen, micro_batch) for seen in self.seen]
        for twin, figures in zip(self.twins, self.now, strict=True):
            twin._buffers["running_mean"], twin._buffers["running_var"] = figures.mean, figures.variance

    def _figures(self, seen: dict[int, BatchFigures], micro_batch: int) -> BatchFigures:
        if micro_batch not in seen:
            mean, variance = self.module.running_mean, self.module.running_var
            assert mean is not None
            assert variance is not None
            mean, variance = (  # by shape: a forward may be watched for what it reads
                torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in (mean, variance)
            )
            seen[micro_batch] = BatchFigures(mean, variance)
        return seen[micro_batch]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if not (self.module.training and self.recording and self.module.track_running_stats):
            self._check_evaluated()
            return type(self.module).forward(self.module, *args, **kwargs)
        if not self.under_way and (micro_batch := self._partition.backward_of) is not None:
            self.begin(micro_batch)  # of a checkpoint in that backward, which calls once more, and counts as in torch
            self.called = self.calls.get(micro_batch, 0)
            self._partition.begun.append(self)
        if not self.under_way and len(self.seen[0]) > 1:
            raise UsageError(
                "a BatchNorm runs again in a backward in two parts (torch.utils.checkpoint): which micro-batch's"
                " statistics these are is not known then",
                hint="leave the checkpoint out and have assigner recompute (rematerialise='always'); or"
                " batch_norm='micro_batch'",
            )
        call, self.called = self.called, self.called + 1
        if call == len(self.twins):
            self._add_twin()
        self._keep_momentum(call)
        twin, figures = self.twins[call], self.now[call]
        if not self._is_own:
            output = type(twin).forward(twin, *args, **kwargs)
            figures.count = _values(args[0] if args else kwargs["input"])
            return output
        runs = self._tried_out if self._tried in (None, self.micro_batch) and not figures.count else self._as_the_module
        return runs(twin, figures, args, kwargs)

    def _keep_momentum(self, call: int) -> None:
        """Running values move at the step's end, by what the module's momentum is now: its parent may set it."""
        momentum = self.module.momentum
        if call == len(self.momenta):
            self.momenta.append(momentum)
            self.turns.append(next(self._turns))
        elif self.momenta[call] != momentum:
            self._refuse(f"whose momentum is {self.momenta[call]} in one micro-batch and {momentum} in another")

    def _check_evaluated(self) -> None:
        """A forward that has trained the module does not evaluate it behind that: the running values have not moved."""
        if self.recording and self.under_way and self.called and not self.module.training:
            raise UsageError(
                f"{self.name} is called in eval mode behind a call in training mode of the same forward: its running"
                " statistics are the whole batch's, and move at the step's end",
                hint=MICRO_BATCH,
            )

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
            hint=MICRO_BATCH,
        )

    def _as_the_module(self, twin: _BatchNorm, figures: BatchFigures, args: Any, kwargs: Any) -> Any:
        """A forward of the user's own runs on a twin that has what the module has; what it sets there would be lost."""
        spaces = [(vars(self.module), vars(twin)), (self.module._buffers, twin._buffers)]
        for mine, theirs in spaces:
            theirs.update((key, value) for key, value in mine.items() if key not in _OF_TWINS)
        with _ValuesOf(figures.mean) as values:
            output = type(twin).forward(twin, *args, **kwargs)
        for mine, theirs in spaces:
            changed = [
                key for key, value in theirs.items() if key not in _OF_TWINS and mine.get(key, mine) is not value
            ]
            if changed:
                raise UsageError(
                    f"{self.name}: {type(twin).__qualname__}.forward sets its {changed[0]!r}, and runs on a copy of it:"
                    " its running statistics are the whole batch's",
                    hint=f"keep {changed[0]!r} elsewhere; or {MICRO_BATCH}",
                )
        figures.count = values.count
        return output

    def storages(self) -> set[int]:
        """Those of the running statistics, and of what stands for them while a step runs."""
        held = [each._buffers[key] for each in (self.module, *self.twins) for key in _RUNNING]
        return {storage_of(each) for each in held if each is not None}

    def own_storages(self) -> set[int]:
        """Those of the running statistics alone."""
        return {storage_of(each) for each in self._statistics() if each is not None}

    def end(self) -> bool:
        """The forward has run; one that comes without a `begin` is a part of a backward.

        Returns:
            Whether it has left those running statistics in their places that its calls in training are to move.
        """
        self.under_way, self.calls[self.micro_batch] = False, self.called
        return not self.called or all(map(is_, self._statistics(), self._held))

    def _statistics(self) -> list[torch.Tensor | None]:
        return [self.module._buffers[key] for key in _RUNNING]

    def have_twins(self, count: int) -> None:
        """Have so many twins, for figures that another worker has of as many calls."""
        while len(self.twins) < count:
            self._add_twin()

    def packed(self, micro_batches: int) -> torch.Tensor:
        """The figures of a step's micro-batches, one row for each call and each of them: zeros where there are none."""
        rows = []
        for seen in self.seen:
            for n in range(micro_batches):
                figures = self._figures(seen, n)
                count = figures.mean.new_full((1,), figures.count, dtype=torch.float64)
                row = torch.cat([count, figures.mean.double(), figures.variance.double()])
                rows.append(row if figures.count else torch.zeros_like(row))  # a forward that raised has left some
        return torch.stack(rows)

    def unpack(self, rows: torch.Tensor) -> None:
        """Take over what `packed` gave on all workers together."""
        each_call = rows.view(len(self.seen), -1, rows.shape[1])
        for seen, found in zip(self.seen, each_call, strict=True):
            for n, (row, count) in enumerate(zip(found, found[:, 0].tolist(), strict=True)):
                figures = self._figures(seen, n)
                mean, variance = row[1:].chunk(2)
                figures.mean.copy_(mean)
                figures.variance.copy_(variance)
                figures.count = int(count)

    def found(self, call: int) -> list[BatchFigures]:
        """What the forwards' calls of a number have seen; of other workers' micro-batches alone where none ran here."""
        seen = self.seen[call] if call < len(self.seen) else {}
        return [figures for _, figures in sorted(seen.items()) if figures.count]

    def momentum(self, call: int) -> float | None:
        """By which a call of all forwards moves the running values."""
        return self.momenta[call] if call < len(self.momenta) else self.module.momentum

    def turn(self, call: int) -> float:
        """When a call of all forwards moves them, where another module has them too; last: none ran here."""
        return self.turns[call] if call < len(self.turns) else math.inf

    def forget(self) -> list[torch.Tensor]:
        """Leave the running values as they are; what is to be zero: an infinity in there would outlive momentum 1.

        A forward of the user's own that has raised has left figures, too, which nobody has counted.
        """
        found = (figures for seen in self.seen for figures in seen.values())
        used = [figures for figures in found if self.recording or figures.count]
        self.recording, self._tried, self.momenta, self.turns, self.calls = False, None, [], [], {}
        for figures in used:
            figures.count = 0
        return [tensor for figures in used for tensor in (figures.mean, figures.variance)]


class PartitionNorms:
    """The BatchNorm modules of one partition whose running statistics are deferred.

    Args:
        partition: Its name.
        modules: They, by name.
        turns: Counts the calls of all modules.

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
            norm.run_eagerly()

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
            hint=MICRO_BATCH,
        )

    def forget(self) -> list[torch.Tensor]:
        """As `DeferredNorm.forget`, of all of them."""
        self.backward_of, self.begun = None, []
        return [tensor for norm in self.norms for tensor in norm.forget()]


def _are_close(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Equal but for rounding, by the root of the type's precision."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if type(one) is not type(other):
                return False
        elif one.shape != other.shape or one.dtype != other.dtype:
            return False
        elif not one.dtype.is_floating_point:
            if not torch.equal(one, other):
                return False
        elif one.numel():
            allowed = math.sqrt(torch.finfo(one.dtype).eps)
            if not torch.allclose(one.double(), other.double(), rtol=allowed, atol=allowed, equal_nan=True):
                return False
    return True
