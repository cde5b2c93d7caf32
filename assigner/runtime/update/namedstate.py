"""An optimizer's state on a rank, and its state dict by the model's parameter names, for scripts.

    torch            {"state": {0: ...}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    a pipeline's     {"state": {"head.weight": ...}, "param_groups": [{"lr": 0.1, "params": ["head.weight", ...]}]}

What an optimizer of the user's adds by methods of its own goes along where one worker has all parameters. On several
workers there would be several of it: refused. So is the state of what another worker updates: that is there, not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.runtime.update.optimizermemory import MEMBERS
from assigner.runtime.update.separability import has_own

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from assigner.runtime.update.rankoptimizer import RankOptimizer


class StateElsewhereError(UsageError, KeyError):
    """State of a parameter that another worker updates."""

    __str__ = UsageError.__str__


class OwnState(defaultdict[Any, Any]):
    """torch's dict of states, which makes none of a parameter that this rank holds and does not update."""

    _elsewhere: Mapping[int, str] = {}

    def leave(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Have no state of these parameters, given by name."""
        self._elsewhere = {id(each): name for name, each in parameters}

    def _check(self, key: Any) -> None:
        if id(key) in self._elsewhere:
            raise StateElsewhereError(
                f"the optimizer's state of {self._elsewhere[id(key)]!r} is not on this rank: under this plan another"
                " worker updates it for this one",
                hint="`parameter in pipeline.optimizer.state` asks; pipeline.optimizer.state_dict() of all ranks, put"
                " together, has it",
            )

    def __missing__(self, key: Any) -> Any:
        """Make one, as torch does.

        Raises:
            StateElsewhereError: another rank has it.
        """
        self._check(key)
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Have it, likewise.

        Raises:
            StateElsewhereError: another rank has it.
        """
        self._check(key)
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        """Copies, and files, are of torch's dict."""
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


def named_state(optimizer: RankOptimizer) -> dict[str, Any]:
    """What a script gets of this rank's optimizer.

    Raises:
        UsageError: the optimizer tells more than state and groups, and several workers have parameters; or in another
            form than torch's, and the run has several ranks.
    """
    made = optimizer.local
    tells = optimizer.memory.is_own("state_dict")
    if optimizer.is_spread:
        optimizer.memory.check_told()
    elif tells and optimizer.applied is not None:
        return _renamed(optimizer, made.state_dict())
    state: dict[Any, Any] = {name: dict(made.state.get(optimizer.held[name], {})) for name in optimizer.mine}
    state |= {key: value for key, value in made.state.items() if not isinstance(key, torch.Tensor)}
    return {"state": state, "param_groups": _named_groups(optimizer, made.param_groups)}


def _named_groups(optimizer: RankOptimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**{key: value for key, value in group.items() if key not in MEMBERS}, "params": list(every)}
        for group, every in zip(groups, optimizer.groups.names, strict=True)
    ]


def _renamed(optimizer: RankOptimizer, told: Any) -> dict[str, Any]:
    """What its own `state_dict` gave, with names for numbers where these are torch's, and else as it is."""
    mine = optimizer.mine
    if not _is_numbered(optimizer, told):
        if optimizer.ranks > 1:
            raise UsageError(
                f"{type(optimizer.local).__name__}.state_dict() has another form than torch's: which of it belongs to"
                f" which parameter is not known, and the run has {optimizer.ranks} ranks",
                hint='give "state" and "param_groups" as torch.optim.Optimizer.state_dict does, and the rest beside'
                " them; or train on one rank",
            )
        return told  # type: ignore[no-any-return]
    state: dict[Any, Any] = {name: dict(told["state"].get(n, {})) for n, name in enumerate(mine)}
    state |= {key: value for key, value in told["state"].items() if not isinstance(key, int) or key >= len(mine)}
    return {**told, "state": state, "param_groups": _named_groups(optimizer, told["param_groups"])}


