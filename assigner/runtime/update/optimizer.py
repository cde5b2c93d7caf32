"""One optimizer over all ranks: each holds the same param groups, and in them the parameters that are its own.

    plain PyTorch                                on every rank
    groups[0]: tokens.weight, head.weight        groups[0]: head.weight
    groups[1]: norm.bias, head.bias              groups[1]: head.bias

The user's builder sees the whole model everywhere, with stand-ins for what other ranks hold, so it groups as it would
without a pipeline; the stand-ins then leave the groups. Learning rates are set alike on every rank by the same
scheduler, and a rank with nothing in a group, or with nothing at all, takes part without a special case.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from assigner.errors import UsageError
from assigner.model.deferred.contents import ATOMS
from assigner.model.plainvalues import SINGLE
from assigner.runtime.update.building import built_optimizer, stand_ins
from assigner.runtime.update.handle import OptimizerHandle, is_plain
from assigner.runtime.update.optimizermemory import OptimizerMemory
from assigner.runtime.update.separability import (
    CLOSURE_HINT,
    StepBehaviour,
    check_separable,
    closure_words,
    is_known,
    needs_closure,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import nn

    from assigner.model.workload import Workload


_MOST_RATES = 3
"""So many learning rates are told of."""


def _is_told(value: Any) -> bool:
    """A setting that can go to another rank."""
    if isinstance(value, tuple):
        return all(map(_is_told, value))
    return type(value) in SINGLE or isinstance(value, float) or type(value) is torch.Tensor


class _BuiltGroup(NamedTuple):
    """A param group as the builder has made it.

    Args:
        group: The group, and
        members: the list of its parameters on this rank: the script may put another group with this one in its place.
        names: Of all its parameters, on whatever rank.
    """

    group: dict[str, Any]
    members: list[nn.Parameter]
    names: tuple[str, ...]


class PipelineOptimizer(OptimizerHandle):
    """The user's optimizer, as one handle on every rank: for schedulers, and for loops that call it themselves.

        pipeline.step(batch, update=False)
        pipeline.optimizer.step()
        scheduler.step()
        pipeline.optimizer.zero_grad()

    All ranks call `step` together. State is keyed by the model's parameter names.

    Args:
        workload: Whose optimizer.
        model: All of the model's parameters by name, in the model's order; those of other ranks only for their shapes.
        held: Those that this rank updates, by the same names.
        apply: Applies the gradients with `local`, on every rank; a closure is what `local` calls for new ones.
        note: Told of calls that every rank makes for itself.
        called: Told instead of those that may look at gradients and change weights: methods of its own, on one rank.
        shares: Names of the parameters that each worker updates; none: one has all.
        beside: Parameters of this rank that another worker updates for it: `zero_grad` drops their gradients.
        holders: How many workers hold each parameter; None: those that update it.
        ranks: How many the run has: some of them may update nothing.

    Attributes:
        local: The optimizer that the user's builder made, over this rank's parameters.
        memory: What `local` keeps beside the state of parameters.
        notes_settings: Its step may write into its groups: it is not torch's own, as it was built.
        changes_gradients: A step may leave other gradients than it finds.

    Raises:
        UsageError: the builder failed, or made an optimizer that is over other parameters than it was given, or that
            looks at parameters of several workers at once, or that needs a closure (LBFGS) where several have some.
    """

    def __init__(
        self,
        workload: Workload,
        model: Iterable[tuple[str, nn.Parameter]],
        held: Mapping[str, nn.Parameter],
        *,
        apply: Callable[[Callable[[], Any] | None], Any],
        note: Callable[[str], None] = lambda _: None,
        called: Callable[[str], None] = lambda _: None,
        shares: Sequence[Collection[str]] = (),
        beside: Mapping[str, nn.Parameter] | None = None,
        holders: Mapping[str, int] | None = None,
        ranks: int = 1,
    ) -> None:
        self._ranks, self._behaviour = ranks, StepBehaviour()
        self._workload, self._apply, self._note, self._called = workload, apply, note, called
        self._model = stand_ins(model)
        self._trained = {name for name, each in self._model if each.requires_grad}
        self._spread = False
        self._given: dict[str, Any] = {}
        beside = beside or {}
        self._hold(held, beside)
        if self.check(shares, holders):
            self._hold(held, beside)  # the one that the builder made last is the one that runs: it may have kept it
        super().__init__(self.local.param_groups, self.local.defaults)
        self._note_groups(range(len(self._built)))
        self.agree(lambda number: [number])
        self._stand_for_local()

    def _hold(self, held: Mapping[str, nn.Parameter], beside: Mapping[str, nn.Parameter]) -> None:
        """Build the user's optimizer over these parameters of the model."""
        self.local, names = built_optimizer(self._workload, self._model, held)
        self._built = [
            _BuiltGroup(group, group["params"], members)
            for group, members in zip(self.local.param_groups, names, strict=True)
        ]
        self._first = {name: value for name, value in vars(self.local).items() if type(value) in ATOMS}
        self.memory = OptimizerMemory(self.local)
        self._held, self._beside = held, beside

    def check(self, shares: Sequence[Collection[str]], holders: Mapping[str, int] | None = None) -> bool:
        """Whether the builder was called for what has to be known of an optimizer that is not torch's own.

        Args:
            shares: Names of the parameters that each worker is to update.
            holders: As the class takes it.

        Raises:
            UsageError: the optimizer looks at parameters of several workers at once, or takes sparse gradients alone
                and several workers hold one parameter; or its handle has hooks, or groups of the script's own.
        """
        if self._made:
            self._check_groups(self.param_groups)
        holders = holders or Counter(name for share in shares for name in share)
        trained = self._trained
        most = sum(not trained.isdisjoint(share) for share in shares)
        most = max(most, *(count for name, count in holders.items() if name in trained), 0)
        self._spread = max([len(shares), *holders.values()]) > 1
        if self._spread and self._made and (self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks):
            self._refuse_hook()
        self._check_sparse({name: count for name, count in holders.items() if name in trained})
        if needs_closure(self.local):
            if most > 1 or (self._spread and not is_known(self.local)):
                raise UsageError(
                    f"{closure_words(self.local)}; under this one {max(most, len(shares))} workers have parameters",
                    hint=CLOSURE_HINT,
                )
            return False
        if is_known(self.local) or (not self._spread and self._ranks == 1):
            return False
        self._behaviour = check_separable(
            self.local, self._model, shares,
            lambda whole, held: built_optimizer(self._workload, list(whole.items()), held)[0],
        )  # fmt: skip
        return True

    def _check_sparse(self, holders: Mapping[str, int]) -> None:
        """A gradient that several workers add up is dense, also that of a sparse embedding."""
        if not isinstance(self.local, torch.optim.SparseAdam):
            return
        shared = [name for names in self.names for name in names if holders.get(name, 0) > 1]
        if shared:
            raise UsageError(
                f"{type(self.local).__name__} takes sparse gradients alone, and that of {shared[0]!r} is added up over"
                f" the {holders[shared[0]]} workers that hold it, which makes a dense one",
                hint="use an optimizer that takes both, as SGD or Adagrad; or have one worker hold it (assigner solve"
                " --max-replicas 1; partitions that share it: assigner.partition(..., colocate=LABEL))",
            )

    def move(self, held: Mapping[str, nn.Parameter], beside: Mapping[str, nn.Parameter]) -> None:
        """Be over other parameters of the same model, with the settings of the groups as they are and without state."""
        groups, numbers = self.param_groups, self._numbers(self.param_groups)
        settings = [{key: value for key, value in group.items() if key not in _MEMBERS} for group in groups]
        kept = {name: value for name, value in vars(self.local).items() if type(value) in ATOMS or name in self._given}
        state, states = self.state, {name: self.state.get(each) for name, each in self._held.items()}
        self._hold(held, beside)
        self._keep_state(state, states)
        vars(self.local).update(kept)  # such as a count of its own
        for group, kept_settings, number in zip(groups, settings, numbers, strict=True):
            made = self._built[number].group
            group.clear()
            group.update(made, **kept_settings)
        self.local.param_groups[:] = groups  # the script may hold one of them
        self._note_groups(numbers)

    def _note_groups(self, numbers: Iterable[int]) -> None:
        """These of the builder's groups are those that there are, whatever objects they are now."""
        for n, group in zip(numbers, self.local.param_groups, strict=True):
            self._built[n] = self._built[n]._replace(group=group, members=group["params"])

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._numbers(groups)

    def _numbers(self, groups: Iterable[Mapping[str, Any]]) -> list[int]:
        """Which of the builder's groups these are: the script may take some out, or put `{**group, "lr": 0.1}` there.

        Raises:
            UsageError: one is none of them.
        """
        found = self._found(groups)
        if -1 in found:
            raise UsageError(
                f"param_groups[{found.index(-1)}] of pipeline.optimizer has a list of parameters of its own: which of"
                " the model's it stands for, on all ranks, is not known",
                hint="make the groups in Workload.optimizer; a script changes them by their settings, takes some out,"
                ' or puts {**group, "lr": 0.1} in the place of group, whose "params" are the same list',
            )
        return found

    def _found(self, groups: Iterable[Mapping[str, Any]]) -> list[int]:
        """As `_numbers`; -1: it is none of the builder's."""
        numbers = {id(each): n for n, built in enumerate(self._built) for each in (built.group, built.members)}
        return [numbers.get(id(group), numbers.get(id(group.get("params")), -1)) for group in groups]

    @property
    def names(self) -> list[tuple[str, ...]]:
        """For each param group that there is now the names of all its parameters, on whatever rank.

        Raises:
            UsageError: a group is none of the builder's.
        """
        return [self._built[n].names for n in self._numbers(self.param_groups)]

    def _keep_state(self, state: defaultdict[torch.Tensor, Any], states: Mapping[str, dict[str, Any] | None]) -> None:
        """Have these be the optimizer's state, and those of parameters: the script may hold them.

        What it holds of a parameter that has left is empty. One that is not torch's own may have its state elsewhere,
        too: there it stays as it was built.
        """
        for each in filter(None, states.values()):
            each.clear()
        if not is_known(self.local):
            return
        made = dict(self.local.state)
        state.clear()
        for name, parameter in self._held.items():
            if (kept := states.get(name)) is not None:
                kept.update(made.pop(parameter, {}))
                state[parameter] = kept
        state.update(made)
        self.local.state = state

    @property
    def applied(self) -> torch.optim.Optimizer | None:
        """What an update calls here; None: this rank updates nothing, and the step fails over nothing."""
        return None if self._is_idle and not self._behaviour.runs_idle else self.local

    @property
    def _is_idle(self) -> bool:
        """This rank updates nothing that is trained."""
        return self._trained.isdisjoint(self._held)

    def agree(self, numbers: Callable[[float], list[float]]) -> None:
        """Go by what any rank has found of the optimizer, on all of them: the messages behind an update hang on it.

        A hook on all optimizers of a process, as a profiler's, may be on one rank alone.

        Args:
            numbers: Every rank's number, on every rank.
        """
        found = numbers(float(not is_known(self.local)) + 2.0 * self._behaviour.changes_gradients)
        self.notes_settings = any(int(each) & 1 for each in found)
        self.changes_gradients = any(int(each) & 2 for each in found)

    @property
    def told_settings(self) -> list[dict[str, Any]]:
        """What its groups have beside parameters, for ranks that update nothing: a rate that it learns, a count."""
        return [
            {key: value for key, value in group.items() if key not in _MEMBERS and _is_told(value)}
            for group in self.param_groups
        ]

    def take_settings(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Have the settings that another rank has told, if this one updates nothing."""
        if not self._is_idle:
            return
        for group, settings in zip(self.param_groups, told, strict=True):
            for key, value in settings.items():
                mine = group.get(key)
                if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape == value.shape:
                    mine.detach().copy_(value)
                else:
                    group[key] = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients, on all ranks together.

        Args:
            closure: As torch's optimizers take it: it drops the gradients, makes new ones, and returns the loss.

                    def closure():
                        pipeline.optimizer.zero_grad()
                        return pipeline.step(batch, update=False)

                Where one worker has all parameters, an optimizer calls it as often as it likes, on all ranks. Where
                several have some, those of torch's own that work from the gradients alone call it once.

        Returns:
            What the closure gave when it was called first: the loss before the update. None without one.

        Raises:
            UsageError: the optimizer needs a closure and there is none; or several workers have parameters, and nobody
                knows how often this optimizer calls it.
            WorkerError: another rank failed; the message has its error.
        """
        if closure is None:
            if self.needs_closure:
                raise UsageError(f"{type(self.local).__name__}.step needs a closure, and there is none", hint=_CALLED)
            return self._apply(None)
        if self._spread and not is_known(self.local):
            raise UsageError(
                f"how often {type(self.local).__name__}.step calls its closure is not known, and several workers have"
                " parameters",
                hint="call pipeline.step(batch, update=False) and the step without a closure; or take a plan on one"
                " worker (assigner solve --max-workers 1)",
            )
        if is_known(self.local) and not self.needs_closure:
            with torch.enable_grad():
                first = closure()
            self._apply(None)
            return first
        return self._apply(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop this rank's gradients; all ranks do."""
        self._note("optimizer.zero_grad()")
        super().zero_grad(set_to_none)
        for name in [name for names in self.names for name in names] if self._beside else ():
            parameter = self._beside.get(name)
            if parameter is None:
                continue
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach().zero_()  # in place: the script may have kept it

    @property
    def settings(self) -> str:
        """What an update goes by, for the comparison of all ranks: the learning rates, and a digest of all settings."""
        plain = [
            sorted((key, value) for key, value in group.items() if key not in _MEMBERS and is_plain(value))
            for group in self.param_groups
        ]
        numbers = self._found(self.param_groups)
        told = plain if numbers == [*range(len(self._built))] else [numbers, *plain]
        rates = dict.fromkeys(f"{group['lr']:g}" for group in self.param_groups if isinstance(group.get("lr"), float))
        digest = hashlib.blake2b(repr(told).encode(), digest_size=3).hexdigest()
        return f"lr {', '.join([*rates][:_MOST_RATES])} (settings {digest})" if rates else f"settings {digest}"

    @property
    def _mine(self) -> list[str]:
        """The names of the parameters in its groups, in their order."""
        return [name for names in self.names for name in names if name in self._held]

    @property
    def needs_closure(self) -> bool:
        """Whether its step cannot be called without one, as that of LBFGS."""
        return needs_closure(self.local)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """As torch's own, where one worker has all parameters.

        Raises:
            UsageError: several have some: the hook would see this rank's alone, and nobody knows what it makes of them.
        """
        return self._refuse_hook() if self._spread else super().register_step_pre_hook(self._told_apart(hook))

    def register_step_post_hook(self, hook: Any) -> Any:
        """As `register_step_pre_hook`."""
        return self._refuse_hook() if self._spread else super().register_step_post_hook(self._told_apart(hook))

    def _told_apart(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook; where it fails on a rank that updates nothing, its error says so."""

        @functools.wraps(hook)
        def called(*arguments: Any) -> Any:
            if not self._is_idle:
                return hook(*arguments)
            try:
                return hook(*arguments)
            except Exception as error:
                raise UsageError(
                    f"a hook on the steps of pipeline.optimizer fails on a rank that updates nothing:"
                    f" {type(error).__name__}: {error}",
                    hint="every rank calls it, over its own parameters: have it return where the groups have none",
                ) from error

        return called

    def _refuse_hook(self) -> None:
        raise UsageError(
            "a hook on the steps of a pipeline's optimizer sees the parameters of one worker, and several have some",
            hint="register it in Workload.optimizer, on the optimizer that it makes: there it is tried out whether it"
            " treats every parameter by itself; gradients are clipped by pipeline.clip_grad_norm_",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: `Workload.optimizer` makes the groups.

        Raises:
            UsageError: always, once the optimizer is made.
        """
        if self._made:
            raise UsageError(
                "param groups cannot be added to a pipeline's optimizer",
                hint="have Workload.optimizer make all groups at once, also of what is to train later: the script"
                " freezes that, by requires_grad_(False) on what pipeline.named_parameters() gives, until it shall",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of what this rank updates by parameter name, and the groups with the names of all their parameters.

        A parameter that has no state yet has an empty one. The form is that of torch.distributed.checkpoint's optimizer
        state: the states of all ranks can be put together.
        """
        return {
            "state": {name: dict(self.state.get(self._held[name], {})) for name in self._mine},
            "param_groups": [
                {**{key: value for key, value in group.items() if key not in _MEMBERS}, "params": list(every)}
                for group, every in zip(self.param_groups, self.names, strict=True)
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on this rank, or on several put together.

        Raises:
            UsageError: it has other groups, or state without what this rank updates: another rank had that.
        """
        groups = state_dict["param_groups"]
        if [tuple(group["params"]) for group in groups] != self.names:
            raise UsageError("the state is of an optimizer with other param groups", hint="build it as it was then")
        given = state_dict["state"]
        missing = [name for name in self._mine if name not in given and self._held[name].requires_grad]
        if missing and (given or self.local.state):
            raise UsageError(
                f"the state has nothing of {missing[0]!r}, which this rank updates: it is of another rank, of this one"
                " under another plan, or of an older release",
                hint="put the states of all ranks together, {name: each for state in states for name, each in"
                " state['state'].items()}; or use pipeline.save and pipeline.load. An empty entry, {}, begins anew",
            )
        number = {name: n for n, name in enumerate(self._mine)}
        kept = [{key: group[key] for key in _MEMBERS if key in group} for group in self.param_groups]
        numbered = [
            {**group, **members, "params": [number[name] for name in names if name in number]}
            for group, members, names in zip(groups, kept, self.names, strict=True)
        ]
        state = {number[name]: each for name, each in given.items() if each and name in number}
        numbers = self._numbers(self.param_groups)
        self.local.load_state_dict({"state": state, "param_groups": numbered})
        self._note_groups(numbers)


_MEMBERS = ("params", "param_names")
_CALLED = (
    "pipeline.step(batch) gives it one; or pipeline.optimizer.step(closure), where the closure calls"
    " pipeline.optimizer.zero_grad() and returns pipeline.step(batch, update=False)"
)
