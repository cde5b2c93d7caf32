"""Has a script changed gradients or weights by a number of a rank's own? It is another on each, and no loss shows it.

    for n, p in pipeline.named_parameters(): ...         rank 0: norm of its gradients 4, clipped to 1: times 0.25
    torch.nn.utils.clip_grad_norm_(those, 1.0)           rank 1: norm of its gradients 0.5, as it is: times 1

So ranks tell each other the numbers by which theirs were changed (rankchanges). Before each update that is what all of
a rank's gradients were multiplied by. A script may do that rightly by the names of parameters, where a rank has no
others; the number is one that it was written with then, as 0.1 or 1 / 3, or those of several ranks have such ratios.
One that was computed from gradients has no such form. Where it has by chance, or a narrow type has rounded it, a norm
tells: that which the multiplied ones have in common, on several ranks at once, or on one in some updates in a row, by
another number each time. So it is where a script clips some of the parameters, as all weights: those that were
multiplied on a rank have that norm, and the others are as they were. (All of one module and no others may be clipped by
themselves, rightly. So it counts only beside a rank whose multiplied ones are no module.)

In the first steps, and then in some, ranks tell each other the numbers of any change, of weights too. Where they are
others on another rank, they come from a norm if

    they are the same on all ranks once they are multiplied or divided by a norm of the rank's weights or gradients, as
    they were or are, all or those that were changed; or by what one of these norms is to the other; if there are two
    numbers alone, two times in a row
    what they multiply has the norm then that other numbers have left there before: weights go back to their first norm

Rates and factors by the names of parameters do neither.
"""

from __future__ import annotations

