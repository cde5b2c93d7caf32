"""When a partition's glue reads parameters and buffers that the forward changes, and who else may read them.

    self.scale.copy_(f(n))       follows from shapes: stored once a step, by each partition that holds the buffer
    x = self.block(x)            its own forward changes self.block.count, or puts another tensor in its place
    x = x * self.block.count     read behind that call, in its partition; in front of it, where the forward does so

A partition runs its nodes in the forward's order. So what reads such a tensor runs there in its turn, and is made
nowhere else; where another partition needs it, on the other side of the change, that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from assigner.errors import MarkingError
from assigner.model.marking.glue import is_size
from assigner.model.marking.nodes import call_of, is_item, line_of, storages
from assigner.model.marking.opaque import is_call
from assigner.model.marking.writing import ONCE, STORES, snapshot, stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.model.marking.glue import Ownership


class StateReads:
    """What reads and changes the tensors that partitions hold, beside who runs it.

    Attributes:
        in_turn: By position in the order of partitions the nodes without owner that run there in the forward's order:
            stores into tensors that are held there, and what reads a tensor that a module there changes.
        replaced: The placeholders in whose tensors' places a module puts new ones: each reader gets what is there then.

    Raises:
        MarkingError: partitions share a tensor that one of them changes, or need it as it was or will be elsewhere.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._of, self._owner, self._order = ownership, ownership.owner, ownership.order
        self._check_state()
        self.in_turn = self._find_stores()
        self.replaced: set[fx.Node] = set()
        self._find_reads()

    def _check_state(self) -> None:
        """What glue changes in a parameter or buffer stays with the partition that runs it.

        So do the statistics of a BatchNorm, which move behind the runtime's back; of what else a module's own forward
        changes the runtime takes note where it matters, over several workers.
        """
        changed = [
            (place, name)
            for node, place in self._owner.items()
            if is_call(node)
            for name in sorted(call_of(node).effects.changed)  # on every rank the same one first
            if name in self._of.capture.deferred_statistics
        ]
        changed += [
            (place, self._of.placeholders[node.args[0]][1])
            for node, place in self._owner.items()
            if node.target is stored
        ]
        for place, name in changed:
            others = self._of.places(self._of.holding(name)) - {place}
            if others:
                raise MarkingError(
                    f"the forward changes {name!r} in {self._order[place]!r}, and {self._order[min(others)]!r} shares"
                    " it: on another worker it would stay as it was",
                    hint="mark one larger module that contains both",
                )

    def _find_stores(self) -> dict[int, list[fx.Node]]:
        """By partition: the stores into tensors that it holds, of values that do not depend on the batch."""
        found: dict[int, list[fx.Node]] = {}
        for node in self._of.nodes:
            if node.target in ONCE:
                for place in self._of.places(self._of.holding(self._of.held(node.args[0]))) or {len(self._order) - 1}:
                    found.setdefault(place, []).append(node)
        return found

    def _find_reads(self) -> None:
        """What the glue reads of a tensor of which a module's own forward makes another one is read in its turn."""
        turn = {node: n for n, node in enumerate(self._of.nodes)}
        for node in filter(is_call, self._owner):
            effects, place = call_of(node).effects, self._owner[node]
            for name in sorted(effects.changed):
                is_replaced = name in effects.replaced
                held = [each for each in self._of.holding(name) if each.op == "placeholder"]
                self._check_changes(node, name, held, turn)
                if is_replaced:
                    self.replaced.update(held)
                for read in self._readers_of(held, views=not is_replaced):
                    places = self._of.places([read])
                    self._check_read(node, name, read, places, is_before=turn[read] < turn[node])
                    if place in places and read not in self._owner and read.op != "output":  # that is read last anyhow
                        self.in_turn.setdefault(place, []).append(read)

    def _check_read(self, node: fx.Node, name: str, read: fx.Node, places: set[int], *, is_before: bool) -> None:
        """What is read of a tensor is needed by no partition that runs on the other side of the call that changes it.

        Nor by any other one, which keeps the tensor in whose place the module puts a new one.
        """
        call, place = call_of(node), self._owner[node]
        is_replaced, is_alone = name in call.effects.replaced, len(self._of.same_tensor.get(name, (name,))) == 1
        if is_replaced:
            strange = places - {place} if is_alone else places  # by which name, no graph says
        else:
            strange = {each for each in places if (each > place if is_before else each < place)}
        if strange:
            does = "puts another tensor in its place" if is_replaced else "changes it"
            other, runs = self._order[min(strange)], "behind" if is_before else "in front of"
            runner = f"{self._order[place]!r}{', which runs it' * (call.module != self._order[place])}"
            why = "keeps the first one" if is_replaced else f"runs {runs} {runner}"
            in_place = f"change it in place ({name.rpartition('.')[2]}.copy_(...)) or " * is_replaced
            raise MarkingError(
                f"the forward reads {name!r} ({line_of(read)}) {'before' if is_before else 'after'} {call.label}"
                f" {does}, and {other!r}, which needs that, {why}",
                hint=f"have the module that changes it {in_place}return the value, too; or mark one larger module that"
                " contains both",
            )

    def _check_changes(self, node: fx.Node, name: str, held: Sequence[fx.Node], turn: Mapping[fx.Node, int]) -> None:
        """What the glue makes of a tensor is a value of the graph, which a change by a module does not reach.

        So no value is read past a call whose module changes that tensor, too, or stored once a step.
        """
        call = call_of(node)
        users = [user for each in held for user in each.users]
        stores = [user for user in users if user.target in STORES]
        values = [*stores, *(user for user in users if user.target is snapshot)]
        past = [
            read for each in values if turn[each] < turn[node] for read in self._readers_of([each])
            if turn[read] > turn[node]
        ]  # fmt: skip
        is_once = any(each.target in ONCE for each in stores)  # and the module's change comes with each micro-batch
        if stores and (past or is_once or name in call.effects.replaced):
            raise MarkingError(
                f"the forward changes {name!r} ({line_of(stores[-1])}), and so does {call.label} itself: where a model"
                " is cut, one of these changes would be lost",
                hint=f"change it in the forward of {call.label} alone, or mark one larger module that contains both",
            )

    def _readers_of(self, values: Sequence[fx.Node], *, views: bool = True) -> list[fx.Node]:
        """The nodes that read values, themselves or through views; without `views` a view is a reader, too."""
        waiting, found = list(values), list[fx.Node]()
        while waiting:
            node = waiting.pop()
            for user in node.users:
                is_own = isinstance(user.target, torch._ops.OpOverload) and not is_call(user)  # no write, no store
                is_view = (is_own or is_item(user)) and not set(storages(node)).isdisjoint(storages(user))
                (waiting if is_view and views else found).append(user)
        return [node for node in dict.fromkeys(found) if not is_size(node)]
