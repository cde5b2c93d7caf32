"""A captured graph without writes: every value is made once, so that it can be cut anywhere.

    y = zeros_like(x)                 y0 = zeros_like(x)
    y[:, 1:] = x[:, :-1]              y1 = written(y0, x[:, :-1])     a copy of y0 with the slice written
    z = y * 2                         z  = y1 * 2

Tensors that share memory (a storage of the fake tensors) are a family. A write makes a new version of the family's
base; whoever reads a member afterwards reads the same view of the new version. So functionalisation does in torch,
here with the operations as autograd sees them: a slice that was written has the gradient of the write. Writes under
no_grad and to detached views change the value and leave its gradient alone.

A write to a parameter or buffer is also stored there. What depends on parameters and buffers alone (a momentum
encoder, a clamped scale) is stored once a step, as the whole batch would; the rest (running averages) at every
micro-batch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from assigner.errors import MarkingError
from assigner.model.deferred.mutation import fresh_values, gives_back, is_random, named_arguments, returned_arguments
from assigner.model.marking.interception import is_hook
from assigner.model.marking.nodes import (
    STATE,
    call_of,
    given_to,
    is_item,
    is_result,
    line_of,
    made_of,
    storages,
    written_by,
)
from assigner.model.marking.opaque import is_call
from assigner.model.marking.unseen import check_unseen_writes
from assigner.model.marking.writing import ONCE, STORES, ViewStep, after, snapshot, stored, wanted, write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNSUPPORTED = ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::swap_", "aten::requires_grad_")


@dataclass(eq=False)
class StorageFamily:
    """Tensors in one memory."""

    current: fx.Node  # the base's newest version in the new graph
    state: fx.Node | None = None  # the placeholder, in the new graph, of the parameter or buffer that it is
    is_constant: bool = False  # it is a tensor of the model that is neither
    version: int = 0
    linked: list[StorageFamily] = field(default_factory=list)  # one list for all of which one is some view of another
    lost: fx.Node | None = None  # what wrote to a linked family, after which nobody knows what is here

    def __post_init__(self) -> None:
        self.linked.append(self)


@dataclass(eq=False)
class Member:
    """A value of the old graph that lies in a family's memory."""

    family: StorageFamily
    made: fx.Node  # in the new graph
    version: int  # of the family, that `made` shows
    parent: fx.Node | None = None  # the old node that it is a view of; None: it is the base
    view: ViewStep | None = None  # makes it from the parent's node; None: it is the parent itself


