"""What an optimizer of the user's keeps beside the state of its parameters: mostly nothing takes it along.

self.state[parameter][...], numbers in groups    saved, and moved
self.count = 3, a list in a group                moved; saved where its own state_dict has it: refused
self.defaults["warm"] = False                    moved
self.seen = [...], self.t = tensor, an optimizer inside, self.state["count"], what hooks on its step note: refused

A move has the builder make it anew: what the builder could reach is there afterwards as it was; what it has made is
made once more. So that counts to which the optimizer leads and the builder did not, but its parameters and groups.
Plain values of its own, which its steps note, go along, to ranks that updated nothing before too: so those that update
something must have them alike. Checkpoints have none of them, as in plain torch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from assigner.errors import UsageError
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.reach import Names, reach
from assigner.model.plainvalues import SINGLE
from assigner.runtime.ranks.packedvalues import PackedValue, broadcast
from assigner.runtime.update.separability import has_own, is_known

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from assigner.runtime.ranks.membership import Membership

_KEPT_HINT = (
    "keep it as a number in each param group, or as a tensor in the state of each parameter; make a scheduler of"
    " pipeline.optimizer"
)
MEMBERS = ("params", "param_names")
"""What a group has of its parameters; the rest are settings."""

_SECTIONS = frozenset(("state", "param_groups"))


class OptimizerMemory:
    """What an optimizer keeps, held against what it kept when its builder had made it.

    `outside` is what that could reach before (`outside_of`).

    Attributes:
        built: Those of its attributes that it was built with, by name, which are plain values.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, builder: Any = None, outside: Iterable[Any] = ()) -> None:
        self._optimizer = optimizer
        self._is_made = "_zero_grad_profile_name" in vars(optimizer)  # else it has no state_dict() of torch's either
        self._made, beside = list[Any](), [*_of_parameters(optimizer), *outside]
        known = set(map(id, beside))
        if not is_known(optimizer):
            self._made += (each for each in outside_of(builder, optimizer) if id(each) not in known)
        places = {} if is_known(optimizer) else dict(self._places())
        self._before = {name: (value, [*_mementos(value, beside)]) for name, value in places.items()}
        self._built = [_plain_in(space) for space in self._spaces]
        self.built = self._built[0]

    @property
    def _spaces(self) -> list[dict[str, Any]]:
        """Where it keeps plain values: its attributes, and its defaults."""
        return [vars(self._optimizer), self._optimizer.defaults]

    def check_moved(self, *, ranks: int) -> None:
        """Refuse to build it anew over other parameters where something would be lost.

        Raises:
            UsageError: it keeps something else than plain values of its own.
        """
        found = self._changed()
        if ranks == 1:  # what a group has stays on its rank
            found = [name for name in found if not name.startswith(_GROUPS)]
        groups = enumerate(self._optimizer.param_groups)
        told = {_in_group(n, key) for n, group in groups for key, value in group.items() if is_told(value)}
        self._refuse("another plan would lose it", [name for name in found if name not in told])

    def check_saved(self, *, is_spread: bool) -> None:
        """Refuse to save its state where its own `state_dict` has something that is not saved.

        Raises:
            UsageError: naming it; or it loads its state by a method of its own, of which several workers would each
                have one.
        """
        if is_spread:
            self.check_loaded()
        if is_known(self._optimizer) and not self.is_own("state_dict"):
            return
        changed = self._changed()
        found = [name for name in changed if not (self._is_made and not name.startswith(("state[", _GROUPS)))]
        self._refuse("a checkpoint of a pipeline would lose it", found + self._told())

    def check_told(self) -> None:
        """As `check_saved`, where several workers have parameters and a script asks for the state of one.

        Raises:
            UsageError: naming what would be lost.
        """
        found = [each for each in self._changed() if each.startswith("state[")]
        self._refuse("the state of one worker of several has it not", found + self._told())

    def check_loaded(self) -> None:
        """Refuse to load its state where several workers have parameters, and a method of its own would see some.

        Raises:
            UsageError: it has one, or a hook on torch's.
        """
        if self.is_own("load_state_dict"):
            raise UsageError(
                f"{type(self._optimizer).__name__} has a load_state_dict() of its own, or hooks on it, which would see"
                " the parameters of one worker, and several have some",
                hint="have step() do what it does; or train under a plan on one worker (assigner solve"
                " --max-workers 1)",
            )

    def is_own(self, method: str) -> bool:
        """Whether its `state_dict` or `load_state_dict` is not torch's, or has hooks."""
        hooks = (vars(self._optimizer).get(f"_optimizer_{method}_{when}_hooks") for when in ("pre", "post"))
        return has_own(self._optimizer, method) or any(hooks)

    def _told(self) -> list[str]:
        """What its `state_dict` has, by a method of its own or a hook, that torch's has not."""
        if not self.is_own("state_dict"):
            return []
        told, usual = self._optimizer.state_dict(), _usual(self._optimizer)
        if not isinstance(told, dict):
            return [f"a {type(told).__name__} for its own state_dict()"]
        found = [f"{key!r} of its own state_dict()" for key in told if key not in _SECTIONS]
        changed = [key for key, each in usual.items() if not equal(told.get(key), each)]
        return found + [f"another {key!r} in its own state_dict()" for key in changed]

    def _changed(self) -> list[str]:
        """The places where it keeps something now that it did not keep when it was made."""
        found = [f"state[{key!r}]" for key in self._optimizer.state if not isinstance(key, torch.Tensor)]
        if is_known(self._optimizer):
            return found
        places = dict(self._places())
        for name, value in places.items():
            held, mementos = self._before.get(name, (None, []))
            is_inner = isinstance(value, torch.optim.Optimizer)
            if is_inner or not mementos or held is not value or any(each.has_changed() for each in mementos):
                found.append(name)
        return found + [name for name in self._before if name not in places and not name.startswith(_GROUPS)]

    def _places(self) -> Iterator[tuple[str, Any]]:
        """Of it, and what its builder has made with it for others, as a scheduler, by names for people."""
        yield from _places(self._optimizer)
        if self._made:
            yield "something that Workload.optimizer has made with it", self._made

    def _refuse(self, what: str, found: list[str]) -> None:
        if found:
            raise UsageError(
                f"{type(self._optimizer).__name__} keeps {found[0]} beside the state of its parameters: {what}",
                hint=_KEPT_HINT,
            )

    def go_on(self, earlier: OptimizerMemory, given: Collection[str]) -> None:
        """Have what an optimizer has by now that the same builder has made before.

        `given`: the attributes that a script has set on it, plain or not.
        """
        was = vars(earlier._optimizer)
        vars(self._optimizer).update({name: each for name, each in was.items() if name in given})
        for mine, theirs in zip(self._spaces + self._built, earlier._spaces + earlier._built, strict=True):
            mine.update(_plain_in(theirs))

    def share(self, member: Membership, at: str, *, is_idle: bool) -> None:
        """Have what its steps have noted on every rank, where no rank has noted otherwise.

        Every rank calls this. One that `is_idle` updates nothing: it gets what the others have.

        Raises:
            UsageError: ranks have unlike values, or one that cannot be compared; on every rank.
        """
        kind = type(self._optimizer).__name__
        packed = member.agree(at, lambda: PackedValue.of([is_idle, *self._noted()], f"what {kind} keeps"))
        with member.guarded(at):
            told = [broadcast(member, rank, packed) for rank in member.ranks]
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
                            hint=f"{_KEPT_HINT}; what is noted for people alone, as a time, goes into a log of the"
                            " script's",
                        )
        for space, noted in zip(self._spaces, first, strict=True) if is_idle else ():
            space.update(noted)

    def _noted(self) -> list[dict[str, Any]]:
        """What it was not built with: attributes, and defaults. Torch's own optimizers note nothing."""
        if is_known(self._optimizer):
            return [{}, {}]
        return [
            {
                key: each
                for key, each in _plain_in(space).items()
                if key not in _of_torch() and (key not in built or repr(built[key]) != repr(each))
            }
            for space, built in zip(self._spaces, self._built, strict=True)
        ]


