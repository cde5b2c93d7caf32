"""Does an optimizer treat every parameter by itself? On several workers each one's sees its own parameters alone.

    clipping by the global norm in step()    plain PyTorch    |g1 g2 g3 g4|
                                             worker 0         |g1 g2|        another norm, other weights

torch's own optimizers do. Of others, and of those with hooks on their step, small stand-ins for the parameters tell:
the user's builder makes one optimizer over all of them and one over each worker's, all get the same gradients for some
steps, and then the parameters must be the same; so they must where the parameters of some workers have no gradients, or
such as are not finite, and those of others have. They tell two more things, too: whether the step runs where no
parameter has a gradient, and whether it changes gradients. A `zero_grad` of an optimizer's own is called as well: it
may keep something of them. Where an optimizer has modes (`train()`, as schedule-free ones), both are tried.

What draws is compared to the last bit, for noise may be as small as it likes; so is what draws for the parameters' own
types alone, and not in float64. Stand-ins are small: what draws for large matrices alone does not there. So true
updates are watched, too: `drawing_nothing`. What draws as often whatever it is over, as one number for a step, draws
alike on all workers.

What treats every parameter by itself may also take one part of them after the other: see `step_in_parts`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from assigner.errors import UsageError
from assigner.model.deferred.likeness import in_likeness
from assigner.runtime.forward.heldtensors import has_values_of
from assigner.runtime.forward.randomness import generator_states, kept_generators, seed_device, seed_python

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

Named = Mapping[str, nn.Parameter]
Build = Callable[[Named, Named], torch.optim.Optimizer]
"""Of the user's optimizer, over all of a model's parameters; it is to keep some, the others have no values."""

_SCALES = (1e-3, 1.0, 30.0, 30.0, 1e3, 1e3, 1.0, 1e-3)
"""Of the gradients in the steps, with a factor of up to 10 for each parameter: below and above what a clipping leaves
alone. They keep their direction, so that a rate that is learnt from the distance to the start does rise."""

_LARGEST = (1e9, 1e8, 1e7, 1e6, 1e5, 1e4)
"""In one step more, the first of these that does not fail, as one that stops at a gradient above its limit does: above
what a clipping leaves alone whose threshold is for the gradients of a scaled loss. It is compared by itself, for beside
such an update no other is seen."""

_PHASE = 0.6 + 0.8j  # of a complex gradient
_NOISE = 1e-7  # relative to an update, in float64
_MOST = 2  # entries in a stand-in's dimension
_LARGE = 4096  # entries in all, of that for the largest parameter of each worker: some code treats large ones otherwise

_ODD = {None: "are there", math.inf: "are finite", math.nan: "are finite"}
"""What stands in the gradients of some parameters alone, None: they have none; and what they are else, in words."""


@dataclass(frozen=True)
class StepBehaviour:
    """How an optimizer's step goes about it, beyond the parameters that it is given."""

    runs_idle: bool = True  # where no parameter has a gradient, or there is none; False: it fails there
    changes_gradients: bool = False  # it leaves other gradients than it finds, as one that clips them in place
    keeps_gradients: bool = False  # its `zero_grad` leaves something of them
    draws_alike: bool = False  # it draws random numbers, and the same whatever parameters it is given
    figure: float = 0.0  # of what it does to stand-ins, which are alike on all ranks; 0: it was not tried out

    def joined(self, other: StepBehaviour) -> StepBehaviour:
        """That of an optimizer which may go about it in both ways."""
        return StepBehaviour(
            runs_idle=self.runs_idle and other.runs_idle,
            changes_gradients=self.changes_gradients or other.changes_gradients,
            keeps_gradients=self.keeps_gradients or other.keeps_gradients,
            draws_alike=self.draws_alike or other.draws_alike,
            figure=other.figure,
        )


@dataclass(frozen=True)
class _Trial:
    """What some steps have done to the stand-ins of one worker's parameters, by name.

    `updates` are their sums, and that of the last step, with the largest gradients. The figure is of all updates,
    measured by the gradients: another kind of step has another one, beyond rounding.
    """

    updates: Mapping[str, tuple[torch.Tensor, ...]]
    drawn: tuple[Any, ...] | None = None  # what the generators held in the end; None: no step has drawn
    changed_gradients: bool = False  # one of the steps has left others
    kept_gradients: bool = False  # the optimizer's own `zero_grad` has left some
    figure: float = 0.0


