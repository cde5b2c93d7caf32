"""What partitions leave in attributes of their modules: no other code of the model may read it.

    self.aux = gate.mean()           in the forward of a partition, maybe on another worker, for each micro-batch anew
    loss = loss + self.moe.aux       between partitions: the graph has no such value, and nobody sends it
    self.others[0].calls             in another partition, which holds the module without having registered it

A capture takes back what a partition's forward leaves in Python, so this code would read what the builder has put in;
and so would code that reads it earlier in the forward, of the last one. A forward may begin to change what others read
after the capture: the rank that runs it looks at the end of each step (`ReadElsewhere`). A loss that reads what any
forward leaves on the builder's model (`MADE[0].moe.aux`) finds it there as it was built, for what runs are the
partitions' copies.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.errors import MarkingError
from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import ABSENT, Memento, StateChange, placed
from assigner.model.deferred.mutation import storage_of, tensor_leaves
from assigner.model.deferred.ownership import STANDARD
from assigner.model.deferred.reach import reach
from assigner.model.marking.isolation import CrossingError
from assigner.usercode import is_asked_by_user

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from assigner.model.marking.fakeforward import Named


Attribute = tuple[int, str]
"""The id of a module, and a name."""


class Leftovers:
    """The attributes that partitions have changed so far, and that other code has read, while forwards are captured.

    Args:
        running: The partition whose forward runs; None, or empty: none does.
        inside: The modules of each, with it, by its name.
    """

    def __init__(self, running: Callable[[], str | None], inside: Mapping[str, Named]) -> None:
        self._running = running
        self._modules = [(name, module) for name, modules in inside.items() for _, module in modules]
        self._paths = {id(module): path for modules in inside.values() for path, module in modules}
        self._homes: dict[int, set[str]] = {}
        for name, module in self._modules:
            self._homes.setdefault(id(module), set()).add(name)
        self._changed: dict[Attribute, str] = {}
        self._read: set[Attribute] = set()
        self._beside: dict[Attribute, str] = {}  # what is no attribute, or was written in place

    @property
    def left(self) -> dict[Attribute, str]:
        """Who has changed an attribute of which module; of other holders the name is empty."""
        return {**self._beside, **self._changed}

    @property
    def read(self) -> frozenset[tuple[str, str]]:
        """What other code has read or set: the modules' names, each with the attribute's."""
        return frozenset((self._paths[module], key) for module, key in self._read)

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Refuse their reads by other code in the block."""
        return _told((module for _, module in self._modules), self._reading, self._setting)

    def note(self, partition: str, inside: Named, values: Memento) -> bool:
        """A partition's forward is done, and not taken back yet. True: it has changed attributes of its modules.

        Raises:
            CrossingError: it has changed what other code has read.
        """
        found = False
        changes = values.changes()
        changed = {id(each.holder) for each in changes}
        deep = [each for each in changes if not isinstance(each.holder, nn.Module)]
        self._beside.update({(id(each.holder), ""): partition for each in deep})
        for path, module in inside:
            keys = {each.key for each in changes if each.holder is module}
            keys |= {key for key, value in module.__dict__.items() if id(value) in changed}
            keys |= {key for key in module.__dict__ if any(_is_within(each.name, f"{path}.{key}") for each in deep)}
            for key in keys - _OTHERS:
                found = True
                self._changed[id(module), key] = partition
                if not self._read.isdisjoint({(id(module), key), (id(module), _ALL)}):
                    raise _read_elsewhere(partition, key)
        return found

    def note_written(self, partition: str, inside: Named, written: Collection[int]) -> None:
        """A partition's forward has written in place, into some memories."""
        for _, module in inside:
            for key in module.__dict__.keys() - _OTHERS:
                if any(storage_of(each) in written for each in tensor_leaves(module.__dict__[key])):
                    self._beside[id(module), key] = partition

    def _reading(self, module: Any, name: str) -> None:
        if self._is_other(module, name) and (name not in _ASKED or is_asked_by_user()):
            self._touch(module, name)

    def _setting(self, module: Any, name: str) -> None:
        if self._is_other(module, name) and name not in _ASKED:
            self._touch(module, name)

    def _is_other(self, module: Any, name: str) -> bool:
        """Whether the code that runs is none of the partitions that have a module, which has such an attribute."""
        homes = self._homes.get(id(module))
        return homes is not None and name not in _OTHERS and self._running() not in homes

    def _touch(self, module: Any, name: str) -> None:
        """Other code reads an attribute, or sets it: if only to what it has been, where a forward has changed that."""
        keys = (key for each, key in self._changed if each == id(module)) if name == _ALL else (name,)
        for key in keys:
            if (id(module), key) in self._changed:
                raise _read_elsewhere(self._changed[id(module), key], key)
        self._read.add((id(module), name))


