"""The state of a rank's optimizer, by parameter: what another worker updates has its state there, and not here."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn


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
        """Have it.

        Raises:
            StateElsewhereError: another rank has it.
        """
        self._check(key)
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        """Copies, and files, are of torch's dict."""
        return defaultdict, (self.default_factory,), None, None, iter(self.items())
