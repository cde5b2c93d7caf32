"""The plain values that an optimizer of the user's has for itself: in its attributes, and in its `defaults`.

    self.count += 1; self.defaults["warm"] = False; optimizer.rate = 0.1 in a script

Its steps note some. Checkpoints have none of them, as in plain torch; a move to another plan takes them along, to ranks
that updated nothing before too: so those that update something must have them alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.model.deferred.contents import ATOMS
from assigner.runtime.ranks.packedvalues import PackedValue, broadcast
from assigner.runtime.update.optimizermemory import KEPT_HINT, of_torch
from assigner.runtime.update.separability import is_known

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from assigner.runtime.ranks.membership import Membership


def _plain_in(space: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in space.items() if type(value) in ATOMS}


class OwnNumbers:
    """Of one optimizer, beside those with which it was built.

    Args:
        optimizer: As its builder has made it.

    Attributes:
        built: Those of its attributes that it was built with, by name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.built, self._built_defaults = _plain_in(vars(optimizer)), _plain_in(optimizer.defaults)

    def go_on(self, earlier: OwnNumbers, given: Collection[str]) -> None:
        """Have what an optimizer has by now that the same builder has made before.

        Args:
            earlier: Of that one.
            given: Names of the attributes that a script has set on it, plain or not.
        """
        was = earlier._optimizer
        vars(self._optimizer).update({name: each for name, each in vars(was).items() if name in given})
        vars(self._optimizer).update(_plain_in(vars(was)))
        self._optimizer.defaults.update(_plain_in(was.defaults))
        self.built.update(earlier.built)
        self._built_defaults.update(earlier._built_defaults)

    def share(self, member: Membership, at: str, *, is_idle: bool) -> None:
        """Have what its steps have noted on every rank, where no rank has noted otherwise.

        Args:
            member: This process in the run; every rank calls this.
            at: What it is done for.
            is_idle: This rank updates nothing: it gets what the others have.

        Raises:
            UsageError: ranks have unlike values, or one that cannot be compared; on every rank.
        """
        kind = type(self._optimizer).__name__
        packed = member.agree(at, lambda: PackedValue.of([is_idle, *self._noted()], f"what {kind} keeps"))
        with member.guarded(at):
            told = [broadcast(member, rank, packed if rank == member.rank else None).value for rank in member.ranks]
        updating = {rank: spaces for rank, (idle, *spaces) in enumerate(told) if not idle}
        first: list[dict[str, Any]] = next(iter(updating.values()), [{}, {}])
        for rank, spaces in updating.items():
            for form, some, others in zip(("self.{}", "self.defaults[{!r}]"), first, spaces, strict=True):
                for name in {**some, **others}:
                    if repr(some.get(name)) != repr(others.get(name)):
                        raise UsageError(
                            f"{kind} keeps {form.format(name)} beside the state of its parameters, which"
                            f" worker:{next(iter(updating))} and worker:{rank} have unlike: another plan would lose one"
                            " of them",
                            hint=f"{KEPT_HINT}; what is noted for people alone, as a time, goes into a log of the"
                            " script's",
                        )
        if is_idle:
            vars(self._optimizer).update(first[0])
            self._optimizer.defaults.update(first[1])

    def _noted(self) -> list[dict[str, Any]]:
        """What it was not built with: attributes, and defaults. Torch's own optimizers note nothing."""
        if is_known(self._optimizer):
            return [{}, {}]
        spaces = (vars(self._optimizer), self.built), (self._optimizer.defaults, self._built_defaults)
        return [
            {
                key: each
                for key, each in _plain_in(space).items()
                if key not in of_torch() and (key not in built or repr(built[key]) != repr(each))
            }
            for space, built in spaces
        ]
