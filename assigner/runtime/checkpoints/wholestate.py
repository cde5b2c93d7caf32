"""The state of the whole model as plain PyTorch has it: gathered from the ranks, or handed out to them.

What `state_dict` and `load_state_dict` of the plain model do of their own (hooks, other names, extra state, files of
old versions) they do here, too: both run on the model without memory, which has real tensors in its places meanwhile.

    gather        every rank lists what it holds; tensor by tensor goes from the first that holds it to who wants all
    hand out      the first rank that has a state lists it; all ranks check it against what they hold; then each tensor
                  goes to the ranks that hold it
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from assigner.errors import UsageError
from assigner.machine.heap import return_free_pages
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.originals import unwatched
from assigner.model.members import named_buffers, named_parameters
from assigner.model.plainvalues import DTYPES
from assigner.runtime.failures.callrecord import checksum
from assigner.runtime.forward.heldtensors import has_values_of
from assigner.runtime.ranks.packedvalues import (
    PackedValue,
    broadcast,
    copy_of,
    receive,
    refuse_unplain,
    send,
    shape_and_type,
)
from assigner.runtime.stages.localpartitions import set_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.model.marking import PartitionGraph
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.stages.localpartitions import LocalPartitions


class WholeState:
    """The model's state over all ranks."""

    def __init__(self, share: LocalPartitions, member: Membership) -> None:
        self.graph, self.share, self.member = share.graph, share, member

    def gather(self, to: int | None) -> dict[str, Any] | None:
        """The plain model's state_dict on rank `to`; see `Pipeline.full_state_dict`."""
        at, member = "gathering the model's state", self.member
        targets = member.ranks if to is None else (to,)
        mine, extra = member.agree(at, self._held)
        found: dict[str, torch.Tensor] = {}
        with member.guarded(at):
            lists = member.told({name: shape_and_type(tensor) for name, tensor in mine.items()})
            extras: dict[str, Any] = {}
            for rank in member.ranks:
                extras.update(broadcast(member, rank, extra))
            first = {name: rank for rank in reversed(member.ranks) for name in lists[rank]}
            for name, source in first.items():
                if source == member.rank:
                    tensor = copy_of(mine[name])
                    send(member, tensor, targets)
                    if source in targets:
                        found[name] = tensor
                elif member.rank in targets:
                    found[name] = receive(member, source, lists[source][name])
        return member.agree(at, lambda: self._plain(found, extras) if member.rank in targets else None)

    def _held(self) -> tuple[dict[str, torch.Tensor], PackedValue]:
        """What this rank has of the state, and what its modules say beside it."""
        return_free_pages()  # copies come on top of what the heap keeps for the next step
        self.share.check_parameters()
        held = {name: tensor.detach() for name, tensor in {**self.share.unread.state(), **self.share.state()}.items()}
        for name, tensor in held.items():
            refuse_unplain(tensor, name)
        return held, PackedValue.of(self.share.extra_state(), "get_extra_state()")

    def _plain(self, found: Mapping[str, torch.Tensor], extras: Mapping[str, Any]) -> dict[str, Any]:
        model = self.graph.deferred.model
        with _unchanged(model):
            self._fill(model, found)
            try:
                state: dict[str, Any] = model.state_dict()
            except Exception as error:
                raise UsageError(f"the model's own state_dict failed: {type(error).__name__}: {error}") from error
            for path, module in model.named_modules(remove_duplicate=False):
                key = extra_key(path)
                names = (each for each, other in model.named_modules(remove_duplicate=False) if other is module)
                if key in state and (said := [extras[each] for each in names if each in extras]):
                    state[key] = said[0]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UsageError(
                    f"the model's own state_dict gives {key!r}, which is no parameter and no buffer of it",
                    hint="register it as a buffer, or give it in get_extra_state",
                )
        return state

    def _fill(self, model: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
        parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in found.items()}
        filled = set()
        for path, module in model.named_modules(remove_duplicate=False):
            for leaf, held in module._parameters.items():
                name = f"{path}.{leaf}" if path else leaf
                if held is not None:
                    module._parameters[leaf] = parameters[self.graph.canonical[name]]
                    filled.add(self.graph.canonical[name])
            for leaf in module._buffers:
                name = f"{path}.{leaf}" if path else leaf
                first = self.graph.canonical.get(name, name)
                filled.add(first)
                if first in found or name in self.graph.persistent:  # one that a forward has set to None is not found
                    module._buffers[leaf] = found.get(first)
        for name in found.keys() - filled:  # buffers that forwards have registered
            set_buffer(model, name, found[name])

    def hand_out(self, state: Mapping[str, Any] | None, *, strict: bool) -> _IncompatibleKeys:
        """Take over a plain model's state; see `Pipeline.load_state_dict`."""
        at, member = "loading a state_dict", self.member
        given = member.agree(at, lambda: None if state is None else _GivenState.of(self.graph, state, strict=strict))
        places = self.share.places()
        with member.guarded(at):
            told: list[dict[str, Any]] = member.told({"holds": [*places], "gives": given and given.told()})
        givers = [rank for rank in member.ranks if told[rank]["gives"]]
        if not givers:
            raise UsageError("no rank has given a state_dict", hint="give it on one rank, or the same on several")
        source, gives = givers[0], told[givers[0]]["gives"]
        for rank in givers[1:]:
            _same_state(source, gives, rank, told[rank]["gives"])
        member.agree(at, lambda: self._check(gives["tensors"], strict=strict))
        with member.guarded(at), torch.no_grad():
            extra = broadcast(member, source, None if given is None else given.extra)
            for name, facts in gives["tensors"].items():
                lacking = [rank for rank in member.ranks if name in told[rank]["holds"] and rank not in givers]
                if source == member.rank and given is not None and lacking:
                    send(member, copy_of(given.tensors[name]), lacking)
                if given is not None:
                    value = given.tensors[name]
                elif member.rank in lacking:
                    value = receive(member, source, facts)
                else:
                    continue
                if name in places:
                    places[name](value)
            self.share.set_extra_state(extra)
        return _IncompatibleKeys(gives["missing"], gives["unexpected"])

    def _check(self, gives: Mapping[str, Any], *, strict: bool) -> None:
        for name, tensor in self.share.state().items():
            if name not in gives:
                if strict and name.rpartition(".")[2] != _COUNT:
                    raise UsageError(f"{name!r} is missing in the state_dict", hint="strict=False leaves it as it is")
                continue
            shape, kind = gives[name]
            if list(tensor.shape) != shape:
                raise UsageError(f"{name!r} has shape {tuple(shape)} in the state_dict, and {tuple(tensor.shape)} here")
            if not torch.can_cast(DTYPES[kind], tensor.dtype):
                raise UsageError(f"{name!r} is {kind} in the state_dict, and {tensor.dtype} here: values would be lost")


