"""What is known of an optimizer under a plan: of a user's by trials, and again where a script turns on more."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.machine.generators import kept_python
from assigner.model.deferred.memento import Memento
from assigner.runtime.update.building import built_optimizer
from assigner.runtime.update.separability import StepBehaviour, UntriedError, check_separable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from assigner.runtime.update.rankoptimizer import RankOptimizer

MOST_TOLD = 3
"""So many learning rates, or settings, are told of."""


def is_plain(value: Any) -> bool:
    """A setting that all ranks can compare; a tensor would have to be waited for."""
    return isinstance(value, bool | int | float | str | None) or (
        isinstance(value, tuple) and all(isinstance(each, bool | int | float | str | None) for each in value)
    )


def kind_of(value: Any) -> Any:
    """What of a setting may turn code of the optimizer's on or off: not which number it is, as schedulers change it."""
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value > 0) - (value < 0) if math.isfinite(value) else repr(value)
    return repr(value) if is_plain(value) else type(value).__name__


@dataclass(frozen=True)
class Verdict:
    """What is known of an optimizer under a plan.

    Args:
        is_spread: Several workers have parameters, or one of them.
        behaviour: How its step is to be treated.
        shares: As `RankOptimizer.check` takes them, if it was tried out; None: it was not.
        tried: The kinds of settings of the script's with which it was.
        is_apart: A worker does not update all that is trained: what it draws, it draws for some parameters alone.
    """

    is_spread: bool
    behaviour: StepBehaviour
    shares: Sequence[Collection[str]] | None = None
    tried: frozenset[Any] = frozenset()
    is_apart: bool = False

    def tried_out(self, optimizer: RankOptimizer, changed: Mapping[tuple[int, str], Any]) -> Verdict:
        """What small stand-ins tell of it.

        Args:
            optimizer: It.
            changed: Settings of the script's, by the group's number and name; -1: attributes of its own.

        Raises:
            UsageError: as of `RankOptimizer.check`.
        """
        groups = [each.names for each in optimizer.built]

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
