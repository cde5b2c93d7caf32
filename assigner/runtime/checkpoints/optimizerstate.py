"""The state of an optimizer by the model's names: how it is saved, checked and put in the place of another's.

What a checkpoint holds is checked in three ways before anything is touched: against what was written down of every
state when it was saved, against the settings that the optimizer has now, and for torch's own optimizers by a trial: one
of the same class makes a step with the settings that were found, on a small stand-in for the parameter, and shows what
it keeps.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.errors import FormatError, UsageError
from assigner.formats.document import shown
from assigner.model.plainvalues import SINGLE, dtype_name
from assigner.runtime.checkpoints.shards import DAMAGED, Index
from assigner.runtime.update.namedstate import load_named_state, named_state
from assigner.runtime.update.separability import is_known, needs_closure
from assigner.runtime.update.sparsemomentum import check_sparse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from assigner.runtime.update.rankoptimizer import RankOptimizer

_PLAIN = "plain"
_ANOTHER = "was it saved with another optimizer, or with other param groups? training=False loads the weights alone"
_FEWER = (
    "make the optimizer of as many parameters as then (a script that takes groups out does so behind load); or take the"
    " weights alone: pipeline.load_state_dict(assigner.load_weights(folder))"
)
_RATES = ("initial_lr", "max_lr", "min_lr")  # what schedulers add to a group
_WAYS = ("foreach", "fused", "capturable", "differentiable")  # how an optimizer computes, not what


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state by the model's names.

    Args:
        tensors: `PARAMETER/STATE` -> tensor.
        plain: `PARAMETER/STATE` -> number, where the optimizer keeps no tensor.
        settings: parameter -> the plain settings of its group (`lr`, `betas`, ...).
    """

    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizer) -> OptimizerState:
        """What an optimizer holds for these parameters.

        Raises:
            UsageError: a value that is neither a tensor nor plain, or a sparse tensor that is not SGD's momentum; or a
                group has other parameters than the builder has put there.
        """
        optimizer.groups.numbers()
        made = cls({}, {}, {})
        group_of = _groups(optimizer)
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(key, str) or "/" in key:
                    raise UsageError(f"the optimizer's state {key!r} of {name!r} is no name that can be saved")
                if isinstance(value, torch.Tensor):
                    check_sparse(optimizer.local, name, key, value)
                    made.tensors[f"{name}/{key}"] = value.detach()
                elif isinstance(value, SINGLE):
                    made.plain[f"{name}/{key}"] = value
                else:
                    raise UsageError(
                        f"the optimizer's state {key!r} of {name!r} is a {type(value).__name__}",
                        hint="a checkpoint takes tensors and plain values; one with a history (LBFGS) has lists:"
                        " pipeline.optimizer.state.clear() before the save forgets it, and it begins anew",
                    )
            made.settings[name] = _settings(group_of.get(id(parameter), {}))
        return made

    @property
    def dense(self) -> dict[str, torch.Tensor]:
        """The tensors as they are written, and go to other ranks: one that is sparse as a dense one."""
        return {key: each if each.layout is torch.strided else each.to_dense() for key, each in self.tensors.items()}

    def sections(self) -> dict[str, dict[str, Any]]:
        """What stands in the index of a checkpoint beside the tensors."""
        return {"plain": self.plain, "settings": self.settings, "state": self._kinds(self.settings)}

    def _kinds(self, names: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """For each of these parameters what its states are, by their names."""
        found: dict[str, dict[str, str]] = {name: {} for name in names}
        for key, value in {**self.tensors, **self.plain}.items():
            name, _, state = key.rpartition("/")
            found[name][state] = _kind(value)
        return found

    @classmethod
    def read(
        cls, folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizer, *, of_old: bool
    ) -> OptimizerState:
        """The state of these parameters in a checkpoint, as the optimizer can take it; `of_old`: it may lack some.

        Raises:
            FormatError: it is broken, or this optimizer cannot take it.
            UsageError: the optimizer loads its state by a method of its own, and several workers have parameters.
        """
        index = Index.read(folder, "optimizer")
        if optimizer.is_spread:
            optimizer.memory.check_loaded()

        def mine(key: str) -> bool:
            return key.rpartition("/")[0] in parameters

        plain, settings = index.section("plain"), index.section("settings")
        for name, each in settings.items():
            index.object(f"settings: {shown(name)}", each)
        for key, value in plain.items():
            if not isinstance(value, SINGLE):
                index.refuse(f"plain: {shown(key)}", value, "a plain value")
        found = cls(index.tensors(mine), {key: plain[key] for key in filter(mine, plain)}, settings)
        for name in parameters:
            index.object(f"settings: {shown(name)}", settings.get(name))
        _check_settings(index, settings, optimizer)
        if not of_old or "state" in index.content:
            found._check_kinds(index, parameters)
        found._check_values(index)
        if is_known(optimizer.local):
            found._check_trial(index, parameters, optimizer)
        return found

    def _check_kinds(self, index: Index, parameters: Mapping[str, nn.Parameter]) -> None:
        """Every state is there, and is what it was when it was saved."""
        recorded, kinds = index.section("state"), self._kinds(parameters)
        for name in parameters:
            expected = index.object(f"state: {shown(name)}", recorded.get(name))
            for state in {**expected, **kinds[name]}:
                found, written = kinds[name].get(state, "missing"), expected.get(state, "nothing")
                if found != written:
                    raise FormatError(
                        f"{index.path}: {shown(f'{name}/{state}')} is {found}; {shown(written)} was saved", hint=DAMAGED
                    )

    def _check_values(self, index: Index) -> None:
        """A count of steps is a finite number, 0 or more."""
        for key, value in {**self.tensors, **self.plain}.items():
            number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if key.endswith("/step") and isinstance(number, int | float) and not (_is_finite(number) and number >= 0):
                index.refuse(shown(key), number, "a number of steps")

    def _check_trial(self, index: Index, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizer) -> None:
        """Every parameter's state is what an optimizer of this class keeps with these settings."""
        kind, group_of, kinds = type(optimizer.local), _groups(optimizer), self._kinds(parameters)

        @functools.cache
        def kept(first: str, dims: int, dtype: torch.dtype) -> dict[str, Any] | None:
            return _trial(kind, self.settings[first], dims, dtype, f"{index.path}: settings: {shown(first)}")

        saved = ([name for name in names if name in self.settings] for names in optimizer.groups.names)
        first_of = {name: names[0] for names in saved for name in names}
        for name, parameter in parameters.items():
            if id(parameter) not in group_of or not parameter.requires_grad:
                continue
            expected = kept(first_of[name], parameter.dim(), parameter.dtype)
            if expected is None or not kinds[name]:
                continue  # a parameter that no gradient has reached has no state
            for state, value in expected.items():
                wanted, found = _kind(_grown(value, parameter)), kinds[name].get(state, "missing")
                if found != wanted:
                    raise FormatError(
                        f"{index.path}: {shown(f'{name}/{state}')} is {found}; {kind.__name__} keeps {wanted}",
                        hint=_ANOTHER,
                    )

    def put(self, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizer) -> None:
        """Replace an optimizer's state; a group gets the settings of its first parameter, on whatever rank that is."""
        optimizer.state.clear()
        for group, names in zip(optimizer.param_groups, optimizer.groups.names, strict=True):
            kept = next((self.settings[name] for name in names if name in self.settings), {})
            for key, value in kept.items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value
        self.add(parameters, optimizer)  # its place depends on the settings
        if optimizer.applied is not None and optimizer.memory.is_own("load_state_dict"):
            load_named_state(optimizer, named_state(optimizer))

    def add(self, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizer) -> None:
        """Give an optimizer this state of its parameters; the settings of its groups stay.

        Tensors go to their parameter's device as in torch's own `Optimizer.load_state_dict`: the count of steps is read
        by Python, and stays where it is, unless the group is fused or capturable.
        """
        group_of = _groups(optimizer)
        for key, value in {**self.tensors, **self.plain}.items():
            name, _, state = key.rpartition("/")
            parameter, group = parameters[name], group_of.get(id(parameters[name]), {})
            goes = state != "step" or group.get("fused") or group.get("capturable")
            on_device = isinstance(value, torch.Tensor) and goes
            optimizer.state[parameter][state] = value.to(parameter.device) if on_device else value


def _groups(optimizer: RankOptimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by the parameter's id."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def _kind(value: Any) -> str:
    """What a state is: `float32 [8, 4]`, or plain."""
    return f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, torch.Tensor) else _PLAIN


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain settings of a parameter group; a learning rate that is a tensor as its number."""
    found = {}
    for key, value in group.items():
        number = value.item() if isinstance(value, torch.Tensor) and not value.dim() else value
        parts = number if isinstance(number, tuple) else (number,)
        if all(isinstance(part, SINGLE) for part in parts):
            found[key] = number
    return found


def _check_settings(index: Index, settings: Mapping[str, dict[str, Any]], optimizer: RankOptimizer) -> None:
    """Every group's settings are there, are the same for all its parameters, and are of the kind that it has now.

    Those of parameters that no group has now are none: when they were saved, the optimizer had more.
    """
    here = {name for names in optimizer.groups.names for name in names}
    more = [name for name, found in settings.items() if found and name not in here]
    if more:
        others = f" and {len(more) - 1} more" if more[1:] else ""
        raise FormatError(
            f"{index.path}: settings: {shown(more[0])}{others} had a param group when it was saved; no group of the"
            " optimizer has it now",
            hint=_FEWER,
        )
    for group, names in zip(optimizer.param_groups, optimizer.groups.names, strict=True):
        saved = [name for name in names if name in settings]  # without those that no partition reads
        for name in saved:
            found = settings[name]
            for key, value in found.items():
                place = f"settings: {shown(name)}: {shown(key)}"
                like = group.get("lr") if key in _RATES and key not in group else group.get(key)
                _check_setting(functools.partial(index.refuse, place, value), value, like)
            own = _settings(group)
            for key in sorted(optimizer.defaults.keys() & own.keys() - found.keys()):
                if isinstance(own[key], int | float | tuple) and not isinstance(own[key], bool):
                    raise FormatError(f"{index.path}: settings: {shown(name)}: {key} is missing", hint=_ANOTHER)
            if found != settings[saved[0]]:
                raise FormatError(
                    f"{index.path}: settings: {shown(saved[0])} and {shown(name)} are in one param group, and differ",
                    hint=_ANOTHER,
                )


def _check_setting(refuse: Callable[[str], None], value: Any, like: Any) -> None:
    """One setting, or a part of one, against what the group has now; None: nothing, or nothing yet."""
    like = like.item() if isinstance(like, torch.Tensor) and not like.dim() else like
    if isinstance(value, list) and (like is None or (isinstance(like, tuple | list) and len(like) == len(value))):
        for part, each in zip(value, like or [None] * len(value), strict=True):
            _check_setting(refuse, part, each)
    elif isinstance(like, tuple | list):
        refuse(f"a list of {len(like)}")
    elif isinstance(value, list | dict):
        refuse("a plain value")
    elif isinstance(value, int | float) and not _is_finite(value) and value != like:
        refuse("a finite number")
    elif isinstance(like, bool):
        if not isinstance(value, bool | None):
            refuse("true or false")
    elif isinstance(like, int | float):
        if not isinstance(value, int | float) or isinstance(value, bool):
            refuse("a finite number")
    elif like is not None and not isinstance(value, type(like)):
        refuse(f"what the optimizer has now: {type(like).__name__}")


def _is_finite(value: float) -> bool:
    """True for a number that a float can hold: JSON's whole numbers may have any number of digits."""
    return abs(value) <= sys.float_info.max


def _trial(
    kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], dims: int, dtype: torch.dtype, place: str
) -> dict[str, Any] | None:
    """What an optimizer of torch's own keeps for a parameter with 2, 3, ... entries along its dimensions, after a step.

    None: it wants other gradients than these (SparseAdam), or a closure (LBFGS).
    """
    small = nn.Parameter(torch.zeros([n + 2 for n in range(dims)], dtype=dtype, device="cpu"))
    small.grad = torch.zeros_like(small)
    takes = inspect.signature(kind).parameters
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in settings.items()
        if key in takes and key not in _WAYS
    }
    try:
        made = kind([small], **given)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise FormatError(f"{place}: {kind.__name__} refuses them: {error}", hint=DAMAGED) from error
    if needs_closure(made):
        return None
    try:
        made.step()
    except RuntimeError:
        return None
    return dict(made.state[small])


def _grown(value: Any, parameter: nn.Parameter) -> Any:
    """A state of the small stand-in in the size that it has for the parameter."""
    if not torch.is_tensor(value) or value.dim() != parameter.dim():
        return value
    pairs = enumerate(zip(value.shape, parameter.shape, strict=True))
    sizes = [size if small == n + 2 else small for n, (small, size) in pairs]
    return torch.empty(sizes, dtype=value.dtype, device="meta")
