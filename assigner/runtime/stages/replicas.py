"""What a stage that several workers share cannot have: each of them runs some of the micro-batches alone.

What forwards change, beside their outputs and BatchNorm's deferred statistics, would go its own way on each worker.
Where the graph or the workload shows it, a plan is refused before training; a write in the user's code is found by the
first forward that does it (`state`), and what Python keeps, a loss that remembers, or a buffer that an evaluation
writes, by the end of the step or evaluation: before it updates anything.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.ownership import STANDARD
from assigner.model.deferred.reach import reach
from assigner.model.marking.writing import STORES
from assigner.runtime.failures.callrecord import checksum
from assigner.runtime.forward.lossvalues import called_of, plain_values
from assigner.runtime.forward.pythonvalues import changeable_modules
from assigner.runtime.stages.copies import CopyComparison

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.stages.localpartitions import LocalPartitions

_MADE_UNLIKE = (
    "the model's builder has made other values for it on one of them than on another",
    "draw them from torch's own generator, which is seeded, or seed what else draws in there",
)
_CHANGED_UNLIKE = (
    "the script has given it other values on one of them than on another before the first step",
    "give all ranks the same: seed what draws them by each one's name, or hand them out with pipeline.load_state_dict",
)


def replicated(plan: Plan, partitions: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of some partitions those that several workers hold, and the workers."""
    return {name: plan.holders[name] for name in partitions if name in plan.holders and len(plan.holders[name]) > 1}


def one_worker(partition: str) -> str:
    """The way out, as a hint."""
    return f"run {partition!r} on one worker: in a stage without replicas (assigner solve --max-replicas 1)"


def obstacles(workload: Workload, graph: PartitionGraph) -> dict[str, str]:
    """Of the partitions that several workers cannot share, why, in words: as far as workload and graph show it."""
    found = dict.fromkeys(graph.piece, "the workload carries state from batch to batch") if workload.carried else {}
    if _trains(workload.loss):
        found.setdefault(graph.last.name, "Workload.loss has parameters that are trained")
    found = {**storing(graph), **found}
    if workload.loss_over == "batch":
        found.setdefault(graph.last.name, "the loss is over the whole batch")
    return found


def check_shared(plan: Plan, why: Mapping[str, str]) -> None:
    """Refuse replicas of partitions that several workers cannot share; `why`, in words: see `obstacles`."""
    for name, workers in replicated(plan, why).items():
        raise UsageError(
            f"{sharers(name, workers)}, and {why[name]}: each of them would see its own micro-batches alone",
            hint=one_worker(name),
        )


def storing(graph: PartitionGraph) -> dict[str, str]:
    """Of the partitions whose forwards store into a buffer or parameter, the first one, in words."""
    found: dict[str, str] = {}
    for piece in graph.pieces:
        for node in piece.graph.nodes:
            if node.target in STORES:
                state = node.args[0]
                found.setdefault(piece.name, f"its forward changes {getattr(state, 'target', state)}")
    return found


def _trains(called: Any) -> bool:
    """Whether a loss is, holds, closes over or reads at the top of its file a module with parameters of its own.

    One that is a method of a model is not looked into: it is called for what it computes, not for the model's weights.
    """
    if isinstance(called, types.MethodType) and isinstance(called.__self__, nn.Module):
        return False
    tensors = (each for _, each in reach({"loss": called}, parameters=True) if isinstance(each, nn.Parameter))
    return any(each.requires_grad for each in tensors)


def sharers(partition: str, workers: Sequence[str]) -> str:
    """Who shares a partition."""
    return f"{', '.join(workers)} share partition {partition!r}"


def _check_alike(share: LocalPartitions, member: Membership, unlike: tuple[str, str]) -> None:
    """Refuse replicas with unlike values: `unlike` says why, and a hint; all members of a group find the same."""
    copies = share.copies()
    for workers, group in member.groups.items():
        names = [name for name in share.partitions if share.plan.holders[name] == workers]
        digests = {sharers(name, workers): _digest(share.held_by(name), share.modules[name]) for name in names}
        seen = {name for partition in names for name in share.parameters_of(partition)}
        for name, parameter in copies.get(workers, {}).items():
            if name not in seen:
                digests[f"{', '.join(workers)} hold copies of {name}"] = _digest({name: parameter})
        for who, is_alike in zip(digests, group.are_alike(digests.values()), strict=True):
            if not is_alike:
                why, hint = unlike
                raise UsageError(f"{who}, and {why}", hint=hint)


