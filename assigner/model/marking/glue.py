"""Who runs the glue: the nodes between marked modules, each given to one partition.

    free     depends on shapes, constants and the batch alone (masks, position ids): run again wherever it is read;
             also what is stored once a step in a parameter or buffer, by whoever holds that
    counted  a number that depends on values (how many are not zero): worked out again wherever it is read
    owned    everything else: runs in one partition
    lent     a parameter or buffer that an earlier partition holds as another capture has it: sent like a value; where a
             module there changes it, as it is behind that call

Partitions are numbered in the order of their first call, or in a plan's. Along every edge of the graph the owner's
number never falls, so the partitions keep an order without cycles. An owned node first goes to the partition that makes
its last input (to its first reader, where nothing comes from a partition). Then, to send fewer bytes,

    from the last node to the first:  to the first reader, where no more bytes cross there
    from the first node to the last:  back to the input, where no more bytes cross there
    from the last node to the first:  to the first reader, where fewer bytes cross there

so that a chain that widens (`x.repeat(1, 5) * 2`) moves as a whole, and what gains nothing stays with its input.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from assigner.errors import FormatError, MarkingError
from assigner.formats.graph import topological_order
from assigner.model.deferred.mutation import is_random
from assigner.model.marking.checks import is_check
from assigner.model.marking.isolation import CrossingError
from assigner.model.marking.nodes import call_of, given_to, is_item, made_of, reached
from assigner.model.marking.opaque import is_call
from assigner.model.marking.writing import ONCE, STORES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from assigner.model.marking.capture import Capture


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Ownership:
    """Which partition runs each node of a capture.

    Args:
        capture: The captured forward.
        marked: Names of the partitions' modules, in the model's order.
        size_of: Bytes of a value for one typical micro-batch.
        homes: The partition that runs an unmarked module or holds a tensor of the glue, by its name, where another
            capture of the model has decided that: marked modules that are not called are left out then. None: there is
            no other one.
        same_tensor: For each tensor that has several names in the model all of them.
        lends: What reads a tensor that another capture has an earlier partition hold may be sent it.
        wished: The marked names in the order of a plan; empty: that of their first calls counts.

    Attributes:
        order: The marked names in the wished order, or where values go against that in the order of their first call.
        owner: node -> position in `order`, for owned nodes.

    Raises:
        MarkingError: a marked module is never called, or the glue would make a cycle.
        CrossingError: likewise, on account of an unmarked module that is one call.
    """

    def __init__(
        self,
        capture: Capture,
        marked: Sequence[str],
        size_of: Callable[[fx.Node], int],
        *,
        homes: Mapping[str, str] | None,
        same_tensor: Mapping[str, tuple[str, ...]],
        lends: bool,
        wished: Sequence[str],
    ) -> None:
        self.capture, self.homes, self.same_tensor = capture, homes or {}, same_tensor
        self.size_of = size_of
        self.nodes = list(capture.graph.nodes)
        self._grouped = {node for group in capture.together for node in group}
        self.placeholders = {node: capture.kinds[node.name] for node in self.nodes if node.op == "placeholder"}
        self.owner: dict[fx.Node, int] = {}
        called = [call_of(node).module for node in self.nodes if is_call(node)]
        self.order = self._ordered(list(dict.fromkeys(name for name in called if name in marked)), wished)
        missing = [name for name in marked if name not in self.order]
        if missing and (homes is None or not self.order):
            others = ", ".join(list(dict.fromkeys(name for name in called if name not in marked))[:3])
            raise MarkingError(
                f"{missing[0]!r} is marked, and the model's forward never calls it",
                hint=f"mark a module that is called{f', as {others}' if others else ''} (a ModuleList is not: mark"
                f" '{missing[0]}.*'); where the batch decides, mark one module that holds them all and picks in its"
                " forward",
            )
        self.counted = {node for node in self.nodes if _is_counted(node)}
        self.free = self._find_free()
        self._late = set[fx.Node]()
        if lends:
            self._find_late()
        self._assign()
        if lends:
            self._lend()
        self._check_gradients()

    def held(self, node: fx.Node) -> str:
        """The parameter, buffer or constant that a node stands for; empty: none."""
        return self.placeholders[node][1] if node.op == "placeholder" else ""

    def holding(self, name: str) -> list[fx.Node]:
        """What has a parameter or buffer, by any of its names: placeholders, and calls of the modules that hold it."""
        names = self.same_tensor.get(name, (name,))
        calls = filter(is_call, self.nodes)
        return [
            *(node for node, (_, target) in self.placeholders.items() if target and target in names),
            *(node for node in calls if any(each.startswith(f"{call_of(node).module}.") for each in names)),
        ]

    def places(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The partitions that run these nodes: their owners, or those of what reads a node that has none."""
        met = reached(nodes, lambda each: () if each in self.owner else each.users)
        return {self.owner.get(each, len(self.order) - 1) for each in met if each in self.owner or each.op == "output"}

    def _ordered(self, called: list[str], wished: Sequence[str]) -> list[str]:
        """Partitions in a wished order, as far as each runs behind all whose values it reads."""
        names = sorted(called, key=wished.index) if wished else called
        if names == called:
            return called
        behind: dict[fx.Node, frozenset[str]] = {}
        edges = set[tuple[str, str]]()
        for node in self.nodes:
            behind[node] = frozenset[str]().union(*(behind[each] for each in node.all_input_nodes))
            if is_call(node) and (name := call_of(node).module) in names:
                edges |= {(each, name) for each in behind[node] if each != name}
                behind[node] |= {name}
        try:
            return list(topological_order(names, edges))
        except FormatError:  # one is called again with what another one has made: the order of the calls tells that
            return called

    def _find_free(self) -> set[fx.Node]:
        free = made_of(node for node in self.nodes if node.target in ONCE) - self._grouped
        for node in self.nodes:
            if node in self._grouped:
                continue
            if node.op == "placeholder":
                if self.placeholders[node][0] is not InputKind.PARAMETER:
                    free.add(node)
            elif is_size(node) or (
                node.op == "call_function"
                and not is_call(node)
                and not is_check(node)
                and not is_random(node.target)
                and node not in self.counted
                and all(argument in free for argument in node.all_input_nodes)
            ):
                free.add(node)
        return free

    def _find_late(self) -> None:
        """The glue that reads a tensor of one partition together with what a later one makes, or for an earlier one."""
        place, end = {name: n for n, name in enumerate(self.order)}, len(self.order)
        least, first = dict[fx.Node, int](), dict[fx.Node, int]()
        for node in self.nodes:
            made = max((least[each] for each in node.all_input_nodes), default=-1)
            if not is_call(node) and made > place.get(self._home(node), -1) >= 0:
                self._late.add(node)  # of which `_home` says nothing
            least[node] = made if node.op == "placeholder" else max(made, place.get(self._home(node), -1))
        for node in reversed(self.nodes):
            needed, own = min((first[each] for each in node.users), default=end), place.get(self._home(node), end)
            if not is_call(node) and needed < own < end:
                self._late.add(node)
            first[node] = min(needed, own)

    def _home(self, node: fx.Node) -> str:
        """The partition that must run a node: of a marked module, or as another capture has it."""
        if is_call(node):
            name = call_of(node).module
            return name if name in self.order else self.homes.get(name, "")
        held = () if node in self._late else map(self.held, node.all_input_nodes)
        return next((self.homes[name] for name in held if name in self.homes), "")

    def _assign(self) -> None:
        position = {name: n for n, name in enumerate(self.order)}
        skipped = self.free | self.counted
        owned = [node for node in self.nodes if node not in skipped and node.op == "call_function"]
        homes = {node: position.get(self._home(node), -1) for node in owned}
        self._fixed = {node: home for node, home in homes.items() if home >= 0}
        groups = [[node for node in group if node in homes] for group in self.capture.together]
        self._place(owned)
        while sum(map(self._gathered, groups)):  # all of them, each time
            self._place(owned)
        for group in groups:
            readers = [self._first_reader(node) for node in group]
            if group and self.owner[group[0]] < 0:
                self._fixed.update(dict.fromkeys(group, min((each for each in readers if each >= 0), default=0)))
                self._place(owned)
        self._settle(owned)

    def _place(self, owned: list[fx.Node]) -> None:
        """Give each node to the partition that makes its last input, or to the one that must run it."""
        for node in owned:
            inputs = [self.owner[each] for each in self._sources(node)]
            if node in self._fixed:
                if inputs and max(inputs) > self._fixed[node]:
                    raise self._called_again(node, max(inputs))
                self.owner[node] = self._fixed[node]
            else:
                self.owner[node] = max(inputs, default=-1)  # -1: before every partition, until a reader is known

    def _called_again(self, node: fx.Node, later: int) -> MarkingError:
        """Of a node that must run in one partition, with what a later one makes."""
        before, place, last = made_of([node]), self.order[self._fixed[node]], self.order[later]
        first = next(each for each in self.nodes if each in before and self.owner.get(each) == later)
        brought, is_run = self._brought(node), is_call(node)
        if brought:
            text = f"{brought}, which {place!r} has, is {'called' if is_run else 'read'} again with what {last!r} made"
        elif first in self._fixed and (other := self._brought(first)):
            text = f"{place!r} needs what {other} is used for, and {last!r} has that, which comes later"
        else:
            text = f"{place!r} is called again with what {last!r} made"
        module = call_of(node).module if brought and is_run else ""
        return CrossingError(text, hint="mark one larger module that contains both", module=module)

    def _brought(self, node: fx.Node) -> str:
        """What has a node run where another capture has it, by name; empty: a mark does."""
        if is_call(node):
            return "" if call_of(node).module in self.order else repr(call_of(node).module)
        return next((repr(name) for each in node.all_input_nodes if (name := self.held(each)) in self.homes), "")

    def _gathered(self, group: list[fx.Node]) -> bool:
        """Have one partition run all of a group: the last one that any of them needs. True: something has moved."""
        place = max((self.owner[node] for node in group), default=-1)
        late = [node for node in group if place >= 0 and self._fixed.get(node) != place]
        for node in late:
            if self._fixed.get(node, place) < place and is_call(node):
                raise MarkingError(
                    f"{self.order[self._fixed[node]]!r} changes or reads what {self.order[place]!r} changes in place",
                    hint="mark one larger module that contains both",
                )
            self._fixed[node] = place
        return bool(late)

    def _settle(self, owned: list[fx.Node]) -> None:
        """Move nodes to where fewer bytes cross; an item of a tuple goes where its tuple goes."""
        movable = [node for node in owned if node not in self._fixed and not is_item(node) and self.owner[node] >= 0]
        for node in reversed(movable):
            self._move_if_cheap(node, self._first_reader(node), or_equal=True)
        for node in movable:
            self._move_if_cheap(node, max(self.owner[each] for each in self._sources(node)), or_equal=True)
        for node in reversed(movable):
            self._move_if_cheap(node, self._first_reader(node), or_equal=False)
        for node in reversed(owned):
            if self.owner[node] < 0:
                self._move(node, max(0, self._first_reader(node)))

    def _first_reader(self, node: fx.Node) -> int:
        return min((self.owner[each] for each in self._readers(node)), default=self.owner[node])

    def _move_if_cheap(self, node: fx.Node, place: int, *, or_equal: bool) -> None:
        here, there = self._bytes(node, self.owner[node]), self._bytes(node, place)
        if there < here or (or_equal and there == here):
            self._move(node, place)

    def _move(self, node: fx.Node, place: int) -> None:
        self.owner[node] = place
        for user in node.users:
            if is_item(user):
                self._move(user, place)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """The owned nodes whose values a node reads."""
        found: list[fx.Node] = []
        for each in node.all_input_nodes:
            found += self._sources(each) if each in self.counted else [each]
        return [each for each in found if each in self.owner]

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """The owned nodes that read a node's value, also through the items of its tuple."""
        found: list[fx.Node] = []
        for user in node.users:
            found += self._readers(user) if is_item(user) or user in self.counted else [user]
        return [each for each in found if each in self.owner]

    def _bytes(self, node: fx.Node, place: int) -> int:
        """Bytes that cross between partitions on account of this node, were it run at `place`."""
        brought = sum(self.size_of(each) for each in self._sources(node) if not self._is_at(each, place, node))
        away = {self.owner[each] for each in self._readers(node)} - {place}
        taken = self.size_of(node) * len(away)
        return brought + taken

    def _is_at(self, source: fx.Node, place: int, reader: fx.Node) -> bool:
        """True if a value is made at `place`, may be made anywhere, or goes there for another reader."""
        if self.owner[source] in (place, -1):
            return True
        return any(self.owner[each] == place for each in self._readers(source) if each is not reader)

    def _lend(self) -> None:
        """Send a tensor from the partition that holds it to later ones that read it.

        One that a module of that partition changes is sent as it is behind that call; the glue changes none. Where an
        earlier partition reads it too, that lacks it, which is told of the pieces.
        """
        stored_names = {self.held(node.args[0]) for node in self.nodes if node.target in STORES}
        turn, calls = {node: n for n, node in enumerate(self.nodes)}, defaultdict[str, list[fx.Node]](list)
        for call in filter(is_call, self.owner):
            for name in call_of(call).effects.changed:
                calls[name].append(call)
        for node, (_, name) in self.placeholders.items():
            home, names = self.homes.get(name), self.same_tensor.get(name, (name,))
            if home not in self.order or node in self._grouped or not stored_names.isdisjoint(names):
                continue
            place, changing = self.order.index(home), [*dict.fromkeys(call for each in names for call in calls[each])]
            if changing[1:] or any(self.owner[each] != place for each in changing):
                continue
            late = [
                user
                for user in node.users
                if (places := self.places([user])) and min(places) >= place and max(places) > place
                and all(turn[user] > turn[each] for each in changing)
            ]  # fmt: skip
            if late:
                keeping = torch.ops.aten.clone.default if changing else torch.ops.aten.alias.default
                with self.capture.graph.inserting_after(changing[0] if changing else node):
                    sent = self.capture.graph.call_function(keeping, (node,))
                sent.meta["val"] = node.meta["val"]
                self.owner[sent] = place
                for user in late:
                    user.replace_input_with(node, sent)
        self.nodes = list(self.capture.graph.nodes)

    def _check_gradients(self) -> None:
        """A forward that takes a gradient sees what it has computed itself, and not what others have."""
        for node in filter(is_call, self.nodes):
            call, given = call_of(node), given_to(node)
            for n, m in sorted(call.effects.differentiated):
                if n == m:
                    if self.owner.get(given[n], self.owner.get(node)) != self.owner.get(node):
                        raise MarkingError(
                            f"the forward of {call.label} looks at the gradient (.grad) of a value that it is given:"
                            " what backwards of other partitions leave there is not in it",
                            hint="take it with torch.autograd.grad; or mark a larger module that makes the value, too",
                        )
                elif given[n] in made_of(given[m].all_input_nodes):
                    raise MarkingError(
                        f"the forward of {call.label} takes a gradient with respect to one of the values that it is"
                        f" given, of what it makes of another one, which was made of the first outside of {call.label}:"
                        " on another worker that part of the gradient is missing",
                        hint="mark one larger module that makes the second value of the first, too",
                    )


def is_size(node: fx.Node) -> bool:
    """True if a node's value is a number worked out from the inputs' shapes."""
    return isinstance(node.meta.get("val"), _NUMBERS) and not free_unbacked_symbols(node.meta["val"])


def _is_counted(node: fx.Node) -> bool:
    """True if a node's value is a number that depends on values."""
    return isinstance(node.meta.get("val"), _NUMBERS) and bool(free_unbacked_symbols(node.meta["val"]))