class _Comparison(NamedTuple):
    """Steps over all parameters beside those over each worker's: where they differ, it is by `others`, in words."""

    together: _Trial
    apart: Mapping[frozenset[str], _Trial]
    others: str


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """It is torch's own, as it was built: each of these treats every parameter by itself."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, hooks_on_all()
    own = type(optimizer).__module__.startswith("torch.optim") and "step" not in vars(optimizer)
    return own and not any(hooks)


def hooks_on_all() -> frozenset[int]:
    """The keys of the hooks on the steps of all optimizers of this process."""
    return frozenset((*torch_optimizer._global_optimizer_pre_hooks, *torch_optimizer._global_optimizer_post_hooks))


def has_own(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """Whether a method that every optimizer has is another one here than torch's."""
    defined = next((each for each in type(optimizer).__mro__ if method in vars(each)), torch.optim.Optimizer)
    return method in vars(optimizer) or not defined.__module__.startswith("torch.optim")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step must be given a closure, which it calls for a loss and gradients as often as it likes."""
    return _takes_closure(type(optimizer).step)  # a scheduler hides that of the object


@functools.cache
def _takes_closure(step: Callable[..., Any]) -> bool:
    _, *arguments = inspect.signature(step).parameters.values()
    needed = [each for each in arguments if each.default is each.empty]
    return any(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in needed)


def closure_words(optimizer: torch.optim.Optimizer) -> str:
    """What is said of an optimizer that needs a closure, wherever it is met."""
    return (
        f"{type(optimizer).__name__}.step needs a closure, which runs the forward again: it trains under plans that"
        " have all parameters on one worker"
    )


CLOSURE_HINT = (
    "ask for such a plan: assigner solve --max-workers 1; or use an optimizer that works from the gradients alone, as"
    " AdamW or SGD"
)


def check_separable(
    optimizer: torch.optim.Optimizer,
    model: Sequence[tuple[str, nn.Parameter]],
    shares: Sequence[Collection[str]],
    build: Build,
) -> StepBehaviour:
    """Refuse an optimizer that would make other weights on several workers than on one.

    A share without a parameter that wants a gradient may be one over which the step fails, as a mean of no gradients
    does: there it can be left out, if a step over all parameters leaves those of the share as they are.

    Args:
        optimizer: What the user's builder made of the model's parameters.
        model: Those by name, for their shapes and attributes.
        shares: Names of those that each worker has; workers that have none beside them may be left out.
        build: Makes such an optimizer over others.

    Returns:
        How its step is to be treated; where it cannot be tried and one worker has all parameters, with all care.

    Raises:
        UsageError: what it does with a parameter depends on the others; or this cannot be found out.
    """
    if not callable(getattr(optimizer, "train", None)):
        return _checked(optimizer, model, shares, build)

    def training(whole: Named, held: Named) -> torch.optim.Optimizer:
        made: Any = build(whole, held)
        made.train()
        return cast("torch.optim.Optimizer", made)

    found = list[StepBehaviour]()
    for each in (training, build):  # as scripts have it by `train()`, and as it was built if it runs so
        try:
            found.append(_checked(optimizer, model, shares, each))
        except UntriedError:
            if each is build and not found:
                raise
    return functools.reduce(StepBehaviour.joined, found)


def _checked(
    optimizer: torch.optim.Optimizer,
    model: Sequence[tuple[str, nn.Parameter]],
    shares: Sequence[Collection[str]],
    build: Build,
) -> StepBehaviour:
    """As `check_separable`, in one mode."""
    name = type(optimizer).__name__
    wanting = {name for name, each in model if each.requires_grad}
    parts = dict.fromkeys([*map(frozenset, shares), frozenset()])
    trials = _Trials(model, parts, build)
    try:
        with kept_generators(_CPU, draws=True):
            together, apart = _tried_apart(trials, parts, wanting)
            odd = _tried_oddly(trials, [share for share in parts if share & wanting])
            drawn = _drawn_in_kind(trials, [share for share in parts if share & wanting and share != trials.whole])
    except Exception as error:
        if all(share in (trials.whole, frozenset()) for share in parts):
            own = has_own(optimizer, "zero_grad")
            return StepBehaviour(runs_idle=False, changes_gradients=True, keeps_gradients=own)
        if trials.runs_with_closure():
            raise UsageError(closure_words(optimizer), hint=CLOSURE_HINT) from error
        said = str(error).strip().splitlines()
        raise UntriedError(
            f"whether {name} treats every parameter by itself cannot be found out: with small tensors in their place it"
            f" fails: {type(error).__name__}{f': {said[0]}' if said else ''}",
            hint=_EMPTY_HINT if isinstance(error, IndexError) else _SMALL_HINT,
        ) from error
    none = _Trial({key: tuple(each * 0 for each in updates) for key, updates in together.updates.items()})
    every = {share: apart.get(share, none) for share in parts}
    plain = _Comparison(together, every, "others that another worker has under this plan")
    for each in (plain, *odd):
        found = _differing(each.together, each.apart)
        if found is None:
            continue
        if each.together.drawn:
            raise _drawn_error(optimizer, repr(found))
        if each is plain and trials.go_on():
            raise UsageError(
                f"{name}, or a hook on its step, keeps something that outlives it, as in an attribute of its class, a"
                f" name of its file or a closure around its builder: its trial would count on there, and what it does"
                f" to {found!r} depends on it",
                hint="keep it as a number in each param group, or as a tensor in the state of each parameter",
            )
        raise UsageError(
            f"{name}, with the hooks on its step if there are any, looks at several parameters at once: what it does to"
            f" {found!r} depends on {each.others}",
            hint=_HINT if each is plain else _ODD_HINT,
        )
    if drawn is not None:
        raise _drawn_error(optimizer, repr(drawn))
    whole = (together, *(each.together for each in odd))
    return StepBehaviour(
        runs_idle=apart.keys() == parts.keys(),
        changes_gradients=any(each.changed_gradients for each in whole),
        keeps_gradients=any(each.kept_gradients for each in (*whole, *apart.values())),
        draws_alike=together.drawn is not None and all(each.drawn == together.drawn for each in apart.values()),
        figure=together.figure,
    )


def _drawn_error(optimizer: torch.optim.Optimizer, what: str) -> UsageError:
    return UsageError(
        f"{type(optimizer).__name__} draws random numbers in its step: what it does to {what} depends on what was drawn"
        " for others, which another worker has under this plan",
        hint="have it draw for each parameter from a torch.Generator of that parameter's own; or solve for one"
        " worker (--only)",
    )


@contextlib.contextmanager
def drawing_nothing(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """A step over some of what is trained, from generators that are seeded alike for all: it draws nothing from them.

    To look takes some ten microseconds, so every update is looked at.

    Raises:
        UsageError: it has drawn.
    """
    before = _watched(device)
    yield
    if _watched(device) != before:
        raise _drawn_error(optimizer, "a parameter")


def _watched(device: torch.device) -> tuple[Any, ...]:
    """All but Python's generator: a thread of the script may draw from that meanwhile, as for when to try again."""
    *of_torch, others = generator_states(device)
    return *of_torch, others.numpy


