"""The user's optimizer on this rank, as the runtime calls it: all hold the same param groups, each its own parameters.

    plain PyTorch                                on every rank
    groups[0]: tokens.weight, head.weight        groups[0]: head.weight
    groups[1]: norm.bias, head.bias              groups[1]: head.bias

The user's builder sees the whole model everywhere, with stand-ins for what other ranks hold, so it groups as it would
without a pipeline; the stand-ins then leave the groups. Learning rates are set alike on every rank by the same
scheduler, and a rank with nothing in a group, or with nothing at all, takes part without a special case.

Scripts have a handle on it, `PipelineOptimizer`, on which nothing of this has a name.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from assigner.errors import UsageError
from assigner.runtime.ranks.packedvalues import PackedValue, broadcast
from assigner.runtime.update.building import StandInParameters, Verdict, built_optimizer
from assigner.runtime.update.namedstate import OwnState
from assigner.runtime.update.optimizermemory import MEMBERS, OptimizerMemory, equal, is_told, outside_of
from assigner.runtime.update.paramgroups import ParamGroups, is_setting
from assigner.runtime.update.separability import (
    CLOSURE_HINT,
    closure_words,
    drawing_nothing,
    has_own,
    hooks_on_all,
    is_known,
    needs_closure,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from assigner.model.workload import Workload
    from assigner.runtime.ranks.membership import Membership


_SAME_FIGURE = 1e-6  # by rounding they differ less, from one machine to another


class RankOptimizer:
    """The user's optimizer over the parameters that one rank updates.

    Args:
        workload: Whose optimizer.
        model: All of the model's parameters by name, in the model's order; those of other ranks only for their shapes.
        held: Those that this rank updates, by the same names.
        shares: Names of the parameters that each worker updates; none: one has all.
        beside: Parameters of this rank that another worker updates for it: `zero_grad` drops their gradients.
        holders: How many workers hold each parameter; None: those that update it.
        ranks: How many the run has: some of them may update nothing.

    Attributes:
        local: The optimizer that the user's builder made, over this rank's parameters.
        memory: What `local` keeps beside the state of parameters.
        model: All of the model's parameters by name, without memory.
        groups: The param groups of `local`.
        given: What the script has set on it, by the names of its attributes.
        hooks: Those on the handle's steps, before them and after.
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
        shares: Sequence[Collection[str]] = (),
        beside: Mapping[str, nn.Parameter] | None = None,
        holders: Mapping[str, int] | None = None,
        ranks: int = 1,
    ) -> None:
        self.ranks, self.workload = ranks, workload
        self.model = StandInParameters(model)
        self._trained = {name for name, each in self.model if each.requires_grad}
        self.given: dict[str, Any] = {}
        self.hooks: tuple[Mapping[int, Callable[..., Any]], ...] = ({}, {})
        beside = beside or {}
        self._hold(held, beside)
        self._verdict = self.check(shares, holders)
        if self._verdict.was_tried:
            self._hold(held, beside)  # the one that the builder made last is the one that runs: it may have kept it
        self.agree(lambda number: [number])

    def _hold(self, held: Mapping[str, nn.Parameter], beside: Mapping[str, nn.Parameter]) -> None:
        """Build the user's optimizer over these parameters of the model."""
        outside = outside_of(self.workload.optimizer)
        self.local, names = built_optimizer(self.workload, self.model, held)
        self.groups = ParamGroups(self.local, names)
        self.memory = OptimizerMemory(self.local, self.workload.optimizer, outside)
        self.held, self._beside = held, beside
        self._own_state()

    def _own_state(self) -> None:
        """Have its state say so where it is asked for that of a parameter which another worker updates.

        One that is not torch's own may share its state with one inside of it: that stays as it is.
        """
        state = self.local.state
        if self.ranks > 1 and type(state) is defaultdict and is_known(self.local):
            self.local.state = state = OwnState(state.default_factory, state)
        if isinstance(state, OwnState):
            state.leave(self._beside.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the one that runs; so are the others of these."""
        return self.local.param_groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """By parameter."""
        return self.local.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of a group that says nothing else."""
        return self.local.defaults

    def check(self, shares: Sequence[Collection[str]], holders: Mapping[str, int] | None = None) -> Verdict:
        """What is known of it under a plan, in which workers update these shares and so many hold each parameter.

        Raises:
            UsageError: the optimizer looks at parameters of several workers at once, or takes sparse gradients alone
                and several workers hold one parameter; or its handle has hooks, or groups of the script's own.
        """
        self.groups.numbers()
        holders = holders or Counter(name for share in shares for name in share)
        trained = self._trained
        counts = {name: count for name, count in holders.items() if name in trained}
        most = max(sum(not trained.isdisjoint(share) for share in shares), *counts.values(), 0)
        is_spread = max([len(shares), *holders.values()]) > 1
        is_apart = any(trained - {*share} for share in shares if not trained.isdisjoint(share))
        verdict = Verdict(is_spread, is_apart, hooks=hooks_on_all())
        if is_spread and any(self.hooks):
            _refuse_hook()
        self._check_sparse(counts)
        is_usual = is_known(self.local) and not has_own(self.local, "zero_grad")
        if needs_closure(self.local):
            if most > 1 or (is_spread and not is_usual):
                raise UsageError(
                    f"{closure_words(self.local)}; under this one {max(most, len(shares))} workers have parameters",
                    hint=CLOSURE_HINT,
                )
            return verdict
        if is_usual or (not is_spread and self.ranks == 1):
            return verdict
        verdict = replace(verdict, shares=shares).tried_out(self, {})
        changed = self._changed()
        return verdict.tried_again(self, changed) if changed else verdict

    def _changed(self) -> dict[tuple[int, str], Any]:
        """As `ParamGroups.changed`; -1: what the script has set on the handle."""
        given = {(-1, name): value for name, value in self.given.items() if is_setting(value)}
        return given | self.groups.changed()

    def _check_sparse(self, holders: Mapping[str, int]) -> None:
        """A gradient that several workers add up is dense, also that of a sparse embedding."""
        if not isinstance(self.local, torch.optim.SparseAdam):
            return
        shared = [name for names in self.groups.names for name in names if holders.get(name, 0) > 1]
        if shared:
            raise UsageError(
                f"{type(self.local).__name__} takes sparse gradients alone, and that of {shared[0]!r} is added up over"
                f" the {holders[shared[0]]} workers that hold it, which makes a dense one",
                hint="use an optimizer that takes both, as SGD or Adagrad; or have one worker hold it (assigner solve"
                " --max-replicas 1; partitions that share it: assigner.partition(..., colocate=LABEL))",
            )

    def move(self, held: Mapping[str, nn.Parameter], beside: Mapping[str, nn.Parameter], verdict: Verdict) -> None:
        """Be over other parameters of the same model, with the settings of the groups as they are and without state.

        `verdict` is what `check` has given of the new plan.
        """
        groups, self._verdict = self.groups.kept(), verdict
        memory, state = self.memory, self.state
        states = {name: state.get(each) for name, each in self.held.items()}
        self._hold(held, beside)
        self._keep_state(state, states)
        self.memory.go_on(memory, self.given)
        self.groups.go_on(groups)
        self._own_state()

    def note_groups(self, numbers: Iterable[int]) -> None:
        """These of the builder's groups are those that there are, and the state is, whatever objects they are now."""
        self.groups.note(numbers)
        self._own_state()

    def _keep_state(self, state: defaultdict[torch.Tensor, Any], states: Mapping[str, dict[str, Any] | None]) -> None:
        """Have these be the optimizer's state, and those of parameters: the script may hold them.

        What it holds of a parameter that has left is empty. One that is not torch's own may have its state elsewhere,
        too: there it stays as it was built.
        """
        for each in filter(None, states.values()):
            each.clear()
        if not is_known(self.local):
            state.clear()  # it goes with the optimizer that was there
            return
        made = dict(self.local.state)
        state.clear()
        for name, parameter in self.held.items():
            if (kept := states.get(name)) is not None:
                kept.update(made.pop(parameter, {}))
                state[parameter] = kept
        state.update(made)
        self.local.state = state
        self._own_state()

    @property
    def applied(self) -> torch.optim.Optimizer | None:
        """What an update calls here; None: this rank updates nothing, and the step fails over nothing."""
        return None if self.is_idle and not self._verdict.behaviour.runs_idle else self.local

    @property
    def is_spread(self) -> bool:
        """Several workers have parameters, or one of them."""
        return self._verdict.is_spread

    def check_hookable(self) -> None:
        """Refuse a hook on the handle's steps where it would not do as in plain torch.

        Raises:
            UsageError: several workers have parameters; or the optimizer's step calls no hooks.
        """
        if self.is_spread:
            _refuse_hook()
        if not getattr(type(self.local).step, "hooked", False):
            raise UsageError(
                f"{type(self.local).__name__}.step calls no hooks: it was made without a call of Optimizer.__init__",
                hint="call super().__init__(parameters, defaults) in it; or do in the loop what the hook does",
            )

    def check_tried(self, numbers: Callable[[float], list[float]]) -> None:
        """Refuse what came when it was found that this optimizer treats parameters by themselves: hooks on all of them.

        It is tried out again with settings of the script's that may turn code of it on.

        Raises:
            UsageError: there are such hooks, and several workers have parameters; or with these settings it looks at
                parameters of several workers at once; or, on several ranks, the script has changed what is in a group.
        """
        if self.ranks > 1:
            self.groups.numbers()
        if self.is_spread and not hooks_on_all() <= self._verdict.hooks:
            raise UsageError(
                "a hook on the steps of all optimizers was registered after the pipeline was made: on several workers"
                " it sees the parameters of one, and was not tried out",
                hint="register it before the pipeline is made: there it is tried out whether it treats every parameter"
                " by itself; gradients are clipped by pipeline.clip_grad_norm_",
            )
        if self._verdict.was_tried and (changed := self._changed()):
            before, self._verdict = self._verdict, self._verdict.tried_again(self, changed)
            if before is not self._verdict:
                self.agree(numbers)

    def around(
        self, applied: torch.optim.Optimizer | None, device: torch.device
    ) -> contextlib.AbstractContextManager[None] | None:
        """What is around an update: hooks on the handle, or a look at what it draws; None: nothing.

        `applied`: what makes it on this rank; None: nothing.
        """
        if any(self.hooks):
            return self.hooked(runs=applied is not None)
        if applied is None or is_known(applied) or not self._verdict.is_apart or self._verdict.behaviour.draws_alike:
            return None
        return drawing_nothing(applied, device)

    @contextlib.contextmanager
    def hooked(self, *, runs: bool) -> Iterator[None]:
        """A step: hooks on the handle run in it, in torch's order with those of the builder and on all optimizers.

        Args:
            runs: `local` makes it; False: this rank has none, and the hooks on the handle run for themselves.
        """
        before, after = self.hooks
        if not runs:
            for hook in tuple(before.values()):
                hook(self.local, (self.local,), {})
            yield
            for hook in tuple(after.values()):
                hook(self.local, (self.local,), {})
            return
        every = (self.local._optimizer_step_pre_hooks, before), (self.local._optimizer_step_post_hooks, after)
        added = [(own, key) for own, hooks in every for key in hooks]
        for own, hooks in every:
            own.update(hooks)
        try:
            yield
        finally:
            for own, key in added:
                own.pop(key, None)

    @property
    def is_idle(self) -> bool:
        """This rank updates nothing that is trained."""
        return self._trained.isdisjoint(self.held)

    def agree(self, numbers: Callable[[float], list[float]]) -> None:
        """Go by what any rank has found of the optimizer, on all of them: the messages behind an update hang on it.

        A hook on all optimizers of a process, as a profiler's, may be on one rank alone.

        Raises:
            UsageError: the builder has made groups of other parameters on another rank; or the step does something else
                there.
        """
        mine = (not is_known(self.local)) + 2 * self._verdict.behaviour.changes_gradients + 4 * self.groups.digest
        found = [*map(int, numbers(float(mine)))]
        unlike = next((rank for rank, each in enumerate(found) if each >> 2 != found[0] >> 2), None)
        if unlike is not None:
            raise UsageError(
                f"Workload.optimizer made other param groups on rank {unlike} than on rank 0, or the same in another"
                " order: what a script sets in one of them would be set for other parameters there",
                hint="make them in one order on every rank, of lists and dicts: a set of names has another order in"
                " every process (sorted(...) gives it one)",
            )
        figures = numbers(self._verdict.behaviour.figure if self.is_spread else 0.0)
        first = next((each for each in figures if each), 0.0)
        other = [rank for rank, each in enumerate(figures) if each and abs(each - first) > _SAME_FIGURE * first]
        if other:
            raise UsageError(
                f"{type(self.local).__name__}.step, with the hooks on it, does something else on rank {other[0]} than"
                f" on rank {figures.index(first)} to the same parameters: their weights would be of two optimizers",
                hint="make it of nothing that differs between ranks: the order of a set (sorted(...) gives it one, and"
                " PYTHONHASHSEED=0 on all ranks one to sets of texts), the number of a rank",
            )
        self.notes_settings = any(each & 1 for each in found)
        self.changes_gradients = any(each & 2 for each in found)

    def share_settings(self, member: Membership, updating: Mapping[int, Collection[str]]) -> None:
        """Give ranks that update nothing of a group what a step of others has noted in it: a rate that it learns, ...

        `updating`: what ranks update of what is trained, in the plan's order. Every rank calls this.
        """
        for first, groups in self._tellers(updating).items() if self.notes_settings else ():
            member.at = "the exchange of what the optimizer notes in its groups"
            packed = None
            if member.rank == first:
                kept = (self.param_groups[n].items() for n in groups)
                told = [{key: value for key, value in each if key not in MEMBERS and is_told(value)} for each in kept]
                packed = PackedValue.of(told, "param_groups")
            told = broadcast(member, first, packed)
            if member.rank != first:
                self._take_settings(groups, told)

    def _tellers(self, updating: Mapping[int, Collection[str]]) -> dict[int, list[int]]:
        """Which ranks tell the others of which groups: of each that not all of them train, the first that does."""
        found = defaultdict[int, list[int]](list)
        for n, names in enumerate(self.groups.names if updating and self.ranks > 1 else ()):
            ranks = [rank for rank, mine in updating.items() if not frozenset(mine).isdisjoint(names)]
            if len(ranks) < self.ranks:
                found[next(iter(ranks or updating))].append(n)
        return found

    def _take_settings(self, groups: Iterable[int], told: Sequence[Mapping[str, Any]]) -> None:
        """Have the settings that another rank has told, of groups of which this one updates nothing."""
        names = self.groups.names
        for n, settings in zip(groups, told, strict=True):
            group = self.param_groups[n]
            for key, value in settings.items() if self._trained.isdisjoint(self.held.keys() & names[n]) else ():
                mine = group.get(key)
                if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape == value.shape:
                    mine.detach().copy_(value)
                elif key not in group or not equal(mine, value):
                    group[key] = value

    @property
    def keeps_gradients(self) -> bool:
        """Its `zero_grad` is its own, which may leave of the gradients what it likes."""
        return has_own(self.local, "zero_grad")

    def zero_grad(self, *arguments: Any, **settings: Any) -> None:
        """Drop this rank's gradients, as torch's optimizers do or by a method of the optimizer's own."""
        if self.applied is not None:
            self.local.zero_grad(*arguments, **settings)
        set_to_none = settings.get("set_to_none", arguments[0] if arguments else True)
        grouped = {name for names in self.groups.names for name in names} if self._beside else ()
        for parameter in [each for name, each in self._beside.items() if name in grouped]:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach().zero_()  # in place: the script may have kept it

    def drop(self, gradients: Mapping[str, nn.Parameter], script: Callable[[], None] | None) -> None:
        """Do what a script's `zero_grad` would do before a step, which has no such call.

        `script`: what the script has put in the place of the handle's `zero_grad`; None: nothing.
        """
        kept: set[int] = set()
        if script is not None or self.keeps_gradients:
            (script or self.zero_grad)()
            kept = {id(each) for group in self.param_groups for each in group["params"]}
        for parameter in gradients.values():
            if id(parameter) not in kept:
                parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """Those in its groups; of sparse ones, which have each place once, the values."""
        found = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        return [each._values() if each.is_sparse else each for each in found]

    @property
    def mine(self) -> list[str]:
        """The names of the parameters in its groups, in their order."""
        return [name for names in self.groups.names for name in names if name in self.held]

    @property
    def needs_closure(self) -> bool:
        """Whether its step cannot be called without one, as that of LBFGS."""
        return needs_closure(self.local)


def _refuse_hook() -> NoReturn:
    """Raise UsageError over a hook on the steps where several workers have parameters."""
    raise UsageError(
        "a hook on the steps of a pipeline's optimizer sees the parameters of one worker, and several have some",
        hint="register it in Workload.optimizer, on the optimizer that it makes: there it is tried out whether it"
        " treats every parameter by itself; gradients are clipped by pipeline.clip_grad_norm_",
    )