def _check_same_loss(workload: Workload, share: LocalPartitions, member: Membership) -> None:
    """Refuse a loss that several workers call and that is another one on one of them; all of them find the same."""
    last = share.graph.last.name
    group = member.groups.get(share.plan.holders[last])
    if group is None:
        return
    called, vocabulary = called_of(workload)
    # a single whole number or a text may be a rank's own
    numbers = {
        name: _rounded(value)
        for name, value in plain_values(called, vocabulary).items()
        if isinstance(value, float | complex) or (name.endswith("]") and isinstance(value, int))
    }
    tensors = Memento((), called.values(), parameters=True, vocabulary=vocabulary).tensors
    found = _added(checksum(sorted(numbers.items())), tensors)
    if not all(group.are_alike([found])):
        raise UsageError(
            f"{sharers(last, group.workers)}, and what Workload.loss or one of Workload.metrics reads has other values"
            " on one of them than on another",
            hint="give all ranks the same: seed what draws them",
        )


def _digest(tensors: Mapping[str, torch.Tensor], module: nn.Module | None = None) -> int:
    """Of some thousand values of each tensor, and of the values among its modules' attributes."""
    found = 0
    for name in sorted(tensors):
        found = _added(found, tensors[name])
    for _, each in () if module is None else changeable_modules(module):
        for name, value in sorted(each.__dict__.items()):
            if name not in STANDARD:
                found = _added(found, [_rounded(leaf) for leaf in pytree.tree_leaves(value) if _is_value(leaf, value)])
    return found


def _added(found: int, values: Any) -> int:
    return (31 * found + checksum(values)) % (1 << 62)


def _is_value(leaf: Any, attribute: Any) -> bool:
    """Whether it is drawn or computed; a single whole number or a text may be a rank's own: its number, its device."""
    return isinstance(leaf, float | complex | np.ndarray | torch.Tensor) or (
        isinstance(leaf, int) and leaf is not attribute
    )


def _rounded(leaf: Any) -> Any:
    """Mathematics of unlike hosts may differ in the last digit."""
    return f"{leaf:.6g}" if isinstance(leaf, float | complex) else leaf


class ReplicaWatch:
    """What workers of a stage must have alike; what steps change in Python, and evaluations in buffers too, is watched.

    Attributes:
        copies: What several workers hold, compared with every step and evaluation.
    """

    def __init__(self, share: LocalPartitions, workload: Workload, member: Membership) -> None:
        _check_alike(share, member, _MADE_UNLIKE)
        _check_same_loss(workload, share, member)
        self._share, self._workload, self._last = share, workload, share.graph.last.name
        self._member, self._has_begun = member, False
        self.copies = CopyComparison(share, member)
        self._shared = replicated(share.plan, share.partitions)
        self._mementos: dict[str, Memento] = {}

    def check_first(self) -> None:
        """A step comes next: before the first one the script has given the workers of a stage the same weights."""
        if not self._has_begun:
            self._member.at = "the comparison of weights that several workers hold"
            self._member.before_sums()
            _check_alike(self._share, self._member, _CHANGED_UNLIKE)
            self._has_begun = True

    def go_on_from(self, other: ReplicaWatch) -> None:
        """Under another plan; from the first step on, unlike kinds of workers may differ by rounding."""
        self._has_begun = other._has_begun
        self.copies.accept()

    def begin(self, *, training: bool) -> None:
        """The forwards of a step or of an evaluation come next; modules are in their modes.

        In an evaluation a module that is left training moves buffers, which are put back (see `passes`).
        """
        self.copies.begin()
        for name in self._shared:
            held = changeable_modules(self._share.modules[name])
            watched = [(path, each) for path, each in held if training or not each.training]
            for _, each in watched:
                if isinstance(each, nn.RNNBase):  # its first forward would take its list of weights anew
                    each._update_flat_weights()
            if watched:
                self._mementos[name] = Memento(watched, beside=(each for _, each in held))
        if self._last in self._shared:
            called = [self._workload.loss, *(self._workload.metrics or {}).values()]
            self._mementos[""] = Memento((), called)

    def end(self) -> None:
        """The forwards, and a step's backwards, are done, and statistics were not moved yet.

        Raises:
            UsageError: attributes of a partition that several workers share have changed, or what a loss or metric
                keeps; or the copies of a weight have come apart.
            LostConnectionError: a worker is gone.
        """
        changed = [name for name, memento in self._mementos.items() if memento.has_changed()]
        self._mementos = {}
        for name in changed:
            partition = name or self._last
            known = sorted(self._share.attributes(partition)) if name else []
            attributes = ", ".join(each for each in known if not each.endswith(".training"))
            what = (
                f"its forward changes {attributes or 'what its modules keep'}"
                if name
                else "Workload.loss or one of Workload.metrics keeps something from call to call"
            )
            check_shared(self._share.plan, {partition: what})
        self.copies.end()

    def forget(self) -> None:
        """Drop what an unfinished step or evaluation has begun."""
        self._mementos = {}
        self.copies.forget()