def outside_of(builder: Any, *made: torch.optim.Optimizer) -> list[Any]:
    """What a builder of optimizers can reach now, but what these have: the same objects when it makes another one."""
    beside = [each for optimizer in made for each in _of_parameters(optimizer)]
    found = (each for _, each in reach({"": builder}, beside=beside, parameters=True))
    return [each for each in found if not isinstance(each, Names)]  # other ones in every walk


def _plain_in(space: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in space.items() if type(value) in ATOMS}


def is_told(value: Any) -> bool:
    """A setting of a group that can go to another rank."""
    if isinstance(value, tuple | list):
        return all(map(is_told, value))
    if type(value) is dict:
        return all(is_told(each) for pair in value.items() for each in pair)
    return type(value) in SINGLE or isinstance(value, float) or type(value) is torch.Tensor


def _of_parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """It, and what goes with its parameters and groups, whoever else holds it."""
    yield from (optimizer, optimizer.state, optimizer.defaults, optimizer.param_groups)
    for group in optimizer.param_groups:
        yield from (group, *group["params"], *(each for each in group.values() if isinstance(each, torch.Tensor)))


def _mementos(value: Any, beside: Iterable[Any]) -> Iterator[Memento]:
    """Of something, and of torch's optimizers and schedulers that it leads to, which no walk looks into."""
    yield Memento((), [value], beside=beside, parameters=True)
    for _, each in reach({"": value}, beside=beside, parameters=True):
        if isinstance(each, torch.optim.Optimizer | LRScheduler):
            yield Memento((), [vars(each)], beside=beside, parameters=True)