_COUNT = "num_batches_tracked"
"""In BatchNorm: torch's own loading code has it stay as it is where a state_dict of no version lacks it."""


@dataclass(frozen=True)
class _GivenState:
    """A state_dict as the model understands it.

    Args:
        tensors: By the first of their names in the model.
        extra: What `set_extra_state` of modules is to be given, by the modules' names.
        missing: Keys of the model that it lacks.
        unexpected: Its keys that the model lacks.
    """

    tensors: Mapping[str, torch.Tensor]
    extra: PackedValue
    missing: list[str]
    unexpected: list[str]

    @classmethod
    def of(cls, graph: PartitionGraph, state: Mapping[str, Any], *, strict: bool) -> _GivenState:
        """Have the model itself read it."""
        if not isinstance(state, Mapping):
            raise UsageError(f"a {type(state).__name__} is no state_dict", hint="torch.load(path, weights_only=True)")
        model = graph.deferred.model
        given = _with_every_name(model, state)
        with _unchanged(model):
            try:
                keys = model.load_state_dict(given, strict=strict, assign=True)
            except Exception as error:
                raise UsageError(f"the state_dict does not fit the model: {' '.join(str(error).split())}") from error
            tensors: dict[str, torch.Tensor] = {}
            parameters = named_parameters(model, remove_duplicate=False)
            # torch's own loading code makes counts where there are none at all; the model's may have renamed some
            makes_counts = not any(key.rpartition(".")[2] == _COUNT for key in given)
            for name, tensor in (*parameters, *named_buffers(model, remove_duplicate=False)):
                if name not in graph.persistent or (makes_counts and name.rpartition(".")[2] == _COUNT):
                    continue
                if not tensor.is_meta:
                    refuse_unplain(tensor.detach(), name)
                    first = graph.canonical.get(name, name)
                    tensors.setdefault(first, tensor.detach())
                elif strict:
                    raise UsageError(
                        f"the state_dict has no values for {name!r}, or the model's own loading code copies them",
                        hint="have that code put the tensor into the state_dict, under the parameter's name",
                    )
            extra = {
                path: given[extra_key(path)]
                for path, module in model.named_modules(remove_duplicate=False)
                if type(module).set_extra_state is not nn.Module.set_extra_state and extra_key(path) in given
            }
        return cls(tensors, PackedValue.of(extra, "extra state"), list(keys.missing_keys), list(keys.unexpected_keys))

    def told(self) -> dict[str, Any]:
        """What the other ranks need to know of it."""
        return {
            "tensors": {name: shape_and_type(tensor) for name, tensor in self.tensors.items()},
            "marks": {**{name: checksum(each) for name, each in self.tensors.items()}, "": checksum(self.extra.text)},
            "missing": self.missing,
            "unexpected": self.unexpected,
        }


