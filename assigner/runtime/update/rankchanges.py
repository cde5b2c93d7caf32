"""By which numbers a script has changed this rank's weights and gradients since a step or an update has left them.

    clip_grad_norm_                              gradients multiplied
    e = gradient * (rho / norm); weight += e     SAM by hand: the norm is that of this rank's part
    weight *= limit / norm                       all weights to one norm
    clip_grad_norm_; gradient += decay * weight  clipped, and more
    clip_grad_norm_; clip_grad_value_            clipped, and cut; or cut at a quantile of this rank's

So some values of each weight and gradient are held against the same as a step or an update has left them. Before each
update gradients are, at the largest value that is known of each: all, or some, were multiplied by one number. Now and
then all of these values are, weights' too. What a script has made of them is, with the same numbers in all of a rank's
parameters that it has changed,

    new = old + own * old + cross * other, cut at plus and minus bound        weights: other is the gradient; or the
                                                                              other way round
where least squares find own and cross, and a largest value that comes in several parameters is the bound. A rank's that
no such numbers explain (each parameter by its own norm, noise, an average) tells nothing of the others' either: what is
done to each by itself looks like that. What is to be said of other ranks' numbers beside these stands in rankfactor.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from torch import nn

ROUNDING = 1e-2
"""Relative, of factors; bfloat16 rounds by 2 ** -9."""
OTHER = 1e-4
"""Likewise, from which on two numbers are others."""
_EXACT = 5e-7  # likewise, of factors in float32 and wider
_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # narrower ones compute nothing on a CPU
_MOST, _VALUES = 64, 256  # parameters that are looked at, and values of each
_FEWEST = 4  # values that have changed: fewer are explained by anything
_KINDS = (2.0, math.inf)  # of norms
_BLOCK = 1 << 15  # values whose squares are added up in their own type, and the sums in float64: relative error 1e-7
_SQUARED = (1e-12, 1e15)  # largest values of what may be squared in float32
_REPEATED = 3e-6  # relative, of the norm that numbers leave behind them
_LARGEST_ERROR = 1e-3  # relative, with which a number is known
_ROUNDINGS = 2  # of a value, in its type's resolution, and as many of what is added to it
_LEAST_EPS = 1e-14  # sums in float64 are rounded, too
_SIGMAS, _VERIFIED = 3, 16  # times the error of a mean: of a number, and of what it explains
_COLLINEAR = 1e-6

SUBJECTS = ("weights", "gradients")


class Multiple(NamedTuple):
    """By what one number gradients were multiplied, and which.

    The number is NaN: nobody can say; infinite: there are several; below 0: it is of one parameter, or of all of one
    module and no others, which may be treated by themselves. Of three digits it is where no more are known of it.
    """

    factor: float
    some: Sequence[nn.Parameter] = ()  # none: all of those that were asked for


class RankChange(NamedTuple):
    """What the numbers are by which a rank's weights, or its gradients, were changed.

    `extent` is NaN: no such numbers explain it; 0: nothing was; 1: one parameter or those of one module, which may be
    treated by themselves; 2: more. `repeats` is 1: all that was changed was multiplied, and has the norm now that
    another such number has left before. Norms are those of all of the rank's weights, of those that were changed, and
    of their gradients likewise, by kind; as they were, and as they are.
    """

    extent: float = 0.0
    own: float = 0.0  # of what was there
    cross: float = 0.0  # of the gradient in the weight, or of the weight in the gradient
    error: float = 0.0  # relative, of these two
    repeats: float = 0.0
    norms: tuple[float, ...] = (0.0,) * 8 * len(_KINDS)

    @property
    def numbers(self) -> list[float]:
        """For other ranks; `told` reads them."""
        return [*self[:-1], *self.norms]

    @classmethod
    def told(cls, numbers: Sequence[float]) -> RankChange:
        """What a rank has found, of its `numbers`."""
        count = len(cls._fields) - 1
        extent, own, cross, error, repeats = numbers[:count]
        return cls(extent, own, cross, error, repeats, tuple(numbers[count:]))

    @property
    def measures(self) -> list[float]:
        """What a number may be alike on all ranks by: the norms, and what one of weights is to that of gradients."""
        largest = self.norms[:: len(_KINDS)]
        pairs = zip(largest[::2], largest[1::2], strict=True)
        return [*self.norms, *(weights / gradients if gradients else 0.0 for weights, gradients in pairs)]


_NOTHING, _UNEXPLAINED = RankChange(), RankChange(math.nan)
NUMBERS = len(_NOTHING.numbers)


class RankChanges:
    """Some values of this rank's weights and gradients, as they were and as they are.

    Those of `parameters`, by name, that are not on the CPU have no part in it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = list(parameters.values())
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        strided = [each for each in self._parameters if each.layout is torch.strided]
        floats = [each for each in strided if each.device.type == "cpu" and each.dtype in _TYPES]
        self._every = [each for each in floats if each.numel()]
        self._held = self._every[:_MOST]
        self._sizes = [len(_some(each)) for each in self._held]
        self._owner = torch.repeat_interleave(torch.tensor(self._sizes, dtype=torch.int64, device="cpu"))
        eps = [max(torch.finfo(each.dtype).eps, _LEAST_EPS) for each in self._held]
        self._eps = torch.tensor(eps, dtype=torch.float64, device="cpu")[self._owner]
        self._noted: torch.Tensor | None = None  # gradients
        self._closely: tuple[torch.Tensor, torch.Tensor] | None = None  # weights, and all norms
        self._left: list[tuple[float, float] | None] = [None for _ in SUBJECTS]  # the last numbers, and their norms

    def note(self, *, closely: bool = True) -> None:
        """Gradients are as a step or an update has left them, and weights: only `closely` are these looked at, too."""
        self.forget()
        if self._held and len(gradients := self._gradients()) == len(self._owner):  # else some are of another size
            self._noted = gradients
            if closely and len(weights := self._weights()) == len(self._owner):
                self._closely = weights, self._norms()

    def multiply_gradients(self, factor: float, among: Container[int]) -> None:
        """Those of these parameters, by id, were multiplied: what the script makes of all of them is told without that.

        What they are now is what was noted, but for rounding, unless the script has changed it before.
        """
        if self._noted is None:
            return
        if len(new := self._gradients()) != len(self._noted):
            self.forget()  # parameters of another size
            return
        held, every = (
            torch.tensor([factor if id(each) in among else 1.0 for each in some], dtype=torch.float64, device="cpu")
            for some in (self._held, self._every)
        )
        self._noted = _unless_apart(held[self._owner] * self._noted, new, _ROUNDINGS * self._eps)
        if self._closely is not None:
            weights, norms = self._closely
            gradient_norms = _unless_apart(every * norms[1], self._norms()[1], _REPEATED)
            self._closely = weights, torch.stack([norms[0], gradient_norms])

    def multiples(self, every: Sequence[Sequence[nn.Parameter]]) -> list[Multiple]:
        """What the script has multiplied since, of each of these: told from what gradients are to those noted."""
        ratios = self._ratios()
        return [_multiple(each, ratios, self._names) for each in every]

    def _ratios(self) -> list[tuple[float, nn.Parameter]]:
        """Where both are some, at the largest value that is known."""
        if self._noted is None or len(new := self._gradients()) != len(self._noted):
            return []
        pairs = zip(torch.split(self._noted, self._sizes), torch.split(new, self._sizes), strict=True)
        found = []
        for parameter, (before, now) in zip(self._held, pairs, strict=True):
            at = int(before.abs().argmax())
            if float(before[at]) and _is_strided(parameter.grad):
                found.append((float(now[at]) / float(before[at]), parameter))
        return found

    def forget(self) -> None:
        """What comes is not to be held against what was noted."""
        self._noted = self._closely = None

    def found(self) -> list[RankChange]:
        """What the script has changed since, of `SUBJECTS`; only what is noted anew can be asked for again."""
        gradients, closely = self._noted, self._closely
        self.forget()
        if gradients is None or closely is None:
            return [_NOTHING, _NOTHING]
        weights, norms = closely
        new_weights, new_gradients = self._weights(), self._gradients()
        if len(new_weights) != len(weights):  # parameters of another size
            return [_UNEXPLAINED, _UNEXPLAINED]
        dropped = torch.tensor([each.grad is None for each in self._held], device="cpu")[self._owner]
        found = [
            self._change(weights, gradients, new_weights, may_cut=False),
            self._change(gradients, weights, torch.where(dropped, gradients, new_gradients), may_cut=True),
        ]
        if not any(each.extent > 0 for each in found):
            return found
        new_norms = self._norms()
        return [
            self._with_norms(n, each, norms, new_norms) if each.extent > 0 else each for n, each in enumerate(found)
        ]

    def _with_norms(self, subject: int, change: RankChange, old: torch.Tensor, new: torch.Tensor) -> RankChange:
        """A change of one of `SUBJECTS`, with the norms, by subject, kind and parameter, that were and that are."""
        changed = (old[subject] != new[subject]).any(dim=0)
        changed |= ~changed.any()  # turned round: the norms are as they were
        norms = [
            float(torch.linalg.vector_norm(each[of, k][some], kind))
            for each in (old, new)
            for some in (torch.ones_like(changed), changed)
            for of in range(len(SUBJECTS))
            for k, kind in enumerate(_KINDS)
        ]
        own, left = change.own if not change.cross else 0.0, float(torch.linalg.vector_norm(new[subject, 0][changed]))
        before, self._left[subject] = self._left[subject], (own, left) if own else None
        repeats = (
            before is not None
            and abs(left - before[1]) <= _REPEATED * left
            and abs(own - before[0]) > max(OTHER, 2 * change.error) * abs(own) + 10 * _REPEATED
        )
        return change._replace(norms=tuple(norms), repeats=float(repeats and own != 0))

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        """Of each weight, and of its gradient: by subject, kind and parameter."""
        room = torch.empty(_BLOCK, dtype=torch.float64, device="cpu")
        found = [
            _norms(each, room) if _is_strided(each) else (0.0,) * len(_KINDS)
            for parameter in self._every
            for each in (parameter, parameter.grad)
        ]
        return (
            torch.tensor(found, dtype=torch.float64, device="cpu").view(-1, len(SUBJECTS), len(_KINDS)).permute(1, 2, 0)
        )

    def _weights(self) -> torch.Tensor:
        return torch.cat([_some(each) for each in self._held]).double()

    def _gradients(self) -> torch.Tensor:
        found = [_some(each.grad) if _is_strided(each.grad) else torch.zeros_like(_some(each)) for each in self._held]
        return torch.cat(found).double()

    def _change(self, old: torch.Tensor, other: torch.Tensor, new: torch.Tensor, *, may_cut: bool) -> RankChange:
        if torch.equal(old, new):
            return _NOTHING
        if not bool((new.isfinite() & old.isfinite() & other.isfinite()).all()):
            return _UNEXPLAINED
        touched = _sums((new != old).double(), self._owner, len(self._held)) > 0
        fit = _Fit(old, other, new, self._owner, self._eps, may_cut=may_cut)
        found = fit.numbers()
        if found is None:
            return _NOTHING if fit.is_small else _UNEXPLAINED
        some = [each for each, is_touched in zip(self._held, touched.tolist(), strict=True) if is_touched]
        able = [each for each in self._held if each.requires_grad or each.grad is not None]
        by_itself = len(some) == 1 or (len(some) < len(able) and are_module(some, self._parameters, self._names))
        return RankChange(1.0 if by_itself else 2.0, *found)