@functools.cache
def _of_torch() -> frozenset[str]:
    """What every optimizer has."""
    return frozenset((*vars(torch.optim.SGD([torch.zeros((), device="cpu")])), *_SECTIONS, "defaults"))


def _usual(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch's own `state_dict` gives, without the hooks on it."""
    number = {id(each): n for n, each in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = [{**group, "params": [number[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    return {"state": {number.get(id(key), key): each for key, each in optimizer.state.items()}, "param_groups": groups}


def equal(one: Any, other: Any) -> bool:
    """Two state dicts, or what is in them."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.layout == other.layout and one.dtype == other.dtype and torch.equal(one.to(other.device), other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(each, other[key]) for key, each in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Its own attributes, hooks on its step, and what stands in its groups and is not carried, by names for people."""
    for name, value in vars(optimizer).items():
        if name not in _of_torch() and _is_kept(value):
            yield f"self.{name}", value
    for name, value in optimizer.defaults.items():
        if _is_kept(value):
            yield f"self.defaults[{name!r}]", value
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for n, hook in enumerate((*before.values(), *after.values()), 1):
        yield f"something in {getattr(hook, '__qualname__', type(hook).__name__)}, hook {n} on its step,", hook
    for n, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            is_number = isinstance(value, torch.Tensor) and not value.dim()
            if name not in MEMBERS and not is_number and _is_kept(value):
                yield _in_group(n, name), value


_GROUPS = "param_groups["


def _in_group(number: int, name: Any) -> str:
    return f"{_GROUPS}{number}][{name!r}]"


def _is_kept(value: Any) -> bool:
    """Something that may change, and is no plain value: neither a class, nor a list of parameters."""
    if type(value) in ATOMS or isinstance(value, type):
        return False
    if isinstance(value, tuple):
        return any(map(_is_kept, value))
    return not (isinstance(value, list) and value and all(isinstance(each, nn.Parameter) for each in value))
