"""One optimizer over all ranks: each holds the same param groups, and in them the parameters that are its own.

    plain PyTorch                                on every rank
    groups[0]: tokens.weight, head.weight        groups[0]: head.weight
    groups[1]: norm.bias, head.bias              groups[1]: head.bias

The user's builder sees the whole model everywhere, with stand-ins for what other ranks hold, so it groups as it would
without a pipeline; the stand-ins then leave the groups. Learning rates are set alike on every rank by the same
scheduler, and a rank with nothing in a group, or with nothing at all, takes part without a special case.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch

from assigner.deferred.likeness import in_likeness
from assigner.errors import UsageError
from assigner.runtime.separability import check_separable, is_known

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import nn

    from assigner.workload import Workload


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
        held: This rank's parameters, by the same names.
        apply: Applies the gradients with `local`, on every rank.
        shares: Names of the parameters that each worker has; none: one has all.

    Attributes:
        local: The optimizer that the user's builder made, over this rank's parameters.
        names: For each param group the names of all its parameters, on whatever rank.

    Raises:
        UsageError: the builder failed, or made an optimizer that needs a closure (LBFGS), that is over other
            parameters than it was given, or that looks at parameters of several workers at once.
    """

    def __init__(
        self,
        workload: Workload,
        model: Iterable[tuple[str, nn.Parameter]],
        held: Mapping[str, nn.Parameter],
        *,
        apply: Callable[[], None],
        shares: Sequence[Collection[str]] = (),
    ) -> None:
        self._workload, self._apply = workload, apply
        self._model = [(name, _stand_in(each)) for name, each in model]
        self._made = self._spread = False
        self._hold(held)
        if self.check(shares):
            self._hold(held)  # the one that the builder made last is the one that runs: it may have kept it
        super().__init__(self.local.param_groups, self.local.defaults)
        self._follow()
        self._made = True

    def _hold(self, held: Mapping[str, nn.Parameter]) -> None:
        """Build the user's optimizer over these parameters of the model."""
        whole = {name: held.get(name, stand_in) for name, stand_in in self._model}
        self.local, self.names = self._built(whole, held)
        self._held = held

    def _built(
        self, whole: Mapping[str, nn.Parameter], held: Mapping[str, nn.Parameter]
    ) -> tuple[torch.optim.Optimizer, list[tuple[str, ...]]]:
        """The user's optimizer, made of all parameters and left with these; and each group's names as it was made."""
        made = self._workload.make_optimizer(whole.items())
        _refuse_closures(made)
        name_of = {id(parameter): name for name, parameter in whole.items()}
        _refuse_foreign(made, name_of)
        names = [tuple(name_of[id(each)] for each in group["params"]) for group in made.param_groups]
        for group, members in zip(made.param_groups, names, strict=True):
            group["params"][:] = [whole[name] for name in members if name in held]
            if "param_names" in group:
                group["param_names"] = [name for name in members if name in held]
        for name in whole.keys() - held.keys():
            made.state.pop(whole[name], None)
        return made, names

    def check(self, shares: Sequence[Collection[str]]) -> bool:
        """Whether the builder was called for what has to be known of an optimizer that is not torch's own.

        Args:
            shares: Names of the parameters that each worker is to have.

        Raises:
            UsageError: the optimizer looks at parameters of several workers at once, or its handle has hooks.
        """
        self._spread = len(shares) > 1
        if self._spread and self._made and (self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks):
            self._refuse_hook()
        if not self._spread or is_known(self.local):
            return False
        check_separable(self.local, self._model, shares, lambda whole, held: self._built(whole, held)[0])
        return True

    def move(self, held: Mapping[str, nn.Parameter]) -> None:
        """Be over other parameters of the same model, with the settings of the groups as they are and without state."""
        settings = [{key: value for key, value in group.items() if key not in _MEMBERS} for group in self.param_groups]
        self._hold(held)
        for group, kept in zip(self.local.param_groups, settings, strict=True):
            group.update(kept)
        self._follow()

    def _follow(self) -> None:
        """Groups and state are the local optimizer's own, not copies."""
        self.param_groups, self.state = self.local.param_groups, self.local.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients, on all ranks together.

        Raises:
            UsageError: a closure is given: a pipeline cannot run the forward again from within.
            WorkerError: another rank failed; the message has its error.
        """
        if closure is not None:
            raise UsageError("a pipeline's optimizer takes no closure", hint="call pipeline.step(batch, update=False)")
        self._apply()

    def register_step_pre_hook(self, hook: Any) -> Any:
        """As torch's own, where one worker has all parameters.

        Raises:
            UsageError: several have some: the hook would see this rank's alone, and nobody knows what it makes of them.
        """
        return self._refuse_hook() if self._spread else super().register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """As `register_step_pre_hook`."""
        return self._refuse_hook() if self._spread else super().register_step_post_hook(hook)

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
        """This rank's state by parameter name, and the groups with the names of all their parameters.

        The form is that of torch.distributed.checkpoint's optimizer state: the states of all ranks can be put together.
        """
        names = {id(parameter): name for name, parameter in self._held.items()}
        return {
            "state": {names[id(each)]: dict(state) for each, state in self.state.items()},
            "param_groups": [
                {**{key: value for key, value in group.items() if key not in _MEMBERS}, "params": list(every)}
                for group, every in zip(self.param_groups, self.names, strict=True)
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave on this rank, or on several put together.

        Raises:
            UsageError: it has other groups.
        """
        groups = state_dict["param_groups"]
        if [tuple(group["params"]) for group in groups] != self.names:
            raise UsageError("the state is of an optimizer with other param groups", hint="build it as it was then")
        mine = [name for names in self.names for name in names if name in self._held]
        number = {name: n for n, name in enumerate(mine)}
        kept = [{key: group[key] for key in _MEMBERS if key in group} for group in self.param_groups]
        numbered = [
            {**group, **members, "params": [number[name] for name in names if name in number]}
            for group, members, names in zip(groups, kept, self.names, strict=True)
        ]
        state = {number[name]: each for name, each in state_dict["state"].items() if name in number}
        self.local.load_state_dict({"state": state, "param_groups": numbered})
        self._follow()


_MEMBERS = ("params", "param_names")


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Shape, type, class and attributes of a parameter, without memory."""
    return cast("nn.Parameter", in_likeness(parameter, torch.empty_like(parameter, device="meta")))


def _refuse_foreign(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> None:
    """Parameters that the builder was not given are no part of the pipeline: nothing would train those that are."""
    strange = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in name_of]
    if strange:
        raise UsageError(
            f"Workload.optimizer made groups with {len(strange)} parameters that it was not given, the first of shape"
            f" {tuple(strange[0].shape)}",
            hint="make them of the parameters that the builder gets, as lambda parameters: AdamW(parameters): those of"
            " a model that was built beside it are others; parameters of the loss need an optimizer of their own",
        )


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer whose step must be given a closure runs the loss as often as it likes: no pipeline can."""
    step = type(optimizer).step  # a scheduler hides that of the object
    _, *arguments = inspect.signature(step).parameters.values()
    needed = [each for each in arguments if each.default is each.empty]
    if any(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in needed):
        raise UsageError(
            f"{type(optimizer).__name__}.step needs a closure, which a pipeline cannot run",
            hint="use an optimizer that works from the gradients alone, as AdamW or SGD",
        )