def _is_numbered(optimizer: RankOptimizer, told: Any) -> bool:
    """A state dict in torch's form, of the parameters that this rank updates."""
    if not (isinstance(told, Mapping) and isinstance(told.get("state"), Mapping)):
        return False
    groups, start = told.get("param_groups"), 0
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return False
    for group, now in zip(groups, optimizer.param_groups, strict=True):
        end = start + len(now["params"])
        if not isinstance(group, Mapping) or group.get("params") != [*range(start, end)]:
            return False
        start = end
    return True


_MOST_TOLD = 5
_NUMBERED = (
    "give the numbers names, in the order in which that optimizer has its parameters: groups ="
    ' pipeline.optimizer.state_dict()["param_groups"]; names = [name for group in groups for name in group["params"]];'
    ' then {"state": {names[n]: each for n, each in state["state"].items()}, "param_groups": groups}, with the settings'
    " of those groups"
)


def _sections(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    """The groups and the states of parameters.

    Raises:
        UsageError: it is no state dict of an optimizer.
    """
    groups, states = given.get("param_groups"), given.get("state")
    if isinstance(groups, list) and all("params" in group for group in groups) and isinstance(states, Mapping):
        return groups, states
    has = ", ".join(map(repr, [*given][:_MOST_TOLD])) or "nothing"
    raise UsageError(
        f"the state of an optimizer has 'state' and 'param_groups', with their 'params'; this has {has}",
        hint="give what pipeline.optimizer.state_dict() gave; a script that has saved more beside it gives that part",
    )


def load_named_state(optimizer: RankOptimizer, given: Mapping[str, Any]) -> None:
    """Give this rank's optimizer what `named_state` has given, on this rank or on several.

    Raises:
        UsageError: it has other groups, or state without what this rank updates: another rank had that; or the
            optimizer loads it by a method of its own, and several workers have parameters.
    """
    made, names, mine = optimizer.local, optimizer.groups.names, optimizer.mine
    if optimizer.is_spread:
        optimizer.memory.check_loaded()
    numbers = optimizer.groups.numbers()
    if optimizer.ranks == 1 and has_own(made, "load_state_dict") and not {"state", "param_groups"} <= given.keys():
        made.load_state_dict(dict(given))
        optimizer.note_groups(numbers)
        return
    groups, states = _sections(given)
    if [tuple(group["params"]) for group in groups] != names:
        members = [each for group in groups for each in group["params"]]
        if members and all(isinstance(each, int) for each in members):
            raise UsageError("the state has numbers for parameters, as that of a plain optimizer", hint=_NUMBERED)
        raise UsageError("the state is of an optimizer with other param groups", hint="build it as it was then")
    missing = [name for name in mine if name not in states and optimizer.held[name].requires_grad]
    if missing and (states or made.state):
        raise UsageError(
            f"the state has nothing of {missing[0]!r}, which this rank updates: it is of another rank, of this one"
            " under another plan, or of an older release",
            hint="put the states of all ranks together, {name: each for state in states for name, each in"
            " state['state'].items()}; or use pipeline.save and pipeline.load. An empty entry, {}, begins anew",
        )
    number = {name: n for n, name in enumerate(mine)}
    more = {key: value for key, value in given.items() if key not in ("state", "param_groups")}
    every = dict(optimizer.model)
    beyond = {key: each for key, each in states.items() if key not in every}
    if optimizer.is_spread and beyond:
        raise UsageError(
            f"the state has {next(iter(beyond))!r}, which is no parameter's, and several workers have parameters",
            hint="keep it as a number in each param group, or as a tensor in the state of each parameter",
        )
    kept = [{key: group[key] for key in MEMBERS if key in group} for group in optimizer.param_groups]
    numbered = [
        {**group, **members, "params": [number[name] for name in of_group if name in number]}
        for group, members, of_group in zip(groups, kept, names, strict=True)
    ]
    state: dict[Any, Any] = {number[name]: each for name, each in states.items() if each and name in number}
    made.load_state_dict({**more, "state": {**state, **beyond}, "param_groups": numbered})
    optimizer.note_groups(numbers)