class _Fit:
    """Least squares of what has changed, in the values of each parameter and of all of them.

    They were `old` and are `new`; `other` is what else may have been added to them. Each has a parameter, its `owner`,
    and the resolution of its type; `may_cut`: the largest may lie at a bound.

    Attributes:
        is_small: No parameter has enough values to tell.
    """

    def __init__(
        self,
        old: torch.Tensor,
        other: torch.Tensor,
        new: torch.Tensor,
        owner: torch.Tensor,
        eps: torch.Tensor,
        *,
        may_cut: bool,
    ) -> None:
        self._old, self._other, self._new, self._change = old, other, new, new - old
        self._owner, self._eps, self._count = owner, _ROUNDINGS * eps, int(owner.max()) + 1
        self._cut = self._at_bound() if may_cut else torch.zeros_like(new, dtype=torch.bool)
        self._kept = ~self._cut
        self._rounding = self._eps * torch.maximum(old.abs(), new.abs())
        changed = self._sums(((self._change != 0) & self._kept).double())
        self._changed, self._tells = changed > 0, changed >= _FEWEST
        self.is_small = not bool(self._tells.any()) and not bool(self._cut.any())

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        return _sums(values, self._owner, self._count)

    def _at_bound(self) -> torch.Tensor:
        """Which values lie at a bound: the largest ones, if they are in several parameters."""
        sizes = self._new.abs()
        cut = (sizes >= sizes.max() * (1 - self._eps)) & (self._change != 0) & (sizes > 0)
        is_bound = int(cut.sum()) >= _FEWEST and int((self._sums(cut.double()) > 0).sum()) > 1
        return cut if is_bound else torch.zeros_like(cut)

    def numbers(self) -> tuple[float, float, float] | None:
        """As `RankChange` has them; None: there are none that explain all that has changed."""
        if not bool(self._changed.any()):
            return (0.0, 0.0, 0.0) if bool(self._cut.any()) else None
        left = self._tells
        for terms in ((True, False), (False, True), (True, True)):
            own, cross = self._solved(terms, self._owner, self._count)
            fits = self._fits(own[self._owner], cross[self._owner]) & left
            if bool(fits.any()) and (found := self._common(terms, fits)) is not None:
                return found
            left = left & ~fits  # one number fits them: two would, by rounding
        return None

    def _common(self, terms: tuple[bool, bool], fits: torch.Tensor) -> tuple[float, float, float] | None:
        """The numbers of all those parameters together, and their error; None: some parameter has others."""
        among = fits[self._owner] & self._kept
        everywhere = torch.zeros_like(self._owner)
        own, cross = (float(each[0]) for each in self._solved(terms, everywhere, 1, among))
        noise = float(self._rounding[among].square().mean() / among.sum()) ** 0.5 / (2 * _ROUNDINGS)
        errors = [
            _SIGMAS * noise / size if is_in and (size := float(each[among].square().mean()) ** 0.5) else 0.0
            for is_in, each in zip(terms, (self._old, self._other), strict=True)
        ]
        errors[0] += float(self._eps.max()) if own else 0.0  # of 1 + own, as it is rounded itself
        error = max(off / abs(each) if each else 0.0 for off, each in zip(errors, (own, cross), strict=True))
        slack = _VERIFIED * (errors[0] * self._old.abs() + errors[1] * self._other.abs())
        explained = ~self._changed
        for first, second in {(own, cross), (own, 0.0), (0.0, cross)}:
            explained = explained | self._fits(first, second, slack)
        return (own, cross, error) if error <= _LARGEST_ERROR and bool(explained.all()) else None

    def _solved(
        self, terms: tuple[bool, bool], owner: torch.Tensor, count: int, among: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers by owner that leave the least squares; those of terms that have no part are 0."""
        kept = (self._kept if among is None else among).double()
        x, y = (kept * each for each in (self._old, self._other))
        products = x * x, y * y, x * self._change, y * self._change
        xx, yy, xd, yd = (_sums(each, owner, count) for each in products)
        nothing = torch.zeros_like(xx)
        if terms == (True, False):
            return torch.where(xx > 0, xd / xx, nothing), nothing
        if terms == (False, True):
            return nothing, torch.where(yy > 0, yd / yy, nothing)
        xy = _sums(x * y, owner, count)
        determinant = xx * yy - xy * xy
        is_well = determinant > _COLLINEAR * xx * yy
        own, cross = (xd * yy - yd * xy) / determinant, (yd * xx - xd * xy) / determinant
        return torch.where(is_well, own, nothing), torch.where(is_well, cross, nothing)

    def _fits(
        self, own: torch.Tensor | float, cross: torch.Tensor | float, slack: torch.Tensor | float = 0.0
    ) -> torch.Tensor:
        """Which parameters' values are explained by numbers, to rounding; those at a bound would lie beyond it."""
        made = own * self._old + cross * self._other
        allowed = self._rounding + self._eps * made.abs() + slack
        off = (made - self._change).abs() > allowed
        beyond = (self._old + made).abs() < self._new.abs() - allowed
        return self._sums(torch.where(self._cut, beyond, off).double()) == 0


def _multiple(
    parameters: Sequence[nn.Parameter], ratios: Sequence[tuple[float, nn.Parameter]], names: Mapping[int, str]
) -> Multiple:
    among = {id(each) for each in parameters}
    found = [pair for pair in ratios if id(pair[1]) in among]
    if not found or not all(math.isfinite(each) for each, _ in found):
        return Multiple(math.nan)
    multiplied = [pair for pair in found if abs(pair[0] - 1) > ROUNDING] or found
    numbers = sorted(each for each, _ in multiplied)
    middle = numbers[len(numbers) // 2]
    if not any(numbers):
        return Multiple(math.nan)
    if middle <= 0 or any(abs(each - middle) > ROUNDING * middle for each in numbers):
        return Multiple(math.inf)
    some = [parameter for _, parameter in multiplied] if len(multiplied) < len(found) else []
    if any(abs(each - middle) > _EXACT * middle for each in numbers):
        middle = float(f"{middle:.3g}")
    by_itself = len(multiplied) == 1 or (bool(some) and are_module(some, [each for _, each in found], names))
    return Multiple(-middle if by_itself else middle, some)


def are_module(some: Sequence[nn.Parameter], among: Sequence[nn.Parameter], names: Mapping[int, str]) -> bool:
    """Some parameters are all those of one module that are among these; their names are by id."""
    paths = zip(*(names[id(each)].split(".")[:-1] for each in some), strict=False)
    module = [parts[0] for parts in itertools.takewhile(lambda parts: len({*parts}) == 1, paths)]
    within = [each for each in among if names[id(each)].split(".")[: len(module)] == module]
    return bool(module) and len(within) == len(some)


def _unless_apart(expected: torch.Tensor, found: torch.Tensor, error: torch.Tensor | float) -> torch.Tensor:
    """What was found; where it is not what was expected, up to a relative error, that."""
    return torch.where((found - expected).abs() <= error * expected.abs(), found, expected)


def _is_strided(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return tensor is not None and tensor.layout is torch.strided


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its values, evenly over it."""
    values, every = tensor.detach(), -(-tensor.numel() // _VALUES) or 1
    if not values.is_contiguous():  # it would be copied whole
        return values[torch.unravel_index(torch.arange(0, values.numel(), every, device="cpu"), values.shape)]
    return values.as_strided((-(-values.numel() // every),), (every,), values.storage_offset())


def _norms(tensor: torch.Tensor, room: torch.Tensor) -> tuple[float, ...]:
    """Of `_KINDS`, block by block: a copy of all of it in float64 would be the most that an update holds at once.

    Args:
        tensor: Whose; its values are taken as they lie in memory.
        room: float64; a block is copied there which is of a narrow type, or whose squares float32 cannot hold.
    """
    outermost_first = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.detach().permute(outermost_first).reshape(-1)
    if not len(flat):  # emptied since
        return (0.0,) * len(_KINDS)
    low, high = flat.aminmax()
    largest = float(torch.maximum(-low, high))
    least, most = _SQUARED
    is_plain = flat.dtype is torch.float64 or (flat.dtype is torch.float32 and least < largest < most)
    blocks = (some if is_plain else room[: len(some)].copy_(some) for some in torch.split(flat, len(room)))
    return math.sqrt(sum(float(torch.dot(block, block)) for block in blocks)), largest


def _sums(values: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64, device="cpu").index_add_(0, owner, values)