_CPU = torch.device("cpu")

_HINT = (
    "clip gradients by their global norm with pipeline.step(batch, max_norm=...) or pipeline.clip_grad_norm_, not in"
    " the optimizer; or use one that treats every parameter by itself, as AdamW; or solve for one worker (--only)"
)
_EMPTY_HINT = (
    "under a plan a param group whose parameters all lie on other workers is empty there: have step() go over those"
    " that there are, for each in group['params']; or solve for one worker (--only)"
)
_SMALL_HINT = (
    f"most have at most {_MOST} entries in a dimension: have its step take those too, as a whole where it divides"
    " others into blocks; or use another one, as AdamW; or solve for one worker (--only)"
)
_ODD_HINT = (
    "have it leave out each parameter by itself; or decide in the loop: pipeline.clip_grad_norm_(math.inf) gives the"
    " same norm on all ranks, which is not finite where a gradient is not; or solve for one worker (--only)"
)


class UntriedError(UsageError):
    """The optimizer cannot be tried out: it fails with stand-ins."""


class _LargeGradientsError(Exception):
    """The step with the largest gradients failed, and none before it: smaller ones may do."""


def _tried_apart(
    trials: _Trials, parts: Collection[frozenset[str]], wanting: set[str]
) -> tuple[_Trial, dict[frozenset[str], _Trial]]:
    """The trials of all parameters and of each worker's, but of those over which it fails with nothing to train."""
    for largest in _LARGEST:
        scales, apart = (*_SCALES, largest), dict[frozenset[str], _Trial]()
        with contextlib.suppress(_LargeGradientsError):
            together = trials.tried(trials.whole, scales)
            for share in parts:
                try:
                    apart[share] = trials.tried(share, scales)
                except Exception:
                    if share & wanting:
                        raise  # else its step is left out there
            return together, apart
    raise AssertionError("an error with the last of them has another class")