def _same_state(source: int, gives: Mapping[str, Any], rank: int, others: Mapping[str, Any]) -> None:
    """Refuse a state_dict that another rank has given otherwise, and name where they first differ."""
    ours, theirs = gives["marks"], others["marks"]
    for name in [*ours, *(each for each in theirs if each not in ours)]:
        if ours.get(name) == theirs.get(name):
            continue
        if name in ours and name in theirs:
            what = f"in {name!r}" if name else "in their extra state"
        else:
            what = f"in {name!r}, which rank {source if name in theirs else rank} has not"
        raise UsageError(
            f"ranks {source} and {rank} have given state_dicts that differ {what}", hint="give it on one rank alone"
        )


def _with_every_name(model: nn.Module, state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state_dict with all names of each tensor that has several: files often have one of them."""
    given = OrderedDict(state)
    for key, each in state.items():
        if isinstance(each, torch.Tensor):  # one that inference mode has made can be no trained parameter
            given[key] = each.detach().clone() if each.is_inference() else each.detach()
    if hasattr(state, "_metadata"):
        given._metadata = copy.deepcopy(state._metadata)  # type: ignore[attr-defined]  # torch notes there how it loads
    same: dict[int, list[str]] = defaultdict(list)
    with unwatched():
        plain = model.state_dict(keep_vars=True)
    for key, tensor in plain.items():
        if isinstance(tensor, torch.Tensor):
            same[id(tensor)].append(key)
    for keys in same.values():
        known = [key for key in keys if isinstance(given.get(key), torch.Tensor)]
        for key in keys:
            if known and key not in given:
                given[key] = given[known[0]]
        for key in known[1:]:
            if not _equal(given[known[0]], given[key]):
                raise UsageError(
                    f"{known[0]!r} and {key!r} are one tensor in the model, and differ in the state_dict",
                    hint="give one of them, or the same under both names",
                )
    return given


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape):
        return True
    return one.dtype == other.dtype and has_values_of(one, other)


def extra_key(path: str) -> str:
    """The key of a module's extra state in a state_dict, by the module's name."""
    return f"{path}.{_EXTRA_STATE_KEY_SUFFIX}" if path else _EXTRA_STATE_KEY_SUFFIX


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever the block does with the model, it is as it was behind it."""
    spaces: list[dict[str, Any]] = [
        space for module in model.modules() for space in (module._parameters, module._buffers)
    ]
    before = [(space, dict(space)) for space in spaces]
    try:
        with Memento(model.named_modules()).put_back(), unwatched():
            yield
    finally:
        for space, held in before:
            space.clear()
            space.update(held)