class Functional:
    """Rewrites one graph.

    Args:
        graph: As exported, without regions; nodes under no_grad have `without_gradient` in their meta, and calls and
            hooks what they call.
        kinds: What each placeholder stands for, by its name.

    Attributes:
        graph: The new graph.
        together: Groups of its nodes that one partition must run.
        state: The placeholders of parameters and buffers in the old graph, with their names.
    """

    def __init__(self, graph: fx.Graph, kinds: Mapping[str, tuple[InputKind, str]]) -> None:
        self.old, self.kinds = graph, kinds
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.state = {node: name for node in inputs for kind, name in [kinds[node.name]] if kind in STATE}
        self.graph = fx.Graph()
        self.together: list[list[fx.Node]] = []
        self._values: dict[fx.Node, Any] = {}
        self._members: dict[fx.Node, Member] = {}
        self._families: dict[int, StorageFamily] = {}
        self._owned: dict[str, StorageFamily] = {}
        self._groups: dict[fx.Node, list[fx.Node]] = {}
        self._items: dict[fx.Node, Any] = {}
        self._kept: dict[fx.Node, list[fx.Node]] = {}
        self._written_state = _written_state(self)
        check_unseen_writes(self)
        for node in graph.nodes:
            self._add(node)
        self._store_last_alone()
        self.graph.lint()

    # -- reading

    @property
    def written_inputs(self) -> frozenset[int]:
        """Which of the model's flattened inputs the forward writes to."""
        families = {node.name: each.family for node, each in self._members.items() if node.op == "placeholder"}
        given = [families.get(name) for name, (kind, _) in self.kinds.items() if kind is InputKind.USER_INPUT]
        return frozenset(n for n, each in enumerate(given) if each and (each.version or each.lost is not None))

    def _read(self, node: fx.Node) -> Any:
        """The new node that shows an old one's value as it is now."""
        member = self._members.get(node)
        if member is None:
            return self._values[node]
        if member.family.lost is not None:
            raise MarkingError(
                f"{node.name} ({line_of(node)}) shares memory with a value that is changed in place"
                f" ({line_of(member.family.lost)}), in a way that a captured graph does not show",
                hint="make the operation out of place (inplace=False), or mark a larger module with both lines",
            )
        if member.version != member.family.version:
            if member.parent is None:
                member.made = member.family.current
            else:
                parent = self._read(member.parent)
                member.made = parent if member.view is None else self._emit_view(member.view, parent, node)
            member.version = member.family.version
        return member.made

    def _emit_view(self, view: ViewStep, parent: fx.Node, like: fx.Node) -> fx.Node:
        made = self.graph.call_function(view.target, *view.filled(parent))
        made.meta.update(like.meta)
        return self._detached(made) if view.detached else made

    def _detached(self, made: fx.Node) -> fx.Node:
        value = made.meta.get("val")
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return made
        return self._new(torch.ops.aten.detach.default, (made,), like=made)

    def _new(self, target: Any, args: Any, *, like: fx.Node | None) -> fx.Node:
        made = self.graph.call_function(target, args)
        if like is not None:
            made.meta.update({key: each for key, each in like.meta.items() if key in ("val", "stack_trace")})
        return made

    # -- one node after the other

    def _add(self, node: fx.Node) -> None:
        if is_hook(node):
            self._add_hook(node)
            return
        if is_call(node):
            self._add_call(node)
            return
        if is_result(node):
            self._item_of_call(node)
            return
        if node in self._items:
            self._take_result(node, self._items[node])
            return
        written = written_by(node)
        if written:
            self._add_write(node, written)
            return
        made = self.graph.node_copy(node, self._read)
        if node.op == "placeholder":
            made.name = node.name  # the export's signature knows it by this one
        plain, detached = made, bool(node.meta.get("without_gradient"))
        if node.op == "placeholder" and self._written_state.get(node):
            made = self._new(snapshot, (made,), like=made)  # what is read stays as it was before the change
            self._join(plain, made)
        if detached:
            made = self._detached(made)
        self._values[node] = made
        self._place(node, made, plain, detached=detached)
        if node in self.state:
            self._owned[self.state[node]] = self._members[node].family

    def _place(self, node: fx.Node, made: fx.Node, plain: fx.Node, *, detached: bool) -> None:
        """Note in whose memory a value lies."""
        memories = storages(node)
        if gives_back(node.target, node.args, node.kwargs) and isinstance(parent := node.args[0], fx.Node):
            if (known := self._members.get(parent)) is not None:
                self._members[node] = Member(known.family, made, known.family.version, parent)
            return
        if len(memories) != 1:  # a list of tensors in several memories: its items are members, once they are taken
            return
        (storage,) = memories
        family = self._families.get(storage)
        if family is None or node.target is torch.ops.aten.lift_fresh_copy.default:
            state = plain if node in self.state else None
            constant = node.op == "placeholder" and self.kinds[node.name][0] is InputKind.CONSTANT_TENSOR
            self._begin(storage, node, StorageFamily(made, state, is_constant=constant))
            return
        source = next((each for each in node.all_input_nodes if each in self._members
                       and self._members[each].family is family), None)  # fmt: skip
        if source is None:
            self._begin(storage, node, StorageFamily(made, linked=family.linked))
            return
        view = ViewStep.of(node, source, self._read, detached=detached)
        self._members[node] = Member(family, made, family.version, source, view)

    def _begin(self, storage: int, node: fx.Node, family: StorageFamily) -> None:
        """A value is the base of a family."""
        self._families[storage] = family
        self._members[node] = Member(family, family.current, 0)

    def _add_hook(self, node: fx.Node) -> None:
        hook, tensor = node.meta["hook"], node.args[1]
        assert isinstance(tensor, fx.Node)
        if hook is None:
            return
        read = self._read(tensor)
        made = self._new(hook, (read,), like=read)
        if hook is not wanted:  # which a reader may do as well
            self._join(read, made)
        if tensor in self._members:
            self._members[tensor].made = made
            if hook is wanted and self._members[tensor].family.current is read:
                self._members[tensor].family.current = made
        else:
            self._values[tensor] = made

    def _add_write(self, node: fx.Node, written: Sequence[fx.Node]) -> None:
        schema = node.target._schema  # type: ignore[union-attr]
        root = self._root(node.args[0]) if schema.name == "aten::copy_" else None
        if root is not None and root is self._root(node.args[1]):  # `buffer += 1` ends in such a copy
            self._take_result(node, node.args[0])
            return
        if schema.name in _UNSUPPORTED:
            raise MarkingError(
                f"the glue between partitions calls {schema.name} ({line_of(node)})",
                hint="write it out of place, or mark a larger module that contains the line",
            )
        of_each = [self._member(each, node).family for each in written]
        families = [*dict.fromkeys(of_each)]
        views = [(families.index(family), self._chain(each)) for family, each in zip(of_each, written, strict=True)]
        bases = [family.current for family in families]
        detached = bool(node.meta.get("without_gradient"))
        target, operands = write(node, written, views, self._read, count=len(families), without_gradient=detached)
        whole = self._new(target, (*bases, *operands), like=None)
        whole.meta["stack_trace"] = node.stack_trace
        whole.meta["val"] = [
            *(base.meta["val"] for base in bases),
            *fresh_values(returned_arguments(node.target), node.meta.get("val")),
        ]
        for n, family in enumerate(families):
            made = self._new(operator.getitem, (whole, n), like=bases[n])
            made.meta["stack_trace"] = node.stack_trace
            self._advance(family, made, node)
        self._take_results(node, whole, len(families))

    def _root(self, node: Any) -> fx.Node | None:
        """The base that a node stands for; None: it is a view, or in no family."""
        member = self._members.get(node)
        while member is not None and member.parent is not None and member.view is None:
            node = member.parent
            member = self._members.get(node)
        return node if member is not None and member.parent is None else None

    def _member(self, node: fx.Node, writer: fx.Node) -> Member:
        self._read(node)
        if node not in self._members:
            raise MarkingError(
                f"{writer.name} ({line_of(writer)}) changes a value in place that is one of several in one list",
                hint="write it out of place, or mark a larger module that contains the line",
            )
        return self._members[node]

    def _chain(self, node: fx.Node) -> list[ViewStep]:
        """The views that lead from a family's base to one of its members."""
        steps: list[ViewStep] = []
        member = self._members[node]
        while member.parent is not None:
            if member.view is not None:
                steps.insert(0, member.view)
            member = self._members[member.parent]
        return steps

    def _advance(self, family: StorageFamily, made: fx.Node, writer: fx.Node) -> None:
        """The family has a new version; what shares its memory in an unknown way is lost."""
        if family.is_constant:
            raise MarkingError(
                f"the forward changes a tensor of the model that is no buffer ({line_of(writer)})",
                hint="register it with register_buffer, and change it in the forward of the module that holds it",
            )
        others = [each for each in family.linked if each is not family]
        if family.state is not None:
            made = self._store(family.state, made, writer)
        elif any(each.state is not None or each.is_constant for each in others):
            raise MarkingError(
                f"a value is changed in place ({line_of(writer)}) that lies in the memory of a parameter or buffer: a"
                " module has returned it, or it has another name, too, and who holds that would not see the change",
                hint="write to a copy, as x = x.clone(), or have the module that holds it change it in its own forward;"
                " or mark a larger module that contains the line and what it changes",
            )
        family.current, family.version = made, family.version + 1
        for other in others:
            other.lost = writer

    def _store(self, state: fx.Node, made: fx.Node, writer: fx.Node) -> fx.Node:
        """Write a new version of a parameter or buffer back."""
        placeholder = next(node for node in self._written_state if node.name == state.name)
        if self._written_state[placeholder]:
            kept = self._new(stored, (state, made), like=made)
            self._join(state, kept)
        else:
            kept = self._new(ONCE[self._is_used_before(placeholder, writer)], (state, made), like=made)
            self._kept.setdefault(state, []).append(kept)
        return kept

    def _store_last_alone(self) -> None:
        """Of several stores in one parameter or buffer once a step only the last one is made.

        Nobody may read what is stored in between, which later micro-batches could not.
        """
        ends = [node for node in self.graph.nodes if node.op == "output" or is_call(node) or node.target in STORES]
        live = made_of(ends)
        for state, stores in self._kept.items():
            needed = made_of(stores[-1:])
            for each in stores[:-1]:
                readers = [user for user in each.users if user in live and user not in needed]
                if each.target is not stores[-1].target or readers:
                    raise MarkingError(
                        f"{self.kinds[state.name][1]!r} is changed several times in one forward, and read in between",
                        hint="change it once, or mark a larger module that contains all of it",
                    )
                each.replace_all_uses_with(each.args[1])  # type: ignore[arg-type]
                self.graph.erase_node(each)

    def _is_used_before(self, state: fx.Node, writer: fx.Node) -> bool:
        """True if the forward uses a parameter or buffer before this write, otherwise than for the write itself."""
        name = self.state[state]
        order = {node: n for n, node in enumerate(self.old.nodes)}
        users = [
            node for node in self.old.nodes
            if is_call(node) and name.startswith(f"{call_of(node).module}.")
        ]  # fmt: skip
        needed = made_of([writer])
        readers = [user for user in state.users if user not in needed]
        before = [each for each in (*users, *readers) if order[each] < order[writer]]
        after_it = [each for each in users if order[each] > order[writer]]
        if any(each in users for each in before) and after_it:
            raise MarkingError(
                f"{name!r} is changed ({line_of(writer)}) between two calls of modules that use it",
                hint="change it before or after all that use it, or mark a larger module that contains all of it",
            )
        return bool(before)

    def _take_results(self, node: fx.Node, whole: fx.Node, count: int) -> None:
        """What a writing operation returns: the tensors that it wrote to, or new ones."""
        returned = returned_arguments(node.target)
        named = named_arguments(node.target, node.args, node.kwargs)
        fresh = iter(range(count, count + len(returned)))
        results: list[Any] = []
        for n, name in enumerate(returned):
            if name is not None:
                results.append(named[name])
            else:
                values = node.meta["val"] if len(returned) > 1 else [node.meta["val"]]
                made = self._new(operator.getitem, (whole, next(fresh)), like=None)
                made.meta["val"] = values[n]
                results.append(self._detached(made) if node.meta.get("without_gradient") else made)
        if len(returned) == 1:
            self._take_result(node, results[0])
        else:
            for user in node.users:
                self._items[user] = results[int(user.args[1])]  # type: ignore[arg-type]

    def _take_result(self, node: fx.Node, result: Any) -> None:
        """An old node stands for an old node that it is, or for a new one."""
        if isinstance(result, fx.Node) and result.graph is self.old:
            member = self._members[result]
            self._members[node] = Member(member.family, self._read(result), member.family.version, result)
            self._values[node] = self._members[node].made
            return
        self._values[node] = result
        for storage in storages(node):
            self._begin(storage, node, StorageFamily(result))

    def _join(self, *nodes: fx.Node) -> None:
        """These nodes run in one partition."""
        groups = [self._groups[node] for node in nodes if node in self._groups]
        joined = list(dict.fromkeys([*(each for group in groups for each in group), *nodes]))
        self.together = [group for group in self.together if not any(group is each for each in groups)]
        self.together.append(joined)
        for node in joined:
            self._groups[node] = joined

    def _add_call(self, node: fx.Node) -> None:
        given = given_to(node)
        tensors = [self._read(each) for each in given]
        copies: dict[StorageFamily, fx.Node] = {}
        made_here: list[fx.Node] = []
        for each in written_by(node):
            family = self._member(each, node).family
            if family not in copies:
                copies[family] = self._new(torch.ops.aten.clone.default, (family.current,), like=family.current)
                made_here.append(copies[family])
        for n, each in enumerate(given):
            member = self._members.get(each)
            if member is not None and member.family in copies:
                made = copies[member.family]
                for step in self._chain(each):
                    made = self._emit_view(step, made, each)
                    made_here.append(made)
                tensors[n] = made
        numbers = fx.map_arg(node.args[2], self._read)
        made = self.graph.call_function(cast("Any", node.target), (node.args[0], tensors, numbers))
        made.meta.update(node.meta)
        self._values[node] = made
        if made_here:
            self._join(made, *made_here)
        for family, copy in copies.items():
            later = self._new(after, (copy, made), like=copy)
            self._join(made, later)
            self._advance(family, later, node)

    def _item_of_call(self, node: fx.Node) -> None:
        """An item of an opaque call's result: its own memory, or that of something else."""
        call_node, index = cast("tuple[fx.Node, int]", node.args)
        made = self.graph.node_copy(node, self._read)
        made = self._detached(made) if call_node.meta.get("without_gradient") else made
        self._values[node] = made
        (storage,) = storages(node) or (0,)
        alias = call_of(call_node).effects.aliases.get(index)
        linked: list[StorageFamily] = []
        owned = self._owned.get(str(alias.index)) if alias is not None and alias.kind == "own" else None
        if owned is not None:
            linked = owned.linked
        elif alias is not None:
            items = {user.args[1]: user for user in call_node.users if is_item(user)}
            given: Any = given_to(call_node)
            other = given[alias.index] if alias.kind == "given" else items.get(alias.index)
            if other is not None and other in self._members:
                family = self._members[other].family
                if alias.exact:
                    self._members[node] = Member(family, made, family.version, other)
                    return
                linked = family.linked
        is_constant = alias is not None and alias.kind == "own" and owned is None
        self._begin(storage, node, StorageFamily(made, is_constant=is_constant, linked=linked))


def _written_state(model: Functional) -> dict[fx.Node, bool]:
    """The placeholders of parameters and buffers that are written to, and whether that depends on the batch."""
    bases: dict[int, fx.Node] = {}
    depends: dict[fx.Node, bool] = {}
    tainted: set[int] = set()
    found: dict[fx.Node, bool] = {}
    for node in model.old.nodes:
        for storage in storages(node):
            if node in model.state:
                bases.setdefault(storage, node)
        is_input = node.op == "placeholder" and model.kinds[node.name][0] is InputKind.USER_INPUT
        brings = is_input or is_call(node) or is_random(node.target)
        depends[node] = brings or any(
            depends[each] or bool(tainted & set(storages(each))) for each in node.all_input_nodes
        )
        for argument in written_by(node):
            for storage in storages(argument):
                if depends[node]:
                    tainted.add(storage)
                if storage in bases:
                    found[bases[storage]] = found.get(bases[storage], False) or depends[node]
    return found
