"""The model's outputs: micro-batches joined to those of the batch, and brought to the ranks that want them.

a tensor with rows      joined along them, whichever dimension they are
one without, a number   stays as it is, where it is the same for all micro-batches
any other               is an error: a mean over the batch, say, cannot be told from those of its parts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.location import Location
from assigner.marking.graph import Output
from assigner.runtime.headers import Header, header_route, post_header, receive_header, send_header
from assigner.runtime.ordering import Message
from assigner.schedule import Payload, Route

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.marking import PartitionGraph
    from assigner.plan import Plan
    from assigner.runtime.membership import Membership
    from assigner.runtime.transport import Transport

_NUMBERS = (bool, int, float)
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@dataclass(frozen=True)
class Part:
    """What the last partition made of one micro-batch.

    Args:
        output: What is known of it.
        leaves: All leaves of it.
        rows: The micro-batch's rows.
    """

    output: Output
    leaves: list[Any]
    rows: int

    def rows_dimension(self, index: int) -> int | None:
        """Along which dimension a leaf has the rows, as far as this micro-batch tells."""
        leaf = self.leaves[index]
        if self.output.rows_known:
            return self.output.rows[index]
        return 0 if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) == self.rows else None


def join(parts: Sequence[Part]) -> list[Any]:
    """The leaves of the whole batch's output.

    Raises:
        UsageError: one of them cannot be told from those of the micro-batches.
    """
    return [_join_leaf(parts, index) for index in range(len(parts[0].leaves))]


def _join_leaf(parts: Sequence[Part], index: int) -> Any:
    leaves = [part.leaves[index] for part in parts]
    if len(leaves) == 1:
        return leaves[0]
    known = [part.rows_dimension(index) for part in parts if part.output.rows_known]
    dim, *others = set(known or [part.rows_dimension(index) for part in parts])
    if dim is not None and not others:
        return torch.cat(leaves, dim)
    if all(_same(leaves[0], leaf) for leaf in leaves[1:]):
        return leaves[0]
    shape = f"of shape {tuple(leaves[0].shape)} " if isinstance(leaves[0], torch.Tensor) else ""
    raise UsageError(
        f"the model's output{_path(parts[0].output, index)} {shape}differs between micro-batches, and has no"
        f" dimension of rows to join them along",
        hint="return it for each row, or return it in training only",
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)


def _path(output: Output, index: int) -> str:
    """Where a leaf stands in the output, as Python writes it."""
    tree = pytree.tree_unflatten(list(range(len(output.leaves))), output.structure)
    return next(pytree.keystr(path) for path, leaf in pytree.tree_leaves_with_path(tree) if leaf == index)


class OutputRoutes:
    """The ways of an output's leaves to the ranks that want them; every rank makes the same.

    Args:
        plan: Names the workers.
        maker: The worker that has the output.
        graph: Whose output.
        targets: The ranks that want it.
    """

    def __init__(self, plan: Plan, maker: str, graph: PartitionGraph, targets: Iterable[int]) -> None:
        names = {Location.parse(worker).rank: worker for worker in plan.workers}
        self.targets, self.made = tuple(targets), graph.output.made
        self.routes = {
            (rank, index): Route(
                Payload.OUTPUT, graph.last.name, index, maker, names.get(rank) or str(Location(rank, "cpu"))
            )
            for rank in self.targets
            if rank != Location.parse(maker).rank
            for index in graph.output.made
        }

    def carry(self, leaves: Sequence[Any] | None, member: Membership) -> list[Any] | None:
        """Bring the leaves to the ranks that want them.

        Args:
            leaves: On the maker, all of them; None elsewhere.
            member: This process in the run.

        Returns:
            Where they are wanted those that the last partition returns, else None.
        """
        transport = member.transport
        found = None if leaves is None else [leaves[index] for index in self.made]
        if self.routes and transport is not None:
            transport.know(self.routes.values())
            transport.know(header_route(route) for route in self.routes.values())
            if leaves is not None:
                for (_, index), route in self.routes.items():
                    _send(transport, route, leaves[index])
            elif member.rank in self.targets:
                mine = [route for (rank, _), route in self.routes.items() if rank == member.rank]
                found = [_receive(transport, route) for route in mine]
        if transport is not None:
            transport.flush()  # also the values between partitions: nothing else waits for them to leave
        return found if member.rank in self.targets else None


def _send(transport: Transport, route: Route, leaf: Any) -> None:
    """The header's kind is the type; of a number, which goes as a tensor, below zero."""
    is_tensor = isinstance(leaf, torch.Tensor)
    tensor = leaf if is_tensor else torch.tensor(leaf)
    kind = _DTYPES.index(tensor.dtype) if is_tensor else -1 - _NUMBERS.index(type(leaf))
    send_header(transport, Message(route, 0), Header(tuple(tensor.shape), kind))
    transport.send(Message(route, 0), tensor if is_tensor else tensor.to(torch.float64))


def _receive(transport: Transport, route: Route) -> Any:
    message = Message(route, 0)
    post_header(transport, message)
    shape, kind = receive_header(transport, message)
    transport.post(message, shape, _DTYPES[kind] if kind >= 0 else torch.float64)
    found = transport.receive(message)
    return found if kind >= 0 else _NUMBERS[-1 - kind](found.item())