import fractions
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from assigner.errors import UsageError
from assigner.runtime.update.rankchanges import (
    NUMBERS,
    OTHER,
    ROUNDING,
    SUBJECTS,
    Multiple,
    RankChange,
    RankChanges,
    are_module,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from assigner.runtime.ranks.membership import Membership

_SAME = 1e-3  # relative, of norms that a script has clipped to
_REPEATED = 3e-4  # likewise, of one rank's from update to update
_TIMES = 2  # so often it has to be the same
_FIRST, _EACH = 8, 17  # steps that are looked at more closely, for ranks tell each other: habits of 2 or 3 steps, too
_NORMS = (2.0, math.inf, 1.0, 3.0)
_UNLIKE = 1e-2  # relative, of numbers on two ranks
_ALIKE, _HARDLY_ALIKE = 1e-5, 1e-4  # likewise, of such a number times a norm: of exact ones, and of others at most
_LEAST_ERROR = 5e-7  # relative, with which a number is known
_DIVISORS = {1e-6: 100, math.inf: 12}
"""Of fractions that a script is written with, by the error from which on they lie too near to each other."""
_WHOLE, _WHOLE_MODULE, _PART, _MODULE = 0.0, 1.0, 2.0, 3.0
"""What was multiplied of a rank's parameters: all of them, which may be those of one module, or some, likewise."""

_Alike = tuple[int, int, int]
"""By what numbers are alike: whether 1 is added to them, the measure's number, and whether it multiplies (1, -1)."""


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
        return is_same and abs(self.factor - other.factor) > ROUNDING * other.factor


class RankFactor:
    """By what numbers a script changes gradients and weights of this rank between a step and the next one.

    Its parameters are those that a clipping by the model's norm multiplies.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], member: Membership) -> None:
        self._parameters, self._member = list(parameters.values()), member
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._changes = RankChanges(parameters)
        self._alike: dict[str, set[_Alike]] = {}  # by what numbers were alike when they were looked at last
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
        held = [
            [each for each in some if id(each) in self._names]
            for some in (self._parameters, *(groups if len(groups) > 1 else ()))
        ]
        found = self._changes.multiples(held)
        mine = [each.factor for each in found]
        mine += itertools.chain(*(each.numbers for each in self._changes.found()))
        told = self._member.numbers_of_all(mine)
        for n, parameters in enumerate(held):
            self._check_multiples(n, parameters, found[n], [each[n] for each in told])
        for n, subject in enumerate(SUBJECTS):
            first = len(held) + n * NUMBERS
            self._check_changes(subject, [RankChange.told(each[first : first + NUMBERS]) for each in told])

    def _check_multiples(
        self, number: int, parameters: Sequence[nn.Parameter], found: Multiple, factors: Sequence[float]
    ) -> None:
        """Of some parameters of this rank, of which it has found that; `number` says which."""
        factor, some = found
        known = {rank: abs(factor) for rank, factor in enumerate(factors) if not math.isnan(factor)}
        least, most = min(known.values(), default=1.0), max(known.values(), default=1.0)
        if most - least <= ROUNDING * most or math.isinf(most):
            return
        changed = [factor for factor in factors if factor > 0 and abs(factor - 1) > ROUNDING]
        if not changed:
            return  # each is of one parameter, which may have been clipped by itself
        extents = self._member.numbers(_extent(some, parameters, self._names))
        in_part = any(each in (_PART, _MODULE) for each in extents)
        if not in_part and not _are_written(changed):
            raise _multiplied_error("all", known)
        multiplied = {extents[rank] for rank, each in known.items() if abs(each - 1) > ROUNDING}
        if _MODULE in multiplied and multiplied <= {_MODULE, _WHOLE_MODULE}:
            return  # each may have been clipped by itself
        clipped = some or (() if in_part and abs(abs(factor) - 1) <= ROUNDING else parameters)
        for kind in _NORMS:
            norms = self._member.numbers(_norm(clipped, kind))
            if self._is_limit((number, kind), known, norms):
                raise _multiplied_error("some" if in_part else "all", known)

    def _is_limit(self, what: tuple[int, float], factors: Mapping[int, float], norms: Sequence[float]) -> bool:
        """Whether gradients that were multiplied have one norm now, and the others lie below it."""
        changed = [rank for rank, factor in factors.items() if abs(factor - 1) > ROUNDING]
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

    def _check_changes(self, subject: str, changes: Sequence[RankChange]) -> None:
        """What the same script would not do to the weights, or the gradients, of a whole model.

        Two numbers are alike by one of many measures now and then, by chance: they have to be so by the same one when
        they are looked at next. Of three or more that hardly happens.
        """
        known = {rank: each for rank, each in enumerate(changes) if each.extent}  # NaN counts
        if len(known) < 2 or any(math.isnan(each.extent) for each in known.values()):
            return
        if max(each.extent for each in known.values()) < 2:
            return  # each may be treated by itself
        error = max(_LEAST_ERROR, *(each.error for each in known.values()))
        for name in ("own", "cross"):
            numbers = {rank: number for rank, each in known.items() if (number := getattr(each, name))}
            unlike = sorted(numbers.values())
            if len(unlike) < 2 or unlike[-1] - unlike[0] <= _UNLIKE * max(map(abs, unlike)):
                continue
            shifts = (1, 0) if name == "own" else (0,)
            alike = set[_Alike]()
            if not any(_are_written([each + shift for each in unlike if each + shift], error) for shift in shifts):
                measures = [known[rank].measures for rank in numbers]
                for shift in shifts:
                    alike |= _alike([abs(each + shift) for each in numbers.values()], measures, error, shift)
            key = f"{subject} {name}"
            again, self._alike[key] = alike & self._alike.get(key, set()), alike
            several = sum(high - low > OTHER * abs(high) for low, high in itertools.pairwise(unlike)) > 1
            if again or (alike and several) or any(known[rank].repeats for rank in numbers):
                raise _changed_error(subject, numbers, shift=name == "own")


def _multiplied_error(which: str, factors: Mapping[int, float]) -> UsageError:
    """The error for factors by rank; a rank may have left its gradients as they were."""
    changed = {rank: each for rank, each in factors.items() if abs(each - 1) > ROUNDING}
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


def _extent(some: Sequence[nn.Parameter], every: Sequence[nn.Parameter], names: Mapping[int, str]) -> float:
    """What was multiplied: some of a rank's parameters; none: every one."""
    if are_module(some or every, every, names):
        return _MODULE if some else _WHOLE_MODULE
    return _PART if some else _WHOLE


def _norm(parameters: Sequence[nn.Parameter], kind: float) -> float:
    gradients = [each.grad for each in parameters if each.grad is not None]
    dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    norms = [torch.linalg.vector_norm(each, kind).double() for each in dense if each.numel()]
    return float(torch.linalg.vector_norm(torch.stack(norms), kind)) if norms else 0.0


def _alike(numbers: Sequence[float], measures: Sequence[Sequence[float]], error: float, shift: int) -> set[_Alike]:
    """By what they are a number of all ranks over, or times, one measure of each: the same one."""
    found, limit = set[_Alike](), min(max(_ALIKE, 4 * error), _HARDLY_ALIKE)
    for n, each in enumerate(zip(*measures, strict=True)):
        if all(0 < norm < math.inf for norm in each):
            for power in (1, -1):
                products = [number * norm**power for number, norm in zip(numbers, each, strict=True)]
                if max(products) - min(products) <= limit * max(products):
                    found.add((shift, n, power))
    return found


def _are_written(numbers: Sequence[float], error: float = _LEAST_ERROR) -> bool:
    """A script is written with all of them, or with the ratios of one to the next, as rates that fall by layers."""
    ordered = sorted(numbers)
    ratios = [one / next_one for one, next_one in itertools.pairwise(ordered)]
    return all(is_written(each, error) for each in ordered) or (
        bool(ratios) and all(is_written(each, 2 * error) for each in ratios)
    )


def is_written(number: float, error: float = _LEAST_ERROR) -> bool:
    """It is of three digits, or a simple fraction, as numbers are that stand in a script; known to a relative error."""
    divisor = next(each for limit, each in _DIVISORS.items() if error <= limit)
    near = (float(f"{number:.3g}"), float(fractions.Fraction(number).limit_denominator(divisor)))
    return any(abs(number - each) <= error * abs(number) for each in near)


def _changed_error(subject: str, numbers: dict[int, float], *, shift: bool) -> UsageError:
    told = ", ".join(f"{each + shift:.3g} on worker:{rank}" for rank, each in numbers.items())
    return UsageError(
        f"since the last step or update the script has changed {subject} by a number of each rank's own ({told}), as by"
        " a norm over pipeline.named_parameters(), which is that of one rank's part of the model",
        hint="the norm of all ranks' gradients is norm = pipeline.clip_grad_norm_(math.inf), which changes nothing;"
        " sums of a number of each parameter are pipeline.sum_over_parameters",
    )
