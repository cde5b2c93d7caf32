"""Has a script multiplied gradients by a number of one rank's own? It is another on every rank, and no loss shows it.

    for n, p in pipeline.named_parameters(): ...         rank 0: norm of its gradients 4, clipped to 1: times 0.25
    torch.nn.utils.clip_grad_norm_(those, 1.0)           rank 1: norm of its gradients 0.5, as it is: times 1

So some values of the gradients as the backward left them are held against the same when they are to be applied. All of
a rank's were multiplied by one number then, by unlike ones on unlike ranks. A script may do that rightly by the names
of parameters, where a rank has no others; the number is one that it was written with then, as 0.1 or 1 / 3, or those of
several ranks have such ratios. One that was computed from gradients has no such form. Where it has by chance, or a
narrow type has rounded it, a norm tells: that which the multiplied ones have in common, on several ranks at once, or on
one in some updates in a row, by another number each time. So it is where a script clips some of the parameters, as all
weights: those that were multiplied on a rank have that norm, and the others are as they were. (All of one module and no
others may be clipped by themselves, rightly. So it counts only beside a rank whose multiplied ones are no module.)
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from assigner.errors import UsageError
from assigner.runtime.update.rankchanges import (
    NUMBERS,
    SUBJECTS,
    Alike,
    RankChange,
    RankChanges,
    are_written,
    check_changes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from assigner.runtime.ranks.membership import Membership

_ROUNDING = 1e-2  # relative, of factors; bfloat16 rounds by 2 ** -9
_EXACT = 5e-7  # likewise, in float32 and wider
_SAME = 1e-3  # relative, of norms that a script has clipped to
_REPEATED = 3e-4  # likewise, of one rank's from update to update
_TIMES = 2  # so often it has to be the same
_FIRST, _EACH = 8, 17  # steps that are looked at more closely, for ranks tell each other: habits of 2 or 3 steps, too
_NORMS = (2.0, math.inf, 1.0, 3.0)
_UNKNOWN, _SEVERAL = math.nan, math.inf
_WHOLE, _WHOLE_MODULE, _PART, _MODULE = 0.0, 1.0, 2.0, 3.0
"""What was multiplied of a rank's parameters: all of them, which may be those of one module, or some, likewise."""


@dataclass
class _Limit:
    """What may be a limit: the norm of one rank's gradients that were multiplied."""

    rank: int
    norm: float
    factor: float  # by what they were
    times: int = 0  # how often the norm was the same by another factor, in a row

    def is_as(self, other: _Limit) -> bool:
        """The same norm, by another factor."""
        is_same = self.rank == other.rank and abs(self.norm - other.norm) <= _REPEATED * self.norm
        return is_same and abs(self.factor - other.factor) > _ROUNDING * other.factor


class RankFactor:
    """By what one number a script multiplies all gradients of this rank between a step and their update.

    Its parameters are those that a clipping by the model's norm multiplies.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], member: Membership) -> None:
        self._parameters, self._member = list(parameters.values()), member
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._changes = RankChanges(self._parameters, lambda some: _are_module(some, self._parameters, self._names))
        self._alike: dict[str, set[Alike]] = {}
        self._begun = 0
        self._last: dict[tuple[int, float], _Limit] = {}

    @property
    def is_watched(self) -> bool:
        """What the script does now, up to the begin of the next step, is looked at more closely than each update is."""
        return self._is_due(self._begun) or self._is_due(self._begun + 1)

    @staticmethod
    def _is_due(number: int) -> bool:
        return number <= _FIRST or number % _EACH == 0

    def begin(self) -> None:
        """A step is about to begin, on all ranks, as the script has left weights and gradients: these are checked.

        Raises:
            UsageError: as of `check`.
        """
        if self._is_due(self._begun + 1):
            self.check()
        self._begun += 1
        self._changes.forget()

    def note(self) -> None:
        """Weights and gradients are as a step's backwards, or an update, have left them."""
        if self._member.transport is not None:
            self._changes.note(closely=self.is_watched)

    def multiplied(self, factor: float, some: Sequence[nn.Parameter]) -> None:
        """The pipeline itself has multiplied gradients of some parameters: what the script did is told without that."""
        self._changes.multiply_gradients(factor, {id(each) for each in some})

    def check(self, groups: Sequence[Sequence[nn.Parameter]] = ()) -> None:
        """The gradients are about to be applied, or added to. All ranks call it together.

        Args:
            groups: The optimizer's, as many on every rank: a script may clip each of several by itself.

        Raises:
            UsageError: each rank's were multiplied by a number of its own part, as by what clips them to one norm; or
                they, or weights, were changed by such a number in another way.
        """
        if self._member.transport is None:
            return
        self._member.at = "the comparison of what the script has changed"
        ratios = self._changes.ratios()
        held = [
            [each for each in some if id(each) in self._names]
            for some in (self._parameters, *(groups if len(groups) > 1 else ()))
        ]
        found = [_factor(each, ratios, self._names) for each in held]
        mine = [*(factor for factor, _ in found), *itertools.chain(*(each.numbers for each in self._changes.found()))]
        told = self._member.numbers_of_all(mine)
        for n, parameters in enumerate(held):
            self._check(n, parameters, found[n], [each[n] for each in told])
        for n, subject in enumerate(SUBJECTS):
            first = len(held) + n * NUMBERS
            check_changes(subject, [RankChange.told(each[first : first + NUMBERS]) for each in told], self._alike)

    def _check(
        self,
        number: int,
        parameters: Sequence[nn.Parameter],
        found: tuple[float, list[nn.Parameter]],
        factors: Sequence[float],
    ) -> None:
        """Of some parameters of this rank, of which it has found that; `number` says which."""
        factor, some = found
        known = {rank: abs(factor) for rank, factor in enumerate(factors) if not math.isnan(factor)}
        least, most = min(known.values(), default=1.0), max(known.values(), default=1.0)
        if most - least <= _ROUNDING * most or math.isinf(most):
            return
        changed = [factor for factor in factors if factor > 0 and abs(factor - 1) > _ROUNDING]
        if not changed:
            return  # each is of one parameter, which may have been clipped by itself
        extents = self._member.numbers(_extent(some, parameters, self._names))
        in_part = any(each in (_PART, _MODULE) for each in extents)
        if not in_part and not are_written(changed):
            raise _refused("all", known)
        multiplied = {extents[rank] for rank, each in known.items() if abs(each - 1) > _ROUNDING}
        if _MODULE in multiplied and multiplied <= {_MODULE, _WHOLE_MODULE}:
            return  # each may have been clipped by itself
        clipped = some or (() if in_part and abs(abs(factor) - 1) <= _ROUNDING else parameters)
        for kind in _NORMS:
            norms = self._member.numbers(_norm(clipped, kind))
            if self._is_limit((number, kind), known, norms):
                raise _refused("some" if in_part else "all", known)

    def _is_limit(self, what: tuple[int, float], factors: Mapping[int, float], norms: Sequence[float]) -> bool:
        """Whether gradients that were multiplied have one norm now, and the others lie below it."""
        changed = [rank for rank, factor in factors.items() if abs(factor - 1) > _ROUNDING]
        limit = max(norms[rank] for rank in changed)
        if any(norms[rank] > (1 + _SAME) * limit for rank in factors):
            return False
        if len(changed) > 1:
            return limit - min(norms[rank] for rank in changed) <= _SAME * limit
        (rank,) = changed
        last = self._last.get(what)
        self._last[what] = now = _Limit(rank, limit, factors[rank])
        if last is not None and now.is_as(last):
            now.times = last.times + 1
        return now.times >= _TIMES


