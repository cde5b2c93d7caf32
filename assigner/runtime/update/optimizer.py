"""What scripts hold of the optimizer: one torch optimizer on every rank, for schedulers and loops that call it.

    optimizer.state = defaultdict(dict)      on every rank's own: each has the state of its parameters
    optimizer.strength *= 0.5                likewise: all of them were built with the number that is read
    optimizer.first_step(zero_grad=True)     on one rank alone: on several it would see the parameters of one

It has the names of torch's `Optimizer` and no others, so that every other name is the user's optimizer's: what the
runtime needs of that is `RankOptimizer`'s. What the script sets is compared between the ranks, as their calls are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.model.singleprocess import as_rank
from assigner.runtime.ranks.run import one_call
from assigner.runtime.update.building import is_plain
from assigner.runtime.update.namedstate import load_named_state, named_state
from assigner.runtime.update.optimizermemory import MEMBERS
from assigner.runtime.update.separability import is_known

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from assigner.runtime.update.rankoptimizer import RankOptimizer

_OF_EVERY_ONE = ("param_groups", "state", "defaults")
"""What every optimizer has: the handle has that of the one that runs."""

_READ = ("grad_scale", "found_inf")  # by steps of torch's own, though none of them has it
_HUNG = ("_opt_called",)  # by torch's schedulers
_PRIVATE = "_PipelineOptimizer__"  # as Python writes `self.__name`: no other class has such a name


class UnsharedAttributeError(UsageError, AttributeError):
    """What an optimizer has on one rank, it may have otherwise on another; `hasattr` and `getattr` find nothing."""


class PipelineOptimizer(torch.optim.Optimizer):
    """The user's optimizer, as one handle on every rank: for schedulers, and for loops that call it themselves.

        pipeline.step(batch, update=False)
        pipeline.optimizer.step()
        scheduler.step()
        pipeline.optimizer.zero_grad()

    All ranks call `step` together. State is keyed by the model's parameter names.

    Args:
        optimizer: What it stands for on this rank.
        apply: Applies the gradients with it, on every rank; a closure is what it calls for new ones.
        note: Told of calls that every rank makes for itself.
        called: Told instead of those that may look at gradients and change weights: methods of its own, on one rank.
    """

    def __init__(
        self,
        optimizer: RankOptimizer,
        *,
        apply: Callable[[Callable[[], Any] | None], Any],
        note: Callable[[str], None] = lambda _: None,
        called: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__([{"params": []}], {})
        for name in _OF_EVERY_ONE:
            vars(self).pop(name)
        self.__apply, self.__note, self.__called = apply, note, called
        optimizer.hooks = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks)
        self.__optimizer = optimizer  # from now on it is scripts that set what the handle has not of its own

    def __setattr__(self, name: str, value: Any) -> None:
        """Have it, or give it to the optimizer that runs, for which a script sets it.

        The handle keeps what it has of its own, and what torch hangs on it, as a scheduler its wrap around `step`. Of
        what steps may read, numbers are the same on all ranks; of what steps of torch's own do not, as a time that a
        script notes, each rank has its own.

        Raises:
            UsageError: `param_groups` are none that a script may put there.
        """
        made = vars(self).get(f"{_PRIVATE}optimizer")
        is_own = name in vars(self) or hasattr(type(self), name)
        if made is None or is_own or name.startswith((_PRIVATE, "__", *_HUNG)):
            super().__setattr__(name, value)
            return
        if name == "param_groups":
            made.groups.numbers([*value])
        is_torchs = name in _READ or name.startswith("_") or hasattr(type(made.local), name)
        is_read = is_torchs or not is_known(made.local) or any(made.hooks)
        self.__note(f"optimizer.{name} = {repr(value) if is_read and is_plain(value) else '...'}")
        setattr(made.local, name, value)
        if name not in _OF_EVERY_ONE:
            made.given[name] = value

    def __delattr__(self, name: str) -> None:
        """Of what `__setattr__` has set, where it is."""
        made = self.__optimizer
        if name not in made.given:
            super().__delattr__(name)
            return
        self.__note(f"del optimizer.{name}")
        delattr(made.local, name)
        del made.given[name]

    def __getattr__(self, name: str) -> Any:
        """What the optimizer that runs has: what it was built with, what the script has set, and its methods.

        On several ranks there are several of it. Modes, as schedule-free ones have them (`train()` and `eval()`), are
        each one's own.

        Raises:
            UnsharedAttributeError: what it has of this rank's parameters alone.
        """
        made = vars(self).get(f"{_PRIVATE}optimizer")
        local = made.local if made is not None else None
        if made is None or not hasattr(local, name):
            raise AttributeError(f"{type(local or self).__name__!r} object has no attribute {name!r}")
        if name.startswith("_") and name not in made.given and made.ranks > 1:
            raise UnsharedAttributeError(
                f"{type(local).__name__}.{name} is what the optimizer has for itself, by its name",
                hint="a script reads what it has set itself, and names without an underscore",
            )
        found = getattr(local, name)
        if name in _OF_EVERY_ONE:
            return found
        if inspect.ismethod(found) and found.__self__ is local:
            is_mode = name in ("train", "eval")
            if made.ranks > 1 and not is_mode:
                raise UnsharedAttributeError(
                    f"{type(local).__name__}.{name}() would see the parameters of this rank, and the run has"
                    f" {made.ranks} ranks",
                    hint="have Workload.optimizer or step() call it; or train under a plan on one worker"
                    " (assigner solve --max-workers 1), on one rank",
                )
            return functools.partial(_call, name, self.__note if is_mode else self.__called, found)
        if made.ranks > 1 and not self.__is_shared(name, found):
            raise UnsharedAttributeError(
                f"{type(local).__name__}.{name} is what it has made of the parameters of this rank, and the run has"
                f" {made.ranks} ranks",
                hint="numbers in param groups are the same on all ranks, and so is what the script sets on all of them",
            )
        return found

    def __is_shared(self, name: str, found: Any) -> bool:
        """Whether all ranks have this as an attribute of their optimizers."""
        made = self.__optimizer
        of_class = getattr(type(made.local), name, self)
        if isinstance(of_class, property) and name not in made.given:
            return _is_of_settings(of_class, self, found)
        return found is made.given.get(name, made.memory.built.get(name, of_class))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks before it calls `step`, or leaves it out for this rank's gradients alone.

        Raises:
            UsageError: others of the run would call it all the same.
        """
        if self.__optimizer.ranks > 1:
            raise UsageError(
                "GradScaler.step(pipeline.optimizer) looks at the gradients of this rank alone, and skips its update"
                f" alone, and the run has {self.__optimizer.ranks} ranks",
                hint="give the scaler to assigner.Pipeline(scaler=...): pipeline.step scales, skips on all ranks or on"
                " none, and changes the scale; Workload(autocast='float16') needs no other",
            )
        return False

    @one_call()
    def step(self, closure: Callable[[], Any] | None = None, *arguments: Any, **settings: Any) -> Any:
        """Apply the gradients, on all ranks together.

        Args:
            closure: As torch's optimizers take it: it drops the gradients, makes new ones, and returns the loss.

                    def closure():
                        pipeline.optimizer.zero_grad()
                        return pipeline.step(batch, update=False)

                Where one worker has all parameters, an optimizer calls it as often as it likes, on all ranks. Where
                several have some, those of torch's own that work from the gradients alone call it once.
            arguments: None: refused.
            settings: None, likewise.

        Returns:
            What the closure gave when it was called first: the loss before the update. None without one.

        Raises:
            UsageError: the optimizer needs a closure and there is none; or several workers have parameters, and nobody
                knows how often this optimizer calls it; or it was given more than a closure.
            WorkerError: another rank failed; the message has its error.
        """
        made = self.__optimizer
        if arguments or settings:
            given = ", ".join([*(type(each).__name__ for each in arguments), *(f"{name}=..." for name in settings)])
            raise UsageError(
                f"pipeline.optimizer.step takes a closure and nothing else, and was given {given}",
                hint=f"have {type(made.local).__name__}.step read it from its groups, where the script sets it on every"
                ' rank: for group in pipeline.optimizer.param_groups: group["loss"] = float(loss)',
            )
        if closure is None:
            if made.needs_closure:
                raise UsageError(f"{type(made.local).__name__}.step needs a closure, and there is none", hint=_CALLED)
            return self.__apply(None)
        if made.is_spread and not is_known(made.local):
            raise UsageError(
                f"how often {type(made.local).__name__}.step calls its closure is not known, and several workers have"
                " parameters",
                hint="call pipeline.step(batch, update=False) and the step without a closure; or take a plan on one"
                " worker (assigner solve --max-workers 1)",
            )
        if is_known(made.local) and not made.needs_closure and not any(made.hooks):
            with torch.enable_grad():
                first = closure()
            self.__apply(None)
            return first
        return self.__apply(closure)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it: hooks run in the user's optimizer's step

    @one_call()
    def zero_grad(self, *arguments: Any, **settings: Any) -> None:
        """Drop this rank's gradients, as the user's optimizer does; all ranks do.

        Args:
            arguments: As its own method takes them; torch's has `set_to_none`, which is True by default.
            settings: Likewise.
        """
        self.__note("optimizer.zero_grad()")
        self.__optimizer.zero_grad(*arguments, **settings)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """As torch's own, where one worker has all parameters: on every rank, as a part of the update.

        Raises:
            UsageError: several have some: the hook would see this rank's alone, and nobody knows what it makes of them;
                or the optimizer's step calls no hooks.
        """
        return super().register_step_pre_hook(self.__told_apart(hook))

    def register_step_post_hook(self, hook: Any) -> Any:
        """As `register_step_pre_hook`."""
        return super().register_step_post_hook(self.__told_apart(hook))

    def __told_apart(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, for this handle and where it may call the pipeline; errors on a rank without updates say so."""
        self.__optimizer.check_hookable()

        @functools.wraps(hook)
        def called(_: Any, *arguments: Any) -> Any:
            try:
                with as_rank():
                    return hook(self, *arguments)
            except Exception as error:
                if not self.__optimizer.is_idle:
                    raise
                raise UsageError(
                    f"a hook on the steps of pipeline.optimizer fails on a rank that updates nothing:"
                    f" {type(error).__name__}: {error}",
                    hint="every rank calls it, over its own parameters: have it return where the groups have none",
                ) from error

        return called

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: `Workload.optimizer` makes the groups.

        Raises:
            UsageError: always, once the optimizer is made.
        """
        if f"{_PRIVATE}optimizer" in vars(self):
            raise UsageError(
                "param groups cannot be added to a pipeline's optimizer",
                hint="have Workload.optimizer make all groups at once, also of what is to train later: the script"
                " freezes that, by requires_grad_(False) on what pipeline.named_parameters() gives, until it shall",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of what this rank updates by parameter name, and the groups with the names of all their parameters.

        A parameter that has no state yet has an empty one. The form is that of torch.distributed.checkpoint's optimizer
        state: the states of all ranks can be put together. Where one worker has all parameters, what the user's
        optimizer adds by a `state_dict` of its own, or by hooks on it, stands beside. Hooks on the handle come last.

        Raises:
            UsageError: it adds something, and several workers have parameters.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        made = named_state(self.__optimizer)
        for after in self._optimizer_state_dict_post_hooks.values():
            found = after(self, made)
            made = made if found is None else found
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on this rank, or on several put together.

        Raises:
            UsageError: it has other groups, or state without what this rank updates: another rank had that; or the
                user's optimizer loads it by a method of its own, and several workers have parameters.
        """
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            found = before(self, given)
            given = given if found is None else found
        load_named_state(self.__optimizer, given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


class _Unshared:
    """In the place of what each rank has of its own: nothing can be made of it."""

    def _fail(self, *_: Any) -> Any:
        raise LookupError

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __eq__ = __ne__ = _fail
    __hash__ = None  # type: ignore[assignment]


class _Settings:
    """An optimizer as all ranks have it: the settings of its groups, and what its handle gives."""

    def __init__(self, handle: PipelineOptimizer) -> None:
        own = self.state = _Unshared()
        self.param_groups = [
            {key: value if key not in MEMBERS and is_plain(value) else own for key, value in group.items()}
            for group in handle.param_groups
        ]
        self.__handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__handle, name)


def _is_of_settings(of_class: property, handle: PipelineOptimizer, found: Any) -> bool:
    """Whether a property gives the same without this rank's parameters and their state."""
    with contextlib.suppress(Exception):  # of what is not there: it is refused as what has other values elsewhere
        made = of_class.__get__(_Settings(handle))
        return is_plain(made) and type(made) is type(found) and made == found
    return False


def _call(name: str, note: Callable[[str], None], method: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    note(f"optimizer.{name}()")
    return method(*args, **settings)


_CALLED = (
    "pipeline.step(batch) gives it one; or pipeline.optimizer.step(closure), where the closure calls"
    " pipeline.optimizer.zero_grad() and returns pipeline.step(batch, update=False)"
)