_ALL = "__dict__"
_ASKED = {"training", _ALL}
"""What torch and this package read all the time."""
_OTHERS = (STANDARD | {"__class__"}) - _ASKED
"""What changes, or is read, all the time."""
_UNLIKE = _ASKED | {"forward"}
"""What is another on a rank's modules: evaluations set the mode, and deferred BatchNorm a forward."""


def _told(
    modules: Iterable[nn.Module], reading: Callable[[Any, str], None], setting: Callable[[Any, str], None]
) -> contextlib.AbstractContextManager[None]:
    """Call these before code in the block reads or sets an attribute of a module of the same classes, with its name."""

    def watched(kind: type) -> list[tuple[type, str, Any]]:
        read: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]
        write: Callable[[Any, str, Any], None] = kind.__setattr__  # type: ignore[assignment]

        def told_read(module: Any, name: str) -> Any:
            reading(module, name)
            return read(module, name)

        def told_write(module: Any, name: str, value: Any) -> None:
            setting(module, name)
            write(module, name, value)

        return [(kind, "__getattribute__", told_read), (kind, "__setattr__", told_write)]

    return placed(entry for kind in dict.fromkeys(map(type, modules)) for entry in watched(kind))


class FirstReads:
    """Which attributes of modules a forward reads before it sets them: what it finds there is of the one before.

    An attribute that each forward sets before it reads it is a local variable (`self.rows = x.shape[0]`): whatever
    it holds, forwards do the same.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = {id(module): module for module in modules}
        self._read: set[Attribute] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note those of the forward in the block, and forget those of the last one."""
        self._read.clear()
        written: set[Attribute] = set()

        def reading(module: Any, name: str) -> None:
            place = id(module), name
            if place not in written and (name != _ALL or is_asked_by_user()):
                self._read.add(place)

        def setting(module: Any, name: str) -> None:
            written.add((id(module), name))

        with _told(self._modules.values(), reading, setting):
            yield

    def are_those_of(self, others: FirstReads) -> bool:
        """Whether two forwards read the same."""
        return self._read == others._read and self._modules.keys() == others._modules.keys()

    def of(self, modules: Named) -> frozenset[tuple[str, str]]:
        """Those of some modules, by the modules' names, but what torch reads all the time."""
        names = {id(module): name for name, module in modules}
        return frozenset(
            (names[module], key)
            for module, key in self._read
            if module in names and (key == _ALL or key not in _OTHERS | _UNLIKE)
        )

    def has(self, attribute: Attribute) -> bool:
        """Whether the forward may have read it before it set it."""
        return attribute[0] not in self._modules or not self._read.isdisjoint({attribute, (attribute[0], _ALL)})


class Notes:
    """What the forward of one capture leaves in attributes of modules, and what it reads there first.

    Args:
        changes: What it leaves, but for tensors that follow from shapes alone.
        reads: What it reads before it sets it.
    """

    def __init__(self, changes: Iterable[StateChange], reads: FirstReads) -> None:
        self.reads = reads
        self._left = {  # by its name, and the number or text, or that it is a tensor; empty: else
            attribute_of(each): (each.name, _in_words(each.now))
            for each in changes
            if isinstance(each.holder, nn.Module)
        }

    def says_as(self, others: Notes) -> bool:
        """Whether nothing is told of one forward that is not told of the other."""
        return self._left == others._left and self.reads.are_those_of(others.reads)

    def found_of(self, others: Notes) -> str | None:
        """What this forward may find as the other has left it, and does not leave so itself, by name; None: nothing."""
        read = (each for each in others._left.items() if self.reads.has(each[0]))
        return min((it[0] for each, it in read if not it[1] or self._left.get(each) != it), default=None)


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"  # what of it was read would be in the graph
    return f"{type(value).__name__} {value!r}" if type(value) in ATOMS else ""


def attribute_of(change: StateChange) -> Attribute:
    """Which one has changed."""
    return id(change.holder), change.key


