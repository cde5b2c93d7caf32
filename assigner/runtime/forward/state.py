"""Tensors that a partition's own forward writes: running normalisers, spectral norm's vectors, weights that it clamps.

Several micro-batches are in flight, and a recompute comes late. So each forward writes to a copy; what it started from
and what it left stay as they are while somebody needs them:

    forward of micro-batch      0          1          2
    tensors                  s0 -> s1   s1 -> s2   s2 -> s3
    a recompute starts from  s0         s1         s2           and leaves no trace
    a kept graph reads          s1         s2         s3        in its backward

Which ones a forward writes is learnt by watching it: most partitions write none, and copy nothing. So a write that
begins later finds no copy, and what earlier micro-batches under way started from is lost with it: `LateWrites`.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from assigner.errors import UsageError
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.mutation import storage_of
from assigner.model.deferred.ownership import coded_classes
from assigner.model.members import buffers, parameters
from assigner.runtime.forward.heldtensors import HeldTensor, apart_from, as_they_were, is_strided, on_copies
from assigner.runtime.forward.pythonvalues import PythonValues

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_version = operator.attrgetter("_version")

_Ordered = dict[torch.Tensor, Any]
"""A set of tensors in the order in which they came; as in any other, they are told apart as objects."""


class WrittenTensors:
    """The tensors of a rank's partitions that forwards write. One that several partitions hold is one here.

    `elsewhere` are, by their ids, tensors that others have too, who would not see a change: that in words, and a hint.
    """

    def __init__(self, modules: Iterable[nn.Module], elsewhere: Mapping[int, tuple[str, str]] | None = None) -> None:
        self._elsewhere = elsewhere or {}
        families: dict[int, list[torch.Tensor]] = defaultdict(list)
        tensors = (each for module in modules for each in itertools.chain(parameters(module), buffers(module)))
        for tensor in dict.fromkeys(tensors):
            families[storage_of(tensor)].append(tensor)
        self._family = {tensor: family for family in families.values() for tensor in family}
        self._found = set[torch.Tensor]()

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._found

    def add(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Note that a forward writes a tensor, and so all that lie on the same storage: these are returned.

        Raises:
            UsageError: another worker or stage has one of them too, and would not see it.
        """
        family = self.family(tensor)
        shared = next((self._elsewhere[id(each)] for each in family if id(each) in self._elsewhere), None)
        if shared is not None:
            what, hint = shared
            raise UsageError(f"its forward writes {what}", hint=f"{hint}; or mark one larger module")
        self._found.update(family)
        return family

    def family(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All tensors on one storage with this one, and itself."""
        return self._family.get(tensor, [tensor])

    def drop(self, tensor: torch.Tensor) -> None:
        """No module holds this one any more."""
        self._found.discard(tensor)


class ModuleTensors:
    """The parameters and buffers of a partition, whichever its modules hold now: a forward may assign others."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.modules = list(module.modules())
        self._spaces: list[dict[str, Any]] = [
            space for each in self.modules for space in (each._parameters, each._buffers)
        ]
        self._values: list[Iterable[torch.Tensor | None]] = []  # of those with something in them
        self._empty = self._spaces  # the others
        self._places: list[tuple[int, str]] = []
        self._held: list[torch.Tensor | None] = []
        self.now: list[torch.Tensor] = []  # found by `renewed`: they can have other memory, and torch counts changes
        self._last: list[int] | None = None  # of `counts`; None: nobody says (`begin_step`) when others change tensors

    def renewed(self) -> list[torch.Tensor] | None:
        """See which tensors the modules hold now, and return those that they no longer do; None: all is as it was."""
        held = list(itertools.chain.from_iterable(self._values))
        is_alike = not any(self._empty) and len(held) == len(self._held)
        if is_alike and all(map(operator.is_, held, self._held)):
            return None
        self._values = [space.values() for space in self._spaces if space]
        self._empty = [space for space in self._spaces if not space]
        held = list(itertools.chain.from_iterable(self._values))
        before, present = (dict.fromkeys(each for each in some if each is not None) for some in (self._held, held))
        self._places, self._held = [(id(space), name) for space in self._spaces for name in space], held
        self.now = [each for each in present if is_strided(each)]
        self._last = None if self._last is None else []
        return [each for each in before if each not in present]

    def places(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        """Where modules held each of `now` when `renewed` looked: a key that the next tensor there has too."""
        known = set(self.now)
        for place, tensor in zip(self._places, self._held, strict=True):
            if tensor is not None and tensor in known:
                yield place, tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of them."""
        return any(each is tensor for each in self.now)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Where the modules hold a tensor, in words."""
        for name, module in self._module.named_modules():
            for key, each in (module._parameters | module._buffers | module.__dict__).items():
                if each is tensor:
                    return f"{name}.{key}" if name else key
        return "a tensor that its modules keep"

    def gradients(self) -> list[tuple[int, int]]:
        """Which gradients the parameters have, and torch's count of the changes to them."""
        found = [each.grad for each in self.now if isinstance(each, nn.Parameter)]
        return [(0, 0) if each is None else (id(each), each._version) for each in found]

    def begin_step(self) -> None:
        """A step comes next, within which nothing but forwards and backwards changes a tensor."""
        self._last = []

    def counts(self) -> list[int]:
        """What torch counts of changes, and where values lie: `.data = ` counts as no change."""
        found = [*map(_version, self.now), *map(torch.Tensor.data_ptr, self.now)]
        self._last = None if self._last is None else found
        return found

    def last_counts(self) -> list[int]:
        """The counts as they were seen last in this step, behind which nothing of it can have changed any."""
        return self._last or self.counts()

    def changed(self, before: list[int], after: list[int]) -> list[torch.Tensor]:
        """The tensors whose counts differ; both lists are of the same tensors."""
        half = len(self.now)
        return [
            tensor for n, tensor in enumerate(self.now) if (before[n], before[half + n]) != (after[n], after[half + n])
        ]

    def changed_since(self, counts: list[int]) -> list[torch.Tensor]:
        """The tensors that have changed since these counts."""
        now = self.counts()
        return [] if now == counts else self.changed(counts, now)


@dataclass(slots=True)
class LateWrites:
    """The tensors that a forward wrote without a copy, for it was not known to."""

    tensors: list[torch.Tensor]  # parameters and buffers
    loose: list[torch.Tensor]  # attributes of modules
    uncounted: bool = False  # torch has counted no change to one: a graph which has saved it would not notice


@dataclass(slots=True)
class ForwardStart:
    """What a forward started from."""

    tensors: list[HeldTensor]  # that it writes: it works on copies
    others: list[HeldTensor]  # that other partitions write and it reads
    memento: Memento | None  # of Python values; None: the forward will not run again
    counts: list[int]  # of the changes to tensors, and where their values lie
    made: list[int] = field(default_factory=list)  # the objects that cached functions have made so far

    def needs(self, late: LateWrites) -> bool:
        """Whether a recompute from here reads what is overwritten; an attribute may have come into being since."""
        held = () if self.memento is None else self.memento.tensors
        return bool(late.tensors) or any(each is tensor for tensor in late.loose for each in held)


class PartitionState:
    """The tensors that one partition's forwards write.

    `written` are the rank's tensors that forwards write; None: no other partition has to know.

    Attributes:
        tensors: All that its modules hold.
        values: What its forwards can find in Python besides.
        was_watched: A forward was, so that most of what is written is known.
        writes: What it is known to write.
    """

    def __init__(self, module: nn.Module, written: WrittenTensors | None = None) -> None:
        written = WrittenTensors([module]) if written is None else written
        self._module = module
        self.tensors = ModuleTensors(module)
        self.values = PythonValues(module)
        self.written = written
        self.was_watched = False
        self.writes: _Ordered = {}
        self._written_places: set[tuple[int, str]] = set()
        self._loose = set[torch.Tensor]()
        self._silent: _Ordered = {}
        self._plain = set[torch.Tensor]()  # of these, what the watched forward gave to no BatchNorm

    @classmethod
    def of_all(cls, states: Sequence[PartitionState]) -> PartitionState:
        """Of partitions whose forwards write nothing that is known, as of one."""
        found = cls(nn.ModuleList([each._module for each in states]), states[0].written)
        found.was_watched = True
        return found

    def begin(self, *, runs_again: bool) -> ForwardStart:
        """A forward in training comes next."""
        self._look()
        if self.was_watched and not (runs_again or self.writes or self._unseen):  # the rule
            return ForwardStart([], [], None, self.last_counts())
        memento = self.values.for_recompute() if runs_again else None
        writes = self.writes | (self._silent if runs_again else self._unseen)
        if memento is not None:
            writes |= dict.fromkeys(each for each in memento.tensors if each in self._loose)
        if not self.was_watched:  # nothing is known yet: buffers are likely, and weights are large
            buffers = [each for each in self.tensors.now if not isinstance(each, nn.Parameter)]
            writes |= dict.fromkeys(each for buffer in buffers for each in self.written.family(buffer))
        start = [HeldTensor.of(each) for each in writes]
        if start:
            on_copies(list(writes))
        others = [
            HeldTensor.of(each)
            for each in (self.tensors.now if self.written and memento is not None else ())
            if each in self.written and each not in writes
        ]
        return ForwardStart(start, others, memento, self.tensors.counts(), self.values.made())

    @property
    def _unseen(self) -> _Ordered:
        """What any forward may write unseen while graphs that are kept have saved it."""
        return dict.fromkeys(each for each in self._silent if each not in self._plain) if self._silent else {}

    def end(self, start: ForwardStart, storages: Iterable[int] = (), used: Collection[int] = ()) -> LateWrites | None:
        """The forward is done: what it wrote of which that was not known; None: a recompute can start from `start`.

        It was seen to write these storages, and has given those `used` to operations that are no BatchNorm's.
        """
        if used:
            self._plain.update(each for each in self._silent if storage_of(each) in used)
        loose = [] if start.memento is None else self.note_loose(start.memento.moved())
        counts = self.tensors.counts()
        if counts == start.counts and self.was_watched:
            return LateWrites([], loose) if loose else None
        changed = self.tensors.changed(start.counts, counts)
        if seen := set(storages):
            known = set(changed)
            changed = [each for each in self.tensors.now if each in known or storage_of(each) in seen]
        copied = {held.tensor for held in start.tensors}
        if not self.was_watched:
            changed += [held.tensor for held in start.tensors if not torch.equal(held.tensor, held.data)]
        if new := [tensor for tensor in changed if tensor not in self.writes]:
            untold = self._untold(new)
            self._learn(new + untold)
            changed += untold
        if not self.was_watched:
            self.was_watched = True
            for held in start.tensors:
                if held.tensor not in self.writes:
                    held.put()
        late = [tensor for tensor in changed if tensor not in copied]
        if not late and not loose:
            return None
        versions = dict(zip(self.tensors.now, start.counts, strict=False))  # the places of values come behind
        return LateWrites(late, loose, any(versions.get(each) == each._version for each in late))

    def has_made(self, start: ForwardStart) -> bool:
        """Cached functions have made others since a forward began, which would find them as it has left them."""
        return start.memento is not None and self.values.made() != start.made

    def _untold(self, new: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Running values, whose changes torch counts nowhere: the number of batches beside them has changed."""
        known = set(new)
        beside = [
            (each.running_mean, each.running_var)
            for each in self.tensors.modules
            if isinstance(each, _NormBase) and each.num_batches_tracked in known
        ]
        return [each for pair in beside for each in pair if each is not None and each not in known]

    def _learn(self, new: Sequence[torch.Tensor]) -> None:
        for tensor in new:
            self.writes.update(dict.fromkeys(self.written.add(tensor)))
        known = set(new)
        self._written_places |= {place for place, tensor in self.tensors.places() if tensor in known}

    def note_loose(self, written: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of tensors that a forward has written those of which it was not known, and that are attributes of modules."""
        known = self._loose.union(self.tensors.now) if written else self._loose
        new = [each for each in written if each not in known]
        self._loose.update(new)
        return new

    def left(self) -> list[HeldTensor]:
        """The tensors of this partition that any forward of this rank writes, or may write unseen, as they are now."""
        if not self.written and not self._silent:
            return []
        self._look()
        unseen = self._unseen
        return [HeldTensor.of(each) for each in self.tensors.now if each in self.written or each in unseen]

    def handed_on(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What a forward returns as others read it, whatever the next forwards write.

        They write to copies, so that the values stay; those that lie in memory that forwards write get a count of
        changes of their own, too, for theirs goes with the tensor from copy to copy.
        """
        if self._loose:
            outputs = apart_from(self._loose, outputs)
        if not self.written:
            return outputs
        storages = {storage_of(each) for each in self.tensors.now if each in self.written}
        lie = [(each, storage_of(each) in storages) for each in outputs]
        return tuple([each.data.requires_grad_(each.requires_grad) if is_held else each for each, is_held in lie])

    def lent(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What a forward returns where nothing is trained: copies of what lies in tensors that its modules hold.

        The next forward may write these, and torch counts neither a write through `.data` nor one of batch_norm.
        """
        self.tensors.renewed()
        attributes = [each for module in self.tensors.modules for each in module.__dict__.values()]
        loose = [each for each in attributes if isinstance(each, torch.Tensor)]
        return apart_from(self.tensors.now + loose, outputs)

    def is_written(self) -> bool:
        """Whether any forward of this rank is known to write a tensor of this partition, or may write one unseen."""
        if self._loose or not (self.written or self._unseen):
            return bool(self._loose)
        self._look()
        return bool(self._unseen) or any(each in self.written for each in self.tensors.now)

    def late_of(self, late: LateWrites) -> LateWrites:
        """Of what several partitions wrote that was not known, what this one holds; it is known from now on."""
        self._look()
        mine = [each for each in late.tensors if self.tensors.holds(each)]
        self._learn(mine)
        return LateWrites(mine, [], late.uncounted)

    @contextlib.contextmanager
    def again(self, start: ForwardStart) -> Iterator[None]:
        """The forward runs again in the block, from what it started from; afterwards all is as it was before."""
        assert start.memento is not None
        with start.memento.restored(), as_they_were(start.tensors + start.others):
            on_copies([each.tensor for each in start.tensors])
            yield

    def _look(self) -> None:
        """See which tensors the modules hold, and which of these it is known of that forwards write them."""
        if (gone := self.tensors.renewed()) is None:
            return
        self._silent = dict.fromkeys(
            each
            for module in self.tensors.modules
            for buffer in _uncounted(module)
            for each in self.written.family(buffer)
        )
        for tensor in gone:
            self.written.drop(tensor)
        self.writes = dict.fromkeys(
            each
            for place, tensor in self.tensors.places()
            if tensor in self.writes or place in self._written_places
            for each in self.written.add(tensor)
        )

    def last_counts(self) -> list[int]:
        """As `ModuleTensors.last_counts`, where no other forward of this rank may have changed a tensor of these."""
        return self.tensors.counts() if self.written or self._unseen else self.tensors.last_counts()


def _uncounted(module: nn.Module) -> list[torch.Tensor]:
    """Buffers that may be running statistics, whose changes torch counts nowhere, with no count of batches beside them.

    Nobody would notice that they begin to move: functional.batch_norm moves any two of one length.
    """
    if module.__dict__["_buffers"].get("num_batches_tracked") is not None and isinstance(module, _BatchNorm):
        return []
    if not coded_classes(type(module)) and not isinstance(module, _NormBase):
        return []
    found = [each for each in module._buffers.values() if each is not None and is_strided(each)]
    found = [each for each in found if each.dim() == 1 and each.is_floating_point()]
    sizes = [len(each) for each in found]
    return [each for each, size in zip(found, sizes, strict=True) if sizes.count(size) > 1]