def _refused(which: str, factors: Mapping[int, float]) -> UsageError:
    """The error for factors by rank; a rank may have left its gradients as they were."""
    changed = {rank: each for rank, each in factors.items() if abs(each - 1) > _ROUNDING}
    told = ", ".join(f"worker:{rank} by {factor:.3g}" for rank, factor in changed.items())
    if left := [f"worker:{rank}" for rank in factors if rank not in changed]:
        told = f"{told} and none of {', '.join(left)}"
    return UsageError(
        f"before the update the script has multiplied {which} gradients of {told}, as"
        " torch.nn.utils.clip_grad_norm_ over pipeline.named_parameters() does: its norm is that of one rank's part of"
        " the model",
        hint="clip by pipeline.clip_grad_norm_ or step(batch, max_norm=...), a part of the model by its own norm with"
        " pipeline.clip_grad_norm_(1.0, names='encoder'); what some parameters are to be multiplied by, whoever holds"
        " them, is a hook on each: parameter.register_hook(lambda gradient: factor * gradient)",
    )


def _factor(
    parameters: Sequence[nn.Parameter], ratios: Sequence[tuple[float, nn.Parameter]], names: Mapping[int, str]
) -> tuple[float, list[nn.Parameter]]:
    """By what one number gradients were multiplied, and which; no parameters: all of them.

    The number is NaN: nobody can say; infinite: there are several; below 0: it is of one parameter, or of all of one
    module and no others, which may be treated by themselves. Of three digits it is where no more are known of it.
    """
    among = {id(each) for each in parameters}
    found = [pair for pair in ratios if id(pair[1]) in among]
    if not found or not all(math.isfinite(each) for each, _ in found):
        return _UNKNOWN, []
    multiplied = [pair for pair in found if abs(pair[0] - 1) > _ROUNDING] or found
    numbers = sorted(each for each, _ in multiplied)
    middle = numbers[len(numbers) // 2]
    if not any(numbers):
        return _UNKNOWN, []
    if middle <= 0 or any(abs(each - middle) > _ROUNDING * middle for each in numbers):
        return _SEVERAL, []
    some = [parameter for _, parameter in multiplied] if len(multiplied) < len(found) else []
    if any(abs(each - middle) > _EXACT * middle for each in numbers):
        middle = float(f"{middle:.3g}")
    by_itself = len(multiplied) == 1 or (bool(some) and _are_module(some, [each for _, each in found], names))
    return -middle if by_itself else middle, some


def _extent(some: Sequence[nn.Parameter], every: Sequence[nn.Parameter], names: Mapping[int, str]) -> float:
    """What was multiplied: some of a rank's parameters; none: every one."""
    if _are_module(some or every, every, names):
        return _MODULE if some else _WHOLE_MODULE
    return _PART if some else _WHOLE


def _are_module(some: Sequence[nn.Parameter], among: Sequence[nn.Parameter], names: Mapping[int, str]) -> bool:
    """Some parameters are all those of one module that are among these."""
    paths = zip(*(names[id(each)].split(".")[:-1] for each in some), strict=False)
    module = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, paths)]
    within = [each for each in among if names[id(each)].split(".")[: len(module)] == module]
    return bool(module) and len(within) == len(some)


def _norm(parameters: Sequence[nn.Parameter], kind: float) -> float:
    gradients = [each.grad for each in parameters if each.grad is not None]
    dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    norms = [torch.linalg.vector_norm(each, kind).double() for each in dense if each.numel()]
    return float(torch.linalg.vector_norm(torch.stack(norms), kind)) if norms else 0.0