class ReadElsewhere:
    """The attributes of one rank's modules, of which code outside of their partitions has read some in captures.

    Args:
        partitions: Those of the rank, by name, as they were built.
    """

    def __init__(self, partitions: Mapping[str, nn.Module]) -> None:
        self._spaces = [
            (name, path, vars(module), dict(vars(module)))
            for name, partition in partitions.items()
            for path, module in partition.named_modules()
        ]
        self._read: Collection[tuple[str, str]] = ()
        self._first: list[tuple[str, str, dict[str, Any], Any]] = []

    def check(self, read: Collection[tuple[str, str]]) -> None:
        """Refuse what is no more as when this was made: `read` has the modules' names, each with the attribute's."""
        if read is not self._read:
            self._read = read
            self._first = [
                (name, key, space, before.get(key, ABSENT))
                for name, path, space, before in self._spaces
                for key in {key for where, key in read if where == path and key not in _UNLIKE}
                | ({each for each in before if each not in _OTHERS | _UNLIKE} if (path, _ALL) in read else set())
            ]
        for name, key, space, first in self._first:
            now = space.get(key, ABSENT)
            if now is not first and (type(first) not in ATOMS or repr(now) != repr(first)):
                raise _read_elsewhere(name, key)


def _is_within(name: str, other: str) -> bool:
    """Whether a name leads on from another one: `b.meter.counts['loss']` from `b.meter`."""
    return name.startswith(other) and not (name[len(other) :][:1].isalnum() or name[len(other) :][:1] == "_")


def left_behind(leftovers: Leftovers, changes: Sequence[StateChange]) -> dict[Attribute, str]:
    """Who has changed what in one forward, by the holder's id and the key; of a container the key is empty."""
    found = {(id(each.holder), each.key if isinstance(each.holder, nn.Module) else ""): "" for each in changes}
    return {**found, **leftovers.left}


def check_loss(loss: Callable[..., Any] | None, model: nn.Module, left: Mapping[Attribute, str]) -> None:
    """A loss may hold no list or dict in which a forward leaves something: it has the builder's, and not a copy.

    Raises:
        MarkingError: it holds such a one.
    """
    for place, value in reach({"loss": loss}, beside=model.modules()) if loss is not None and left else ():
        if (partition := left.get((id(value), ""))) is not None:
            raise MarkingError(
                f"the loss reads {place}, which {_forward_of(partition)} changes: the loss has it as it was built, for"
                " what runs are copies of its partitions",
                hint="return it from the model's forward: the loss is given all that this returns",
            )


def check_apart(model: nn.Module, left: Mapping[Attribute, str], read: Collection[tuple[str, str]]) -> None:
    """What code outside of partitions reads or sets in one capture, as in eval mode, none of them changes in another.

    Of the builder's model; `left` is as `left_behind` gives it, `read` as `Leftovers.read` has it.

    Raises:
        CrossingError: they do.
    """
    for path, key in sorted(read):
        module = id(model.get_submodule(path))
        keys = [each for holder, each in left if holder == module and each] if key == _ALL else [key]
        for each in keys:
            if partition := left.get((module, each)):
                raise _read_elsewhere(partition, each)


def check_followed(followed: Named, read: Memento, left: Mapping[Attribute, str]) -> None:
    """Code that is followed in one capture, and was a call's in the first one, reads nothing that this call changes.

    Raises:
        CrossingError: it can read a list, a dict or another object that they change.
    """
    sent = {id(space) for _, module in followed for space in (module._parameters, module._buffers)}
    if found := sorted({left[holder, ""] for holder in read.holders() - sent if left.get((holder, ""))}):
        raise _crossing(found[0], "a list, dict or object that it holds")


def left_by_module(model: nn.Module, left: Mapping[Attribute, str]) -> dict[nn.Module, dict[str, str]]:
    """The attributes that forwards change, by the builder's module that has them, each in words."""
    found: dict[nn.Module, dict[str, str]] = {}
    for path, module in model.named_modules():
        for (holder, key), partition in sorted(left.items()):
            if holder == id(module) and key:
                name = f"{path}.{key}" if path else key
                found.setdefault(module, {})[key] = f"{name!r}, which {_forward_of(partition)} changes"
    return found


def _forward_of(partition: str) -> str:
    """Whose code it is, in words; an empty name: what is between partitions."""
    return f"the forward of {partition!r}" if partition else "the model's forward"


def _read_elsewhere(partition: str, name: str) -> CrossingError:
    return _crossing(partition, f"its attribute {name!r}")


def _crossing(partition: str, what: str) -> CrossingError:
    return CrossingError(
        f"the forward of {partition!r} changes {what}, and code outside of it reads or sets that:"
        " nobody sends it from the worker that runs it, or to that",
        hint="return it from the marked module, leave that module unmarked, or mark a larger one that contains both",
        module=partition,
    )
