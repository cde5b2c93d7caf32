"""The param groups of the user's optimizer: which of those that its builder has made there are now.

    builder    {"params": own list}                  the rank's parameters in it, and the names of all of the model's
    script     {**group, "lr": 0.1}, in its place    the same list: it is of the same parameters on all ranks

A script may take groups out, too. One with another list is refused: on other ranks nobody could say what it is of.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from assigner.errors import UsageError
from assigner.model.deferred.origins import digest
from assigner.runtime.update.building import MOST_TOLD, is_plain, kind_of
from assigner.runtime.update.optimizermemory import MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import nn


class _BuiltGroup(NamedTuple):
    """A param group as the builder has made it."""

    group: dict[str, Any]
    members: list[nn.Parameter]  # its own list, on this rank: the script may put another group with that in its place
    parameters: tuple[nn.Parameter, ...]  # what that list has
    names: tuple[str, ...]  # of all its parameters, on whatever rank
    kinds: dict[str, Any]  # of its settings, as it was built


class ParamGroups:
    """Those of an optimizer that the builder has just made, and what the script makes of them.

    `names` are, for each group, those of all its parameters.

    Attributes:
        digest: Of the names, group by group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Sequence[tuple[str, ...]]) -> None:
        self._optimizer = optimizer
        self.digest = digest([repr([sorted(members) for members in names])])
        self._built = [
            _BuiltGroup(
                group,
                group["params"],
                tuple(group["params"]),
                members,
                {key: kind_of(value) for key, value in group.items()},
            )
            for group, members in zip(optimizer.param_groups, names, strict=True)
        ]

    @property
    def built_names(self) -> list[tuple[str, ...]]:
        """For each group that the builder has made the names of all its parameters, on whatever rank."""
        return [each.names for each in self._built]

    @property
    def names(self) -> list[tuple[str, ...]]:
        """Likewise, for each that there is now.

        Raises:
            UsageError: a group is none of the builder's.
        """
        return [self._built[n].names for n in self.numbers()]

    def numbers(self, groups: Iterable[Mapping[str, Any]] | None = None) -> list[int]:
        """Which of the builder's groups these are; None: those that there are now.

        Raises:
            UsageError: one is none of them, or has other parameters than it had.
        """
        groups = self._optimizer.param_groups if groups is None else [*groups]
        found = self._found(groups)
        if -1 in found:
            raise UsageError(
                f"param_groups[{found.index(-1)}] of pipeline.optimizer has a list of parameters of its own: which of"
                " the model's it stands for, on all ranks, is not known",
                hint="make the groups in Workload.optimizer; a script changes them by their settings, takes some out,"
                ' or puts {**group, "lr": 0.1} in the place of group, whose "params" are the same list',
            )
        for group, n in zip(groups, found, strict=True):
            if [*map(id, group.get("params", ()))] != [*map(id, self._built[n].parameters)]:
                raise UsageError(
                    f"param_groups[{found.index(n)}] of pipeline.optimizer has other parameters than those that"
                    " Workload.optimizer has put there: on another rank, under another plan, and in a checkpoint, its"
                    " parameters are those",
                    hint="to leave some out for a while, freeze them (requires_grad_(False) on what"
                    " pipeline.named_parameters() gives); what trains beside the model has an optimizer of its own",
                )
        return found

    def _found(self, groups: Iterable[Mapping[str, Any]]) -> list[int]:
        """As `numbers`; -1: it is none of the builder's."""
        numbers = {id(each): n for n, built in enumerate(self._built) for each in (built.group, built.members)}
        return [numbers.get(id(group), numbers.get(id(group.get("params")), -1)) for group in groups]

    def note(self, numbers: Iterable[int]) -> None:
        """The groups that there are now are these of the builder's, whatever objects they are."""
        for n, group in zip(numbers, self._optimizer.param_groups, strict=True):
            self._built[n] = self._built[n]._replace(
                group=group, members=group["params"], parameters=tuple(group["params"])
            )

    def kept(self) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Those that there are now, each with its number before it and its settings as they are behind it."""
        groups = self._optimizer.param_groups
        return [
            (n, group, {key: value for key, value in group.items() if key not in MEMBERS})
            for n, group in zip(self.numbers(), groups, strict=True)
        ]

    def go_on(self, kept: Sequence[tuple[int, dict[str, Any], dict[str, Any]]]) -> None:
        """Have what was `kept` of an earlier optimizer of the same builder: the script may hold one of its groups."""
        for n, group, settings in kept:
            made = self._built[n].group
            group.clear()
            group.update(made, **settings)
        self._optimizer.param_groups[:] = [group for _, group, _ in kept]
        self.note([n for n, _, _ in kept])

    def changed(self) -> dict[tuple[int, str], Any]:
        """Settings of another kind than those with which it was built, by the group's number and name.

        What is no number, text or function is left out: it may be of this rank's parameters, and a trial may change it.
        """
        return {
            (n, key): value
            for n, group in zip(self.numbers(), self._optimizer.param_groups, strict=True)
            for key, value in group.items()
            if kind_of(value) != self._built[n].kinds.get(key) and is_setting(value)
        }

    @property
    def settings(self) -> str:
        """What an update goes by, for the comparison of all ranks: the learning rates, and a digest of all settings."""
        groups = self._optimizer.param_groups
        plain = [
            sorted((key, value) for key, value in group.items() if key not in MEMBERS and is_plain(value))
            for group in groups
        ]
        numbers = self._found(groups)
        told = plain if numbers == [*range(len(self._built))] else [numbers, *plain]
        rates = dict.fromkeys(f"{group['lr']:g}" for group in groups if isinstance(group.get("lr"), float))
        told_as = hashlib.blake2b(repr(told).encode(), digest_size=3).hexdigest()
        return f"lr {', '.join([*rates][:MOST_TOLD])} (settings {told_as})" if rates else f"settings {told_as}"


def is_setting(value: Any) -> bool:
    """Something by which a trial may go that another optimizer of the same builder can be given, too."""
    return is_plain(value) or inspect.isfunction(value)
