"""The user's optimizer, made of all of a model's parameters and left with those of one rank; what trials tell of it.

It is tried out under each plan, and again where a script turns on more of it: `Verdict`.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from assigner.errors import UsageError
from assigner.machine.generators import kept_python
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.originals import choosing_parameters, unwatched
from assigner.model.deferred.ownership import BARE
from assigner.model.plainvalues import SINGLE
from assigner.runtime.update.optimizermemory import outside_of
from assigner.runtime.update.separability import StepBehaviour, UntriedError, check_separable, stand_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from assigner.model.workload import Workload
    from assigner.runtime.update.rankoptimizer import RankOptimizer

_HOOKS = tuple(
    f"_optimizer_{call}_{when}_hooks" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)
_ADDRESS_BITS = 32
"""An id has more, and hardly any other number."""
MOST_TOLD = 3
"""So many learning rates, or settings, are told of."""


class StandInParameters(list[tuple[str, "nn.Parameter"]]):
    """All of a model's parameters by name, in its order, without memory.

    Attributes:
        originals: The model's own, likewise.
    """

    def __init__(self, model: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.originals = list(model)
        super().__init__((name, stand_in(each)) for name, each in self.originals)


def built_optimizer(
    workload: Workload,
    model: Sequence[tuple[str, nn.Parameter]],
    held: Mapping[str, nn.Parameter],
    *,
    groups: Sequence[tuple[str, ...]] | None = None,
) -> tuple[torch.optim.Optimizer, list[tuple[str, ...]]]:
    """The user's optimizer, made of all of a model's parameters and left with some.

    Args:
        workload: Whose optimizer.
        model: All parameters by name, in the model's order; values have those that are held alone.
        held: Those that it is left with, by the same names.
        groups: The names of the parameters of each param group, of others than these are: a builder that goes by sizes
            would make other groups of small ones. None: as it makes them.

    Returns:
        The optimizer, and for each param group the names of all its parameters as it was made.

    Raises:
        UsageError: the builder failed, or made a group of none where it makes one of some of the model's own, or a
            group of other parameters than it was given; or another number of groups than there are names for.
    """
    whole = {name: held.get(name, stand_in) for name, stand_in in model}
    made = _made(workload, whole)
    if isinstance(model, StandInParameters) and (empty := _empty(made)):
        _check_empty(workload, model, empty)
        made = _made(workload, whole)  # a builder may keep the one that it makes last: it is to be the one that runs
    # one that is around another may never have called Optimizer.__init__
    vars(made).update({**{name: OrderedDict() for name in _HOOKS}, "defaults": {}, **vars(made)})
    name_of = {id(parameter): name for name, parameter in whole.items()}
    _check_groups(made, name_of)
    names = [tuple(name_of[id(each)] for each in group["params"]) for group in made.param_groups]
    if groups is not None and len(groups) != len(names):
        raise UsageError(
            f"Workload.optimizer makes {len(groups)} param groups of the model's parameters and {len(names)} of small"
            " ones",
            hint="make as many whatever the sizes: one without parameters may stay",
        )
    names = names if groups is None else [*groups]
    for group, members in zip(made.param_groups, names, strict=True):
        group["params"][:] = [whole[name] for name in members if name in held]
        if "param_names" in group:
            group["param_names"] = [name for name in members if name in held]
    for name in whole.keys() - held.keys():
        made.state.pop(whole[name], None)
    return made, names


def _check_groups(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> None:
    """Parameters that the builder was not given are no part of the pipeline."""
    strange = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in name_of]
    if strange:
        raise UsageError(
            f"Workload.optimizer made groups with {len(strange)} parameters that it was not given, the first of shape"
            f" {tuple(strange[0].shape)}",
            hint="make them of the parameters that the builder gets, as lambda parameters: AdamW(parameters): those of"
            " a model that was built beside it are others; parameters of the loss need an optimizer of their own",
        )


def _made(workload: Workload, whole: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    with choosing_parameters():
        return workload.make_optimizer(whole.items())


def _empty(optimizer: torch.optim.Optimizer) -> list[int]:
    return [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]


def _check_empty(workload: Workload, model: StandInParameters, empty: Sequence[int]) -> None:
    """A group that shall have `[p for p in parameters if id(p) in ids]` is empty where the ids are of the model's own.

    One that is empty also where the builder is given these is meant so, as the biases of a model that has none; but
    not where it is given no names and can reach the parameters of a model beside it, or their ids.
    """
    with contextlib.suppress(Exception), unwatched():
        is_meant = empty == _empty(workload.make_optimizer(model.originals))
        if is_meant and (workload.names_parameters or not _reaches_others(workload, model)):
            return
    raise UsageError(
        f"param group {empty[0]} of Workload.optimizer has no parameter",
        hint="leave it out; if it is chosen by comparison with a model's parameters (id(p) in ids, p is w): those that"
        " are trained are copies, to be chosen by name, as optimizer(named_parameters) is given them",
    )


def _reaches_others(workload: Workload, model: StandInParameters) -> bool:
    """Whether a builder of optimizers can compare with parameters that are not the model's own."""
    own = {id(each) for _, each in model.originals}
    for found in outside_of(workload.optimizer):
        for each in (found, *found) if type(found) in BARE else (found,):
            is_id = type(each) is int and each >> _ADDRESS_BITS
            if is_id or (isinstance(each, nn.Parameter) and id(each) not in own):
                return True
    return False


