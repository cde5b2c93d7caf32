"""What a module's forward gives, learnt from calls of it on tensors with values.

Shapes are looked for with tensors that have no values. A forward that needs some (`x.numpy()`, a loop over
`lengths.tolist()`) runs for real instead, on several small batches of unlike numbers of rows. Its results' sizes:

    in the calls         given: (4, 8)   (8, 8)   (12, 8)     is
    result, dimension 0         4        8        12          that size of what is given
    result, dimension 1         16       16       16          16
    another                     9        17       25          2 * that size + 1
    another                     3        7        6           a size that depends on data
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.model.deferred.origins import digest
from assigner.model.marking.fakeforward import Alias, any_way
from assigner.model.marking.operations import Way

if TYPE_CHECKING:
    from collections.abc import Sequence


class DecidedError(MarkingError):
    """A value, or the number of rows, decides what is to be captured: it does so for whatever sizes may vary."""


@dataclass
class ValueDependence:
    """Modules whose forward depends on values, as one capture has met them."""

    failed: tuple[str, Exception] | None = None  # whose forward did not go through without values, and why
    fixing: dict[str, None] = field(default_factory=dict)  # whose forward took a size that may vary for a number
    line: str = ""  # where code between modules did so first; empty: nowhere
    sizes: dict[Any, str] = field(default_factory=dict)  # symbols that depend on values, and whose results have them

    @property
    def wanting(self) -> dict[str, Exception | None]:
        """The modules that should run with values, and why."""
        return dict.fromkeys(self.fixing) if self.failed is None else dict([self.failed])


@dataclass(frozen=True)
class CallEffects:
    """What a call gives and does, as far as others see it."""

    results: Any  # what it returns, with a Slot for each tensor
    written: frozenset[int]  # which of the tensors that it is given it writes to in place
    aliases: dict[int, Alias]  # results by their number that share memory with others
    changed: frozenset[str]  # names, in the model, of its module's own parameters and buffers that it changes
    replaced: frozenset[str]  # of those, the names that it gives to another tensor
    differentiated: frozenset[tuple[int, int]]  # pairs of the given tensors; see `gradients_taken`
    wanting: frozenset[int]  # results by their number that require a gradient, or may
    begun: frozenset[int]  # results that a graph begins with, as `x.detach().requires_grad_()`, on every way
    kept: frozenset[int]  # containers that it is given, and then that it returns, by number: its modules hold them, too
    asks: bool  # what it does depends on whether a tensor requires a gradient: see `gradients_asked`
    order: tuple[int, int]  # of its operations: see `Operations`
    ways: tuple[Way, ...]  # what it runs, on each way that was gone; empty: nobody knows

    @classmethod
    def any_of(cls, results: Any, seen: Sequence[CallEffects]) -> CallEffects:
        """What a call may do, of which this was seen, and that returns these results."""
        kinds, ways = (digest(map(str, each)) for each in zip(*(each.order for each in seen), strict=True))
        return cls(
            results,
            frozenset().union(*(each.written for each in seen)),
            any_way([each.aliases for each in seen]),
            frozenset().union(*(each.changed for each in seen)),
            frozenset().union(*(each.replaced for each in seen)),
            frozenset().union(*(each.differentiated for each in seen)),
            frozenset().union(*(each.wanting for each in seen)),
            frozenset.intersection(*(each.begun for each in seen)),
            frozenset().union(*(each.kept for each in seen)),
            any(each.asks for each in seen),
            (kinds, ways),
            tuple(way for each in seen for way in each.ways),
        )


@dataclass(frozen=True)
class Observation:
    """One call of a module on tensors with values."""

    given: tuple[torch.Size, ...]  # of the tensors that it was given
    made: tuple[torch.Tensor, ...]  # like those that it returned, on the meta device
    effects: CallEffects


RETURNED = "return the tensor itself, without .item(), int() or float(), or mark a larger module that uses it up inside"
"""What to do about a number that a module returns by value: a larger module that returns it as well helps nobody."""


_FEW = "the rows that it was run on"


@dataclass(frozen=True)
class LearntCall:
    """What several observations of one call have in common."""

    label: str
    calls: tuple[Observation, ...]

    def __post_init__(self) -> None:
        """Refuse results that are not alike."""
        first = self.calls[0]
        leaves, structure = pytree.tree_flatten(first.effects.results)
        for other in self.calls[1:]:
            others, theirs = pytree.tree_flatten(other.effects.results)
            kinds = [[(each.dtype, each.dim()) for each in call.made] for call in (first, other)]
            self._check_given([*map(len, other.given)], "other batches")
            if theirs != structure or kinds[0] != kinds[1]:
                raise MarkingError(
                    f"what {self.label} returns is not the same for all batches: its structure, or a tensor's type or"
                    " number of dimensions, changes",
                    hint="return the same tensors each time; a shape may depend on values, structure and types may not",
                )
            if [*map(repr, others)] != [*map(repr, leaves)]:
                raise MarkingError(f"{self.label} returns a plain value that depends on its input", hint=RETURNED)

    def _check_given(self, dims: list[int], where: str) -> None:
        """What it is given, by the numbers of its dimensions, must be alike elsewhere, too."""
        first = [*map(len, self.calls[0].given)]
        if dims != first:
            raise MarkingError(
                f"a value decides what {self.label} is given: tensors of {first} dimensions for {_FEW}, and of {dims}"
                f" in {where}",
                hint="give it the same tensors each time, as a mask also where nothing is masked; or mark a larger"
                " module that contains the decision",
            )

    @property
    def effects(self) -> CallEffects:
        """What it may do: all that was seen of it."""
        return CallEffects.any_of(self.calls[0].effects.results, [call.effects for call in self.calls])

    def fakes(self, given: Sequence[torch.Tensor], environment: ShapeEnv) -> list[torch.Tensor]:
        """Tensors without values that look like its results.

        Args:
            given: What it is given in the capture; a size of theirs that was the same in all calls becomes a number.
            environment: Of their sizes.

        Raises:
            MarkingError: these are other tensors than in the calls.
        """
        self._check_given([each.dim() for each in given], "a capture, which knows no values")
        known = self._varying(given)
        sizes: dict[tuple[int, ...], Any] = {}
        found = []
        for n, made in enumerate(self.calls[0].made):
            shape = []
            for dim in range(made.dim()):
                values = tuple(call.made[n].size(dim) for call in self.calls)
                if values not in sizes:
                    sizes[values] = _size(values, known, environment)
                shape.append(sizes[values])
            order = sorted(range(made.dim()), key=lambda dim: (-made.stride()[dim], dim))  # the outermost first
            inverse = sorted(range(made.dim()), key=order.__getitem__)
            found.append(torch.empty([shape[dim] for dim in order], dtype=made.dtype, device="cpu").permute(inverse))
        return found

    def _varying(self, given: Sequence[torch.Tensor]) -> dict[tuple[int, ...], Any]:
        """The sizes of what is given by what they were in the calls, where that was not always the same."""
        found: dict[tuple[int, ...], Any] = {}
        for n, tensor in enumerate(given):
            for dim in range(tensor.dim()):
                values = tuple(call.given[n][dim] for call in self.calls)
                size = tensor.size(dim)
                if len(set(values)) > 1:
                    found.setdefault(values, size)
                elif isinstance(size, torch.SymInt) and not free_unbacked_symbols(size):
                    int(size)  # other sizes are another capture
        return found


def _size(values: tuple[int, ...], known: dict[tuple[int, ...], Any], environment: ShapeEnv) -> Any:
    if len(set(values)) == 1:
        return values[0]
    if values in known:
        return known[values]
    for each, size in known.items():
        one, other = each.index(min(each)), each.index(max(each))
        slope, rest = divmod(values[other] - values[one], each[other] - each[one])
        fixed = values[one] - slope * each[one]
        if not rest and slope and all(value == slope * at + fixed for value, at in zip(values, each, strict=True)):
            return slope * size + fixed
    return environment.create_unbacked_symint()
