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
import inspect
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.originals import choosing_parameters
from assigner.model.plainvalues import SINGLE
from assigner.runtime.update.optimizermemory import OptimizerMemory
from assigner.runtime.update.separability import StepBehaviour, check_separable, is_known, stand_in

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


def _is_plain(value: Any) -> bool:
    """A setting that all ranks can compare; a tensor would have to be waited for."""
    return isinstance(value, bool | int | float | str | None) or (
        isinstance(value, tuple) and all(isinstance(each, bool | int | float | str | None) for each in value)
    )


class PipelineOptimizer(torch.optim.Optimizer):
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
        shares: Names of the parameters that each worker updates; none: one has all.
        beside: Parameters of this rank that another worker updates for it: `zero_grad` drops their gradients.
        holders: How many workers hold each parameter; None: those that update it.
        ranks: How many the run has: some of them may update nothing.

    Attributes:
        local: The optimizer that the user's builder made, over this rank's parameters.
        names: For each param group the names of all its parameters, on whatever rank.
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
        shares: Sequence[Collection[str]] = (),
        beside: Mapping[str, nn.Parameter] | None = None,
        holders: Mapping[str, int] | None = None,
        ranks: int = 1,
    ) -> None:
        self._ranks, self._behaviour = ranks, StepBehaviour()
        self._workload, self._apply, self._note = workload, apply, note
        self._model = stand_ins(model)
        self._trained = {name for name, each in self._model if each.requires_grad}
        self._made = self._spread = False
        beside = beside or {}
        self._hold(held, beside)
        if self.check(shares, holders):
            self._hold(held, beside)  # the one that the builder made last is the one that runs: it may have kept it
        super().__init__(self.local.param_groups, self.local.defaults)
        self._follow()
        self.agree(lambda number: [number])
        self._made = True

    def _hold(self, held: Mapping[str, nn.Parameter], beside: Mapping[str, nn.Parameter]) -> None:
        """Build the user's optimizer over these parameters of the model."""
        self.local, self.names = built_optimizer(self._workload, self._model, held)
        self.memory = OptimizerMemory(self.local)
        self._held = held
        grouped = {name for names in self.names for name in names}
        self._beside = [each for name, each in beside.items() if name in grouped]

    def check(self, shares: Sequence[Collection[str]], holders: Mapping[str, int] | None = None) -> bool:
        """Whether the builder was called for what has to be known of an optimizer that is not torch's own.

        Args:
            shares: Names of the parameters that each worker is to update.
            holders: As the class takes it.

        Raises:
            UsageError: the optimizer looks at parameters of several workers at once, or takes sparse gradients alone
                and several workers hold one parameter, or its handle has hooks.
        """
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
        groups = self.param_groups
        settings = [{key: value for key, value in group.items() if key not in _MEMBERS} for group in groups]
        kept = {name: value for name, value in vars(self.local).items() if type(value) in ATOMS}
        state, states = self.state, {name: self.state.get(each) for name, each in self._held.items()}
        self._hold(held, beside)
        self._keep_state(state, states)
        vars(self.local).update(kept)  # such as a count of its own
        for group, kept_settings, made in zip(groups, settings, list(self.local.param_groups), strict=True):
            group.clear()
            group.update(made, **kept_settings)
        self.local.param_groups[:] = groups  # the script may hold one of them
        self._follow()

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

    def _follow(self) -> None:
        """Groups and state are the local optimizer's own, not copies."""
        self.param_groups, self.state = self.local.param_groups, self.local.state

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

    def __getattr__(self, name: str) -> Any:
        """The modes that some optimizers have, as schedule-free ones: `train()` and `eval()`, of this rank's own."""
        local = vars(self).get("local")
        if name not in ("train", "eval") or not hasattr(local, name):
            raise AttributeError(f"{type(local or self).__name__!r} object has no attribute {name!r}")

        def change() -> Any:
            self._note(f"optimizer.{name}()")
            return getattr(local, name)()

        return change

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
        for parameter in self._beside:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = parameter.grad.detach().zero_()

    @property
    def settings(self) -> str:
        """What an update goes by, for the comparison of all ranks: the learning rates, and a digest of all settings."""
        plain = [
            sorted((key, value) for key, value in group.items() if key not in _MEMBERS and _is_plain(value))
            for group in self.param_groups
        ]
        rates = dict.fromkeys(f"{group['lr']:g}" for group in self.param_groups if isinstance(group.get("lr"), float))
        digest = hashlib.blake2b(repr(plain).encode(), digest_size=3).hexdigest()
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
            raise UsageError("param groups cannot be added to a pipeline's optimizer", hint="make them in its builder")
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
        self.local.load_state_dict({"state": state, "param_groups": numbered})
        self._follow()


_MEMBERS = ("params", "param_names")


def stand_ins(model: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """All of a model's parameters by name, in its order, without memory."""
    return [(name, stand_in(each)) for name, each in model]


def built_optimizer(
    workload: Workload, model: Sequence[tuple[str, nn.Parameter]], held: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, list[tuple[str, ...]]]:
    """The user's optimizer, made of all of a model's parameters and left with some.

    Args:
        workload: Whose optimizer.
        model: All parameters by name, in the model's order; values have those that are held alone.
        held: Those that it is left with, by the same names.

    Returns:
        The optimizer, and for each param group the names of all its parameters as it was made.

    Raises:
        UsageError: the builder failed, or made a group of none, or of other parameters than it was given.
    """
    whole = {name: held.get(name, stand_in) for name, stand_in in model}
    with choosing_parameters():
        made = workload.make_optimizer(whole.items())
    name_of = {id(parameter): name for name, parameter in whole.items()}
    _check_groups(made, name_of)
    names = [tuple(name_of[id(each)] for each in group["params"]) for group in made.param_groups]
    for group, members in zip(made.param_groups, names, strict=True):
        group["params"][:] = [whole[name] for name in members if name in held]
        if "param_names" in group:
            group["param_names"] = [name for name in members if name in held]
    for name in whole.keys() - held.keys():
        made.state.pop(whole[name], None)
    return made, names


def _check_groups(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> None:
    """Parameters that the builder was not given are no part of the pipeline, and none that it was given is one of them.

    A group that shall have `[p for p in parameters if id(p) in ids]` is empty where the ids are of the model's own.
    """
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if empty and name_of:
        raise UsageError(
            f"param group {empty[0]} of Workload.optimizer has no parameter",
            hint="leave it out; if it is chosen by comparison with a model's parameters (id(p) in ids, p is w): those"
            " that are trained are copies, to be chosen by name, as optimizer(named_parameters) is given them",
        )
    strange = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in name_of]
    if strange:
        raise UsageError(
            f"Workload.optimizer made groups with {len(strange)} parameters that it was not given, the first of shape"
            f" {tuple(strange[0].shape)}",
            hint="make them of the parameters that the builder gets, as lambda parameters: AdamW(parameters): those of"
            " a model that was built beside it are others; parameters of the loss need an optimizer of their own",
        )


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
_CALLED = (
    "pipeline.step(batch) gives it one; or pipeline.optimizer.step(closure), where the closure calls"
    " pipeline.optimizer.zero_grad() and returns pipeline.step(batch, update=False)"
)
