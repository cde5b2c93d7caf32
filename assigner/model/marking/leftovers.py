"""What partitions leave in attributes of their modules: code between partitions must not read it.

    self.aux = gate.mean()           in the forward of a partition, maybe on another worker, for each micro-batch anew
    loss = loss + self.moe.aux       between partitions: the graph has no such value, and nobody sends it

A capture takes back what a partition's forward leaves in Python, so this code would read what the builder has put in.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from assigner.errors import MarkingError
from assigner.model.deferred.reach import STANDARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.model.deferred.memento import Memento
    from assigner.model.marking.fakeforward import Named


class Leftovers:
    """The attributes that partitions have changed so far, while a forward is captured.

    Args:
        within: Whether the code that runs is a partition's own.
    """

    def __init__(self, within: Callable[[], bool]) -> None:
        self._within = within
        self._found: dict[int, dict[str, str]] = {}
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse their reads by other code in the block."""
        with self._stack:
            yield
        self._found.clear()

    def note(self, partition: str, inside: Named, values: Memento) -> None:
        """A partition's forward is done, and what it left was not taken back yet.

        Args:
            partition: Its name.
            inside: Its modules.
            values: Of these before.
        """
        changes = values.changes()
        changed = {id(each.holder) for each in changes}
        for _, module in inside:
            kind, entries = type(module), module.__dict__
            keys = {each.key for each in changes if each.holder is module}
            keys |= {key for key, value in entries.items() if id(value) in changed}
            keys -= STANDARD | {"training"}
            if keys and not kind.__module__.startswith("torch."):
                self._found.setdefault(id(module), {}).update(dict.fromkeys(keys, partition))
                self._watch(kind)

    def _watch(self, kind: type) -> None:
        before = vars(kind).get("__getattribute__")
        if getattr(before, "watches", None) is self:
            return
        plain: Callable[[Any, str], Any] = kind.__getattribute__  # type: ignore[assignment]

        def reading(module: Any, name: str) -> Any:
            partition = self._found.get(id(module), {}).get(name)
            if partition is not None and not self._within():
                raise MarkingError(
                    f"the forward of {partition!r} changes its attribute {name!r}, and code outside of it reads that:"
                    " nobody sends it from the worker that runs it",
                    hint="return it from the marked module, or mark a larger module that contains both",
                )
            return plain(module, name)

        reading.watches = self  # type: ignore[attr-defined]
        kind.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        if before is None:
            self._stack.callback(delattr, kind, "__getattribute__")
        else:
            self._stack.callback(setattr, kind, "__getattribute__", before)
