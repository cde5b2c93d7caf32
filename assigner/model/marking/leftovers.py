"""What partitions leave in attributes of their modules: no other code of the model may read it.

    self.aux = gate.mean()           in the forward of a partition, maybe on another worker, for each micro-batch anew
    loss = loss + self.moe.aux       between partitions: the graph has no such value, and nobody sends it
    self.others[0].calls             in another partition, which holds the module without having registered it

A capture takes back what a partition's forward leaves in Python, so this code would read what the builder has put in;
and so would code that reads it earlier in the forward, of the last one.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from assigner.errors import MarkingError
from assigner.model.deferred.reach import STANDARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from assigner.model.deferred.memento import Memento
    from assigner.model.marking.fakeforward import Named


class Leftovers:
    """The attributes that partitions have changed so far, and that other code has read, while forwards are captured.

    Args:
        running: The partition whose forward runs; empty: none does.
        inside: The modules of each, with it, by its name.
    """

    def __init__(self, running: Callable[[], str], inside: Mapping[str, Named]) -> None:
        self._running = running
        self._modules = [(name, module) for name, modules in inside.items() for _, module in modules]
        self._homes: dict[int, set[str]] = {}
        for name, module in self._modules:
            self._homes.setdefault(id(module), set()).add(name)
        self._changed: dict[tuple[int, str], str] = {}
        self._read: set[tuple[int, str]] = set()
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse their reads by other code in the block."""
        with self._stack:
            for kind in dict.fromkeys(type(module) for _, module in self._modules):
                self._watch(kind)
            yield
        self._changed.clear()
        self._read.clear()

    def note(self, partition: str, inside: Named, values: Memento) -> None:
        """A partition's forward is done, and what it left was not taken back yet.

        Args:
            partition: Its name.
            inside: Its modules.
            values: Of these before.

        Raises:
            MarkingError: it has changed what other code has read.
        """
        changes = values.changes()
        changed = {id(each.holder) for each in changes}
        for _, module in inside:
            keys = {each.key for each in changes if each.holder is module}
            keys |= {key for key, value in module.__dict__.items() if id(value) in changed}
            for key in keys - _OTHERS:
                self._changed[id(module), key] = partition
                if (id(module), key) in self._read:
                    raise _read_elsewhere(partition, key)

    def _watch(self, kind: type) -> None:
        before = vars(kind).get("__getattribute__")
        plain: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]

        def reading(module: Any, name: str) -> Any:
            homes = self._homes.get(id(module))
            if homes is not None and name not in _OTHERS and self._running() not in homes:
                if (id(module), name) in self._changed:
                    raise _read_elsewhere(self._changed[id(module), name], name)
                self._read.add((id(module), name))
            return plain(module, name)

        kind.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        if before is None:
            self._stack.callback(delattr, kind, "__getattribute__")
        else:
            self._stack.callback(setattr, kind, "__getattribute__", before)


_OTHERS = STANDARD | {"training", "__dict__", "__class__"}
"""What changes, or is read, all the time."""


def _read_elsewhere(partition: str, name: str) -> MarkingError:
    return MarkingError(
        f"the forward of {partition!r} changes its attribute {name!r}, and code outside of it reads that:"
        " nobody sends it from the worker that runs it",
        hint="return it from the marked module, or mark a larger module that contains both",
    )