def _tried_oddly(trials: _Trials, shares: Sequence[frozenset[str]]) -> list[_Comparison]:
    """Trials of all parameters with odd gradients in the middle, for every other worker; and those of the rest alone.

    Where there are no gradients, those of the workers without are tried too: a count may go on where others have some.
    A step that fails over such gradients says nothing: it ends a run, on however many workers.
    """
    scales, found = (1.0, 1.0, 1.0), list[_Comparison]()
    for odd, even in (shares[::2], shares[1::2]), (shares[1::2], shares[::2]):
        if names := frozenset().union(*odd) - frozenset().union(*even):
            fine = {share: trials.tried(share, scales) for share in even}
            for value, words in _ODD.items() if fine else ():
                others = f"whether the gradients of others {words}, which another worker has under this plan"
                given = dict.fromkeys(names, value)
                with contextlib.suppress(Exception):
                    together = trials.tried(trials.whole, scales, odd=given)
                    found.append(_Comparison(together, fine, others))
                    if value is None:
                        without = {each: trials.tried(each, scales, odd=given) for each in odd}
                        found.append(_Comparison(together, without, others))
    return found


def _drawn_in_kind(trials: _Trials, shares: Sequence[frozenset[str]]) -> str | None:
    """A parameter that is drawn for otherwise in steps over all than over those of its worker, in its own type.

    As in stochastic rounding of bfloat16, with one generator of the optimizer's own for all: no other watches that.
    Types that torch does not compute in say nothing.
    """
    scales = (1.0, 1.0, 1.0)
    with contextlib.suppress(Exception):
        together = trials.tried(trials.whole, scales, in_kind=True)
        return _differing(together, {each: trials.tried(each, scales, in_kind=True) for each in shares}, noise=0.0)
    return None


def _differing(together: _Trial, apart: Mapping[frozenset[str], _Trial], *, noise: float = _NOISE) -> str | None:
    """A parameter that steps over all have moved otherwise than steps over those of its worker.

    Beyond rounding, or by a bit where they draw: what draws for each parameter may have as small an effect as it likes.
    """
    for share, trial in apart.items():
        beyond = 0.0 if together.drawn or trial.drawn else noise
        for key in filter(share.__contains__, together.updates):
            pairs = zip(together.updates[key], trial.updates[key], strict=True)
            if not all(_alike(*pair, noise=beyond) for pair in pairs):
                return key
    return None


class _Trials:
    """Optimizers with stand-ins for the parameters of workers."""

    def __init__(
        self, model: Sequence[tuple[str, nn.Parameter]], shares: Iterable[frozenset[str]], build: Build
    ) -> None:
        self._model, self._build, self.whole = model, build, frozenset(name for name, _ in model)
        sizes = {name: each.numel() for name, each in model}
        self._large = {max(share, key=lambda name: (sizes[name], name)) for share in shares if share}

    def runs_with_closure(self) -> bool:
        """Whether a step that fails without a closure calls one that it is given, and does not fail then."""
        scales, called = (*_SCALES, _LARGEST[-1]), list[bool]()
        with kept_generators(_CPU, draws=True):
            with contextlib.suppress(Exception):
                self.tried(self.whole, scales)
                return False  # it fails over others
            with contextlib.suppress(Exception):
                self.tried(self.whole, scales, called=called)
                return bool(called)
        return False

    def go_on(self) -> bool:
        """Whether two of the same optimizer, one after the other, do not do the same."""
        with kept_generators(_CPU, draws=True), contextlib.suppress(Exception):
            one, other = (self.tried(self.whole, _SCALES) for _ in range(2))
            return _differing(one, {self.whole: other}) is not None
        return False

    def tried(
        self,
        share: Collection[str],
        scales: Sequence[float],
        *,
        odd: Mapping[str, float | None] | None = None,
        called: list[bool] | None = None,
        in_kind: bool = False,
    ) -> _Trial:
        """Some steps of the optimizer with the stand-ins of one worker's parameters.

        Args:
            share: The worker's.
            scales: Those of the gradients in the steps.
            odd: Parameters whose gradients are others in the step in the middle, and what stands in these; None: they
                have none then.
            called: Notes its calls of a closure, which gives the same gradients again; None: there is no closure.
            in_kind: The stand-ins are of the types that the parameters have.
        """
        generator = torch.Generator().manual_seed(0)
        seed_device(0, _CPU)
        seed_python(0)
        small = {
            name: _small(each, generator, is_large=name in self._large, in_kind=in_kind) for name, each in self._model
        }
        directions = {
            name: ((_random(each, generator).abs() + 0.1) * (_PHASE if each.is_complex() else 1)).to(each.dtype)
            for name, each in small.items()
        }
        held = {name: each for name, each in small.items() if name in share}
        before = {name: each.detach().clone() for name, each in held.items()}
        optimizer = self._build({name: each if name in held else stand_in(each) for name, each in small.items()}, held)
        changed, kept, figure = False, False, 0.0
        states = generator_states(_CPU)
        moved: dict[str, torch.Tensor] = {}
        for n, scale in enumerate(scales):
            moved = {name: each.detach().clone() for name, each in held.items()}
            if has_own(optimizer, "zero_grad"):
                optimizer.zero_grad()
                kept = kept or any(each.grad is not None and bool(each.grad.any()) for each in held.values())
            shares = {name: 10 ** (2 * float(torch.rand((), generator=generator, device="cpu")) - 1) for name in small}
            given = {name: directions[name] * scale * shares[name] for name, each in held.items() if each.requires_grad}
            for name, value in (odd or {}).items() if n == len(scales) // 2 else ():
                if value is None:
                    given.pop(name, None)
                elif name in given:
                    given[name].view(-1)[:1] = value

            def closure(given: Mapping[str, torch.Tensor] = given) -> float:
                for name, each in held.items():
                    each.grad = given[name].clone() if name in given else None
                if called is not None:
                    called.append(True)
                return 0.0

            closure()
            try:
                if called is None:
                    optimizer.step()
                else:
                    called.clear()
                    optimizer.step(closure)
            except Exception as error:
                if scale in _LARGEST[:-1]:
                    raise _LargeGradientsError from error
                raise
            changed = changed or any(not _same(given.get(name), each.grad) for name, each in held.items())
            steps = ((each.detach() - moved[name]).nan_to_num(0.0, 0.0, 0.0) for name, each in sorted(held.items()))
            figure += sum(weight * float(each.norm()) / scale for weight, each in enumerate(steps, 1))
        updates = {name: (moved[name] - before[name], each.detach() - moved[name]) for name, each in held.items()}
        after = generator_states(_CPU)
        return _Trial(updates, None if after == states else after, changed, kept, figure)


