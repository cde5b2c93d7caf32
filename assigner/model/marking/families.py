"""Which values of a captured graph lie in one memory, and which parameters and buffers are written to there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from torch import fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from assigner.model.deferred.mutation import named_arguments, written_names
from assigner.model.marking.interception import is_hook
from assigner.model.marking.nodes import brings_data, storages
from assigner.model.marking.opaque import is_call
from assigner.model.marking.writing import ViewStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from assigner.model.marking.opaque import OpaqueCall

    CallArguments = tuple[int, list[fx.Node], list[Any]]

STATE = (InputKind.PARAMETER, InputKind.BUFFER)


@dataclass(eq=False)
class StorageFamily:
    """Tensors in one memory.

    Args:
        current: The base's newest version in the new graph.
        state: The placeholder, in the new graph, of the parameter or buffer that it is.
        is_constant: It is a tensor of the model that is neither.
        linked: One list for all families of which one is some view of another: they, with this one.
        lost: What wrote to a linked family, after which nobody knows what is here.
    """

    current: fx.Node
    state: fx.Node | None = None
    is_constant: bool = False
    version: int = 0
    linked: list[StorageFamily] = field(default_factory=list)
    lost: fx.Node | None = None

    def __post_init__(self) -> None:
        self.linked.append(self)


@dataclass(eq=False)
class Member:
    """A value of the old graph that lies in a family's memory.

    Args:
        made: Its node in the new graph.
        version: Of the family, that `made` shows.
        parent: The old node that it is a view of; None: it is the base.
        view: Makes it from the parent's node; None: it is the parent itself.
    """

    family: StorageFamily
    made: fx.Node
    version: int
    parent: fx.Node | None = None
    view: ViewStep | None = None


def opaque_arguments(node: fx.Node) -> CallArguments:
    """An opaque call's number, its tensors and its sizes."""
    return cast("CallArguments", node.args)


def written_by(node: fx.Node, calls: Sequence[OpaqueCall]) -> list[fx.Node]:
    """The nodes whose memory a node writes to."""
    if node.op != "call_function":
        return []
    if is_call(node):
        number, given, _ = opaque_arguments(node)
        return [given[n] for n in sorted(calls[number].effects.written)]
    if is_hook(node):
        return []
    names = written_names(node.target, node.args, node.kwargs)
    if not names:
        return []
    named = named_arguments(node.target, node.args, node.kwargs)
    return [leaf for name in names for leaf in pytree.tree_leaves(named[name]) if isinstance(leaf, fx.Node)]


def written_state(
    graph: fx.Graph, kinds: Mapping[str, tuple[InputKind, str]], calls: Sequence[OpaqueCall]
) -> dict[fx.Node, bool]:
    """The placeholders of parameters and buffers that are written to, and whether that depends on the batch.

    Args:
        graph: As exported.
        kinds: What each placeholder stands for, by its name.
        calls: The opaque calls.
    """
    bases: dict[int, fx.Node] = {}
    depends: dict[fx.Node, bool] = {}
    tainted: set[int] = set()
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        for storage in storages(node):
            if node.op == "placeholder" and kinds[node.name][0] in STATE:
                bases.setdefault(storage, node)
        depends[node] = brings_data(node, kinds) or any(
            depends[each] or bool(tainted & set(storages(each))) for each in node.all_input_nodes
        )
        for argument in written_by(node, calls):
            for storage in storages(argument):
                if depends[node]:
                    tainted.add(storage)
                if storage in bases:
                    found[bases[storage]] = found.get(bases[storage], False) or depends[node]
    return found