def is_plain(value: Any) -> bool:
    """A setting that all ranks can compare; a tensor would have to be waited for."""
    return all(isinstance(each, SINGLE) for each in (value if isinstance(value, tuple) else (value,)))


def kind_of(value: Any) -> Any:
    """What of a setting may turn code of the optimizer's on or off: not which number it is, as schedulers change it."""
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value > 0) - (value < 0) if math.isfinite(value) else repr(value)
    return repr(value) if is_plain(value) else type(value).__name__


@dataclass(frozen=True)
class Verdict:
    """What is known of an optimizer under a plan."""

    is_spread: bool  # several workers have parameters, or one of them
    is_apart: bool  # a worker does not update all that is trained: what it draws, it draws for some parameters alone
    behaviour: StepBehaviour = field(default_factory=StepBehaviour)
    shares: Sequence[Collection[str]] | None = None  # as of `RankOptimizer.check`; None: it was not tried out
    tried: frozenset[Any] = frozenset()  # the kinds of settings of the script's with which it was
    hooks: frozenset[int] = frozenset()  # those on the steps of all optimizers, which its trials had, too

    @property
    def was_tried(self) -> bool:
        """The builder was called, for what has to be known of an optimizer that is not torch's own."""
        return self.shares is not None

    def tried_out(self, optimizer: RankOptimizer, changed: Mapping[tuple[int, str], Any]) -> Verdict:
        """What small stand-ins tell of it.

        Args:
            optimizer: It.
            changed: Settings of the script's, by the group's number and name; -1: attributes of its own.

        Raises:
            UsageError: as of `RankOptimizer.check`.
        """
        groups = optimizer.groups.built_names

        def build(whole: Mapping[str, nn.Parameter], held: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
            made = built_optimizer(optimizer.workload, list(whole.items()), held, groups=groups)[0]
            for (n, name), value in changed.items():
                if n < 0:
                    setattr(made, name, value)
                else:
                    made.param_groups[n][name] = value
            return made

        assert self.shares is not None
        behaviour = check_separable(optimizer.local, optimizer.model, self.shares, build)
        if self.is_spread and behaviour.keeps_gradients:
            raise UsageError(
                f"{type(optimizer.local).__name__}.zero_grad keeps something of the gradients, or may: what of them on"
                " several workers is not known, and under this plan several have parameters",
                hint="have step() keep it, in the state of each parameter; or train under a plan on one worker"
                " (assigner solve --max-workers 1)",
            )
        return replace(self, behaviour=behaviour)

    def tried_again(self, optimizer: RankOptimizer, changed: Mapping[tuple[int, str], Any]) -> Verdict:
        """As `tried_out`, once for each kind of settings. One that fails so says nothing.

        It may be its own step that has noted these, which only go with a state that others have not.
        """
        kinds = frozenset((place, kind_of(value)) for place, value in changed.items())
        if kinds in self.tried:
            return self
        behaviour = self.behaviour
        # the builder may keep what it makes: that is to be the one that runs
        builders = Memento((), [optimizer.workload.optimizer])
        try:
            with contextlib.suppress(UntriedError), kept_python():
                behaviour = behaviour.joined(self.tried_out(optimizer, changed).behaviour)
        except UsageError as error:
            places = [f"param_groups[{n}][{name!r}]" if n >= 0 else name for n, name in changed]
            set_since = f"as it was built it did not, but {', '.join(places[:MOST_TOLD])} was set since"
            raise UsageError(f"{error.message}; {set_since}", hint=error.hint) from error
        finally:
            builders.restore()
        return replace(self, behaviour=behaviour, tried=self.tried | {kinds})