def _small(parameter: nn.Parameter, generator: torch.Generator, *, is_large: bool, in_kind: bool) -> nn.Parameter:
    """A parameter with the same number of dimensions and attributes, else in float64: updates may be tiny."""
    most = round(_LARGE ** (1 / max(parameter.dim(), 1))) if is_large else _MOST
    sizes = [min(each, most) for each in parameter.shape]
    kind = torch.float64 if parameter.is_floating_point() else parameter.dtype
    kind = parameter.dtype if in_kind else torch.complex128 if parameter.is_complex() else kind
    values = _random(torch.empty(sizes, dtype=kind, device="cpu"), generator)
    return cast("nn.Parameter", in_likeness(parameter, values))


def stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter without memory, as what another worker has is seen when the optimizer is built."""
    return cast("nn.Parameter", in_likeness(parameter, torch.empty_like(parameter, device="meta")))


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like.dtype)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Two gradients, to the last bit; a sparse one is another than a dense one."""
    if one is None or other is None:
        return one is other
    return one.layout == other.layout and has_values_of(one, other)


def _alike(one: torch.Tensor, other: torch.Tensor, *, noise: float) -> bool:
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    one, other = one[finite], other[finite]
    largest = max((float(each.abs().max()) for each in (one, other) if each.numel()), default=0.0)
    return bool(((one - other).abs() <= noise * largest).all())


def step_in_parts(optimizer: torch.optim.Optimizer, parts: Iterable[Iterable[nn.Parameter]]) -> None:
    """An update of torch's own optimizers; where they work on many parameters at once, one part after the other.

    Temporaries are then as large as the largest part, and not as all parameters: that is what a profile has measured,
    and a plan counts on. What comes out is the same: each of these treats every parameter by itself.
    """
    if not (is_known(optimizer) and any(map(_is_foreach, optimizer.param_groups))):
        optimizer.step()
        return
    waiting = {
        id(each): (each, each.grad)
        for group in optimizer.param_groups for each in group["params"] if each.grad is not None
    }  # fmt: skip
    left = dict(waiting)
    try:
        for parameter, _ in waiting.values():
            parameter.grad = None
        for part in (*parts, [parameter for parameter, _ in waiting.values()]):
            now = [left.pop(id(each)) for each in part if id(each) in left]
            for parameter, gradient in now:
                parameter.grad = gradient
            if now:
                optimizer.step()
            for parameter, _ in now:
                parameter.grad = None
    finally:
        for parameter, gradient in waiting.values():
            parameter.grad = gradient


def _is_foreach(group: Mapping[str, Any]) -> bool:
    """Torch takes lists of tensors where it is told to, and by default on all devices but the CPU."""
    if group.get("foreach") is None and not group.get("fused"):
        return "foreach" in group and any(each.device.type != "cpu" for each in group["params"])
    return bool(group.get("foreach"))
